"""Sections that Ctrl-C cannot interrupt."""

import importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# Without `signal.signal`'s conversions to enumerations, which take twenty times as long.
_signal: Any = importlib.import_module("_signal")
_MAIN = threading.main_thread().ident
_noted: list[FrameType | None] = []


class uninterrupted:  # noqa: N801 - reads as what it does, like contextlib.suppress
    """Hold every interrupt until the end of a section.

    An interrupt would lose what is claimed and not yet noted, or noted and not yet given
    back. Several interrupts are delivered as one. Sections nest; only the outermost lets
    an interrupt through. A section must not wait for anything that may never come. Does
    nothing in threads other than the main one, where no interrupt arrives, or if SIGINT
    has no handler in Python. Putting a handler back forgets what `signal.siginterrupt`
    said of SIGINT. Takes about 1 us.

    Examples
    --------
    >>> with uninterrupted():
    ...     pass
    """

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: Any = None

    def __enter__(self) -> None:
        """Replace the handler by one that only notes the interrupt."""
        if threading.get_ident() != _MAIN:
            return
        before = _signal.getsignal(signal.SIGINT)
        if before is _note or not callable(before):
            return
        _noted.clear()
        # From here on nothing comes in between: the next line is done when an interrupt is noted.
        self._before = before
        try:
            _signal.signal(signal.SIGINT, _note)
        except ValueError:  # embedded: Python's main thread is not `threading`'s
            self._before = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the handler back, and pass it the interrupt that was noted."""
        before: Callable[..., object] | None = self._before
        if before is None:
            return
        try:
            _signal.signal(signal.SIGINT, before)
        except BaseException:
            # Setting a handler first runs the handlers of pending signals, and one of them raised.
            _signal.signal(signal.SIGINT, before)
            raise
        if _noted:
            frame = _noted.pop()
            _noted.clear()
            before(signal.SIGINT, frame)


def _note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - of a handler
    _noted.append(frame)
