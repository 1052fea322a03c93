"""CtrlC: an interrupted command ends with one line and exit code 130, whenever that comes."""

import _thread
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

EXIT_CODE = 130
_LINE = "moecache: interrupted\n"
_SHOW_CURSOR = b"\x1b[?25h"
# A key held down repeats, and torchrun passes on signals that the terminal sends to all, too.
_REPEAT_S = 1.0


class CtrlC:
    """Handler of SIGINT in the process of a command.

    Before the command runs, and once it has ended, there is nothing to close: an interrupt ends
    the process at once. In the command it is a KeyboardInterrupt, which closes what is open.
    Repeats of it within a second are ignored; a later one ends the process at once, so a close
    that hangs can be left. Nothing is raised in imports, finalizers, or as the interpreter ends,
    where a KeyboardInterrupt would be a traceback on standard error.
    """

    def __init__(self) -> None:
        self._is_running = False
        self._has_ended = False
        self._is_told = False
        self._raised_s: float | None = None
        self._code = EXIT_CODE
        self._has_returned = self._stays = self._is_first = False

    def catch(self) -> None:
        """Handle SIGINT from now on, unless it is ignored, as in a shell's background job."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # In other threads than the main one no interrupt arrives.
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGINT, self._handle)

    def release(self) -> None:
        """Put Python's own handler back."""
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def stay(self) -> None:
        """Handle SIGINT up to the end of the process, from now on again if it was released."""
        self.catch()
        if not self._stays and signal.getsignal(signal.SIGINT) == self._handle:
            # Registered first, called last, unless the interpreter was told to begin with another.
            self._stays, self._is_first = True, not atexit._ncallbacks()  # noqa: SLF001
            atexit.register(self._leave)
            sys.unraisablehook = self._ignored

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let interrupts be raised in the command; a failure because of one is an interrupt."""
        self._is_running, self._has_ended, self._is_told, self._raised_s = True, False, False, None
        try:
            yield
        except Exception as error:
            if self._raised_s is not None:
                raise KeyboardInterrupt from error
            raise
        finally:
            self._is_running, self._has_ended = False, True

    def answer(self) -> None:
        """Note that a command has done what an interrupt asked for, and goes on."""
        self._raised_s = None

    def tell(self) -> None:
        """Write the line, once."""
        if not self._is_told and sys.stderr is not None:
            self._is_told = True
            with contextlib.suppress(OSError):
                sys.stderr.write(_LINE)
                sys.stderr.flush()

    def end(self, code: int, *, has_returned: bool) -> None:
        """Note that the command has ended, with an exit code that is the process's if it returned.

        Anything else that leaves it, such as SystemExit, has a code of its own.
        """
        # Before the code counts, of a process that an interrupt may end at once.
        _flush()
        self._has_ended, self._code, self._has_returned = True, code, has_returned

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - of a handler
        if self._is_running:
            if self._raised_s is None:
                self._raised_s = time.monotonic()
                raise KeyboardInterrupt
            if time.monotonic() - self._raised_s < _REPEAT_S:
                return
        self._exit()

    def _leave(self) -> None:
        """End the process, or let no signal kill it any more.

        All is closed by now, threads have ended, and the other functions of atexit were called, as
        this one was the first. Python would take a second to dissolve torch's modules, piece by
        piece; programs that are traced or profiled have that, as C's functions at exit are left
        out. It also kills itself by SIGINT, whatever the exit code, if an interrupt ever left
        `exec` of a string, of which imports have many.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        is_watched = sys.gettrace() is not None or sys.getprofile() is not None
        if self._raised_s is None and (is_watched or not (self._has_returned and self._is_first)):
            return
        # Python reports what could not be written.
        if _flush() or self._raised_s is not None:
            os._exit(self._code)

    def _exit(self) -> None:
        with contextlib.suppress(OSError):
            if self._is_running and os.isatty(2):
                os.write(2, _SHOW_CURSOR)
            if not self._is_told and not (self._has_ended and self._raised_s is None):
                # First: another interrupt may come in between.
                self._is_told = True
                os.write(2, _LINE.encode())
        os._exit(self._code)

    def _ignored(self, unraisable: Any) -> None:
        """Deliver an interrupt again that came in a finalizer, where nothing can be raised."""
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(unraisable)
        elif self._is_running:
            self._raised_s = None
            # Not from here: it would be raised here.
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(_interrupt_soon, ())


def _flush() -> bool:
    """Return whether all that was written has left."""
    has_failed = False
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            has_failed = True
    return not has_failed


def _is_command() -> bool:
    name = (getattr(sys, "argv", None) or [""])[0]
    if name == "-m":  # until the module is found
        after = sys.orig_argv.index("-m") + 1 if "-m" in sys.orig_argv else len(sys.orig_argv)
        return sys.orig_argv[after : after + 1] == ["moecache"]
    return os.path.basename(name) == "moecache"


def _interrupt_soon() -> None:
    time.sleep(0.01)
    # The signal goes to the main thread, so that its wait ends.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


CTRL_C = CtrlC()
# Whether this process was started as `moecache` or `python -m moecache`, whose arguments say so no
# more once the module is found.
IS_COMMAND = _is_command()
