"""LeCaR: LRU or LFU, drawn by weights learnt from what each evicted too early."""

cimport cython
from libc.math cimport exp
from libc.math cimport pow as power
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from moecache.policies._heap cimport RankedPolicy
from moecache.policies._policy cimport RESIDENT, empty_list, link, settle, unlink

from moecache.policies.registry import register

cdef enum:
    NOBODY = 0
    LRU = 1
    LFU = 2


@cython.final
cdef class LecarCache(RankedPolicy):
    """LeCaR (Vietri et al., HotStorage 2018): regret decides between LRU and LFU.

    For every victim one of the two experts, LRU and LFU, is drawn by its
    weight. An expert's victims enter its history. A miss on a key of a history
    multiplies the other expert's weight by exp(learning_rate * r), with
    r = discount_rate^(accesses since the key was evicted), and the weights are
    scaled to a sum of 1.

    Details, where the paper leaves room, are those of its authors' code: each
    history holds half as many keys as the cache, the earliest evicted leaving
    first; a weight stays in [0.01, 0.99]; a victim that both experts name
    enters no history. A key's count is kept while it is in a history and
    forgotten with it. LFU's ties go to the least recently used. Draws come
    from a generator of the policy's own (splitmix64), one per eviction, so
    that a trace gives the same victims on every run.

    Only evicted keys enter a history, not keys that are discarded or could not
    be filled. A prefetch is not a use: it leaves the weights alone, and takes
    its key out of its history.

    Operations are O(log n); a search by recency steps over held and pinned keys.

    Parameters
    ----------
    capacity : int
        Most keys in the cache, at least 1.
    num_keys : int
        Keys are in [0, num_keys).
    learning_rate : float, default 0.45
        Above 0.
    discount_rate : float, optional
        Per access, in (0, 1]; 0.005^(1 / capacity) if not given.
    seed : int, default 0
        Seed of the draws, in [0, 2^64).

    Raises
    ------
    ValueError
        If the capacity is smaller than 1 or a rate out of range.
    """

    cdef readonly double learning_rate
    cdef double discount      # per access
    cdef double lru_weight
    cdef uint64_t* counts     # uses, of keys in the cache or in a history
    cdef uint8_t* ghost       # the expert whose history holds a key that is not in the cache
    cdef int history          # keys that each history holds
    cdef int[3] num_ghosts
    cdef uint64_t seed
    cdef uint64_t random      # state of the generator
    cdef double draw          # in [0, 1): decides which expert names the next victim
    cdef int expected         # the key that is to be inserted, or -1
    cdef int chosen           # the victim named last, or -1
    cdef uint8_t chosen_by

    def __cinit__(
        self,
        int capacity,
        *,
        int num_keys,
        double learning_rate=0.45,
        discount_rate=None,
        uint64_t seed=0,
    ):
        self.hold_at_most(capacity)
        if not learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {learning_rate}")
        if discount_rate is not None and not 0 < discount_rate <= 1:
            raise ValueError(f"discount_rate must be in (0, 1], got {discount_rate}")
        self.learning_rate = learning_rate
        self.discount = power(0.005, 1.0 / capacity) if discount_rate is None else discount_rate
        self.history = max(1, capacity // 2)
        self.seed = seed
        self.counts = <uint64_t*>calloc(num_keys, sizeof(uint64_t))
        self.ghost = <uint8_t*>calloc(num_keys, sizeof(uint8_t))
        if self.counts == NULL or self.ghost == NULL:
            raise MemoryError(f"no memory for the counts of {num_keys} keys")
        self.reset()

    def __dealloc__(self):
        free(self.counts)
        free(self.ghost)

    @property
    def discount_rate(self) -> float:
        """Factor by which each access since the eviction shrinks a regret."""
        return self.discount

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of LRU and of LFU; their sum is 1."""
        return self.lru_weight, 1.0 - self.lru_weight

    cdef void access(self, int key) noexcept nogil:
        self.clock += 1
        self.counts[key] += 1
        self.nodes[key].stamp = self.clock
        unlink(self.nodes, key)
        link(self.nodes, self.num_keys, key)
        self.rise(key)

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        cdef double weight = self.lru_weight
        self.meet_ghost(key)
        if not accessed:
            self.lru_weight = weight
        self.counts[key] += accessed
        settle(self, key, RESIDENT)
        link(self.nodes, self.num_keys, key)
        RankedPolicy.insert(self, key, accessed)
        self.expected = self.chosen = -1

    cdef void remove(self, int key) noexcept nogil:
        unlink(self.nodes, key)
        RankedPolicy.remove(self, key)
        # A key that leaves without having been named as victim is discarded.
        if key == self.chosen:
            # Dropped before the victim enters a history: this key may be the one too many there.
            if self.expected >= 0:
                self.meet_ghost(self.expected)
            self.remember(key, self.chosen_by)
            self.next_draw()
        else:
            self.counts[key] = 0
        self.chosen = -1

    cdef void expect(self, int key) noexcept nogil:
        self.expected = key

    cdef int victim(self) noexcept nogil:
        cdef int oldest = self.last_unheld(self.num_keys)
        cdef int rarest = self.heap.first_unblocked(self.nodes)
        cdef double weight = self.lru_weight
        if self.expected >= 0:
            weight = self.weight_after(self.expected)
        if oldest == rarest:
            self.chosen = oldest
            self.chosen_by = NOBODY
        elif self.draw < weight:
            self.chosen = oldest
            self.chosen_by = LRU
        else:
            self.chosen = rarest
            self.chosen_by = LFU
        return self.chosen

    cdef uint64_t rank(self, int key) noexcept nogil:
        return self.counts[key]

    cdef void reset(self) noexcept nogil:
        memset(self.counts, 0, self.num_keys * sizeof(uint64_t))
        memset(self.ghost, 0, self.num_keys * sizeof(uint8_t))
        empty_list(self.nodes, self.num_keys + LRU)
        empty_list(self.nodes, self.num_keys + LFU)
        self.num_ghosts[LRU] = self.num_ghosts[LFU] = 0
        RankedPolicy.reset(self)
        self.lru_weight = 0.5
        self.random = self.seed
        self.next_draw()
        self.expected = self.chosen = -1
        self.chosen_by = NOBODY

    cdef str audit(self):
        cdef int expert
        for expert in (LRU, LFU):
            keys = self.walk(self.num_keys + expert)
            if len(keys) != self.num_ghosts[expert] or len(keys) > self.history:
                return f"{len(keys)} keys in a history of {self.history}"
            if any(self.nodes[<int>key].segment for key in keys):
                return "a key in the cache is in a history"
        if len(self.walk(self.num_keys)) != self.size:
            return f"the list does not hold {self.size} keys"
        return RankedPolicy.audit(self)

    cdef double weight_after(self, int key) noexcept nogil:
        # LRU's weight after a miss on the key, which is the access after `clock`.
        cdef double regret, lru = self.lru_weight, lfu = 1.0 - self.lru_weight
        if self.ghost[key] == NOBODY:
            return lru
        regret = power(self.discount, <double>(self.clock + 1 - self.nodes[key].stamp))
        if self.ghost[key] == LRU:
            lfu *= exp(self.learning_rate * regret)
        else:
            lru *= exp(self.learning_rate * regret)
        return min(0.99, max(0.01, lru / (lru + lfu)))

    cdef void meet_ghost(self, int key) noexcept nogil:
        # Its count stays: the key is about to be inserted.
        cdef uint64_t count = self.counts[key]
        if self.ghost[key] != NOBODY:
            self.lru_weight = self.weight_after(key)
            self.drop_ghost(key)
            self.counts[key] = count

    cdef void next_draw(self) noexcept nogil:
        # splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
        cdef uint64_t bits
        self.random += <uint64_t>0x9E3779B97F4A7C15
        bits = self.random
        bits = (bits ^ (bits >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
        bits = (bits ^ (bits >> 27)) * <uint64_t>0x94D049BB133111EB
        bits ^= bits >> 31
        self.draw = <double>(bits >> 11) / 9007199254740992.0

    cdef void remember(self, int key, uint8_t expert) noexcept nogil:
        if expert == NOBODY:
            self.counts[key] = 0
            return
        if self.num_ghosts[expert] == self.history:
            self.drop_ghost(self.nodes[self.num_keys + expert].previous)
        self.ghost[key] = expert
        self.num_ghosts[expert] += 1
        # The stamp is the time of the eviction: outside the cache it has no other meaning.
        self.nodes[key].stamp = self.clock + 1
        link(self.nodes, self.num_keys + expert, key)

    cdef void drop_ghost(self, int key) noexcept nogil:
        unlink(self.nodes, key)
        self.num_ghosts[self.ghost[key]] -= 1
        self.ghost[key] = NOBODY
        self.counts[key] = 0


register("lecar", LecarCache, for_replays=True)
