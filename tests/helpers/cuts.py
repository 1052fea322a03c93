"""A timeout that comes at a certain line of some files, as a signal's handler raises it."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def cut_at(call: Callable[[], object], files: tuple[str, ...], line: int) -> bool | None:
    """Call something; SIGALRM comes at the nth line that it executes in some files.

    Return whether its TimeoutError came out; `None` if so many lines were not executed.
    """
    left = line

    def raise_timeout(number: int, frame: object) -> None:
        raise TimeoutError

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if event == "line" and frame.f_code.co_filename.endswith(files):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGALRM)
        return trace

    before = signal.signal(signal.SIGALRM, raise_timeout)
    sys.settrace(trace)
    try:
        call()
    except TimeoutError:
        return True
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGALRM, before)
    return None if left > 0 else False
