cimport cython

from moecache.policies._policy cimport Policy


@cython.final
cdef class PythonPolicy(Policy):
    cdef object script
    cdef object on_step
    cdef object on_sequence
    cdef object on_prefers
    cdef object held
    cdef readonly object error  # what the script raised first, or None

    cdef void fail(self, object error)


@cython.final
cdef class Held:
    cdef Policy policy
