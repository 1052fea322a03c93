"""Outlook: how likely each expert is used next, by its own history and by votes."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t
from libc.string cimport memset

import numpy as np

from moecache.policies._echo_loops cimport ECHO_TIME_DISCOUNT, echo_loops

cnp.import_array()

# Weights of an expert's own history among the votes. Flat: half or double moves little.
cdef float PRIOR = 0.2
cdef float AHEAD_PRIOR = 0.5


@cython.final
cdef class Outlook:
    """Probabilities of the next use, as of each layer's last request.

    Everywhere `own` has the probabilities of a layer's experts by their own history, and
    `total` is the weight of those that have put their votes into `ballot()`.

    Parameters
    ----------
    num_layers, num_experts : int
    """

    def __cinit__(self, int num_layers, int num_experts):
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.loops = echo_loops()
        self.arrays = {
            "next_use": np.zeros((num_layers, num_experts), np.float32),
            "values": np.zeros((num_layers, num_experts), np.float32),
            "votes": np.zeros(num_experts, np.float32),
            "unused": np.zeros(num_experts, np.float32),
        }
        self.next_use = <float*>cnp.PyArray_DATA(<cnp.ndarray>self.arrays["next_use"])
        self.values = <float*>cnp.PyArray_DATA(<cnp.ndarray>self.arrays["values"])
        self.votes = <float*>cnp.PyArray_DATA(<cnp.ndarray>self.arrays["votes"])
        self.unused = <float*>cnp.PyArray_DATA(<cnp.ndarray>self.arrays["unused"])

    cdef void judge(self, int layer, const float* own, float total) noexcept nogil:
        """Compute what a layer's experts are worth to the only sequence."""
        cdef Py_ssize_t base = <Py_ssize_t>layer * self.num_experts
        self.loops.value(
            self.num_experts, own, self.votes, total, PRIOR, ECHO_TIME_DISCOUNT,
            self.next_use + base, self.values + base,
        )

    cdef void begin_union(self) noexcept nogil:
        """Begin with several sequences, each of which comes with its own votes."""
        cdef int e
        for e in range(self.num_experts):
            self.unused[e] = 1

    cdef void unite(self, const float* own, float total, bint ahead) noexcept nogil:
        """Add one of several sequences; `ahead`: the votes are those for a layer still to come."""
        self.loops.spare(
            self.num_experts, own, self.votes, total, AHEAD_PRIOR if ahead else PRIOR,
            self.unused,
        )

    cdef void judge_union(self, int layer, const float* own, int num_sequences) noexcept nogil:
        """Compute what a layer's experts are worth to those that were united."""
        cdef Py_ssize_t base = <Py_ssize_t>layer * self.num_experts
        self.loops.unite(
            self.num_experts, own, self.unused, num_sequences, ECHO_TIME_DISCOUNT,
            self.next_use + base, self.values + base,
        )

    cdef const float* ahead(self, const float* own, float total) noexcept nogil:
        """Return the probabilities that the only sequence uses the experts of a layer to come."""
        cdef int e
        for e in range(self.num_experts):
            self.votes[e] = (self.votes[e] + AHEAD_PRIOR * own[e]) / (total + AHEAD_PRIOR)
        return self.votes

    cdef const float* ahead_of_union(self) noexcept nogil:
        """Return the probabilities that any of those that were united uses them."""
        cdef int e
        for e in range(self.num_experts):
            self.votes[e] = 1 - self.unused[e]
        return self.votes

    cdef tuple likeliest(self, const float* scores, int num):
        """Return ids and scores of the highest ones, the likeliest first, ties by id."""
        cdef int e, position
        ids, best = np.empty(num, np.int32), np.empty(num, np.float32)
        cdef int32_t* chosen = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>ids)
        cdef float* kept = <float*>cnp.PyArray_DATA(<cnp.ndarray>best)
        if num == 0:
            return ids, best
        # An insertion into a short sorted list: most experts end at its last entry.
        for e in range(self.num_experts):
            position = min(e, num)
            if position == num and scores[e] <= kept[num - 1]:
                continue
            position = min(e, num - 1)
            while position > 0 and kept[position - 1] < scores[e]:
                kept[position] = kept[position - 1]
                chosen[position] = chosen[position - 1]
                position -= 1
            kept[position] = scores[e]
            chosen[position] = e
        return ids, best

    cdef void forget(self) noexcept nogil:
        cdef Py_ssize_t num_keys = <Py_ssize_t>self.num_layers * self.num_experts
        memset(self.next_use, 0, num_keys * sizeof(float))
        memset(self.values, 0, num_keys * sizeof(float))
