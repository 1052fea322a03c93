"""Ring: the last 256 tokens, what each asked for, and what those like the current one foretell.

How much a token looks like the current one is its score, which the caller keeps: each
sequence has scores of its own.
"""

cimport cython
cimport numpy as cnp
from libc.math cimport INFINITY, expf
from libc.stdint cimport int32_t, uint8_t, uint64_t
from libc.string cimport memcpy, memset

import numpy as np

from moecache.policies._echo_loops cimport (
    ECHO_RING, echo_loops, echo_lowest_bit, echo_nearest,
)

cnp.import_array()

cdef enum:
    NEIGHBOURS = 8         # tokens whose successors vote
    SUCCESSORS = 3         # how far they look ahead
    AHEAD_NEIGHBOURS = 16  # tokens that vote for a layer still to come

# All of these are flat: halving or doubling them moves the hit rate little.
cdef float DECAY = 0.8          # of a score, per layer
cdef float GAIN = 0.6           # per expert in common
cdef float CARRY = 0.5          # of a score, to the next token; and a vote's temperature
cdef float LOWEST_CARRY = -3.0
cdef float SUCCESSOR_DECAY = 0.7


@cython.final
cdef class Ring:
    """Requests of the last tokens at each layer, and which token followed which.

    A token's slot is its number modulo 256.

    Parameters
    ----------
    num_layers : int
        0: it is not used.
    num_words : int
        Words of 64 bits that a request of a layer takes.
    """

    def __cinit__(self, int num_layers, int num_words):
        cdef int i
        self.num_layers = num_layers
        self.num_words = num_words
        self.loops = echo_loops()
        self.arrays = {
            "masks": np.zeros((num_layers, ECHO_RING, num_words), np.uint64),
            "before": np.zeros(ECHO_RING, np.uint8),
        }
        self.masks = <uint64_t*>cnp.PyArray_DATA(<cnp.ndarray>self.arrays["masks"])
        self.before = <uint8_t*>cnp.PyArray_DATA(<cnp.ndarray>self.arrays["before"])
        self.discounts[0] = 1.0 / (1.0 + SUCCESSOR_DECAY + SUCCESSOR_DECAY * SUCCESSOR_DECAY)
        for i in range(1, SUCCESSORS):
            self.discounts[i] = self.discounts[i - 1] * SUCCESSOR_DECAY

    cdef void note(self, int layer, int32_t token, const uint64_t* request) noexcept nogil:
        """Note what a token asks for."""
        memcpy(
            self.mask(layer, token % ECHO_RING), request, self.num_words * sizeof(uint64_t)
        )

    cdef void match(self, int layer, const uint64_t* request, float* scores) noexcept nogil:
        """Have a request of a layer change how much each token looks like the current one."""
        self.loops.match(self.mask(layer, 0), request, self.num_words, DECAY, GAIN, scores)

    cdef void carry(self, int32_t token, int32_t unseen, float* scores) noexcept nogil:
        """Begin a token's scores with those of its sequence's last one.

        If that one resembled token u - 1, this one resembles u. The last `unseen` tokens have
        no score so far.
        """
        cdef float best = -INFINITY
        cdef float[256] old
        cdef int u, ago, slot = token % ECHO_RING
        for u in range(ECHO_RING):
            best = max(best, scores[u])
        if best == -INFINITY:
            best = 0
        memcpy(old, scores, sizeof(old))
        for u in range(ECHO_RING):
            ago = (slot - u) & (ECHO_RING - 1)
            # A place of the ring that no earlier token has filled takes no part.
            if u == slot or ago >= token:
                scores[u] = -INFINITY
            elif self.before[u] and ago + self.before[u] >= unseen:
                scores[u] = max(
                    LOWEST_CARRY, CARRY * (old[(u - self.before[u]) & (ECHO_RING - 1)] - best)
                )
            else:
                scores[u] = LOWEST_CARRY

    cdef void enter(self, int32_t token, int32_t previous) noexcept nogil:
        """Link a new token to its sequence's previous one, if that is still here; 0: none."""
        cdef int slot = token % ECHO_RING
        cdef int32_t ago = token - previous
        cdef int last = (slot - ago) & (ECHO_RING - 1)
        self.unlink(slot)
        self.before[slot] = 0
        if previous and ago < ECHO_RING:
            self.unlink(last)
            self.after[last] = self.before[slot] = <uint8_t>ago

    cdef float vote_successors(
        self, int layer, const float* scores, float* votes
    ) noexcept nogil:
        """Add votes for what the neighbours' successors used here, this request among them.

        Returns the sum of the neighbours' weights.
        """
        cdef int[NEIGHBOURS] near
        cdef int count = echo_nearest(scores, NEIGHBOURS, near)
        cdef int i, step, slot
        cdef float weight, total = 0
        for i in range(count):
            weight = expf(CARRY * (scores[near[i]] - scores[near[0]]))
            total += weight
            slot = near[i]
            for step in range(SUCCESSORS):
                if not self.after[slot]:
                    break
                slot = (slot + self.after[slot]) & (ECHO_RING - 1)
                self.add_votes(layer, slot, weight * self.discounts[step], votes)
        return total

    cdef float vote_same(self, int layer, const float* scores, float* votes) noexcept nogil:
        """Add votes for what similar tokens used at a layer that the current one has not reached.

        Returns the sum of their weights.
        """
        cdef int[AHEAD_NEIGHBOURS] near
        cdef int count = echo_nearest(scores, AHEAD_NEIGHBOURS, near)
        cdef int i
        cdef float weight, total = 0
        for i in range(count):
            weight = expf(scores[near[i]] - scores[near[0]])
            total += weight
            self.add_votes(layer, near[i], weight, votes)
        return total

    cdef void link_back(self) noexcept nogil:
        """Compute `after` of a ring that was just restored."""
        cdef int slot
        for slot in range(ECHO_RING):
            if self.before[slot]:
                self.after[(slot - self.before[slot]) & (ECHO_RING - 1)] = self.before[slot]

    cdef void forget(self) noexcept nogil:
        memset(self.before, 0, ECHO_RING)
        memset(self.after, 0, sizeof(self.after))
        memset(
            self.masks, 0,
            <size_t>self.num_layers * ECHO_RING * self.num_words * sizeof(uint64_t),
        )

    cdef void unlink(self, int slot) noexcept nogil:
        """Part a token from its successor."""
        if self.after[slot]:
            self.before[(slot + self.after[slot]) & (ECHO_RING - 1)] = 0
            self.after[slot] = 0

    cdef void add_votes(
        self, int layer, int slot, float weight, float* votes
    ) noexcept nogil:
        cdef const uint64_t* mask = self.mask(layer, slot)
        cdef uint64_t bits
        cdef int w
        for w in range(self.num_words):
            bits = mask[w]
            while bits:
                votes[64 * w + echo_lowest_bit(bits)] += weight
                bits &= bits - 1
