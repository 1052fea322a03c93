"""FIFO, SIEVE and S3-FIFO: queues that a hit does not reorder."""

cimport cython
from libc.stdint cimport uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from moecache.policies._policy cimport RESIDENT, Policy, empty_list, link, settle, unlink

from moecache.policies.registry import register

cdef enum:
    SMALL = 1
    MAIN = 2
    MAX_USES = 3  # two bits per key


@cython.final
cdef class FifoCache(Policy):
    """Evict the key that was admitted first. Every operation is O(1).

    A victim search steps over held and pinned keys, which keep their place.

    Parameters
    ----------
    capacity : int
        Most keys in the cache, at least 1.
    num_keys : int
        Keys are in [0, num_keys).
    """

    def __cinit__(self, int capacity, *, int num_keys):
        self.hold_at_most(capacity)

    cdef void access(self, int key) noexcept nogil:
        self.clock += 1
        self.nodes[key].stamp = self.clock

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        settle(self, key, RESIDENT)
        link(self.nodes, self.num_keys, key)

    cdef void remove(self, int key) noexcept nogil:
        unlink(self.nodes, key)
        self.forget(key)

    cdef int victim(self) noexcept nogil:
        return self.last_unheld(self.num_keys)


@cython.final
cdef class SieveCache(Policy):
    """SIEVE (Zhang, Yang, Yue, Vigfusson and Rashmi, NSDI 2024).

    One queue in the order of admission, and a hand that moves from the oldest
    key to the newest and round again. A hit marks its key as visited; the hand
    clears marks until it meets a key without one, which is evicted. Unlike
    CLOCK's, survivors keep their place, so that new keys are sifted quickly.

    A new key is not marked, nor is a prefetched one. The hand steps over held
    and pinned keys and leaves their marks. Operations are O(1), a victim
    search amortised over the hits that set the marks.

    Parameters
    ----------
    capacity : int
        Most keys in the cache, at least 1.
    num_keys : int
        Keys are in [0, num_keys).
    """

    cdef uint8_t* visited
    cdef int hand          # where the next search begins; the sentinel: at the oldest key

    def __cinit__(self, int capacity, *, int num_keys):
        self.hold_at_most(capacity)
        self.visited = <uint8_t*>calloc(num_keys, sizeof(uint8_t))
        if self.visited == NULL:
            raise MemoryError(f"no memory for the marks of {num_keys} keys")
        self.reset()

    def __dealloc__(self):
        free(self.visited)

    cdef void access(self, int key) noexcept nogil:
        self.clock += 1
        self.nodes[key].stamp = self.clock
        self.visited[key] = 1

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        settle(self, key, RESIDENT)
        self.visited[key] = 0
        link(self.nodes, self.num_keys, key)

    cdef void remove(self, int key) noexcept nogil:
        if self.hand == key:
            self.hand = self.nodes[key].previous
        unlink(self.nodes, key)
        self.forget(key)

    cdef int victim(self) noexcept nogil:
        # The hand stays at the victim: asked again, it has nothing to clear on its way.
        if self.num_evictable == 0:
            return -1
        while True:
            if self.hand == self.num_keys:
                self.hand = self.nodes[self.num_keys].previous
            elif self.nodes[self.hand].blocked:
                self.hand = self.nodes[self.hand].previous
            elif self.visited[self.hand]:
                self.visited[self.hand] = 0
                self.hand = self.nodes[self.hand].previous
            else:
                return self.hand

    cdef void reset(self) noexcept nogil:
        memset(self.visited, 0, self.num_keys * sizeof(uint8_t))
        self.hand = self.num_keys

    cdef str audit(self):
        keys = self.walk(self.num_keys)
        if len(keys) != self.size:
            return f"{len(keys)} keys in the queue, {self.size} in all"
        if self.hand != self.num_keys and self.hand not in keys:
            return f"the hand is at key {self.hand}, which is not in the queue"
        return Policy.audit(self)


