"""LFU and LFRU: keys in a list per count, the lists in the order of their counts."""

cimport cython
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from moecache.policies._policy cimport (
    PINNED, RESIDENT, Node, Policy, empty_list, link, link_by_stamp, settle, unlink,
)

from moecache.policies.registry import register

cdef struct Bucket:
    # Keys of one count; buckets are a circular list in the order of their counts.
    uint64_t count
    int previous
    int next


cdef class LfuCache(Policy):
    """Evict the least often used key, ties to the least recently used.

    Counts survive eviction ("perfect LFU"); `clear` forgets them. What a wide step uses and a
    cache does not admit is not counted. A touch is O(1), an admission O(different counts below
    its own).

    Parameters
    ----------
    capacity : int
        Most keys in the cache, at least 1.
    num_keys : int
        Keys are in [0, num_keys).
    """

    cdef uint64_t* counts
    cdef int* bucket_of    # [num_keys] of keys that can be victims
    cdef Bucket* buckets   # [num_keys + 2]; 0 is the sentinel
    cdef int* free_buckets
    cdef int num_free_buckets

    def __cinit__(self, int capacity, *, int num_keys):
        self.hold_at_most(capacity)
        self.counts = <uint64_t*>calloc(num_keys, sizeof(uint64_t))
        self.bucket_of = <int*>calloc(num_keys, sizeof(int))
        # One per key, one more for a key between two counts, and the sentinel.
        self.buckets = <Bucket*>calloc(num_keys + 2, sizeof(Bucket))
        self.free_buckets = <int*>calloc(num_keys + 1, sizeof(int))
        if (
            self.counts == NULL or self.bucket_of == NULL or self.buckets == NULL
            or self.free_buckets == NULL
        ):
            raise MemoryError(f"no memory for the counts of {num_keys} keys")
        self.reset()

    def __dealloc__(self):
        free(self.counts)
        free(self.bucket_of)
        free(self.buckets)
        free(self.free_buckets)

    cdef void access(self, int key) noexcept nogil:
        cdef int bucket = self.bucket_of[key]
        self.clock += 1
        self.counts[key] += 1
        self.nodes[key].stamp = self.clock
        if not self.nodes[key].blocked & PINNED:
            unlink(self.nodes, key)
            # The new bucket comes right after the old one, and is made if need be.
            self.bucket_of[key] = self.find_bucket(bucket, self.counts[key])
            link(self.nodes, self.bucket_list(self.bucket_of[key]), key)
            self.drop_if_empty(bucket)

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        settle(self, key, RESIDENT)
        self.counts[key] += accessed
        self.enter(key, 0)

    cdef void remove(self, int key) noexcept nogil:
        self.leave(key)
        self.forget(key)

    cdef int victim(self) noexcept nogil:
        cdef int key, bucket = self.buckets[0].next
        while bucket != 0:
            key = self.last_unheld(self.bucket_list(bucket))
            if key >= 0:
                return key
            bucket = self.buckets[bucket].next
        return -1

    cdef bint prefers(self, int candidate, int resident) noexcept nogil:
        return self.counts[candidate] > self.counts[resident]

    cdef bint pin_key(self, int key) noexcept nogil:
        if self.nodes[key].segment and not self.nodes[key].blocked & PINNED:
            self.leave(key)
        return Policy.pin_key(self, key)

    cdef void unpin_key(self, int key) noexcept nogil:
        if self.nodes[key].blocked & PINNED:
            Policy.unpin_key(self, key)
            self.enter(key, 0)

    cdef void reset(self) noexcept nogil:
        cdef int bucket
        memset(self.counts, 0, self.num_keys * sizeof(uint64_t))
        self.buckets[0].previous = self.buckets[0].next = 0
        self.num_free_buckets = self.num_keys + 1
        for bucket in range(self.num_keys + 1):
            self.free_buckets[bucket] = self.num_keys + 1 - bucket

    cdef str audit(self):
        cdef int key, previous = 0, bucket = self.buckets[0].next, listed = 0
        while bucket != 0:
            if previous and self.buckets[previous].count >= self.buckets[bucket].count:
                return "the buckets are not in the order of their counts"
            keys = self.walk(self.bucket_list(bucket))
            if not keys:
                return f"the bucket of count {self.buckets[bucket].count} is empty"
            if sorted(keys, key=self._stamp, reverse=True) != keys:
                return f"the bucket of count {self.buckets[bucket].count} is not by recency"
            for key in keys:
                if self.bucket_of[key] != bucket or self.counts[key] != self.buckets[bucket].count:
                    return f"key {key} is in the wrong bucket"
            listed += len(keys)
            previous, bucket = bucket, self.buckets[bucket].next
        if listed != self.size - self.pin_count:
            return f"{listed} keys in buckets, {self.size} in all, {self.pin_count} pinned"
        return Policy.audit(self)

    cdef int find_bucket(self, int after, uint64_t count) noexcept nogil:
        # The bucket of `count`, made if need be; it comes after the bucket `after`.
        cdef int bucket = self.buckets[after].next
        cdef int made, before
        while bucket != 0 and self.buckets[bucket].count < count:
            bucket = self.buckets[bucket].next
        if bucket != 0 and self.buckets[bucket].count == count:
            return bucket
        self.num_free_buckets -= 1
        made = self.free_buckets[self.num_free_buckets]
        before = self.buckets[bucket].previous
        self.buckets[made].count = count
        self.buckets[made].previous = before
        self.buckets[made].next = bucket
        self.buckets[before].next = made
        self.buckets[bucket].previous = made
        empty_list(self.nodes, self.bucket_list(made))
        return made

    cdef void enter(self, int key, int after) noexcept nogil:
        cdef int bucket = self.find_bucket(after, self.counts[key])
        self.bucket_of[key] = bucket
        # At the head, unless the key was pinned for a while.
        link_by_stamp(self.nodes, self.nodes, self.bucket_list(bucket), key)

    cdef void leave(self, int key) noexcept nogil:
        unlink(self.nodes, key)
        self.drop_if_empty(self.bucket_of[key])

    cdef void drop_if_empty(self, int bucket) noexcept nogil:
        cdef int before, following
        if self.nodes[self.bucket_list(bucket)].next != self.bucket_list(bucket):
            return
        before = self.buckets[bucket].previous
        following = self.buckets[bucket].next
        self.buckets[before].next = following
        self.buckets[following].previous = before
        self.free_buckets[self.num_free_buckets] = bucket
        self.num_free_buckets += 1

    cdef int bucket_list(self, int bucket) noexcept nogil:
        return self.num_keys + 1 + bucket


