"""The distinct experts of a step that are not resident."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free

from moecache.policies._ids cimport id_at, sort_by_uses


cdef int open_misses(Misses* misses, int num_experts) noexcept nogil:
    """Make room for all experts of a layer; -1 if there is no memory."""
    misses.num_experts = num_experts
    misses.experts = <int*>calloc(num_experts, sizeof(int))
    misses.first = <int*>calloc(num_experts, sizeof(int))
    misses.uses = <int*>calloc(num_experts, sizeof(int))
    misses.last_row = <Py_ssize_t*>calloc(num_experts, sizeof(Py_ssize_t))
    misses.order = <uint64_t*>calloc(num_experts, sizeof(uint64_t))
    misses.seen = <uint64_t*>calloc(num_experts, sizeof(uint64_t))
    if (
        misses.experts == NULL or misses.first == NULL or misses.uses == NULL
        or misses.last_row == NULL or misses.order == NULL or misses.seen == NULL
    ):
        return -1
    return 0


cdef void close_misses(Misses* misses) noexcept nogil:
    free(misses.experts)
    free(misses.first)
    free(misses.uses)
    free(misses.last_row)
    free(misses.order)
    free(misses.seen)


cdef int find_misses(
    Misses* misses, const int32_t* table, const void* ids, bint wide, Py_ssize_t n,
    Py_ssize_t top_k, bint drop,
) except -1:
    """Find the experts that have no slot in a layer's table; return how many.

    Raises ValueError for an id that is out of range, unless these are dropped.
    """
    cdef Py_ssize_t i, row
    cdef int64_t expert
    cdef int num = 0
    misses.call += 1
    for i in range(n):
        expert = id_at(ids, wide, i)
        if expert < 0 or expert >= misses.num_experts:
            if drop:
                continue
            raise ValueError(f"expert {expert} is not in [0, {misses.num_experts})")
        if table[expert] >= 0:
            continue
        if misses.seen[expert] != misses.call:
            misses.seen[expert] = misses.call
            misses.first[expert] = <int>i
            misses.uses[expert] = 0
            misses.last_row[expert] = -1
            misses.experts[num] = <int>expert
            num += 1
        # Once per row, as a trace has it: a row with an expert twice is still one token.
        row = i // top_k
        if misses.last_row[expert] != row:
            misses.last_row[expert] = row
            misses.uses[expert] += 1
    misses.num = num
    return num


cdef void sort_misses(Misses* misses, const int* worths) noexcept nogil:
    """Put those first that are worth most or, without worths, that the most rows ask for."""
    if worths == NULL:
        worths = misses.uses
    sort_by_uses(misses.experts, worths, misses.order, misses.num)
