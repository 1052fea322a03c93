"""ProgramTexts: several texts of a program's model that go on side by side."""

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from moecache.decoding.prefixes import PAGE_TOKENS
from moecache.decoding.program_model import PROMPT_TOKENS, ProgramModel
from moecache.decoding.streams import Stopped
from moecache.decoding.text import Text
from moecache.decoding.together import TextsTogether


class ProgramTexts(TextsTogether[Text]):
    """Goes on with several texts of a model that a program computes.

    Prompts take turns; short ones go through the model together, so that an expert is read once
    for them.

    Parameters
    ----------
    model : ProgramModel
    """

    def __init__(self, model: ProgramModel) -> None:
        super().__init__()
        self._model = model

    def _read_some(self, reading: Sequence[Text], *, are_steps: bool) -> None:
        """Read on in the first of some prompts; short ones go with it, a page's worth in all."""
        reading = [text for text in reading if not any(map(text.will_find, reading))]
        picked = self._pick(reading)
        if len(picked) > 1:
            self._read_together(picked)
        else:
            # Experts are read once for a whole part, where nobody waits for it.
            num_tokens = PAGE_TOKENS if are_steps else PROMPT_TOKENS
            self._do(reading[0], lambda: reading[0].read(num_tokens))
        self._pass_on([*picked] or reading[:1])

    def _pick(self, reading: Sequence[Text]) -> dict[Text, list[int]]:
        """Return the prompts that go through the model together, and their tokens.

        Their experts are read once. Of more than a page's worth products take longer than reads:
        one after the other, each has its first token earlier.
        """
        picked: dict[Text, list[int]] = {}
        left = PAGE_TOKENS
        for text in reading:
            # One that begins by this, too, may be the one to wait for.
            if not left or any(map(text.will_find, reading)):
                continue
            try:
                tokens = text.unread()
            except Exception:  # noqa: BLE001 - comes again, to the text that it is of
                break
            if len(tokens) <= left:
                picked[text] = tokens
                left -= len(tokens)
            elif not picked:
                break
        return picked

    def _read_together(self, picked: Mapping[Text, list[int]]) -> None:
        """Read several prompts; each is read alone if that fails."""
        caches = [text.cache for text in picked if text.cache is not None]
        begins = {text: cache.length for text, cache in zip(picked, caches, strict=True)}

        def on_layer(layer: int) -> None:
            for text, tokens in picked.items():
                read = len(tokens) * layer // self._model.num_layers
                text.streamer.read_tokens = begins[text] + read
            if all(text.streamer.stopped for text in picked):
                raise Stopped

        rows = self._shared(
            "prompts",
            list(picked),
            lambda: self._model.read_together(list(picked.values()), caches, on_layer),
        )
        if rows is None:
            for text, tokens in picked.items():
                if not text.is_over:
                    self._do(text, functools.partial(text.read, len(tokens)))
            return
        for text, row in zip(picked, rows, strict=True):
            self._do(text, functools.partial(text.take_read, row))

    def _logits(self, texts: Sequence[Text]) -> np.ndarray:
        tokens = [[text.token] for text in texts if text.token is not None]
        caches = [text.cache for text in texts if text.cache is not None]
        return self._model.read_together(tokens, caches)
