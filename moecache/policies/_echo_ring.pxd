"""Declarations of what is beside this file."""

cimport cython
from libc.stdint cimport int32_t, uint8_t, uint64_t

from moecache.policies._echo_loops cimport ECHO_RING, EchoLoops


cdef enum:
    REBASE = 1 << 30  # tokens after which their numbers are set back


@cython.final
cdef class Ring:
    cdef int num_layers
    cdef int num_words
    cdef EchoLoops loops
    cdef dict arrays       # what owns the memory, by the names in `Echo.state`
    cdef uint64_t* masks   # [num_layers, ECHO_RING, num_words] requests
    cdef uint8_t* before   # [ECHO_RING] how far back a token's sequence was last; 0: nowhere
    cdef uint8_t after[256]  # how far ahead it went on
    cdef float discounts[8]

    cdef inline uint64_t* mask(self, int layer, int slot) noexcept nogil:
        return self.masks + (<size_t>layer * ECHO_RING + slot) * self.num_words

    cdef void note(self, int layer, int32_t token, const uint64_t* request) noexcept nogil
    cdef void match(self, int layer, const uint64_t* request, float* scores) noexcept nogil
    cdef void carry(self, int32_t token, int32_t unseen, float* scores) noexcept nogil
    cdef void enter(self, int32_t token, int32_t previous) noexcept nogil
    cdef float vote_successors(
        self, int layer, const float* scores, float* votes
    ) noexcept nogil
    cdef float vote_same(self, int layer, const float* scores, float* votes) noexcept nogil
    cdef void link_back(self) noexcept nogil
    cdef void forget(self) noexcept nogil

    cdef void unlink(self, int slot) noexcept nogil
    cdef void add_votes(self, int layer, int slot, float weight, float* votes) noexcept nogil
