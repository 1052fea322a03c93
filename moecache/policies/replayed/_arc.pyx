"""ARC: recency and frequency, balanced by recent evictions."""

cimport cython
from libc.stdint cimport uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from moecache.policies._policy cimport Policy, empty_list, link, settle, unlink

from moecache.policies.registry import register

cdef enum:
    # The paper's lists; those of keys in the cache are segments.
    T1 = 1
    T2 = 2
    B1 = 3
    B2 = 4


@cython.final
cdef class ArcCache(Policy):
    """ARC (Megiddo and Modha, FAST 2003), the ARC(c) of its figure 4.

    T1 has the keys used once lately, T2 those used again, each by recency; B1
    and B2 remember what was evicted from them. A miss on a key of B1 raises
    the target size p of T1, one on a key of B2 lowers it, by the other ghost
    list's size over its own and at least 1; p is a real number, as in the
    paper. T1 gives the victim if it is larger than p, or as large while the
    missed key is in B2; T2 otherwise. T1 and B1 hold at most c keys, all four
    lists 2c.

    Details: a prefetched key enters T1 and changes no target, whether it is a
    ghost or not, and its first use moves it to T2 like any second one. If all
    of the list that is to give a victim is held or pinned, the other list gives
    it. Only evicted keys become ghosts, not keys that are discarded or could
    not be filled; a key that is no longer a ghost for such a reason is not put
    back.

    Every operation is O(1); a victim search steps over held and pinned keys.

    Parameters
    ----------
    capacity : int
        Most keys in the cache (c), at least 1.
    num_keys : int
        Keys are in [0, num_keys).
    """

    cdef double target     # p: the keys that T1 is meant for
    cdef uint8_t* ghost    # B1 or B2, of keys that are not in the cache
    cdef int num_t1
    cdef int num_b1
    cdef int num_b2
    cdef int expected      # the key that is to be inserted, or -1
    cdef int returning     # the ghost that the last victim was evicted for, or -1
    cdef int chosen        # the victim named last, or -1

    def __cinit__(self, int capacity, *, int num_keys):
        self.hold_at_most(capacity)
        self.ghost = <uint8_t*>calloc(num_keys, sizeof(uint8_t))
        if self.ghost == NULL:
            raise MemoryError(f"no memory for the ghosts of {num_keys} keys")
        self.reset()

    def __dealloc__(self):
        free(self.ghost)

    @property
    def recency_target(self) -> float:
        """The size that T1 is meant to have (p), in [0, capacity]."""
        return self.target

    cdef void access(self, int key) noexcept nogil:
        self.clock += 1
        self.nodes[key].stamp = self.clock
        self.num_t1 -= self.nodes[key].segment == T1
        self.nodes[key].segment = T2
        unlink(self.nodes, key)
        link(self.nodes, self.list_of(T2), key)

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        cdef uint8_t entered
        if self.ghost[key] and accessed:
            self.meet_ghost(key)
        elif self.ghost[key]:
            self.drop_ghost(key)
        entered = T2 if key == self.returning else T1
        settle(self, key, entered)
        self.num_t1 += entered == T1
        link(self.nodes, self.list_of(entered), key)
        # The paper makes this room first and then evicts; the lists are the same after both.
        while self.num_t1 + self.num_b1 > self.capacity and self.num_b1:
            self.drop_ghost(self.nodes[self.list_of(B1)].previous)
        while self.size + self.num_b1 + self.num_b2 > 2 * <long long>self.capacity:
            self.drop_ghost(self.nodes[self.list_of(B2 if self.num_b2 else B1)].previous)
        self.expected = self.returning = self.chosen = -1

    cdef void remove(self, int key) noexcept nogil:
        cdef uint8_t left = self.nodes[key].segment
        unlink(self.nodes, key)
        self.forget(key)
        self.num_t1 -= left == T1
        # A key that leaves without having been named as victim is discarded.
        if key == self.chosen:
            # p moves by the ghost lists as they were when the key was missed.
            if self.expected >= 0 and self.ghost[self.expected]:
                self.meet_ghost(self.expected)
            self.remember(key, B1 if left == T1 else B2)
        self.chosen = -1

    cdef void expect(self, int key) noexcept nogil:
        self.expected = key

    cdef int victim(self) noexcept nogil:
        cdef bint from_b2 = self.expected >= 0 and self.ghost[self.expected] == B2
        cdef double target = self.target
        if self.expected >= 0:
            target = self.target_for(self.expected)
        self.chosen = -1
        if self.num_t1 > target or (self.num_t1 == target and from_b2):
            self.chosen = self.last_unheld(self.list_of(T1))
        if self.chosen < 0:
            self.chosen = self.last_unheld(self.list_of(T2))
        if self.chosen < 0:
            self.chosen = self.last_unheld(self.list_of(T1))
        return self.chosen

    cdef void reset(self) noexcept nogil:
        memset(self.ghost, 0, self.num_keys * sizeof(uint8_t))
        empty_list(self.nodes, self.list_of(B1))
        empty_list(self.nodes, self.list_of(B2))
        self.target = 0.0
        self.num_t1 = self.num_b1 = self.num_b2 = 0
        self.expected = self.returning = self.chosen = -1

    cdef str audit(self):
        t1, t2 = self.walk(self.list_of(T1)), self.walk(self.list_of(T2))
        b1, b2 = self.walk(self.list_of(B1)), self.walk(self.list_of(B2))
        if (len(t1), len(b1), len(b2)) != (self.num_t1, self.num_b1, self.num_b2):
            return f"|T1|, |B1|, |B2| are {len(t1)}, {len(b1)}, {len(b2)}, counted otherwise"
        if len(t1) + len(t2) != self.size:
            return f"{len(t1)} + {len(t2)} keys, counted {self.size}"
        # Capacity that T1 and T2 cannot use yet, as its slots are given back late, is still theirs.
        if len(t1) + len(b1) > self.capacity or self.size + len(b1) + len(b2) > 2 * self.capacity:
            return f"|T1|, |T2|, |B1|, |B2| are {len(t1)}, {len(t2)}, {len(b1)}, {len(b2)}"
        if not 0 <= self.target <= self.capacity:
            return f"the target is {self.target}"
        for key in b1 + b2:
            if self.nodes[<int>key].segment:
                return f"ghost {key} is in the cache"
        return Policy.audit(self)

    cdef double target_for(self, int key) noexcept nogil:
        # p after a miss on the key.
        if self.ghost[key] == B1:
            return min(
                <double>self.capacity, self.target + max(1.0, <double>self.num_b2 / self.num_b1)
            )
        if self.ghost[key] == B2:
            return max(0.0, self.target - max(1.0, <double>self.num_b1 / self.num_b2))
        return self.target

    cdef void meet_ghost(self, int key) noexcept nogil:
        self.target = self.target_for(key)
        self.drop_ghost(key)
        self.returning = key

    cdef void remember(self, int key, uint8_t list_number) noexcept nogil:
        # A key that is not in the cache has no other use for its links.
        self.ghost[key] = list_number
        self.num_b1 += list_number == B1
        self.num_b2 += list_number == B2
        link(self.nodes, self.list_of(list_number), key)

    cdef void drop_ghost(self, int key) noexcept nogil:
        unlink(self.nodes, key)
        self.num_b1 -= self.ghost[key] == B1
        self.num_b2 -= self.ghost[key] == B2
        self.ghost[key] = 0

    cdef int list_of(self, uint8_t list_number) noexcept nogil:
        return self.num_keys + list_number - 1


register("arc", ArcCache, for_replays=True)
