"""Load: one expert on its way into one slot.

A load is in one table of the loader's, from the claim of its slot until the slot is filled
or given back:

    claimed ---> QUEUED ---> READING ---> DONE ---> published, or abandoned
                   |  buffers   |  the engine  |  `_bring_in`: uploaded, and told
                   |  are free  |  gave it back|
                   +------------+--------------+--> cancelled: no step waits for it
                                   ^           |
                                   +-- once more, as a demand: a read ahead that failed,
                                       and that a step waits for by then
"""

import enum
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from moecache.errors import FormatError, MoeCacheError
from moecache.stores.base import ExpertStore, FileStore


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
    """How far a load is; see the diagram above."""

    QUEUED = "queued"  # it waits for a buffer
    READING = "reading"  # an engine has it
    DONE = "done"  # it was read, or failed


class ReadCancelledError(MoeCacheError):
    """A read that was taken back, interrupted, or ended by `close`: no failure of the store."""


def named(error: Exception, load: "Load", store: ExpertStore) -> Exception:
    """Return an error; one of an expert's bytes says whose they are, and in which files."""
    if not isinstance(error, FormatError):
        return error
    what = f"expert {load.expert} of layer {load.layer}"
    if isinstance(store, FileStore):
        runs = store.runs(load.layer, load.expert)
        paths = sorted({str(store.files[number].path) for number, *_ in runs})
        what = f"{', '.join(paths)}: {what}"
    told = FormatError(f"{what}: {error}")
    told.__cause__ = error
    return told


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
        The counter of its bytes.
    staged : bool
        Whether the slot is a staging slot, which no cache knows.
    urgent : bool
        Whether a step waits for it, or did.
    state : LoadState
    waiting : list of SimpleQueue
        Queues of the steps that wait for it; each gets the load when it is over.
    parts : dict of role to ndarray
        The arrays to read to, while it is read.
    fills : tuple of (Tiler, role, int, ndarray)
        Parts that the engine brings into compute form, and the slot's arrays that it writes.
    is_wrong : bool
        Whether it found a scale there that is wrong.
    error : Exception or None
        Why it failed; `ReadCancelledError` from when it is taken back.
    """

    __slots__ = (
        "cause",
        "error",
        "expert",
        "fills",
        "is_wrong",
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
        self.parts: Mapping[str, Any] = {}
        self.fills: tuple[tuple[Any, str, int, Any], ...] = ()
        self.is_wrong = False
        self.error: Exception | None = None

    @property
    def is_unwanted(self) -> bool:
        """Whether it was foreseen, and no step has asked for it so far."""
        taken = self.urgent or self.waiting or self.is_cancelled
        return self.cause is Cause.PREFETCH and not taken

    @property
    def is_cancelled(self) -> bool:
        """Whether it was taken back."""
        return isinstance(self.error, ReadCancelledError)
