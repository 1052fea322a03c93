"""Declarations of what is beside this file."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from moecache.policies._ids cimport id_at


cdef struct Misses:
    # The distinct experts of a step that are not resident, and where the step asks for them.
    int num_experts
    int* experts            # [num_experts] the missing ones first
    int num
    int* first              # [num_experts] index of an expert's first occurrence in the ids
    int* uses               # [num_experts] rows that chose it
    Py_ssize_t* last_row    # [num_experts] the last of them
    uint64_t* order         # [num_experts] for sorting
    uint64_t* seen          # [num_experts] the last call that missed this expert
    uint64_t call


cdef int open_misses(Misses* misses, int num_experts) noexcept nogil
cdef void close_misses(Misses* misses) noexcept nogil
cdef int find_misses(
    Misses* misses, const int32_t* table, const void* ids, bint wide, Py_ssize_t n,
    Py_ssize_t top_k, bint drop,
) except -1
cdef void sort_misses(Misses* misses, const int* worths) noexcept nogil


# Inline: every step of every layer calls this, and finds all of its experts as a rule.
cdef inline bint are_resident(
    const int32_t* table, int num_experts, const void* ids, bint wide, Py_ssize_t n
) noexcept nogil:
    # False for an id that is out of range, too.
    cdef Py_ssize_t i
    cdef int64_t expert
    for i in range(n):
        expert = id_at(ids, wide, i)
        if expert < 0 or expert >= num_experts or table[expert] < 0:
            return False
    return True
