"""Holds memory for a process that needs it soon; run as a program, with nothing else imported.

`python -I -S holding.py PARENT BYTES BYTES ...` takes that much from the system, part by part. For
each byte on its standard input it gives the next part back; when the input ends, or its parent is
not process PARENT, it ends. A process of its own does this because a thread that populates memory
blocks all others of its process that map or unmap some.
"""

import contextlib
import mmap
import os
import select
import sys
import time

# Taken at once: as long as nothing is given back.
_STEP_BYTES = 16 * 2**20
# What was freed last is handed out first: without a pause this process would take it again.
_PAUSE_S = 2.0
# Another process that was forked may keep the input open.
_LOOK_S = 1.0
# Linux 5.14.
_MADV_POPULATE_WRITE = 23


def hold(parent: int, sizes: list[int]) -> None:
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
    while first < len(parts) and os.getppid() == parent:
        number = next((i for i in range(first, len(parts)) if taken[i] < len(parts[i])), None)
        pause_s = max(0.0, resumes_s - time.monotonic())
        wait_s = _LOOK_S if number is None else min(pause_s, _LOOK_S)
        if select.select([0], [], [], wait_s)[0]:
            if not os.read(0, 1):
                return
            parts[first].close()
            first += 1
            resumes_s = time.monotonic() + _PAUSE_S
        elif number is not None and time.monotonic() >= resumes_s:
            step = min(_STEP_BYTES, len(parts[number]) - taken[number])
            try:
                parts[number].madvise(_MADV_POPULATE_WRITE, taken[number], step)
            except OSError:
                return
            taken[number] += step


if __name__ == "__main__":
    hold(int(sys.argv[1]), [int(size) for size in sys.argv[2:]])