@cython.final
cdef class LfruCache(LfuCache):
    """Evict the key with the lowest count / age, ties to the least recently used.

    Age is the number of accesses since the key's last one, the one that asks for
    a victim included, plus one. Counts survive eviction; `clear` forgets them.

    Parameters
    ----------
    capacity : int
        Most keys in the cache, at least 1.
    num_keys : int
        Keys are in [0, num_keys).
    """

    cdef Node* recency     # a second list of the same keys, the latest first

    def __cinit__(self, int capacity, *, int num_keys):
        self.recency = <Node*>calloc(num_keys + 1, sizeof(Node))
        if self.recency == NULL:
            raise MemoryError(f"no memory for the recency of {num_keys} keys")
        empty_list(self.recency, num_keys)

    def __dealloc__(self):
        free(self.recency)

    cdef void access(self, int key) noexcept nogil:
        LfuCache.access(self, key)
        if not self.nodes[key].blocked & PINNED:
            unlink(self.recency, key)
            link(self.recency, self.num_keys, key)

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        LfuCache.insert(self, key, accessed)
        link(self.recency, self.num_keys, key)

    cdef void remove(self, int key) noexcept nogil:
        unlink(self.recency, key)
        LfuCache.remove(self, key)

    cdef int victim(self) noexcept nogil:
        cdef int key, best = -1
        cdef int bucket = self.buckets[0].next
        cdef double lowest = 0.0, score, oldest
        oldest = self.age(self.recency[self.num_keys].previous)
        # Among equal counts the oldest has the lowest score: one key per bucket
        # is weighed, and none once a count is too high even at the oldest age.
        while bucket != 0:
            if best >= 0 and <double>self.buckets[bucket].count / oldest > lowest:
                break
            key = self.last_unheld(self.bucket_list(bucket))
            if key >= 0:
                score = <double>self.counts[key] / self.age(key)
                if best < 0 or score < lowest or (
                    score == lowest and self.nodes[key].stamp < self.nodes[best].stamp
                ):
                    best = key
                    lowest = score
            bucket = self.buckets[bucket].next
        return best

    cdef bint prefers(self, int candidate, int resident) noexcept nogil:
        return (
            <double>self.counts[candidate] / self.age(candidate)
            > <double>self.counts[resident] / self.age(resident)
        )

    cdef bint pin_key(self, int key) noexcept nogil:
        if self.nodes[key].segment and not self.nodes[key].blocked & PINNED:
            unlink(self.recency, key)
        return LfuCache.pin_key(self, key)

    cdef void unpin_key(self, int key) noexcept nogil:
        if self.nodes[key].blocked & PINNED:
            LfuCache.unpin_key(self, key)
            link_by_stamp(self.recency, self.nodes, self.num_keys, key)

    cdef void reset(self) noexcept nogil:
        LfuCache.reset(self)
        if self.recency != NULL:
            empty_list(self.recency, self.num_keys)

    cdef double age(self, int key) noexcept nogil:
        # As of the access that asks for a victim.
        return <double>(self.clock - self.nodes[key].stamp + 2)


register("lfru", LfruCache)
register("lfu", LfuCache)
