"""Sections that Ctrl-C does not come in the middle of."""

import importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# Without the conversions to enumerations of `signal.signal`, which take twenty times as long.
_signal: Any = importlib.import_module("_signal")
_MAIN = threading.main_thread().ident
_noted: list[FrameType | None] = []
_real: list[Callable[..., object]] = []


class deferred:  # noqa: N801 - reads as what it does, like contextlib.suppress
    """Have an interrupt come at the end of a section, rather than between any two of its lines.

    What is claimed and not yet noted, or noted and not yet given back, would be lost. A second
    interrupt comes at once: the section may hang. Sections nest. Does nothing in other threads
    than the main one, where no interrupt comes, and where SIGINT has no handler in Python.
    Putting a handler back forgets what `signal.siginterrupt` said of SIGINT. About 1 us.

    Examples
    --------
    >>> with deferred():
    ...     pass
    """

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: Any = None

    def __enter__(self) -> None:
        """Put a handler that only takes a note before the one there is."""
        if threading.get_ident() != _MAIN:
            return
        before = _signal.getsignal(signal.SIGINT)
        if before is _note or not callable(before):
            return
        _noted.clear()
        _real[:] = (before,)
        # From here on nothing comes in between: the next line is done when an interrupt is noted.
        self._before = before
        try:
            _signal.signal(signal.SIGINT, _note)
        except ValueError:  # embedded: Python's main thread is another than `threading`'s
            self._before = None
            _real.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the handler back, and hand it what was noted."""
        before = self._before
        if before is None:
            return
        try:
            _signal.signal(signal.SIGINT, before)
        except BaseException:
            # A second interrupt was handled on the way in, before anything was put back.
            _signal.signal(signal.SIGINT, before)
            _noted.clear()
            raise
        finally:
            _real.clear()  # a loop's handler keeps its loop
        if _noted:
            frame = _noted.pop()
            _noted.clear()
            before(signal.SIGINT, frame)


def _note(number: int, frame: FrameType | None) -> None:
    if _noted and _real:
        _real[0](number, frame)
    _noted.append(frame)
