cimport cython
from libc.stdint cimport uint32_t, uint64_t

from moecache.policies._echo cimport Echo
from moecache.policies._policy cimport Policy


@cython.final
cdef class EchoCache(Policy):
    cdef readonly Echo echo
    cdef int first_layer       # of this cache's keys
    cdef int num_layers
    cdef int num_experts
    cdef float* discounts      # [echo.num_layers + 1] by layers until a layer's turn comes
    cdef uint32_t* seen        # [num_layers] the version that `lowest` is of
    cdef int* lowest           # [num_layers] the evictable key of the lowest value, or -1
    cdef uint64_t* present     # [num_layers, echo.num_words] keys in the cache
    cdef float* minima         # [num_layers] its value, or infinity

    cdef void rescan(self, int layer) noexcept nogil
    cdef void consider(self, int key) noexcept nogil
    cdef Py_ssize_t word(self, int key) noexcept nogil
    cdef float value(self, int key) noexcept nogil
