cimport cython
from libc.stdint cimport int32_t, uint8_t, uint64_t

from moecache.cache._cache cimport ExpertCache

cdef enum:
    MAX_GUESSES = 128  # twice the most experts that a token uses
    NUM_CLASSES = 32


@cython.final
cdef class Foresight:
    cdef ExpertCache cache
    cdef int32_t* guesses   # [num_layers, MAX_GUESSES] the likeliest first
    cdef uint8_t* classes   # [num_layers, MAX_GUESSES] of a guess: how likely it looked
    cdef uint8_t* absent    # [num_layers, MAX_GUESSES] it was neither there nor on its way
    cdef int* num_guesses   # [num_layers]
    cdef uint64_t* used     # [num_experts] the last call in which it was named
    cdef uint64_t call
    cdef double trials[NUM_CLASSES]
    cdef double successes[NUM_CLASSES]
    cdef readonly uint64_t num_used
    cdef readonly uint64_t num_predicted_k
    cdef readonly uint64_t num_found_k
    cdef readonly uint64_t num_predicted_2k
    cdef readonly uint64_t num_found_2k

    cdef double likelihood(self, int number, bint scored) noexcept
