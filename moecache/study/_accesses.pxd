"""A trace as one sequence of accesses: the interface for the bounds that are computed of it."""

cimport cython
from libc.stdint cimport int32_t

cdef enum:
    SIGNALS_EVERY = 4096  # steps between two looks at Ctrl-C


@cython.final
cdef class Accesses:
    cdef int num_layers
    cdef int num_experts
    cdef Py_ssize_t num_steps
    cdef Py_ssize_t size
    cdef int32_t* keys        # [size] layer * num_experts + expert
    cdef int32_t* uses        # [size] rows of the step that ask for it
    cdef Py_ssize_t* bounds   # [num_steps * num_layers + 1] of each visit
    cdef unsigned char* bulk  # [num_steps] 1: a step keeps to its layer's fair share; or CHOOSING