@cython.final
cdef class S3FifoCache(Policy):
    """S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, SOSP 2023).

    New keys enter a small queue; keys that left it lately (ghosts) enter the main
    one. The oldest key of the small queue moves on to the main queue if it was
    used twice or more since it came, and is evicted otherwise; the main queue
    gives its oldest key another round for every use, and at most three uses
    count.

    This follows Algorithm 1 of the published descriptions. Every key that
    is no ghost enters the small queue, also while the cache fills (libCacheSim
    then sends some to the main queue). The small queue gives a victim whenever
    it has its share, the main queue otherwise. There are as many ghosts as the
    main queue has room for keys, and they leave in the order they came. Whether
    a key is a ghost is settled when it is missed, before a victim is evicted for
    it. A key that moves on starts with no uses, and a move by itself evicts no
    key from the main queue. Only keys evicted from the small queue become
    ghosts, not keys that are discarded or could not be filled. A prefetched key
    is like any other, without a use.

    Operations are O(1), a victim search amortised over the uses; it steps over
    held and pinned keys, which keep their place.

    Parameters
    ----------
    capacity : int
        Most keys in the cache, at least 1.
    num_keys : int
        Keys are in [0, num_keys).
    small_ratio : float, default 0.1
        The small queue's share of the capacity, in (0, 1]; at least one key.

    Raises
    ------
    ValueError
        If the capacity is smaller than 1 or the ratio out of range.
    """

    cdef readonly int small
    cdef readonly int main
    cdef uint8_t* uses     # since the key entered its queue, at most 3
    cdef uint8_t* ghost    # whether a key that is not in the cache is remembered
    cdef int num_small
    cdef int num_ghosts
    cdef int expected      # the key that is to be inserted, or -1
    cdef int returning     # the ghost that the last victim was evicted for, or -1
    cdef int chosen        # the victim named last, while nothing has changed since

    def __cinit__(self, int capacity, *, int num_keys, double small_ratio=0.1):
        self.hold_at_most(capacity)
        if not 0 < small_ratio <= 1:
            raise ValueError(f"small_ratio must be in (0, 1], got {small_ratio}")
        self.small = max(1, <int>(capacity * small_ratio))
        self.main = capacity - self.small
        self.uses = <uint8_t*>calloc(num_keys, sizeof(uint8_t))
        self.ghost = <uint8_t*>calloc(num_keys, sizeof(uint8_t))
        if self.uses == NULL or self.ghost == NULL:
            raise MemoryError(f"no memory for the uses of {num_keys} keys")
        self.reset()

    def __dealloc__(self):
        free(self.uses)
        free(self.ghost)

    cdef void access(self, int key) noexcept nogil:
        self.clock += 1
        self.nodes[key].stamp = self.clock
        if self.uses[key] < MAX_USES:
            self.uses[key] += 1
        self.chosen = -1

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        self.clock += 1
        self.nodes[key].stamp = self.clock
        self.uses[key] = 0
        self.size += 1
        self.num_evictable += 1
        if self.ghost[key] or key == self.returning:
            if self.ghost[key]:
                self.drop_ghost(key)
            self.nodes[key].segment = MAIN
            link(self.nodes, self.num_keys + 1, key)
        else:
            self.nodes[key].segment = SMALL
            self.num_small += 1
            link(self.nodes, self.num_keys, key)
        self.chosen = self.expected = self.returning = -1

    cdef void remove(self, int key) noexcept nogil:
        cdef bint was_small = self.nodes[key].segment == SMALL
        unlink(self.nodes, key)
        self.forget(key)
        self.num_small -= was_small
        # A key that leaves without having been named as victim is discarded.
        if key == self.chosen:
            # Dropped before the victim becomes a ghost: this ghost may be the one too many.
            if self.expected >= 0 and self.ghost[self.expected]:
                self.drop_ghost(self.expected)
                self.returning = self.expected
            if was_small:
                self.remember(key)
        self.chosen = -1

    cdef void expect(self, int key) noexcept nogil:
        self.expected = key

    cdef int victim(self) noexcept nogil:
        # A search moves keys between the queues, after which a second one could turn to the other.
        if self.chosen >= 0 and not self.nodes[self.chosen].blocked:
            return self.chosen
        self.chosen = -1
        if self.num_small >= self.small:
            self.chosen = self.search_small()
        if self.chosen < 0:
            self.chosen = self.search_main()
        # Leases may hold all of the main queue.
        if self.chosen < 0:
            self.chosen = self.search_small()
        if self.chosen < 0:
            self.chosen = self.search_main()
        return self.chosen

    cdef void reset(self) noexcept nogil:
        memset(self.uses, 0, self.num_keys * sizeof(uint8_t))
        memset(self.ghost, 0, self.num_keys * sizeof(uint8_t))
        empty_list(self.nodes, self.num_keys + 2)
        self.num_small = self.num_ghosts = 0
        self.chosen = self.expected = self.returning = -1

    cdef str audit(self):
        small, ghosts = self.walk(self.num_keys), self.walk(self.num_keys + 2)
        if len(small) != self.num_small or len(ghosts) != self.num_ghosts:
            return (
                f"{len(small)} small keys and {len(ghosts)} ghosts, "
                f"counted {self.num_small} and {self.num_ghosts}"
            )
        if len(small) + len(self.walk(self.num_keys + 1)) != self.size:
            return f"the queues do not hold {self.size} keys"
        if self.num_ghosts > self.main:
            return f"{self.num_ghosts} ghosts, room for {self.main}"
        for key in ghosts:
            if self.nodes[<int>key].segment or not self.ghost[<int>key]:
                return f"ghost {key} is in the cache or not marked"
        return Policy.audit(self)

    cdef int search_small(self) noexcept nogil:
        cdef int earlier, key = self.nodes[self.num_keys].previous
        while key != self.num_keys:
            earlier = self.nodes[key].previous
            if not self.nodes[key].blocked:
                if self.uses[key] < 2:
                    return key
                unlink(self.nodes, key)
                self.num_small -= 1
                self.uses[key] = 0
                self.nodes[key].segment = MAIN
                link(self.nodes, self.num_keys + 1, key)
            key = earlier
        return -1

    cdef int search_main(self) noexcept nogil:
        cdef int earlier, key = self.nodes[self.num_keys + 1].previous
        # Survivors go to the head, where the search meets them again: it ends.
        while key != self.num_keys + 1:
            if not self.nodes[key].blocked:
                if self.uses[key] == 0:
                    return key
                self.uses[key] -= 1
                earlier = self.nodes[key].previous
                if earlier != self.num_keys + 1:
                    unlink(self.nodes, key)
                    link(self.nodes, self.num_keys + 1, key)
                    key = earlier
            else:
                key = self.nodes[key].previous
        return -1

    cdef void remember(self, int key) noexcept nogil:
        if self.main == 0:
            return
        if self.num_ghosts == self.main:
            self.drop_ghost(self.nodes[self.num_keys + 2].previous)
        # A key that is not in the cache has no other use for its links.
        self.ghost[key] = 1
        self.num_ghosts += 1
        link(self.nodes, self.num_keys + 2, key)

    cdef void drop_ghost(self, int key) noexcept nogil:
        unlink(self.nodes, key)
        self.ghost[key] = 0
        self.num_ghosts -= 1


register("fifo", FifoCache, for_replays=True)
register("s3-fifo", S3FifoCache, for_replays=True)
register("sieve", SieveCache, for_replays=True)
