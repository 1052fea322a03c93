"""Declarations of what is beside this file."""

from libc.stdint cimport int32_t, int64_t, uint8_t

from moecache.decoding._bound cimport Bound, Layer, Linear, Norm
from moecache.kernels._jobs cimport mc_matrix

cdef enum:
    # Rows of a call, if nobody says: more are a prompt.
    ROWS = 16


cdef class Workspace:
    cdef Bound bound
    cdef int64_t hidden_size, expert_size, top_k, max_rows
    # Of the call.
    cdef int64_t num_rows
    # What the caller writes and reads: `hidden`, `normed`, `given`, `ids`, `rows`.
    cdef tuple arrays
    cdef float *hidden
    cdef float *normed
    cdef float *given
    cdef int32_t *ids
    cdef float *rows
    # Results on the way, each of all rows.
    cdef float *queries
    cdef float *keys
    cdef float *values
    cdef float *mixed
    cdef float *wide
    cdef float *second
    cdef float *added
    cdef float *logits
    cdef float *scratch
    cdef float *weights
    cdef float *latents
    cdef float *gates
    cdef float *beside
    # Of attention, as `reserve_scores` says.
    cdef float *scores
    cdef int64_t num_scores
    # A product's inputs: where each is, and the converted ones, of two matrices.
    cdef const uint8_t **taken
    cdef uint8_t *converted
    cdef int64_t converted_bytes
    cdef list _owners

    cdef void *own(self, int64_t nbytes) except NULL
    cdef float *_floats(self, int64_t width) except NULL
    cdef int _reserve(self) except -1
    cdef int _share(self, bint has_latents) except -1
    cdef int reserve_scores(self, int64_t num_rows, int64_t num_positions) except -1
    cdef void multiply(
        self, const Linear *linear, const float *given, int64_t num, float *out,
        const Linear *before=*
    ) noexcept nogil
    cdef void take(
        self, const mc_matrix *matrix, int wanted, const float *given, int64_t num, int part=*
    ) noexcept nogil


cdef void norm_row(const Norm *norm, const float *x, float *out) noexcept nogil
cdef void norm_rows(
    const Norm *norm, const float *x, float *out, int64_t num, int64_t step
) noexcept nogil
cdef void norm_parts(const Norm *norm, float *rows, int64_t num_floats) noexcept nogil
cdef int64_t num_parts(const Layer *layer) noexcept nogil
cdef int64_t rows_at_once(int64_t parts) noexcept nogil
