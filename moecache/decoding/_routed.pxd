"""Declarations of what is beside this file."""

from libc.stdint cimport int32_t, int64_t, uint8_t

from moecache.cache._cache cimport ExpertCache
from moecache.decoding._bound cimport Layer
from moecache.decoding._context cimport Context
from moecache.decoding._workspace cimport Workspace


cdef class Routed:
    cdef ExpertCache cache
    cdef Workspace workspace
    cdef Context context
    # What an observer is told of.
    cdef object ids
    # Of each layer since they were taken: experts of whole steps, those of single tokens, and the
    # time that the latter took.
    cdef int64_t *num_products
    cdef int64_t *num_single
    cdef int64_t *busy_ns
    # Of each pair: its slot, and where its input and its hidden row are.
    cdef int32_t *slots
    cdef const uint8_t **inputs
    cdef const uint8_t **hidden_inputs
    cdef uint8_t *hidden
    # Pairs by expert: the experts' slots, and where the pairs of each begin.
    cdef int32_t *some
    cdef int64_t *offsets
    cdef int64_t *pairs
    # Pairs of each expert of the layer, while they are put in order.
    cdef int64_t *places

    cdef bint compute_resident(self, int64_t at, observe) except -1
    cdef int64_t compute(self, const Layer *layer, const int32_t *slots, list chosen) except -1
    cdef list take_counts(self)
    cdef int64_t _group(self, Workspace w, int64_t num_experts) noexcept nogil
    cdef void _compute(
        self, Workspace w, const Layer *layer, int64_t num_experts
    ) noexcept nogil
