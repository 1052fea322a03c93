"""Declarations of what is beside this file."""

from libc.stdint cimport int64_t

from moecache.decoding._context cimport Context
from moecache.decoding._workspace cimport Workspace


cdef void recur(Workspace w, Context c, int64_t at) noexcept nogil
