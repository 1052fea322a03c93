"""Load: one expert on its way into one slot."""

import enum
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from moecache.errors import MoeCacheError


class Cause(enum.Enum):
    """Why an expert is read."""

    DEMAND = "demand"  # a token chose it
    BULK = "bulk"  # one of many tokens did
    PREFETCH = "prefetch"  # no token did so far, but one may
    WARM_START = "warm_start"  # an earlier run used it

    @property
    def is_ahead(self) -> bool:
        """Whether the read begins before a step asks for it."""
        return self is Cause.PREFETCH or self is Cause.WARM_START


class LoadState(enum.Enum):
    """How far a load is; see the diagram in `loader.py`."""

    QUEUED = "queued"  # it waits for a buffer
    READING = "reading"  # an engine has it
    DONE = "done"  # it was read, or failed


class ReadCancelledError(MoeCacheError):
    """A read that was taken back, interrupted, or ended by `close`: no failure of the store."""


def interrupted(read: Any) -> ReadCancelledError:
    """Return how a read ends whose caller was interrupted; steps that wait have it read again."""
    return ReadCancelledError(
        f"reading expert {read.expert} of layer {read.layer} was interrupted; call again"
    )


class Load:
    """One expert on its way into one slot.

    Attributes
    ----------
    layer, expert, slot : int
    cause : Cause
        What its bytes are counted as.
    staged : bool
        Whether the slot is a staging slot, which no cache knows.
    urgent : bool
        Whether a step waits for it, or did.
    state : LoadState
    waiting : list of SimpleQueue
        Queues of the steps that wait for it; each gets the load when it is over.
    parts : dict of role to ndarray, or None
        Where to read to, while it is read; `None` if the pool takes views of the store.
    error : Exception or None
        Why it failed; `ReadCancelledError` from when it is taken back.
    """

    __slots__ = (
        "cause",
        "error",
        "expert",
        "layer",
        "parts",
        "slot",
        "staged",
        "state",
        "urgent",
        "waiting",
    )

    def __init__(
        self, layer: int, expert: int, slot: int, cause: Cause, *, staged: bool = False
    ) -> None:
        self.layer = layer
        self.expert = expert
        self.slot = slot
        self.cause = cause
        self.staged = staged
        self.urgent = not cause.is_ahead
        self.state = LoadState.QUEUED
        self.waiting: list[SimpleQueue[Load]] = []
        self.parts: Mapping[str, Any] | None = None
        self.error: Exception | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether it was taken back."""
        return isinstance(self.error, ReadCancelledError)
