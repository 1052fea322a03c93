"""Holds memory for a process that needs it soon; run as a program, with nothing else imported.

`python -I -S holding.py BYTES BYTES ...` takes that much from the system, part by part, and gives
the next part back for each byte on its standard input, all at its end. In another process than the
one that it is for: there, a thread that takes memory has all others wait that map or unmap some.
"""

import contextlib
import mmap
import os
import select
import sys
import time

# Taken at once: as long as nothing is given back.
_STEP_BYTES = 16 * 2**20
# Else what was given back would be taken again, as it is the warmest.
_PAUSE_S = 2.0
# Linux 5.14.
_MADV_POPULATE_WRITE = 23


def hold(sizes: list[int]) -> None:
    """Take memory, and give it back as standard input says."""
    # If memory runs out, this goes first.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    parts = [mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for size in sizes]
    taken = [0] * len(parts)
    first, resumes_s = 0, 0.0
    for part in parts:
        with contextlib.suppress(OSError):
            part.madvise(mmap.MADV_HUGEPAGE)
    while first < len(parts):
        number = next((i for i in range(first, len(parts)) if taken[i] < len(parts[i])), None)
        wait_s = None if number is None else max(0.0, resumes_s - time.monotonic())
        if select.select([0], [], [], wait_s)[0]:
            if not os.read(0, 1):
                return
            parts[first].close()
            first += 1
            resumes_s = time.monotonic() + _PAUSE_S
        elif number is not None:
            step = min(_STEP_BYTES, len(parts[number]) - taken[number])
            try:
                parts[number].madvise(_MADV_POPULATE_WRITE, taken[number], step)
            except OSError:
                return
            taken[number] += step


if __name__ == "__main__":
    hold([int(size) for size in sys.argv[1:]])
