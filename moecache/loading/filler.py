"""Filler: a thread that fills slots whose contents are computed from what was read."""

import logging
import threading
import weakref
from queue import SimpleQueue
from typing import Protocol

logger = logging.getLogger(__name__)


class Fills(Protocol):
    """Takes in finished reads; a `SlotLoader` does."""

    def fill(self) -> bool:
        """Wait for a moment, and take in what has arrived; False if nothing is on its way."""


class Filler:
    """Takes in what was read as soon as it is there, so that steps need not.

    It is worth its while where filling a slot takes time, as with compute forms: a caller
    computes experts meanwhile, or fills another slot itself.

    Parameters
    ----------
    loader : SlotLoader
        Held weakly.
    """

    def __init__(self, loader: Fills) -> None:
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve,
            args=(weakref.ref(loader), self._wake),
            name="moecache-filler",
            daemon=True,
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # callers fill slots themselves
            logger.warning("filler.no_thread error=%s", error)

    @property
    def is_alive(self) -> bool:
        """Whether the thread works."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Say that something is on its way."""
        self._wake.put(True)

    def close(self, timeout_s: float) -> None:
        """End the thread; waits for what it is filling."""
        self._wake.put(False)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)


def _serve(reference: "weakref.ref[Fills]", wake: "SimpleQueue[bool]") -> None:
    while wake.get():
        going = True
        while going:
            # Held while it works alone: a runtime that is dropped goes at once.
            loader = reference()
            try:
                going = loader is not None and loader.fill()
            except Exception:
                logger.exception("filler.failed")
                return
            finally:
                del loader
