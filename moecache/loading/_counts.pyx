"""LoadCounts: a loader's reads, and how long steps waited for them."""

cimport cython
from libc.stdint cimport int64_t

from moecache.loading._load cimport Load
from moecache.loading.load import Cause

cdef tuple CAUSES = tuple(Cause)
if len(CAUSES) != NUM_CAUSES:
    raise ImportError("each Cause needs a counter of its bytes")
cdef object PREFETCH = Cause.PREFETCH


@cython.final
cdef class LoadCounts:
    """Counters of a loader; changed under its lock.

    Parameters
    ----------
    clock : callable () -> int
        Nanoseconds.

    Attributes
    ----------
    clock
        As given.
    num_steps, num_resident_steps : int
        All steps, and those that missed nothing.
    num_reads, num_failed_reads : int
        Experts that were read, and experts that could not be.
    num_urgent_reads, urgent_ns : int
        Reads that a step waited for, and the time in which at least one was under way.
    num_prefetches, num_failed_prefetches, num_cancelled_prefetches : int
        Reads ahead that were begun; those that failed, or were taken back, before a step
        asked for them.
    num_prefetches_in_flight, prefetch_bytes_in_flight : int
    """

    def __cinit__(self, clock):
        self.clock = clock

    @property
    def bytes_read(self):
        """Bytes from the store into slots, a dict of each Cause."""
        return {cause: self._bytes[number] for number, cause in enumerate(CAUSES)}

    cdef int begin_urgent(self) except -1:
        """Note that a step waits for one more load."""
        if self._num_urgent == 0:
            self._urgent_since = self.clock()
        self._num_urgent += 1
        return 0

    cdef int end_urgent(self, bint read) except -1:
        """Note that a load that a step waited for is over, and whether it was read."""
        self._num_urgent -= 1
        self.num_urgent_reads += read
        if self._num_urgent == 0:
            self.urgent_ns += <int64_t>self.clock() - self._urgent_since
        return 0

    cdef void begin_prefetch(self, int64_t num_bytes) noexcept:
        """Note that a read ahead begins."""
        self.num_prefetches += 1
        self.num_prefetches_in_flight += 1
        self.prefetch_bytes_in_flight += num_bytes

    cdef void end_prefetch(self, Load load, int64_t num_bytes) noexcept:
        """Note that a read ahead is over, or now the demand of a step."""
        cdef bint cancelled
        if load.cause is not PREFETCH:
            return
        self.num_prefetches_in_flight -= 1
        self.prefetch_bytes_in_flight -= num_bytes
        if load.error is not None and not load.waiting:
            cancelled = load.was_taken_back()
            self.num_failed_prefetches += not cancelled
            self.num_cancelled_prefetches += cancelled

    cdef void done(self, Load load, int64_t num_bytes) noexcept:
        """Note what became of a load."""
        cdef int number
        if load.error is None:
            self.num_reads += 1
            for number in range(NUM_CAUSES):
                if CAUSES[number] is load.cause:
                    self._bytes[number] += num_bytes
        elif not load.was_taken_back():
            self.num_failed_reads += 1
