"""Served: a model of transformers as a server asks it."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from transformers import PreTrainedTokenizerFast

from moecache.decoding import text
from moecache.decoding.prefixes import PrefixCache
from moecache.decoding.program_texts import ProgramTexts
from moecache.decoding.sampler import Mask, Sampler, Sampling
from moecache.decoding.streams import TokenTimes
from moecache.decoding.text import NUM_NAMES
from moecache.integrations.transformers import _following, generation
from moecache.integrations.transformers._decoded import decoded_model
from moecache.integrations.transformers._loops import ends_of, has_loop
from moecache.integrations.transformers.continuing import Text, sampling_of
from moecache.integrations.transformers.prompts import bytes_per_token
from moecache.integrations.transformers.together import Together
from moecache.runtime.runtime import ExpertRuntime
from moecache.telemetry import RuntimeStats


class Served:
    """A model of transformers; a `ServedModel`.

    Parameters
    ----------
    model : PreTrainedModel
        As `load` returns it.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.runtime: ExpertRuntime = model.moecache.runtime
        self.num_tokens: int = model.config.get_text_config().vocab_size
        self._decoded = decoded_model(model)
        self._names = itertools.cycle(range(NUM_NAMES))

    @property
    def ends(self) -> set[int]:
        """Tokens with which the model ends its texts."""
        return ends_of(self.model)

    @property
    def own_context(self) -> int | None:
        """Tokens that the model takes; `None` if there is no end."""
        return generation.own_context(self.model)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values."""
        return bytes_per_token(self.model)

    @property
    def is_spread(self) -> bool:
        """Whether experts are spread over processes."""
        return _following.ranks_of(self.model) is not None

    @property
    def is_alone(self) -> bool:
        """Whether texts are generated as a whole: by all ranks, or by transformers' own loop."""
        return self.is_spread or not has_loop(self.model)

    @property
    def why_alone(self) -> str:
        """Why answers do not decode together; empty if they do."""
        if self.is_spread:
            return "its experts are spread over processes"
        decoder = self.model.moecache.decoder
        if self.is_alone or decoder is None:
            return "its tokens are not computed by moecache's own loop and kernels"
        return "" if decoder.is_ready() else f"no recipe: {decoder.reason}"

    def stats(self) -> RuntimeStats:
        """Return the runtime's counters."""
        found: RuntimeStats = self.model.moecache.stats()
        return found

    @staticmethod
    def splits_plainly(tokenizer: Any) -> bool:
        """Return whether the library's own code splits texts: subclasses do what they like."""
        names = ("__call__", "_encode_plus", "apply_chat_template")
        return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
            getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name)
            for name in names
        )

    def encode(self, tokenizer: Any, text: str) -> Any:
        """Return a text's tokens, int64 [1, tokens]."""
        return generation.encode(tokenizer, text)

    def encode_chat(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> Any:
        """Return a conversation's tokens with the beginning of an answer, int64 [1, tokens]."""
        return generation.encode_chat(tokenizer, messages, variables)

    def render_chat(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Return the text of which `encode_chat` makes tokens."""
        return generation.render_chat(tokenizer, messages, variables)

    def sampling_of(self, seed: int, **given: Any) -> Sampling:
        """Return how tokens are drawn: what is given, else what generation_config.json says."""
        return sampling_of(self.model, seed, **given)

    def check_text(
        self, prompt: Any, max_new_tokens: int, seed: int, **sampling: Any
    ) -> tuple[int, Sampling]:
        """Return how many tokens fit behind a prompt, up to a number, and how they are drawn."""
        return generation.check_text(self.model, prompt, max_new_tokens, seed, **sampling)

    def new_text(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        stream: TokenTimes,
        *,
        max_new_tokens: int,
        mask: Mask | None,
        prefixes: PrefixCache | None,
    ) -> Text | text.Text:
        """Return a text whose prompt is still to be read."""
        given: dict[str, Any] = {"max_new_tokens": max_new_tokens, "mask": mask}
        if self._decoded is None:
            return Text(self.model, prompt, sampler, stream, prefixes=prefixes, **given)
        return text.Text(
            self._decoded,
            prompt,
            sampler,
            stream,
            prefixes=self._decoded.own(prefixes),
            name=next(self._names),
            **given,
        )

    def together(self) -> Together | ProgramTexts:
        """Return what goes on with texts side by side."""
        return Together(self.model) if self._decoded is None else ProgramTexts(self._decoded)

    def check_between_layers(self, stream: TokenTimes) -> ExitStack:
        """Have a text that goes alone end between layers, until the stack is closed."""
        return generation.check_between_layers(self.model, stream)

    def continue_tokens(self, prompt: Any, stream: TokenTimes, **given: Any) -> int:
        """Generate a text that goes alone; return how many tokens it may have."""
        return generation.continue_tokens(self.model, prompt, stream, **given)
