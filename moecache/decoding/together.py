"""Together: several texts that go on side by side, a call for all of them."""

import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from moecache.decoding._program import MAX_ROWS
from moecache.decoding.streams import Stopped, TokenTimes

logger = logging.getLogger(__name__)


class Text(Protocol):
    """A text that goes on beside others.

    Attributes
    ----------
    streamer : TokenTimes
    is_over : bool
    error : Exception or None
        What ended it, if it was that.
    """

    streamer: TokenTimes
    is_over: bool
    error: Exception | None

    @property
    def is_reading(self) -> bool:
        """Whether some of the prompt is still to be read."""

    def step(self) -> None:
        """Compute the logits after the last token, alone, and draw the next one."""

    def take(self, logits: np.ndarray) -> None:
        """Draw a token of the logits after the last one."""


T = TypeVar("T", bound=Text)
R = TypeVar("R")


class TextsTogether(ABC, Generic[T]):
    """Goes on with several texts of a model: their next tokens come from one call.

    Prompts are read between two of these calls, a part at a time. Each text has the tokens that it
    has alone. Not for two threads at once.
    """

    def __init__(self) -> None:
        self._texts: list[T] = []

    def add(self, text: T) -> None:
        """Take a text in, whose prompt is still to be read."""
        self._texts.append(text)

    def advance(self) -> list[T]:
        """Read a part of the prompts, and take a step of each text that has read its own.

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
            self._read_some(reading, are_steps=bool(steps))
        for begin in range(0, len(steps), MAX_ROWS):
            self._step(steps[begin : begin + MAX_ROWS])
        over = [text for text in self._texts if text.is_over]
        self._texts = [text for text in self._texts if not text.is_over]
        return over

    @abstractmethod
    def _read_some(self, reading: Sequence[T], *, are_steps: bool) -> None:
        """Read on in some of these prompts; whether other texts wait for it is `are_steps`."""

    @abstractmethod
    def _logits(self, texts: Sequence[T]) -> np.ndarray | None:
        """Return the logits after each text's last token; `None` if they have to go alone."""

    def _blaming(self) -> "contextlib.AbstractContextManager[Any]":
        """Return what says who is at fault for an error."""
        return contextlib.nullcontext()

    def _pass_on(self, texts: Sequence[T]) -> None:
        """Have texts that had their turn be the last ones."""
        for text in texts:
            self._texts.remove(text)
            self._texts.append(text)

    def _shared(self, what: str, texts: Sequence[T], call: Callable[[], R]) -> R | None:
        """Return what one call gives for some texts; `None`: those not over by it have to go alone.

        A call that fails has changed nothing. An expert that cannot be read is not every text's:
        the error comes again, to the text that it is of.
        """
        try:
            return call()
        except Stopped:
            for text in texts:
                self._do(text, text.streamer.check)
        except Exception as error:  # noqa: BLE001 - as said
            logger.info("%s.apart num=%d %s: %s", what, len(texts), type(error).__name__, error)
        return None

    def _step(self, texts: Sequence[T]) -> None:
        rows = None
        if len(texts) > 1:
            rows = self._shared("texts", texts, lambda: self._logits(texts))
        if rows is None:
            for text in texts:
                self._do(text, text.step)
            return
        for text, row in zip(texts, rows, strict=True):
            self._do(text, functools.partial(text.take, row))

    def _do(self, text: T, action: Callable[[], object]) -> None:
        """Do something for a text; note how it ends by it."""
        try:
            with self._blaming():
                try:
                    action()
                except Stopped:
                    text.is_over = True
                if text.is_over:
                    text.streamer.end()
        except Exception as error:  # noqa: BLE001 - the caller has it raised where it belongs
            text.error, text.is_over = error, True
