"""Declarations of what is beside this file."""

from libc.stdint cimport int64_t, uint64_t

cdef extern from "<sys/uio.h>" nogil:
    cdef struct iovec:
        void *iov_base
        size_t iov_len

cdef extern from "_files.h" nogil:
    int64_t mc_preadv(int descriptor, const iovec *parts, int num_parts, uint64_t offset)
    int64_t mc_preadv_cached(int descriptor, const iovec *parts, int num_parts, uint64_t offset)

cdef struct File:
    int cached  # a descriptor that reads through the page cache
    int direct  # one that reads around it, or -1
    size_t alignment  # of direct reads; 1 without

cdef struct Files:
    File *each
    int num
    size_t alignment  # the largest

cdef int open_files(Files *files, descriptors, bint direct) except -1
cdef int num_direct(const Files *files) noexcept nogil
cdef void close_files(Files *files) noexcept nogil
