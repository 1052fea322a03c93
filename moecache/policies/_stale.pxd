cimport cython
from libc.stdint cimport int64_t

from moecache.policies._policy cimport Policy


@cython.final
cdef class LeastStaleCache(Policy):
    cdef readonly int num_experts
    cdef int num_layers
    cdef int64_t* used_in  # the pass in which a key was last used
    cdef int64_t current   # the pass under way
    cdef int lowest_layer  # -1 before the first step
    cdef int layer         # the layer visited last

    cdef int last_done(self) noexcept nogil
