"""Memory that a virtual machine's host has to give before a clock starts, rather than after."""

import subprocess
import sys
from types import TracebackType
from typing import Self

from moecache.sizing.host_memory import free_host_bytes
from moecache.units import format_bytes

# What the machine keeps where memory is held.
_SPARE_BYTES = 2**30
# A huge page.
_LEAST_BYTES = 2**21
# A process of its own: what it has is free the moment it is killed, and belongs to no limit.
_PROGRAM = """
import mmap, sys, time
memory = mmap.mmap(-1, int(sys.argv[1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
memory.madvise(23)  # MADV_POPULATE_WRITE, which `mmap` has no name for
print("held", flush=True)
time.sleep(3600)
"""


class HeldMemory:
    """A process that has touched `nbytes` of memory, until `free`; a context manager.

    Many hypervisors take back memory that a guest has had free for some 2 s, and whoever touches
    it next waits for them. Freed a moment ago, it is still the guest's. Blocks until all is there.

    Parameters
    ----------
    nbytes : int

    Raises
    ------
    RuntimeError
        If the memory cannot be held: too little is free, or Linux is older than 5.14.
    """

    def __init__(self, nbytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(nbytes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "held\n":
            _, errors = self._process.communicate()
            raise RuntimeError(
                f"{format_bytes(nbytes)} cannot be held ({self._process.returncode}; it takes "
                f"free memory, and Linux 5.14): {errors[-300:]}"
            )

    def free(self) -> None:
        """Give the memory back to the kernel, and return once it has it."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        """Return the memory."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back."""
        self.free()


def back(nbytes: int, kept_bytes: int = 0) -> None:
    """Have free memory be the guest's own for some 2 s.

    Parameters
    ----------
    nbytes : int
        So much, as far as there is so much.
    kept_bytes : int, default 0
        Of what is available, that others are to keep: pages of files.
    """
    free = free_host_bytes() - kept_bytes - _SPARE_BYTES
    with HeldMemory(max(_LEAST_BYTES, min(nbytes, free))):
        pass
