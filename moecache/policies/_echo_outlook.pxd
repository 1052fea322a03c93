"""Declarations of what is beside this file."""

cimport cython
from libc.string cimport memset

from moecache.policies._echo_loops cimport EchoLoops


@cython.final
cdef class Outlook:
    cdef int num_layers
    cdef int num_experts
    cdef EchoLoops loops
    cdef dict arrays      # what owns the memory, by the names in `Echo.state`
    # For each expert, [num_layers, num_experts].
    cdef float* next_use  # probability of use
    cdef float* values    # discounted next use
    # For the layer at hand, [num_experts].
    cdef float* votes     # of one sequence
    cdef float* unused    # probability that none of several sequences uses it

    # Returns `votes`, all of them 0.
    cdef inline float* ballot(self) noexcept nogil:
        memset(self.votes, 0, self.num_experts * sizeof(float))
        return self.votes

    cdef void judge(self, int layer, const float* own, float total) noexcept nogil
    cdef void begin_union(self) noexcept nogil
    cdef void unite(self, const float* own, float total, bint ahead) noexcept nogil
    cdef void judge_union(self, int layer, const float* own, int num_sequences) noexcept nogil
    cdef const float* ahead(self, const float* own, float total) noexcept nogil
    cdef const float* ahead_of_union(self) noexcept nogil
    cdef tuple likeliest(self, const float* scores, int num)
    cdef void forget(self) noexcept nogil
