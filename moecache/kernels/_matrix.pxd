"""A weight matrix, as other compiled code has it computed."""

from moecache.kernels._jobs cimport mc_matrix


cdef class Matrix:
    cdef mc_matrix matrix
    cdef readonly object owner
