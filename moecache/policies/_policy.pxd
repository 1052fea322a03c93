# The interface between a cache and an eviction policy, and the lists that policies share.

cimport cython
from libc.stdint cimport int32_t, uint8_t, uint64_t

cdef enum:
    # Lists, their sentinels and LFU's buckets are numbered by int.
    MAX_KEYS = 1073741820
    MAX_SEQUENCES = 64  # sequences that are told apart

cdef enum:
    RESIDENT = 1  # the segment of policies that have but one

cdef enum:
    HELD = 1    # leased or being filled: not a victim until released
    PINNED = 2  # kept until unpinned


cdef struct Node:
    uint64_t stamp    # time of the last access or admission
    int previous
    int next
    uint8_t segment   # 0: not in the cache; other values belong to the policy
    uint8_t blocked   # HELD | PINNED
    uint8_t parked    # taken out of the victims' order while held


cdef class Policy:
    cdef Node* nodes
    cdef readonly int num_keys
    cdef readonly int capacity
    cdef bint is_taken  # by a cache, whose tables have its keys
    cdef int size
    cdef int pin_count
    cdef int num_evictable
    cdef uint64_t clock

    # A policy implements these. `begin_step` comes before a step's accesses: `rows` tokens of one
    # layer, with `k` ids each (int64 if `wide`), some of them perhaps out of range. `sequences` has
    # a number for each row, or is NULL if all are of one sequence. `worths` comes after it: a
    # policy that decides itself which experts a bulk step admits returns a number for each of the
    # layer's experts, the more the better; others return NULL. `insert` is called when there is
    # room. `victim` returns -1 if every key is blocked; its answer need not be removed, and two
    # calls in a row give the same one. `expect` comes before it and names the key that is to be
    # inserted; it may change the next answer of `victim` alone, as the insertion may not follow.
    cdef void begin_step(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* sequences,
    ) noexcept nogil
    cdef const int* worths(self, int layer) noexcept nogil
    cdef void access(self, int key) noexcept nogil
    cdef void insert(self, int key, bint accessed) noexcept nogil
    cdef void remove(self, int key) noexcept nogil
    cdef bint full(self) noexcept nogil
    cdef void expect(self, int key) noexcept nogil
    cdef int victim(self) noexcept nogil
    cdef bint prefers(self, int candidate, int resident) noexcept nogil
    cdef bint pin_key(self, int key) noexcept nogil
    cdef void unpin_key(self, int key) noexcept nogil
    cdef void unpark(self, int key) noexcept nogil
    cdef void recount(self) noexcept nogil
    cdef void begin_sequence(self) noexcept nogil
    cdef void reset(self) noexcept nogil
    cdef str audit(self)

    # For subclasses: lists are circular, their sentinels the nodes from num_keys on.
    cdef int hold_at_most(self, int capacity) except -1
    cdef int last_unheld(self, int sentinel) noexcept nogil
    cdef void forget(self, int key) noexcept nogil
    cdef list walk(self, int sentinel)
    cdef int checked(self, Py_ssize_t key) except -1


# Inline functions rather than methods: a hit costs five of these.
cdef inline void hold(Policy policy, int key) noexcept nogil:
    # For keys that are in the policy.
    if not policy.nodes[key].blocked:
        policy.num_evictable -= 1
    policy.nodes[key].blocked |= HELD


cdef inline void unhold(Policy policy, int key) noexcept nogil:
    policy.nodes[key].blocked &= ~HELD
    if not policy.nodes[key].blocked:
        policy.num_evictable += 1
    if policy.nodes[key].parked:
        policy.nodes[key].parked = 0
        policy.unpark(key)


cdef inline void settle(Policy policy, int key, uint8_t segment) noexcept nogil:
    # Every insertion calls this; `forget` undoes it.
    policy.clock += 1
    policy.nodes[key].stamp = policy.clock
    policy.nodes[key].segment = segment
    policy.size += 1
    policy.num_evictable += 1


cdef inline void empty_list(Node* nodes, int sentinel) noexcept nogil:
    nodes[sentinel].previous = sentinel
    nodes[sentinel].next = sentinel


cdef inline void link(Node* nodes, int after, int key) noexcept nogil:
    cdef int following = nodes[after].next
    nodes[key].previous = after
    nodes[key].next = following
    nodes[following].previous = key
    nodes[after].next = key


cdef inline void unlink(Node* nodes, int key) noexcept nogil:
    cdef int before = nodes[key].previous
    cdef int following = nodes[key].next
    nodes[before].next = following
    nodes[following].previous = before


cdef inline void link_by_stamp(
    Node* links, const Node* nodes, int sentinel, int key
) noexcept nogil:
    # Puts the key back into a list that has the latest first, as if it had never left.
    cdef int after = sentinel
    while links[after].next != sentinel and nodes[links[after].next].stamp > nodes[key].stamp:
        after = links[after].next
    link(links, after, key)


@cython.final
cdef class LruCache(Policy):
    pass
