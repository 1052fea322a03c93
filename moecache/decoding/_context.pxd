"""Declarations of what is beside this file."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from moecache.decoding._bound cimport Bound, Layer
from moecache.decoding._linear cimport mc_stretch
from moecache.decoding._steps cimport mc_held
from moecache.decoding._workspace cimport Workspace


cdef class Context:
    cdef Bound bound
    cdef Workspace workspace
    # Most new tokens of a sequence, and most positions that one has.
    cdef int64_t each, longest
    # The row behind each sequence's last one, and how many the shortest of them has.
    cdef int64_t num_sequences
    cdef int64_t *ends
    cdef int64_t fewest
    # Of each layer: what its rows see, and of which type it is.
    cdef mc_held *held
    cdef int *types
    # The same of layers with states, for each sequence.
    cdef mc_stretch *stretches
    cdef const float *cos
    cdef const float *sin
    # Which sequence each row is of, int32, or `None`.
    cdef cnp.ndarray sequences
    cdef list _caches
    cdef tuple _angles

    cdef int begin(
        self, list caches, cnp.ndarray lengths, int64_t batch, cnp.ndarray counts,
        cnp.ndarray begins, cnp.ndarray cos, cnp.ndarray sin, cnp.ndarray sequences
    ) except -1
    cdef void end(self) noexcept
    cdef const int32_t *names(self) noexcept
    cdef int64_t _count_rows(
        self, list caches, int64_t batch, cnp.ndarray counts, cnp.ndarray sequences
    ) except -1
    cdef int _check_cache(
        self, list pages, int64_t length, int64_t batch, int64_t each, const int64_t *begins
    ) except -1
    cdef int _note_rows(
        self, int64_t at, list caches, const int64_t *lengths, int64_t batch,
        const int64_t *counts, const int64_t *begins
    ) except -1
    cdef int _note_stretches(
        self, int64_t at, list caches, int64_t batch, const int64_t *counts
    ) except -1
