"""Together: several texts of transformers' model that go on side by side."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moecache.decoding.prefixes import PAGE_TOKENS
from moecache.decoding.streams import Stopped
from moecache.decoding.together import TextsTogether
from moecache.integrations.transformers._damage import Damage
from moecache.integrations.transformers.continuing import Text
from moecache.integrations.transformers.generation import blamed, check_between_layers
from moecache.integrations.transformers.prompts import (
    FEW_TOKENS,
    SPAN_PAGES,
    Span,
    read_spans,
)


class Together(TextsTogether[Text]):
    """Goes on with several texts of transformers' model.

    A page's worth of prompts is read between two calls, prompts take turns; short ones go through
    the model together, so that an expert is read once for them.

    Parameters
    ----------
    model : PreTrainedModel
        As `load` returns it, on the CPU and of one process.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    @torch.no_grad()
    def advance(self) -> list[Text]:
        """Read a page's worth of prompts, and take a step of each text that has read its own."""
        return super().advance()

    def _read_some(self, reading: Sequence[Text], *, are_steps: bool) -> None:
        """Read on in the first of some prompts; short ones go with it, a page's worth in all."""
        # Experts are read once for a whole span, where nobody waits for it.
        num_pages = 1 if are_steps else SPAN_PAGES
        reading = [text for text in reading if not any(map(text.will_find, reading))]
        picked: dict[Text, Span] = {}
        with contextlib.suppress(Exception):  # comes again, to the text that it is of
            picked = self._pick(reading)
        if len(picked) > 1:
            self._read_together(picked)
        else:
            self._do(reading[0], lambda: self._read(reading[0], num_pages))
        self._pass_on([*picked] or reading[:1])

    def _pick(self, reading: Sequence[Text]) -> dict[Text, Span]:
        """Return the prompts that go through the model together, the first one among them.

        Their experts are read once. Of more than a page's worth products take longer than reads:
        one after the other, each has its first token earlier.
        """
        picked: dict[Text, Span] = {}
        begun: list[Text] = []
        left = PAGE_TOKENS
        for text in reading:
            if any(map(text.will_find, begun)):
                continue
            text.begin()
            begun.append(text)
            # One that has read pages of its own would have to read them anew if this failed.
            fits = text.is_fresh and text.num_unread <= left
            span = text.next_span(1) if fits else None
            if span is not None:
                picked[text] = span
                left -= span.num_tokens
            elif not picked:
                break
        return picked

    def _read_together(self, picked: dict[Text, Span]) -> None:
        """Read pages of several prompts; each is read alone if that fails."""
        progress = [(text.streamer, text.progress_of(span)) for text, span in picked.items()]

        def on_layer() -> None:
            for streamer, tokens_read in progress:
                streamer.read_tokens = tokens_read()
            if all(streamer.stopped for streamer, _ in progress):
                raise Stopped

        def read() -> bool:
            read_spans(list(picked.values()), on_layer)
            return True

        if not self._shared("prompts", list(picked), read):
            for text in picked:
                if not text.is_over:
                    text.forget()
                    self._do(text, functools.partial(self._read, text, 1))
            return
        for text, span in picked.items():
            self._do(text, functools.partial(text.take_span, span))

    def _read(self, text: Text, num_pages: int) -> None:
        with contextlib.ExitStack() as stack:
            # A few tokens are decoded, by a program that takes no model with hooks.
            if text.num_unread > FEW_TOKENS:
                stack.enter_context(check_between_layers(self._model, text.streamer))
            text.read(num_pages)

    def _logits(self, texts: Sequence[Text]) -> np.ndarray | None:
        decoder = self._model.moecache.decoder
        if decoder is None:
            return None
        tokens = [text.token for text in texts]
        found: np.ndarray | None = decoder.step_together(tokens, [text.cache for text in texts])
        return found

    def _blaming(self) -> Damage:
        return blamed(self._model)
