"""CountHeap: keys in the order of their counts; RankedPolicy: the lowest of them leaves."""

cimport cython
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from moecache.policies._policy cimport PINNED, Node, Policy


cdef class RankedPolicy(Policy):
    """Base of policies whose victim has the lowest rank, ties to the least recently used.

    A subclass gives `rank`, calls `rise` where an access may have raised it, and calls the methods
    of this class from its own `insert`, `remove` and `reset`.
    """

    def __cinit__(self, *args, int num_keys, **kwargs):
        self.heap = CountHeap(num_keys)

    cdef uint64_t rank(self, int key) noexcept nogil:
        return 0

    cdef void rise(self, int key) noexcept nogil:
        if self.heap.contains(key):
            self.heap.raise_to(key, self.rank(key), self.nodes[key].stamp)

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        self.heap.push(key, self.rank(key), self.nodes[key].stamp)

    cdef void remove(self, int key) noexcept nogil:
        if self.heap.contains(key):
            self.heap.remove(key)
        self.forget(key)

    cdef int victim(self) noexcept nogil:
        return self.heap.first_unblocked(self.nodes)

    cdef bint pin_key(self, int key) noexcept nogil:
        if self.heap.contains(key):
            self.heap.remove(key)
        return Policy.pin_key(self, key)

    cdef void unpin_key(self, int key) noexcept nogil:
        if self.nodes[key].blocked & PINNED:
            Policy.unpin_key(self, key)
            self.nodes[key].parked = 0
            self.heap.push(key, self.rank(key), self.nodes[key].stamp)

    cdef void unpark(self, int key) noexcept nogil:
        # Pinned while it was held: `unpin_key` puts it back.
        if not self.nodes[key].blocked & PINNED:
            self.heap.push(key, self.rank(key), self.nodes[key].stamp)

    cdef void reset(self) noexcept nogil:
        self.heap.clear()

    cdef str audit(self):
        cdef int key
        for key in range(self.num_keys):
            blocked = self.nodes[key].blocked
            if self.heap.contains(key) and (not self.nodes[key].segment or blocked & PINNED):
                return f"key {key} is in the heap but absent or pinned"
            if self.nodes[key].segment and not blocked and not self.heap.contains(key):
                return f"key {key} can be evicted but is not in the heap"
        return Policy.audit(self)


@cython.final
cdef class CountHeap:
    """Indexed 4-ary min-heap of (count, stamp) per key."""

    def __cinit__(self, int num_keys):
        self.num_keys = num_keys
        self.entries = <Entry*>malloc(num_keys * sizeof(Entry))
        self.positions = <int*>malloc(num_keys * sizeof(int))
        if self.entries == NULL or self.positions == NULL:
            raise MemoryError(f"no memory for a heap of {num_keys} keys")
        self.clear()

    def __dealloc__(self):
        free(self.entries)
        free(self.positions)

    cdef bint contains(self, int key) noexcept nogil:
        return self.positions[key] >= 0

    cdef void push(self, int key, uint64_t count, uint64_t stamp) noexcept nogil:
        cdef Entry entry
        entry.count = count
        entry.stamp = stamp
        entry.key = key
        self.size += 1
        self._sift_up(self.size - 1, entry)

    cdef void remove(self, int key) noexcept nogil:
        cdef int index = self.positions[key]
        self.positions[key] = -1
        self.size -= 1
        if index < self.size:
            self._sift_up(index, self.entries[self.size])
            # The entry that stands there now may still be larger than its children.
            self._sift_down(index, self.entries[index])

    cdef void raise_to(self, int key, uint64_t count, uint64_t stamp) noexcept nogil:
        cdef Entry entry
        entry.count = count
        entry.stamp = stamp
        entry.key = key
        self._sift_down(self.positions[key], entry)

    cdef void clear(self) noexcept nogil:
        self.size = 0
        memset(self.positions, 0xFF, self.num_keys * sizeof(int))

    cdef int first_unblocked(self, Node* nodes) noexcept nogil:
        # Held keys are taken out, or every search would meet them; `unpark` puts them back.
        cdef int key
        while self.size:
            key = self.entries[0].key
            if not nodes[key].blocked:
                return key
            self.remove(key)
            nodes[key].parked = 1
        return -1

    cdef void _place(self, int index, Entry entry) noexcept nogil:
        self.entries[index] = entry
        self.positions[entry.key] = index

    cdef void _sift_up(self, int index, Entry entry) noexcept nogil:
        cdef int parent
        while index > 0:
            parent = (index - 1) // 4
            if not _before(entry, self.entries[parent]):
                break
            self._place(index, self.entries[parent])
            index = parent
        self._place(index, entry)

    cdef void _sift_down(self, int index, Entry entry) noexcept nogil:
        cdef int child, best
        while True:
            best = 4 * index + 1
            if best >= self.size:
                break
            for child in range(best + 1, min(best + 4, self.size)):
                if _before(self.entries[child], self.entries[best]):
                    best = child
            if not _before(self.entries[best], entry):
                break
            self._place(index, self.entries[best])
            index = best
        self._place(index, entry)


cdef inline bint _before(Entry a, Entry b) noexcept nogil:
    return a.count < b.count or (a.count == b.count and a.stamp < b.stamp)
