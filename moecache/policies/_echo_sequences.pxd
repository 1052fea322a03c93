"""Declarations of what is beside this file."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t

from moecache.policies._echo_loops cimport ECHO_RING
from moecache.policies._policy cimport MAX_SEQUENCES


cdef struct Sequence:
    int64_t name    # below 0: rows that no one named
    uint64_t used   # when a step last had a row of it; 0: none yet
    int32_t token   # its last one; 0: none yet
    int32_t seen    # tokens up to this one have a score


@cython.final
cdef class Sequences:
    cdef object array     # owns `scores`
    cdef float* scores    # [MAX_SEQUENCES, ECHO_RING] how much the ring's tokens look like
    cdef Sequence known[MAX_SEQUENCES]
    cdef int current[MAX_SEQUENCES]  # places in `known` of the last step's sequences
    cdef int num_current
    cdef int32_t latest[MAX_SEQUENCES]  # the last token of each place in this step
    cdef int32_t named[MAX_SEQUENCES]  # of each row of the last step, if that had names
    cdef Py_ssize_t num_named
    cdef int64_t unnamed  # the name given to rows without one
    cdef bint between     # rows without a name begin a sequence
    cdef uint64_t steps

    # What the current token of a sequence looks like.
    cdef inline float* scores_of(self, int place) noexcept nogil:
        return self.scores + place * ECHO_RING

    cdef bint follow(
        self, const int32_t* names, Py_ssize_t rows, int32_t token
    ) noexcept nogil
    cdef int place_of(self, int64_t name) noexcept nogil
    cdef void leave_out(
        self, const int32_t* names, Py_ssize_t rows, int place, int32_t token
    ) noexcept nogil
    cdef object last_scores(self)
    cdef void go_on(self, int32_t token) noexcept nogil
    cdef void set_back(self, int32_t tokens) noexcept nogil
    cdef void forget(self) noexcept nogil

    cdef void join(self, int64_t name, int32_t token) noexcept nogil
