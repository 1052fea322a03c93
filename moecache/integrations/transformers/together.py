"""Together: several texts of one model that go on side by side."""

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from moecache.decoding._program import MAX_ROWS
from moecache.decoding.prefixes import PAGE_TOKENS
from moecache.decoding.streams import Stopped
from moecache.integrations.transformers.continuing import Text
from moecache.integrations.transformers.generation import blamed, check_between_layers
from moecache.integrations.transformers.prompts import (
    FEW_TOKENS,
    SPAN_PAGES,
    Span,
    read_spans,
)

logger = logging.getLogger(__name__)


class Together:
    """Goes on with several texts: their next tokens come from one call, if the model decodes so.

    A page's worth of prompts is read between two of these calls, prompts take turns; short ones go
    through the model together, so that an expert is read once for them. Each text has the
    tokens that it has alone. Not for two threads at once.

    Parameters
    ----------
    model : PreTrainedModel
        As `load` returns it, on the CPU and of one process.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._texts: list[Text] = []

    def add(self, text: Text) -> None:
        """Take a text in, whose prompt is still to be read."""
        self._texts.append(text)

    @torch.no_grad()
    def advance(self) -> list[Text]:
        """Read a page's worth of prompts, and take a step of each text that has read its own.

        An error ends the text that it is of, and no other.

        Returns
        -------
        list of Text
            Those that are over; their `error` says how, where they have failed. They are left to
            the caller.
        """
        for text in self._texts:
            # Nobody wants it any more.
            if text.streamer.stopped:
                self._do(text, text.streamer.check)
        going = [text for text in self._texts if not text.is_over]
        reading = [text for text in going if text.is_reading]
        steps = [text for text in going if not text.is_reading]
        if reading:
            # Experts are read once for a whole span, where nobody waits for it.
            self._read_some(reading, 1 if steps else SPAN_PAGES)
        for begin in range(0, len(steps), MAX_ROWS):
            self._step(steps[begin : begin + MAX_ROWS])
        over = [text for text in self._texts if text.is_over]
        self._texts = [text for text in self._texts if not text.is_over]
        return over

    def _read_some(self, reading: Sequence[Text], num_pages: int) -> None:
        """Read on in the first of some prompts; short ones go with it, a page's worth in all."""
        reading = [text for text in reading if not any(map(text.will_find, reading))]
        picked: dict[Text, Span] = {}
        with contextlib.suppress(Exception):  # comes again, to the text that it is of
            picked = self._pick(reading)
        if len(picked) > 1:
            self._read_together(picked)
        else:
            self._do(reading[0], lambda: self._read(reading[0], num_pages))
        for text in picked or reading[:1]:
            self._texts.remove(text)
            self._texts.append(text)

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

        try:
            read_spans(list(picked.values()), on_layer)
        except Stopped:
            for text in picked:
                self._do(text, text.streamer.check)
            return
        except Exception as error:  # noqa: BLE001 - it comes again, to the text that it is of
            # An expert that cannot be read is not every text's.
            logger.info("prompts.apart num=%d %s: %s", len(picked), type(error).__name__, error)
            for text in picked:
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

    def _step(self, texts: Sequence[Text]) -> None:
        rows = self._logits(texts) if len(texts) > 1 else None
        if rows is None:
            for text in texts:
                self._do(text, text.step)
            return
        for text, row in zip(texts, rows, strict=True):
            self._take(text, row)

    def _take(self, text: Text, row: np.ndarray) -> None:
        self._do(text, lambda: text.take(row))

    def _logits(self, texts: Sequence[Text]) -> np.ndarray | None:
        """Return the logits after each text's last token; `None` if they have to go alone."""
        decoder = self._model.moecache.decoder
        if decoder is None:
            return None
        tokens = [text.token for text in texts]
        try:
            found: np.ndarray | None = decoder.step_together(tokens, [text.cache for text in texts])
        except Exception as error:  # noqa: BLE001 - it comes again, to the text that it is of
            # All caches are as they were. An expert that cannot be read is not every text's.
            logger.info("texts.apart num=%d %s: %s", len(texts), type(error).__name__, error)
            return None
        return found

    def _do(self, text: Text, action: Callable[[], object]) -> None:
        """Do something for a text; note how it ends by it."""
        try:
            with blamed(self._model):
                try:
                    action()
                except Stopped:
                    text.is_over = True
                if text.is_over:
                    text.streamer.end()
        except Exception as error:  # noqa: BLE001 - the caller has it raised where it belongs
            text.error, text.is_over = error, True
