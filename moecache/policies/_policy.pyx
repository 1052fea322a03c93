"""The interface between a cache and an eviction policy, and the simplest one: LRU.

A policy orders the keys that are in the cache and names a victim. It owns no
memory of experts. A key that is leased or being filled is *held*; a held or
pinned key is never a victim.
"""

cimport cython
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from moecache.errors import CapacityError
from moecache.policies.registry import register

cdef class Policy:
    """Base of every eviction policy; not a policy itself.

    Keys are integers in [0, num_keys). Not safe for use from two threads at
    once; `ExpertCache` locks around its policy.
    """

    def __cinit__(self, *args, int num_keys, **kwargs):
        if num_keys < 1:
            raise ValueError(f"num_keys must be at least 1, got {num_keys}")
        if num_keys > MAX_KEYS:
            raise ValueError(f"num_keys must be at most {MAX_KEYS}, got {num_keys}")
        self.num_keys = num_keys
        # From num_keys on: the sentinels of lists, at most as many as LFU has buckets.
        self.nodes = <Node*>calloc(2 * num_keys + 3, sizeof(Node))
        if self.nodes == NULL:
            raise MemoryError(f"no memory for a policy over {num_keys} keys")
        empty_list(self.nodes, num_keys)
        empty_list(self.nodes, num_keys + 1)

    def __dealloc__(self):
        free(self.nodes)

    def touch(self, Py_ssize_t key) -> bool:
        """Record an access to `key`; return whether it is in the cache."""
        self.checked(key)
        if not self.nodes[key].segment:
            return False
        self.access(<int>key)
        return True

    def admit(self, Py_ssize_t key) -> int:
        """Put `key` into the cache and return the key that left, or -1.

        Admitting a key that is in the cache is a touch.

        Raises
        ------
        CapacityError
            If the cache is full of pinned keys. Nothing is changed.
        """
        cdef int evicted = -1
        self.checked(key)
        if self.nodes[key].segment:
            self.access(<int>key)
            return -1
        if self.full():
            self.expect(<int>key)
            evicted = self.victim()
            if evicted < 0:
                raise CapacityError(
                    f"cannot admit key {key}: all {self.size} keys are pinned; unpin one first"
                )
            self.remove(evicted)
        self.insert(<int>key, True)
        return evicted

    def discard(self, Py_ssize_t key) -> None:
        """Take `key` out of the cache, pinned or not; do nothing if it is not in it."""
        self.checked(key)
        if self.nodes[key].segment:
            self.unpin_key(<int>key)
            self.remove(<int>key)

    def pin(self, Py_ssize_t key) -> bool:
        """Keep `key` until it is unpinned; return False if that cannot be honoured."""
        self.checked(key)
        return self.pin_key(<int>key)

    def unpin(self, Py_ssize_t key) -> None:
        """Let `key` be evicted again; do nothing if it is not pinned."""
        self.checked(key)
        self.unpin_key(<int>key)

    def is_pinned(self, Py_ssize_t key) -> bool:
        """Return whether `key` is pinned."""
        self.checked(key)
        return self.nodes[key].blocked & PINNED != 0

    def keys(self) -> list[int]:
        """Return the keys in the cache, the most recently used first."""
        resident = [key for key in range(self.num_keys) if self.nodes[key].segment]
        resident.sort(key=self._stamp, reverse=True)
        return resident

    def clear(self) -> None:
        """Forget every key, pin and access."""
        cdef int key
        for key in range(self.num_keys):
            memset(&self.nodes[key], 0, sizeof(Node))
        empty_list(self.nodes, self.num_keys)
        empty_list(self.nodes, self.num_keys + 1)
        self.size = self.pin_count = self.num_evictable = 0
        self.clock = 0
        self.reset()

    @property
    def num_pinned(self) -> int:
        """Number of pinned keys."""
        return self.pin_count

    def __contains__(self, Py_ssize_t key) -> bool:
        self.checked(key)
        return self.nodes[key].segment != 0

    def __len__(self) -> int:
        return self.size

    def _stamp(self, int key) -> int:
        return self.nodes[key].stamp

    cdef void begin_step(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* sequences,
    ) noexcept nogil:
        pass

    cdef const int* worths(self, int layer) noexcept nogil:
        return NULL

    cdef void access(self, int key) noexcept nogil:
        pass

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        pass

    cdef void remove(self, int key) noexcept nogil:
        pass

    cdef bint full(self) noexcept nogil:
        return self.size == self.capacity

    cdef void expect(self, int key) noexcept nogil:
        pass

    cdef int victim(self) noexcept nogil:
        return -1

    cdef bint prefers(self, int candidate, int resident) noexcept nogil:
        # Recency says nothing in favour of a key that is not in the cache.
        return False

    cdef bint pin_key(self, int key) noexcept nogil:
        if not self.nodes[key].segment:
            return False
        if not self.nodes[key].blocked & PINNED:
            if not self.nodes[key].blocked:
                self.num_evictable -= 1
            self.nodes[key].blocked |= PINNED
            self.pin_count += 1
        return True

    cdef void unpin_key(self, int key) noexcept nogil:
        if self.nodes[key].blocked & PINNED:
            self.nodes[key].blocked &= ~PINNED
            self.pin_count -= 1
            if not self.nodes[key].blocked:
                self.num_evictable += 1

    cdef void unpark(self, int key) noexcept nogil:
        pass

    cdef void recount(self) noexcept nogil:
        pass

    cdef void begin_sequence(self) noexcept nogil:
        pass

    cdef void reset(self) noexcept nogil:
        pass

    cdef str audit(self):
        cdef int key, size = 0, pinned = 0, evictable = 0
        for key in range(self.num_keys):
            if self.nodes[key].segment:
                size += 1
                pinned += self.nodes[key].blocked & PINNED != 0
                evictable += self.nodes[key].blocked == 0
            elif self.nodes[key].blocked or self.nodes[key].parked:
                return f"key {key} is blocked but not in the cache"
        if size != self.size or size > self.capacity:
            return f"{size} keys, counted {self.size}, capacity {self.capacity}"
        if pinned != self.pin_count or evictable != self.num_evictable:
            return (
                f"pinned {pinned}, counted {self.pin_count}; "
                f"evictable {evictable}, counted {self.num_evictable}"
            )
        return None

    cdef int hold_at_most(self, int capacity) except -1:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        return 0

    cdef int last_unheld(self, int sentinel) noexcept nogil:
        cdef int key = self.nodes[sentinel].previous
        while key != sentinel:
            if not self.nodes[key].blocked:
                return key
            key = self.nodes[key].previous
        return -1

    cdef void forget(self, int key) noexcept nogil:
        # The stamp stays: LFRU weighs a key that comes back by its last access.
        if not self.nodes[key].blocked:
            self.num_evictable -= 1
        self.nodes[key].segment = 0
        self.nodes[key].blocked = 0
        self.nodes[key].parked = 0
        self.size -= 1

    cdef list walk(self, int sentinel):
        cdef list keys = []
        cdef int key = self.nodes[sentinel].next
        while key != sentinel:
            keys.append(key)
            key = self.nodes[key].next
        return keys

    cdef int checked(self, Py_ssize_t key) except -1:
        if key < 0 or key >= self.num_keys:
            raise ValueError(f"key {key} is not in [0, {self.num_keys})")
        return 0


@cython.final
cdef class LruCache(Policy):
    """Evict the least recently used key. Every operation but `unpin` is O(1).

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
        # Pinned keys are not in the list: no victim search has to step over them.
        if not self.nodes[key].blocked & PINNED:
            unlink(self.nodes, key)
            link(self.nodes, self.num_keys, key)

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        settle(self, key, RESIDENT)
        link(self.nodes, self.num_keys, key)

    cdef void remove(self, int key) noexcept nogil:
        unlink(self.nodes, key)
        self.forget(key)

    cdef int victim(self) noexcept nogil:
        return self.last_unheld(self.num_keys)

    cdef bint pin_key(self, int key) noexcept nogil:
        if self.nodes[key].segment and not self.nodes[key].blocked & PINNED:
            unlink(self.nodes, key)
        return Policy.pin_key(self, key)

    cdef void unpin_key(self, int key) noexcept nogil:
        if self.nodes[key].blocked & PINNED:
            Policy.unpin_key(self, key)
            link_by_stamp(self.nodes, self.nodes, self.num_keys, key)


register("lru", LruCache)
