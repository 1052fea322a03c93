"""Load: one expert on its way into one slot.

A load is in one table of the loader's, from the claim of its slot until the slot is filled
or given back:

    claimed ---> QUEUED ---> READING ---> DONE ---> published, or abandoned
                   |  buffers   |  the engine  |  `Transfers`: uploaded, told
                   |  are free  |  gave it back|
                   +------------+--------------+--> cancelled: no step waits for it
                                   ^           |
                                   +-- once more, as a demand: a read ahead that failed,
                                       and that a step waits for by then
"""

cimport cython

from moecache.loading.load import Cause, ReadCancelledError

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

    def __cinit__(
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

    cdef bint began_ahead(self) noexcept:
        """Whether the read began before a step asked for it."""
        return self.cause is not DEMAND and self.cause is not BULK
