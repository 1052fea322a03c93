"""Load and Step: one expert on its way into one slot, and what a layer of a call asks for.

A load is in one table of the loader's, from the claim of its slot until the slot is filled
or given back:

    claimed ---> QUEUED ---> READING ---> DONE ---> published, or abandoned
                   |  buffers   |  the engine  |  `bring_in`: uploaded, and told
                   |  are free  |  gave it back|
                   +------------+--------------+--> cancelled: no step waits for it
                                   ^           |
                                   +-- once more, as a demand: a read ahead that failed,
                                       and that a step waits for by then
"""

cimport cython
cimport numpy as cnp
from libc.string cimport memset

from queue import SimpleQueue

from moecache.loading.load import Cause, ReadCancelledError

cnp.import_array()

cdef object PREFETCH = Cause.PREFETCH
cdef object DEMAND = Cause.DEMAND
cdef object BULK = Cause.BULK


@cython.final
cdef class Load:
    """One expert on its way into one slot.

    Parameters
    ----------
    layer, expert, slot : int
    cause : Cause
    staged : bool, default False

    Attributes
    ----------
    layer, expert, slot : int
    cause : Cause
        The counter of its bytes.
    staged : bool
        Whether the slot is a staging slot, which no cache knows.
    urgent : bool
        Whether a step waits for it, or did.
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

    def __init__(
        self, Py_ssize_t layer, Py_ssize_t expert, Py_ssize_t slot, cause, *, bint staged=False
    ):
        self.layer = layer
        self.expert = expert
        self.slot = slot
        self.cause = cause
        self.staged = staged
        self.urgent = cause is DEMAND or cause is BULK
        self.state = QUEUED
        self.waiting = []
        self.parts = {}
        self.fills = ()
        self.is_wrong = False
        self.error = None

    @property
    def is_unwanted(self):
        """Whether it was foreseen, and no step has asked for it so far."""
        return self.is_useless()

    @property
    def is_cancelled(self):
        """Whether it was taken back."""
        return self.was_taken_back()

    cdef bint was_taken_back(self) noexcept:
        return self.error is not None and isinstance(self.error, ReadCancelledError)

    cdef bint is_useless(self) noexcept:
        return self.cause is PREFETCH and not (
            self.urgent or self.waiting or self.was_taken_back()
        )


@cython.final
cdef class Step:
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

    def __init__(
        self,
        Py_ssize_t layer,
        cnp.ndarray ids not None,
        Py_ssize_t num_experts,
        *,
        Py_ssize_t share=-1,
        bint ignore_out_of_range=False,
        sequences=None,
    ):
        cdef cnp.npy_intp size = cnp.PyArray_SIZE(ids)
        cdef cnp.npy_intp num_misses = min(size, num_experts)
        cdef int dimensions = cnp.PyArray_NDIM(ids)
        self.layer = layer
        self.ids = ids
        self.sequences = sequences
        self.share = share
        self.ignore_out_of_range = ignore_out_of_range
        one_token = dimensions == 0 or size == cnp.PyArray_DIM(ids, dimensions - 1)
        self.cause = DEMAND if one_token else BULK
        self.slots = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT32, 0)
        memset(cnp.PyArray_DATA(self.slots), 0xFF, <size_t>size * 4)  # -1
        self.misses = cnp.PyArray_EMPTY(1, &num_misses, cnp.NPY_INT32, 0)
        self.arrived = SimpleQueue()
        self.loads = set()
        self.bypassed = []
        self.leased = self.slots
        self.staged = set()
