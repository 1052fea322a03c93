cimport cython
from libc.stdint cimport int32_t, uint64_t


# Policies as pointers: without the GIL no reference can be taken, and the list holds them.
ctypedef void (*BeginPart)(void*) noexcept nogil
ctypedef void (*RunPart)(
    void*, void*, int, const int32_t*, const int32_t*, Py_ssize_t, int, bint, bint, int32_t*,
    int32_t*
) noexcept nogil


@cython.final
cdef class Visit:
    cdef BeginPart begin_part
    cdef RunPart run_part
    cdef int num_layers
    cdef int num_experts
    cdef list partitions
    cdef void** policies      # [num_layers] borrowed from the list
    cdef object counts_owner
    cdef uint64_t[:, ::1] counts  # [num_layers, num_experts] accesses
    cdef uint64_t* seen       # [num_experts] the last visit that asked for it
    cdef int* uses            # [num_experts] rows of this visit that ask for it
    cdef int* hits            # [num_experts]
    cdef int* missing         # [num_experts]
    cdef uint64_t* order      # [num_experts] for sorting
    cdef int32_t* rows        # of a step of many, side by side
    cdef uint64_t call

    cdef void copy_row(self, Py_ssize_t row, const int32_t* ids, int k) noexcept nogil
    cdef void begin_sequence(self) noexcept nogil
    cdef void run(
        self, int layer, const int32_t* ids, const int32_t* names, Py_ssize_t rows, int k,
        bint bulk, bint is_global, int32_t* hits_out, int32_t* misses_out,
    ) noexcept nogil
