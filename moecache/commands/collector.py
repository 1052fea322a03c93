"""The collector of cycles, which waits while a command imports torch.

Imports make hundreds of thousands of objects that stay. The collector goes through them again and
again, and finds next to nothing: a fifth of the time that torch and transformers take.
"""

import contextlib
import gc
from collections.abc import Iterator

# Holds something while the collector waits.
_waits: list[bool] = []


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Have the collector wait, until `go_on` or the end; leave one alone that does not work."""
    if gc.isenabled():
        gc.disable()
        _waits.append(True)
    try:
        yield
    finally:
        go_on()


def go_on() -> None:
    """Have the collector work again if it was told to wait."""
    if _waits:
        _waits.clear()
        gc.enable()
