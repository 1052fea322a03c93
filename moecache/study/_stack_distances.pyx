"""Stack distances: LRU at every capacity in one pass."""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from moecache.study._accesses cimport SIGNALS_EVERY, Accesses

import numpy as np


def stack_distances(Accesses trace not None, str scope) -> np.ndarray:
    """Return how often LRU finds a key at which depth (Mattson et al., 1970).

    With C slots LRU hits what is found at a depth of up to C. All experts of a step are
    looked up first and then moved to the top in the order of their ids. (A replay
    moves hits before misses, which depends on the capacity: the two differ in the
    fourth digit.) Holds for capacities of at least a step's experts. O(n log n).

    Parameters
    ----------
    trace : Accesses
    scope : {"global", "layer"}
        One stack, or one for each layer.

    Returns
    -------
    ndarray of int64, shape [num_stacks, keys of a stack + 1]
        Entry d - 1: accesses found at depth d; the last: first accesses.
    """
    cdef bint is_global = scope == "global"
    cdef int first, num_keys = trace.num_experts * (trace.num_layers if is_global else 1)
    cdef int64_t[:, ::1] counts
    cdef int64_t* last
    cdef int32_t* tree
    found = np.zeros((1 if is_global else trace.num_layers, num_keys + 1), np.int64)
    counts = found
    if trace.size > 2**31 - 2:
        raise ValueError(f"{trace.size} accesses are more than 2**31 - 2")
    last = <int64_t*>malloc(trace.num_layers * <size_t>trace.num_experts * sizeof(int64_t))
    tree = <int32_t*>calloc(trace.size + 1, sizeof(int32_t))
    if last == NULL or tree == NULL:
        free(last)
        free(tree)
        raise MemoryError(f"no memory for the stack distances of {trace.size} accesses")
    memset(last, 0xFF, trace.num_layers * <size_t>trace.num_experts * sizeof(int64_t))
    try:
        with nogil:
            for first in range(1 if is_global else trace.num_layers):
                memset(tree, 0, (trace.size + 1) * sizeof(int32_t))
                _stack(
                    trace, first, trace.num_layers if is_global else first + 1, last, tree,
                    &counts[first, 0], num_keys,
                )
    finally:
        free(last)
        free(tree)
    return found


cdef int _stack(
    Accesses trace, int first, int end, int64_t* last, int32_t* tree, int64_t* found,
    int num_keys,
) except -1 nogil:
    # A Fenwick tree over time: 1 where the latest access of a key is.
    cdef Py_ssize_t step, visit, a, live = 0
    cdef int layer
    cdef int64_t before
    for step in range(trace.num_steps):
        if step % SIGNALS_EVERY == SIGNALS_EVERY - 1:
            with gil:
                PyErr_CheckSignals()
        for layer in range(first, end):
            visit = step * trace.num_layers + layer
            for a in range(trace.bounds[visit], trace.bounds[visit + 1]):
                before = last[trace.keys[a]]
                if before < 0:
                    found[num_keys] += 1
                else:
                    found[live - _sum(tree, before)] += 1
            for a in range(trace.bounds[visit], trace.bounds[visit + 1]):
                before = last[trace.keys[a]]
                if before < 0:
                    live += 1
                else:
                    _add(tree, trace.size, before, -1)
                _add(tree, trace.size, a, 1)
                last[trace.keys[a]] = a
    return 0


cdef inline void _add(int32_t* tree, Py_ssize_t size, Py_ssize_t at, int32_t value) noexcept nogil:
    at += 1
    while at <= size:
        tree[at] += value
        at += at & -at


cdef inline Py_ssize_t _sum(const int32_t* tree, Py_ssize_t at) noexcept nogil:
    # The sum of the entries up to `at`.
    cdef Py_ssize_t total = 0
    at += 1
    while at > 0:
        total += tree[at]
        at -= at & -at
    return total
