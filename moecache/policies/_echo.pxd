"""Declarations of what is beside this file."""

cimport cython
from libc.stdint cimport int32_t, uint32_t, uint64_t

from moecache.policies._echo_history cimport History
from moecache.policies._echo_outlook cimport Outlook
from moecache.policies._echo_ring cimport Ring
from moecache.policies._echo_sequences cimport Sequence, Sequences


@cython.final
cdef class Echo:
    cdef readonly int num_layers
    cdef readonly int num_experts
    cdef readonly bint ring
    cdef History history
    cdef Ring recent      # of no layers unless `ring`
    cdef Sequences sequences
    cdef Outlook outlook
    cdef dict arrays      # what owns the memory, also that of the parts
    cdef int num_words
    cdef int lowest       # the lowest layer seen: with it a token begins
    cdef int layer        # the last one seen
    cdef int32_t token    # how many there were
    cdef uint32_t* versions   # [num_layers] changes with the layer's values
    # For the request at hand.
    cdef uint64_t* request    # [num_words]
    cdef float* wanted        # [num_experts] 0 or 1
    cdef float* sums          # [num_experts] of `wanted`, over the rows of several sequences

    cdef dict learned(self)
    cdef int checked(self, Py_ssize_t layer) except -1
    cdef void observe_rows(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* names,
    ) noexcept nogil
    cdef void observe_one(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k
    ) noexcept nogil
    cdef void observe_several(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* names,
    ) noexcept nogil
    cdef bint read_row(self, const void* ids, bint wide, Py_ssize_t k) noexcept nogil
    cdef int32_t token_of(self, int layer, int place, Py_ssize_t later) noexcept nogil
    cdef void begin_scores(self, Sequence* sequence, float* scores) noexcept nogil
    cdef float vote_next(self, int layer, int place) noexcept nogil
    cdef float vote_ahead(self, int layer, int place) noexcept nogil
    cdef void forget_all(self) noexcept nogil
