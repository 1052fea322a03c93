"""SLRU: a probationary and a protected segment, pins, and a least-accessed victim."""

cimport cython
from libc.stdint cimport uint64_t

import numpy as np

from moecache.policies._heap cimport CountHeap
from moecache.policies._policy cimport MAX_KEYS, PINNED, Policy, link, link_by_stamp, unlink

from moecache.policies._policy import LruCache
from moecache.policies.registry import register

cdef enum:
    PROBATIONARY = 1
    PROTECTED = 2


@cython.final
cdef class SlruCache(Policy):
    """Segmented LRU over integer keys (Karedla, Love and Wherry, Computer 27(3), 1994).

    A new key is on probation; a second access promotes it to the protected
    segment; victims come from probation. `touch` and `admit` are O(1), or
    O(log n) with `counts`.

    Parameters
    ----------
    probationary, protected : int
        Keys each segment is meant for, at least 1.
    num_keys : int
        Keys are in [0, num_keys).
    counts : ndarray of uint64, num_keys elements, optional
        How often each key was used, kept by the caller (`AccessProfiler.counts`).
        With it the victim is the least used key on probation, ties to the
        older, rather than the oldest. A count is read when its key enters
        probation or is touched there, so count an access before reporting it.
    strict : bool, default False
        Evict as soon as probation overflows. By default probation may use
        the room that the protected segment does not.

    Raises
    ------
    ValueError
        If a segment is smaller than 1 or `counts` has the wrong size.
    """

    cdef readonly int probationary
    cdef readonly int protected
    cdef readonly bint strict
    cdef int num_probationary
    cdef int num_protected
    cdef CountHeap heap
    cdef const uint64_t[::1] counts

    def __cinit__(
        self,
        int probationary,
        int protected,
        *,
        int num_keys,
        counts=None,
        bint strict=False,
    ):
        if probationary < 1 or protected < 1:
            raise ValueError(
                f"both segments must hold at least 1 key, got {probationary} and {protected}"
            )
        if probationary > MAX_KEYS - protected:
            raise ValueError(f"the segments hold more than {MAX_KEYS} keys together")
        self.probationary = probationary
        self.protected = protected
        self.strict = strict
        self.capacity = probationary + protected
        if counts is not None:
            flat = np.asarray(counts)
            if flat.dtype != np.uint64 or flat.size != num_keys or not flat.flags.c_contiguous:
                raise ValueError(
                    f"counts must be {num_keys} contiguous uint64, "
                    f"got {flat.size} of {flat.dtype}"
                )
            self.counts = flat.reshape(-1)
            self.heap = CountHeap(num_keys)

    def probationary_keys(self) -> list[int]:
        """Return the keys on probation, the most recent first."""
        return self.walk(self.num_keys)

    def protected_keys(self) -> list[int]:
        """Return the protected keys, pinned ones among them, the most recent first."""
        return [key for key in self.keys() if self.nodes[<int>key].segment == PROTECTED]

    cdef void access(self, int key) noexcept nogil:
        if self.nodes[key].segment == PROTECTED:
            self.clock += 1
            self.nodes[key].stamp = self.clock
            if not self.nodes[key].blocked & PINNED:
                unlink(self.nodes, key)
                link(self.nodes, self.num_keys + 1, key)
            return
        self.leave_probation(key)
        if self.num_protected == self.protected and not self.demote_one():
            # Every protected key is pinned: only the recency is refreshed.
            self.clock += 1
            self.nodes[key].stamp = self.clock
            self.enter_probation(key)
            return
        self.clock += 1
        self.nodes[key].stamp = self.clock
        self.nodes[key].segment = PROTECTED
        self.num_protected += 1
        link(self.nodes, self.num_keys + 1, key)

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        self.clock += 1
        self.nodes[key].stamp = self.clock
        self.size += 1
        self.num_evictable += 1
        self.enter_probation(key)

    cdef void remove(self, int key) noexcept nogil:
        if self.nodes[key].segment == PROBATIONARY:
            self.leave_probation(key)
        else:
            unlink(self.nodes, key)
            self.num_protected -= 1
        self.forget(key)

    cdef bint full(self) noexcept nogil:
        if self.strict and self.num_probationary == self.probationary:
            return True
        return self.size == self.capacity

    cdef int victim(self) noexcept nogil:
        cdef int key
        if self.heap is None:
            key = self.last_unheld(self.num_keys)
        else:
            key = self.heap.first_unblocked(self.nodes)
        if key >= 0:
            return key
        # Leases hold all of probation. A slot must be found all the same.
        return self.last_unheld(self.num_keys + 1)

    cdef bint prefers(self, int candidate, int resident) noexcept nogil:
        if self.heap is None:
            return False
        return self.counts[candidate] > self.counts[resident]

    cdef bint pin_key(self, int key) noexcept nogil:
        cdef int segment = self.nodes[key].segment
        if segment == 0 or self.nodes[key].blocked & PINNED:
            return segment != 0
        if segment == PROTECTED:
            unlink(self.nodes, key)
        else:
            if self.num_protected == self.protected and not self.demote_one():
                return False
            self.leave_probation(key)
            self.clock += 1
            self.nodes[key].stamp = self.clock
            self.nodes[key].segment = PROTECTED
            self.num_protected += 1
        return Policy.pin_key(self, key)

    cdef void unpin_key(self, int key) noexcept nogil:
        if self.nodes[key].blocked & PINNED:
            Policy.unpin_key(self, key)
            link_by_stamp(self.nodes, self.nodes, self.num_keys + 1, key)

    cdef void unpark(self, int key) noexcept nogil:
        self.heap.push(key, self.counts[key], self.nodes[key].stamp)

    cdef void recount(self) noexcept nogil:
        cdef int key
        if self.heap is None:
            return
        self.heap.clear()
        key = self.nodes[self.num_keys].next
        while key != self.num_keys:
            if not self.nodes[key].parked:
                self.heap.push(key, self.counts[key], self.nodes[key].stamp)
            key = self.nodes[key].next

    cdef void reset(self) noexcept nogil:
        self.num_probationary = 0
        self.num_protected = 0
        if self.heap is not None:
            self.heap.clear()

    cdef str audit(self):
        probationary = self.probationary_keys()
        if len(probationary) != self.num_probationary:
            return f"{len(probationary)} keys on probation, counted {self.num_probationary}"
        if self.num_probationary + self.num_protected != self.size:
            return f"{self.num_probationary} + {self.num_protected} keys, counted {self.size}"
        if self.num_protected > self.protected:
            return f"{self.num_protected} protected keys in a segment of {self.protected}"
        if self.heap is not None:
            for key in probationary:
                if self.heap.contains(key) == <bint>self.nodes[<int>key].parked:
                    return f"probationary key {key} must be in the heap or parked"
        return Policy.audit(self)

    cdef void enter_probation(self, int key) noexcept nogil:
        self.nodes[key].segment = PROBATIONARY
        self.num_probationary += 1
        link(self.nodes, self.num_keys, key)
        if self.heap is not None:
            self.heap.push(key, self.counts[key], self.nodes[key].stamp)

    cdef void leave_probation(self, int key) noexcept nogil:
        self.num_probationary -= 1
        unlink(self.nodes, key)
        if self.heap is not None:
            if self.heap.contains(key):
                self.heap.remove(key)
            self.nodes[key].parked = 0

    cdef bint demote_one(self) noexcept nogil:
        # Pinned keys are not in the list, so the tail is the tail-most unpinned.
        cdef int key = self.nodes[self.num_keys + 1].previous
        if key == self.num_keys + 1:
            return False
        unlink(self.nodes, key)
        self.num_protected -= 1
        # Its time on probation counts from now: ties go to the key that came earlier.
        self.clock += 1
        self.nodes[key].stamp = self.clock
        self.enter_probation(key)
        return True


def _make(part, counts=None):
    # Two segments need two slots; with one, SLRU and LRU are the same.
    if part.capacity == 1:
        return LruCache(1, num_keys=part.num_keys)
    probationary = max(1, part.capacity // 4)
    return SlruCache(
        probationary, part.capacity - probationary, num_keys=part.num_keys, counts=counts
    )


register("slru", _make)
register("slru-lfu", lambda part: _make(part, part.counts))
