"""Served: a model of files as a server asks it."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moecache.decoding.files.continuing import prompt_of, sampling_of
from moecache.decoding.files.model import TextModel
from moecache.decoding.prefixes import PrefixCache
from moecache.decoding.program_texts import ProgramTexts
from moecache.decoding.sampler import Mask, Sampler, Sampling
from moecache.decoding.streams import TokenTimes
from moecache.decoding.text import NUM_NAMES, Text
from moecache.runtime.runtime import ExpertRuntime
from moecache.telemetry import RuntimeStats


class Served:
    """A model of files; a `ServedModel`.

    Parameters
    ----------
    model : TextModel
    """

    is_spread = is_alone = False
    why_alone = ""

    def __init__(self, model: TextModel) -> None:
        self.model = model
        self.runtime: ExpertRuntime = model.runtime
        self.num_tokens, self.ends = model.vocabulary, model.ends
        self.own_context: int | None = model.context
        self.bytes_per_token = model.bytes_per_token
        self._names = itertools.cycle(range(NUM_NAMES))

    def stats(self) -> RuntimeStats:
        """Return the runtime's counters."""
        return self.runtime.stats()

    def splits_plainly(self, _: Any) -> bool:
        """Return that nothing but a tokenizer's backend splits texts."""
        return True

    def encode(self, tokenizer: Any, text: str) -> np.ndarray:
        """Return a text's tokens, int64 [1, tokens]."""
        return prompt_of(tokenizer.encode(text), self.num_tokens)

    def encode_chat(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> np.ndarray:
        """Return a conversation's tokens with the beginning of an answer, int64 [1, tokens]."""
        return prompt_of(tokenizer.encode_chat(messages, variables), self.num_tokens)

    def render_chat(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Return the text of which `encode_chat` makes tokens."""
        return str(tokenizer.render_chat(messages, variables))

    def sampling_of(self, seed: int, **given: Any) -> Sampling:
        """Return how tokens are drawn: what is given, else what the files say."""
        return sampling_of(self.model, seed, **given)

    def check_text(
        self, prompt: np.ndarray, max_new_tokens: int, seed: int, **sampling: Any
    ) -> tuple[int, Sampling]:
        """Return how many tokens fit behind a prompt, up to a number, and how they are drawn."""
        room = self.model.check_room(prompt.shape[1])
        return min(max_new_tokens, room), sampling_of(self.model, seed, **sampling)

    def new_text(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        stream: TokenTimes,
        *,
        max_new_tokens: int,
        mask: Mask | None,
        prefixes: PrefixCache | None,
    ) -> Text:
        """Return a text whose prompt is still to be read."""
        return Text(
            self.model,
            prompt,
            sampler,
            stream,
            max_new_tokens=max_new_tokens,
            mask=mask,
            prefixes=prefixes,
            name=next(self._names),
        )

    def together(self) -> ProgramTexts:
        """Return what goes on with texts side by side."""
        return ProgramTexts(self.model)
