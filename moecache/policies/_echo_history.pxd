"""Declarations of what is beside this file."""

cimport cython
from libc.stdint cimport int32_t, uint8_t

from moecache.policies._echo_loops cimport EchoLoops


cdef enum:
    CELLS = 192
    NEVER = -100000  # the last use of an expert that was never used


@cython.final
cdef class History:
    cdef int num_layers
    cdef int num_experts
    cdef EchoLoops loops
    cdef dict arrays      # what owns the memory, by the names in `Echo.state`
    cdef int top_k        # of the first request; 0 before
    cdef float scale      # num_experts / top_k
    cdef float* table     # [CELLS] probability of use by popularity and age
    cdef float* samples   # [CELLS] how often each cell was seen
    cdef float* found     # [num_experts] of the table
    # For each expert, [num_layers, num_experts].
    cdef float* fast      # moving averages of its use
    cdef float* slow
    cdef int32_t* last    # the token that used it last
    cdef uint8_t* cells
    cdef float* own       # probability of use

    cdef void expect(self, int top_k) noexcept nogil
    cdef void start(self, int top_k) noexcept nogil
    cdef void learn(
        self, int layer, int32_t token, Py_ssize_t rows, const float* wanted
    ) noexcept nogil
    cdef void recall(self, int layer) noexcept nogil
    cdef void blend(self) noexcept nogil
    cdef void set_back(self, int32_t tokens) noexcept nogil
    cdef void forget(self) noexcept nogil
