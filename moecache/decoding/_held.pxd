"""Declarations of the classes beside this file."""

from libc.stdint cimport int64_t, uint8_t


cdef class KeyValues:
    cdef uint8_t *keys
    cdef uint8_t *values
    cdef int type
    cdef int64_t batch, heads, capacity, width, value_width, dropped
    cdef readonly object owner


cdef class States:
    cdef const uint8_t *seen
    cdef uint8_t *next_seen
    cdef uint8_t *saved_seen
    cdef const float *states
    cdef float *next_states
    cdef float *saved_states
    cdef int type
    cdef int64_t batch, rows, channels, sequence_step, row_step, channel_step
    cdef int64_t heads, width, value_width
    cdef public int64_t num_saved
    cdef readonly object owner
