"""Step: the experts that one layer of one forward call asks for, and their leases."""

cimport cython
cimport numpy as cnp
from libc.string cimport memset

from queue import SimpleQueue

from moecache.loading.load import Cause

cnp.import_array()

cdef object DEMAND = Cause.DEMAND
cdef object BULK = Cause.BULK


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

    def __cinit__(
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
