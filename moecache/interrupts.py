"""Sections that Ctrl-C, a timeout or a request to end cannot interrupt; ends with a parent."""

import importlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# Without `signal.signal`'s conversions to enumerations, which take twenty times as long.
_signal: Any = importlib.import_module("_signal")
_handler_of: Callable[[int], Any] = _signal.getsignal
# Those whose handlers raise by custom: `signal.alarm` and timers, Ctrl-C, a request to end.
_ALARM, _INTERRUPT, _END = int(signal.SIGALRM), int(signal.SIGINT), int(signal.SIGTERM)

_LOOK_S = 0.5
_main = threading.main_thread().ident
# The outermost section; what it has replaced, and what came meanwhile.
_owner: "weakref.ref[uninterrupted] | None" = None
_held: list[tuple[int, Callable[..., object]]] = []
_noted: dict[int, FrameType | None] = {}


class uninterrupted:  # noqa: N801 - reads as what it does, like contextlib.suppress
    """Hold SIGALRM, SIGINT and SIGTERM until the end of a section.

    What their handlers raise would lose what is claimed and not yet noted, or noted and not yet
    given back. Several of a kind are delivered as one. Where two kinds come, both handlers are
    called; what the second raises has the first's as its context. Sections nest; only the outermost
    lets a signal through. A section must not wait for anything that may never come. Does nothing
    in threads other than the main one, where no handler runs, and for signals that have no
    handler in Python. Putting a handler back forgets what `signal.siginterrupt` said of its
    signal, and handlers that C code has put over Python's. Takes about 1.7 us.

    Examples
    --------
    >>> with uninterrupted():
    ...     pass
    """

    __slots__ = ("__weakref__",)

    def __enter__(self) -> None:
        """Replace the handlers by one that only notes the signal."""
        global _owner  # noqa: PLW0603 - there is one main thread, and it has one outermost section
        if threading.get_ident() != _main:
            return
        if _held or _noted:
            if _owner is not None and _owner() is not None:  # a section around this one
                return
            # What an earlier section could not end: another signal's handler raised there.
            _release()
        # Spelled out: a step has several sections.
        alarm, interrupt, end = _handler_of(_ALARM), _handler_of(_INTERRUPT), _handler_of(_END)
        before = [(_ALARM, alarm)] if callable(alarm) else []
        if callable(interrupt):
            before.append((_INTERRUPT, interrupt))
        if callable(end):
            before.append((_END, end))
        if not before:
            return
        try:
            _owner = weakref.ref(self)
            _held.extend(before)
            for number, _ in before:
                _signal.signal(number, _note)
        except BaseException as error:
            # Embedded: Python's main thread is not `threading`'s.
            if isinstance(error, ValueError) and "only works in main thread" in str(error):
                _held.clear()
                return
            # Setting a handler first runs those of pending signals, and one of them raised.
            _release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the handlers back, and pass them what was noted."""
        if _owner is not None and _owner() is self and threading.get_ident() == _main:
            _release()


def end_with(parent: int, *, patience_s: float = 0.0) -> None:
    """End this process soon after its parent has ended, even if that was killed.

    A thread looks twice a second who the parent is. No pipe is needed, which a third process
    might hold open, and the parent's threads may come and go.

    Parameters
    ----------
    parent : int
        The parent's process id, as the parent says it: it may be gone before this is called.
    patience_s : float, default 0
        If positive, the main thread is interrupted first, as by Ctrl-C, and has so many seconds
        to clean up. What runs then ends at once.
    """
    thread = threading.Thread(
        target=_end_with, args=(parent, patience_s), name="moecache-parent", daemon=True
    )
    thread.start()


def _end_with(parent: int, patience_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    if patience_s > 0:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(patience_s)
    os._exit(1)


def _release() -> None:
    """Put the handlers back, and call those whose signal was noted."""
    global _owner  # noqa: PLW0603
    try:
        _owner = None
        while _held:
            # One that is back may be called here, raise, or have a section of its own.
            _signal.signal(*_held[-1])
            del _held[-1:]
        while _noted:
            number = min(_noted, key=_ORDER.index)
            frame, handler = _noted.pop(number), _handler_of(number)
            if callable(handler):
                handler(number, frame)
    except BaseException:
        # Whatever raised, all others come back; what they raise has this as its context.
        if _held or _noted:
            _release()
        raise


_ORDER = (_ALARM, _INTERRUPT, _END)


def _note(number: int, frame: FrameType | None) -> None:
    _noted[number] = frame


def _leave_parent() -> None:
    """Put handlers back in a forked child whose only thread is none that was in a section."""
    global _main  # noqa: PLW0603
    if threading.get_ident() != _main:
        _main = threading.get_ident()
        _noted.clear()
        _release()


os.register_at_fork(after_in_child=_leave_parent)
