"""Declarations of the header beside this file."""

from libc.stdint cimport int64_t, uint64_t

from moecache.reader._files cimport iovec


cdef extern from "_ring.h" nogil:
    ctypedef struct mc_ring:
        int descriptor
    int mc_ring_open(mc_ring *ring, unsigned num_entries)
    int mc_ring_try(mc_ring *ring)
    void mc_ring_close(mc_ring *ring)
    bint mc_ring_is_full(const mc_ring *ring)
    unsigned mc_ring_waiting(const mc_ring *ring)
    void mc_ring_push(
        mc_ring *ring, int descriptor, const iovec *parts, int num_parts, uint64_t offset,
        void *piece, bint elsewhere)
    void mc_ring_push_nothing(mc_ring *ring)
    int mc_ring_enter(mc_ring *ring, bint wait, int64_t timeout_ns)
    bint mc_ring_has_done(const mc_ring *ring)
    bint mc_ring_pop(mc_ring *ring, void **piece, int64_t *result)
