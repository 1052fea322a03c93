cimport cython
from libc.stdint cimport uint8_t, uint64_t

from moecache.policies._policy cimport Policy
from moecache._slru cimport CountHeap


@cython.final
cdef class LecarCache(Policy):
    cdef readonly double learning_rate
    cdef double discount      # per access
    cdef double lru_weight
    cdef uint64_t* counts     # uses, of keys in the cache or in a history
    cdef CountHeap heap       # keys that can be victims, by count
    cdef uint8_t* ghost       # the expert whose history holds a key that is not in the cache
    cdef int history          # keys that each history holds
    cdef int[3] num_ghosts
    cdef uint64_t seed
    cdef uint64_t random      # state of the generator
    cdef double draw          # in [0, 1): decides which expert names the next victim
    cdef int expected         # the key that is to be inserted, or -1
    cdef int chosen           # the victim named last, or -1
    cdef uint8_t chosen_by

    cdef double weight_after(self, int key) noexcept nogil
    cdef void meet_ghost(self, int key) noexcept nogil
    cdef void next_draw(self) noexcept nogil
    cdef void remember(self, int key, uint8_t expert) noexcept nogil
    cdef void drop_ghost(self, int key) noexcept nogil
