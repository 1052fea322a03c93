"""The end of a runtime: its threads first, then its files and slots."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from moecache.loading._loader import CLOSE_TIMEOUT_S, SlotLoader
from moecache.prefault.background import BackgroundSweep
from moecache.prefetch.prefetcher import Prefetcher
from moecache.profiles.warm_start import WarmStart

logger = logging.getLogger(__name__)


def close_parts(
    stack: contextlib.ExitStack,
    loader: SlotLoader,
    prefetcher: Prefetcher | None,
    warm_start: WarmStart | None,
    prefault: BackgroundSweep | None,
    callbacks: Sequence[Callable[[], object]],
) -> None:
    """Have a stack stop the threads of a runtime, then call the callbacks, the last one first."""
    until = time.monotonic() + CLOSE_TIMEOUT_S
    # In reverse: an interrupt leaves none of it out.
    for callback in callbacks:
        stack.callback(callback)
    if prefetcher is not None:
        prefetcher.stop()
        stack.callback(lambda: prefetcher.close(max(0.0, until - time.monotonic())))
    stack.callback(loader.close)
    if warm_start is not None:
        stack.callback(warm_start.cancel, 0)
    if prefault is not None:
        stack.callback(prefault.cancel, 0)


def wait_for_sweep(prefault: BackgroundSweep | None) -> None:
    """Wait until a sweep that was cancelled has ended; warn if it does not."""
    # The sweep holds the memory that it reads, so a read that hangs need not be waited for.
    if prefault is not None and not prefault.cancel(CLOSE_TIMEOUT_S):
        logger.warning("runtime.prefault_hangs after=%d s", CLOSE_TIMEOUT_S)
