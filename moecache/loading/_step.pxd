cdef class Step:
    cdef readonly Py_ssize_t layer, share
    cdef readonly object ids, sequences, cause, slots, misses, arrived
    cdef readonly bint ignore_out_of_range
    cdef readonly set loads
    cdef readonly list bypassed
    cdef public object leased
    cdef readonly set staged
    cdef object __weakref__
