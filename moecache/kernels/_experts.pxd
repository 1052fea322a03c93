"""The experts in slots, as other compiled code has them computed."""

from moecache.kernels._jobs cimport mc_experts
from moecache.kernels._matrix cimport Matrix


cdef class Experts:
    cdef mc_experts experts
    cdef readonly object owner
    cdef tuple ups
    cdef bint multiplies_alike  # whether gate and up multiply the same inputs
    cdef Matrix down
