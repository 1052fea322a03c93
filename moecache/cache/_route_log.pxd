cimport cython
from libc.stdint cimport int32_t, uint32_t


cdef struct StepHeader:
    int32_t layer  # -1: a sequence begins here
    int32_t rows
    # 4 * top_k, plus 2 if each row's sequence comes after the ids, plus 1 if the step kept to its
    # layer's fair share.
    uint32_t width


# The sizes that `trace_parts` finds out, then the arrays that it writes.
cdef struct Passes:
    const char* begin  # of the first step, and the end of the last
    const char* end
    Py_ssize_t widest  # wider steps are left out
    Py_ssize_t most_rows  # passes that would exceed it are left out
    Py_ssize_t num_rows
    Py_ssize_t top_k
    Py_ssize_t usual  # how wide most steps are
    Py_ssize_t num_left_out
    unsigned char* phase
    int32_t* sequence
    int32_t* name  # that the row's sequence was given, or -1
    int32_t* step
    unsigned char* bulk
    uint32_t* seen  # per expert, the last row that had it
    uint32_t num_seen


@cython.final
cdef class RouteLog:
    cdef readonly int num_layers
    cdef readonly int num_experts
    cdef readonly Py_ssize_t max_bytes
    cdef readonly Py_ssize_t num_steps
    cdef readonly Py_ssize_t num_dropped  # steps that came when the log was full
    cdef readonly bint full
    cdef char* data        # StepHeader, ids, StepHeader, ids, ...
    cdef Py_ssize_t used
    cdef Py_ssize_t capacity
    cdef int model_top_k   # 0: not known
    cdef bint wide         # ids are kept as int32, not int16
    cdef bint between      # no step since the last sequence began

    cdef void append(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t top_k,
        bint bulk, const int32_t* names,
    ) noexcept nogil
    cdef void mark_sequence(self) noexcept nogil
    cdef Py_ssize_t id_bytes(self, Py_ssize_t n) noexcept nogil
    cdef const int32_t* names_of(self, const StepHeader* header) noexcept nogil
    cdef bint named_alike(
        self, const StepHeader* header, const StepHeader* other
    ) noexcept nogil
    cdef char* reserve(self, Py_ssize_t nbytes) noexcept nogil
    cdef Py_ssize_t row_bytes(self, const Passes* passes) noexcept nogil
    cdef void scan(self, Passes* passes, char* experts) noexcept nogil
    cdef void name_rows(
        self, const int32_t* names, Py_ssize_t rows, int32_t* name, unsigned char* phase
    ) noexcept nogil
    cdef void copy_step(
        self, const StepHeader* header, char* out, Py_ssize_t stride, Passes* passes
    ) noexcept nogil
