"""W-TinyLFU: a small window before a segmented LRU that admits by count."""

cimport cython
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from moecache.policies._policy cimport Policy, empty_list, link, unlink

from moecache.policies.registry import register

cdef enum:
    WINDOW = 1
    PROBATION = 2
    PROTECTED = 3
    MAX_COUNT = 15  # four bits, as in the paper


@cython.final
cdef class WTinyLfuCache(Policy):
    """W-TinyLFU (Einziger, Friedman and Manes, ACM Trans. Storage 13(4), 2017).

    New keys enter a window, an LRU of 1 % of the keys; the rest is a segmented
    LRU of 20 % probation and 80 % protected. When a key must leave, the least
    recently used key of the window (the candidate) competes with that of
    probation: the one counted less often leaves, on a tie the candidate, and a
    candidate that wins goes on probation. While the cache fills, keys that fall
    out of the window go on probation without a contest.

    Counts have four bits, and all are halved after 10 * capacity uses, as in
    Caffeine. Keys are dense integers here: a count for each of them costs less
    than the count-min sketch of the paper and has no collisions, and the
    doorkeeper is left out. Counts survive eviction. A prefetch is not a use.

    This cache must admit every key that is used, where the paper's may turn the
    candidate away at once; the key just admitted is held, and the contest is
    for its room. If leases hold all of the window, the other key leaves
    without a contest, so that the window grows as far as one step's leases
    need; a key of the window that is used again goes on probation as long as
    there are less than 99 % outside.

    Operations are O(1), the halving amortised over num_keys / capacity / 10
    counts per use; a victim search steps over held and pinned keys.

    Parameters
    ----------
    capacity : int
        Most keys in the cache, at least 1.
    num_keys : int
        Keys are in [0, num_keys).
    window_ratio : float, default 0.01
        The window's share of the capacity, in (0, 1]; at least one key.
    protected_ratio : float, default 0.8
        The protected segment's share of what is outside the window, in [0, 1].

    Raises
    ------
    ValueError
        If the capacity is smaller than 1 or a ratio out of range.
    """

    cdef readonly int window
    cdef readonly int protected
    cdef int main             # probation and the protected segment together
    cdef uint8_t* counts
    cdef int64_t num_counted  # until the counts are halved
    cdef int64_t sample
    cdef int num_window
    cdef int num_protected
    cdef int candidate        # of the window, to move on in the chosen key's place, or -1
    cdef int chosen           # the victim named last, or -1
    cdef bint made_room       # whether a key left for the one that is inserted next

    def __cinit__(
        self,
        int capacity,
        *,
        int num_keys,
        double window_ratio=0.01,
        double protected_ratio=0.8,
    ):
        self.hold_at_most(capacity)
        if not 0 < window_ratio <= 1:
            raise ValueError(f"window_ratio must be in (0, 1], got {window_ratio}")
        if not 0 <= protected_ratio <= 1:
            raise ValueError(f"protected_ratio must be in [0, 1], got {protected_ratio}")
        self.window = max(1, <int>(capacity * window_ratio))
        self.main = capacity - self.window
        self.protected = <int>(self.main * protected_ratio)
        self.sample = 10 * <int64_t>capacity
        self.counts = <uint8_t*>calloc(num_keys, sizeof(uint8_t))
        if self.counts == NULL:
            raise MemoryError(f"no memory for the counts of {num_keys} keys")
        self.reset()

    def __dealloc__(self):
        free(self.counts)

    cdef void access(self, int key) noexcept nogil:
        cdef int demoted
        self.count(key)
        if self.nodes[key].segment == WINDOW:
            if self.size - self.num_window < self.main and self.num_window > self.window:
                self.move(key, PROBATION)
            else:
                self.move(key, WINDOW)
            return
        self.move(key, PROTECTED)
        while self.num_protected > self.protected:
            demoted = self.nodes[self.list_of(PROTECTED)].previous
            self.move(demoted, PROBATION)

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        if accessed:
            self.count(key)
        else:
            self.clock += 1
            self.nodes[key].stamp = self.clock
        self.nodes[key].segment = WINDOW
        self.num_window += 1
        self.size += 1
        self.num_evictable += 1
        link(self.nodes, self.list_of(WINDOW), key)
        if (
            not self.made_room and self.num_window > self.window
            and self.size - self.num_window < self.main
        ):
            self.move(self.nodes[self.list_of(WINDOW)].previous, PROBATION)
        self.made_room = False
        self.chosen = self.candidate = -1

    cdef void remove(self, int key) noexcept nogil:
        cdef uint8_t left = self.nodes[key].segment
        unlink(self.nodes, key)
        self.forget(key)
        self.num_window -= left == WINDOW
        self.num_protected -= left == PROTECTED
        # A key that leaves without having been named as victim is discarded.
        if key == self.chosen:
            self.made_room = True
            if self.candidate >= 0 and self.nodes[self.candidate].segment == WINDOW:
                self.move(self.candidate, PROBATION)
        self.chosen = self.candidate = -1

    cdef int victim(self) noexcept nogil:
        cdef int candidate = -1, resident
        if self.num_window >= self.window:
            candidate = self.last_unheld(self.list_of(WINDOW))
        resident = self.last_unheld(self.list_of(PROBATION))
        if resident < 0:
            resident = self.last_unheld(self.list_of(PROTECTED))
        self.candidate = -1
        if candidate >= 0 and resident >= 0:
            if self.counts[candidate] > self.counts[resident]:
                self.candidate = candidate
                self.chosen = resident
            else:
                self.chosen = candidate
        elif resident >= 0:
            self.chosen = resident
        else:
            self.chosen = self.last_unheld(self.list_of(WINDOW))
        return self.chosen

    cdef bint prefers(self, int candidate, int resident) noexcept nogil:
        return self.counts[candidate] > self.counts[resident]

    cdef void reset(self) noexcept nogil:
        memset(self.counts, 0, self.num_keys * sizeof(uint8_t))
        empty_list(self.nodes, self.list_of(PROTECTED))
        self.num_counted = 0
        self.num_window = self.num_protected = 0
        self.chosen = self.candidate = -1
        self.made_room = False

    cdef str audit(self):
        window, protected = self.walk(self.list_of(WINDOW)), self.walk(self.list_of(PROTECTED))
        if len(window) != self.num_window or len(protected) != self.num_protected:
            return (
                f"{len(window)} keys in the window and {len(protected)} protected, "
                f"counted {self.num_window} and {self.num_protected}"
            )
        if len(window) + len(protected) + len(self.walk(self.list_of(PROBATION))) != self.size:
            return f"the segments do not hold {self.size} keys"
        if self.num_protected > self.protected:
            return f"{self.num_protected} protected keys in a segment of {self.protected}"
        return Policy.audit(self)

    cdef void count(self, int key) noexcept nogil:
        cdef int other
        self.clock += 1
        self.nodes[key].stamp = self.clock
        if self.counts[key] < MAX_COUNT:
            self.counts[key] += 1
        self.num_counted += 1
        if self.num_counted >= self.sample:
            self.num_counted //= 2
            for other in range(self.num_keys):
                self.counts[other] //= 2

    cdef void move(self, int key, uint8_t segment) noexcept nogil:
        # To the most recent end of its own segment or of another.
        self.num_window += (segment == WINDOW) - (self.nodes[key].segment == WINDOW)
        self.num_protected += (segment == PROTECTED) - (self.nodes[key].segment == PROTECTED)
        self.nodes[key].segment = segment
        unlink(self.nodes, key)
        link(self.nodes, self.list_of(segment), key)

    cdef int list_of(self, uint8_t segment) noexcept nogil:
        return self.num_keys + segment - 1


register("w-tinylfu", WTinyLfuCache, for_replays=True)
