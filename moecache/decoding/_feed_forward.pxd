"""Declarations of what is beside this file."""

from libc.stdint cimport int32_t, int64_t

from moecache.decoding._bound cimport Layer
from moecache.decoding._workspace cimport Workspace


cdef void choose(Workspace w, const Layer *layer) noexcept nogil
cdef void add_forward(Workspace w, const Layer *layer) noexcept nogil
cdef void foresee(
    Workspace w, const Layer *layer, float *sums, int64_t n, int32_t *out
) noexcept nogil
