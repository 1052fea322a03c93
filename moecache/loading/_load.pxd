cdef enum State:
    QUEUED   # it waits for a buffer
    READING  # an engine has it
    DONE     # it was read, or failed


cdef class Load:
    cdef readonly Py_ssize_t layer, expert, slot
    cdef public object cause
    cdef readonly bint staged
    cdef public bint urgent
    cdef State state
    cdef readonly list waiting
    cdef public object parts, fills
    cdef public bint is_wrong
    cdef public object error

    cdef bint was_taken_back(self) noexcept
    cdef bint is_useless(self) noexcept
    cdef bint began_ahead(self) noexcept
