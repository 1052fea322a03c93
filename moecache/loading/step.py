"""Step: the experts that one layer of one forward call asks for, and their leases."""

from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from moecache.loading.load import Cause, Load


class Step:
    """The experts that one layer of one forward call asks for, and holds until it is over.

    Made before anything is acquired, so that it is known what to give back at any
    interrupt: `SlotLoader.guard` ties it to the loader.

    Parameters
    ----------
    layer : int
    ids : ndarray of int32 or int64, any shape
    num_experts : int
        Experts of a layer.
    share : int, default -1
        Most experts of the step with a slot in the cache, see `ExpertCache.acquire`;
        -1: all of them, or none is acquired.
    ignore_out_of_range : bool, default False
    sequences : array of int, shape [rows], optional
        Which sequence each row is of.

    Attributes
    ----------
    cause : Cause
    slots : ndarray of int32, shape [ids.size]
        Slot of each id; -1: none.
    arrived : SimpleQueue of Load
        Loads of the step that are over.
    loads : set of Load
        Loads that it waits for, or has not looked at.
    bypassed : list of int
        Experts that `share` left without a slot: to be staged.
    leased : ndarray of int32, or set of int
    staged : set of int
        Slots to give back, of the cache and beside it.
    """

    __slots__ = (
        "__weakref__",
        "arrived",
        "bypassed",
        "cause",
        "ids",
        "ignore_out_of_range",
        "layer",
        "leased",
        "loads",
        "misses",
        "sequences",
        "share",
        "slots",
        "staged",
    )

    def __init__(
        self,
        layer: int,
        ids: np.ndarray,
        num_experts: int,
        *,
        share: int = -1,
        ignore_out_of_range: bool = False,
        sequences: npt.ArrayLike | None = None,
    ) -> None:
        self.layer = layer
        self.ids = ids
        self.sequences = sequences
        self.share = share
        self.ignore_out_of_range = ignore_out_of_range
        one_token = ids.ndim == 0 or ids.size == ids.shape[-1]
        self.cause = Cause.DEMAND if one_token else Cause.BULK
        self.slots = np.full(ids.size, -1, np.int32)
        self.misses = np.empty(min(ids.size, num_experts), np.int32)
        self.arrived: SimpleQueue[Load] = SimpleQueue()
        self.loads: set[Load] = set()
        self.bypassed: list[int] = []
        self.leased: np.ndarray | set[int] = self.slots
        self.staged: set[int] = set()
