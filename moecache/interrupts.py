"""Sections that Ctrl-C, a timeout or a request to end cannot interrupt."""

import importlib
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

# Without `signal.signal`'s conversions to enumerations, which take twenty times as long.
_signal: Any = importlib.import_module("_signal")
_MAIN = threading.main_thread().ident
# Those whose handlers raise by custom: Ctrl-C, `signal.alarm` and timers, a request to end.
_INTERRUPT, _ALARM, _END = int(signal.SIGINT), int(signal.SIGALRM), int(signal.SIGTERM)
_handler_of: Callable[[int], Any] = _signal.getsignal
_noted: dict[int, FrameType | None] = {}

_Handlers = Sequence[tuple[int, Callable[..., object]]]


class uninterrupted:  # noqa: N801 - reads as what it does, like contextlib.suppress
    """Hold SIGINT, SIGALRM and SIGTERM until the end of a section.

    What their handlers raise would lose what is claimed and not yet noted, or noted and not yet
    given back. Several of a kind are delivered as one. Sections nest; only the outermost lets
    a signal through. A section must not wait for anything that may never come. Does
    nothing in threads other than the main one, where no handler runs, and for signals that
    have no handler in Python. Putting a handler back forgets what `signal.siginterrupt`
    said of its signal. Takes about 1 us.

    Examples
    --------
    >>> with uninterrupted():
    ...     pass
    """

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: _Handlers = ()

    def __enter__(self) -> None:
        """Replace the handlers by one that only notes the signal."""
        if threading.get_ident() != _MAIN:
            return
        # Spelled out: a step has several sections.
        interrupt, alarm = _handler_of(_INTERRUPT), _handler_of(_ALARM)
        end = _handler_of(_END)
        if interrupt is _note or alarm is _note or end is _note:  # a section around this one
            return
        before = [(_INTERRUPT, interrupt)] if callable(interrupt) else []
        if callable(alarm):
            before.append((_ALARM, alarm))
        if callable(end):
            before.append((_END, end))
        if not before:
            return
        _noted.clear()
        try:
            for number, _ in before:
                _signal.signal(number, _note)
            self._before = before
        except BaseException as error:
            # Embedded: Python's main thread is not `threading`'s.
            if str(error).startswith("signal only works in main thread"):
                return
            # A handler that was still there raised, and maybe one whose signal was noted.
            raised = _let_through(before)
            if raised is None:
                raise
            raise raised from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the handlers back, and pass them what was noted."""
        before = self._before
        if not before:
            return
        raised: BaseException | None = None
        try:
            for number, handler in before:
                _signal.signal(number, handler)
            if not _noted:
                return
        except BaseException as caught:  # noqa: BLE001 - raised below
            # Setting a handler first runs those of pending signals, and one of them raised.
            raised = caught
        raised = _let_through(before) or raised
        if raised is not None:
            raise raised


def _let_through(before: _Handlers) -> BaseException | None:
    """Put handlers back, and call those whose signal was noted; return what one raised."""
    raised: BaseException | None = None
    left = list(before)
    while left:
        try:
            while left:
                _signal.signal(*left[-1])
                left.pop()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            raised = error
    noted = dict(_noted)
    _noted.clear()
    for number, handler in before:
        if number in noted:
            try:
                handler(number, noted[number])
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                error.__context__ = raised
                raised = error
    return raised


def _note(number: int, frame: FrameType | None) -> None:
    _noted[number] = frame
