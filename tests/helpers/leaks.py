"""What a block leaves behind: open files and threads."""

import contextlib
import gc
import threading
from collections.abc import Iterator

from tests.helpers.pages import num_descriptors, wait_until


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that what a block opens and starts is given back.

    A thread that has done its work is counted for a moment longer, on a busy machine for a long
    one: the check waits.
    """
    descriptors, threads = num_descriptors(), threading.active_count()

    def given_back() -> bool:
        return num_descriptors() <= descriptors and threading.active_count() <= threads

    yield
    if not given_back():
        gc.collect()
    wait_until(given_back)
