"""Least-Stale: first those that the forward pass under way has left behind."""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc

from moecache.policies._policy cimport RESIDENT, Policy, empty_list, link, settle, unlink

from moecache.policies.registry import register


@cython.final
cdef class LeastStaleCache(Policy):
    """Least-Stale eviction (SpecMD, Hoang et al., arXiv 2602.03921, 2026).

    A forward pass visits the layers in order, so that a layer's experts are
    not needed again before the next pass once the layer is done. A key used in
    the pass under way is *current*, any other *stale*. The victim comes from
    the first of these groups that has one:

    1. the stale keys of layers that are done, the layer under way included,
       the least recently used first;
    2. the current keys of those layers, in the same order;
    3. the keys of layers that are still to come in this pass, those of the
       last layer first and there the least recently used. Evicting one that
       this pass then asks for is the paper's collision miss.

    Only part of the paper's text was at hand; where accounts of it differ
    (some evict the stale keys of layers to come before current ones), this
    class keeps to its aim of few collision misses. The prefetcher that the
    policy was published with is left out. A key prefetched for a layer to come
    is stale until it is used: it is among the first to leave once its layer is
    done without it. A prefetch may take the slot of a key of the first group.

    A pass begins when the lowest layer seen so far is visited again. While the
    policy is told of no steps (`touch` and `admit` alone), this is LRU.
    Operations are O(1); a victim search looks at one key of each layer and
    steps over held and pinned ones.

    Parameters
    ----------
    capacity : int
        Most keys in the cache, at least 1.
    num_keys : int
        Keys are in [0, num_keys).
    num_experts : int, optional
        Keys of one layer: a key's layer is key // num_experts. All keys are of
        one layer if not given.

    Raises
    ------
    ValueError
        If the capacity or `num_experts` is smaller than 1.
    """

    cdef readonly int num_experts
    cdef int num_layers
    cdef int64_t* used_in  # the pass in which a key was last used
    cdef int64_t current   # the pass under way
    cdef int lowest_layer  # -1 before the first step
    cdef int layer         # the layer visited last

    def __cinit__(self, int capacity, *, int num_keys, num_experts=None):
        self.hold_at_most(capacity)
        self.num_experts = num_keys if num_experts is None else num_experts
        if self.num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        self.num_layers = (num_keys - 1) // self.num_experts + 1
        self.used_in = <int64_t*>malloc(num_keys * sizeof(int64_t))
        if self.used_in == NULL:
            raise MemoryError(f"no memory for the passes of {num_keys} keys")
        self.reset()

    def __dealloc__(self):
        free(self.used_in)

    cdef void begin_step(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* sequences,
    ) noexcept nogil:
        if self.lowest_layer < 0 or layer <= self.lowest_layer:
            self.lowest_layer = layer
            self.current += 1
        self.layer = layer

    cdef void access(self, int key) noexcept nogil:
        self.clock += 1
        self.nodes[key].stamp = self.clock
        self.used_in[key] = self.current
        unlink(self.nodes, key)
        link(self.nodes, self.num_keys + key // self.num_experts, key)

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        settle(self, key, RESIDENT)
        self.used_in[key] = self.current
        # A key that is prefetched for a layer that is done is meant for the next pass.
        if not accessed and key // self.num_experts > self.last_done():
            self.used_in[key] -= 1
        link(self.nodes, self.num_keys + key // self.num_experts, key)

    cdef void remove(self, int key) noexcept nogil:
        unlink(self.nodes, key)
        self.forget(key)

    cdef int victim(self) noexcept nogil:
        cdef int layer, key, stale = -1, done = -1
        if self.num_evictable == 0:
            return -1
        for layer in range(self.last_done() + 1):
            # A layer's keys are by recency: if any is stale, the oldest is.
            key = self.last_unheld(self.num_keys + layer)
            if key < 0:
                continue
            if self.used_in[key] < self.current:
                if stale < 0 or self.nodes[key].stamp < self.nodes[stale].stamp:
                    stale = key
            elif done < 0 or self.nodes[key].stamp < self.nodes[done].stamp:
                done = key
        if stale >= 0:
            return stale
        if done >= 0:
            return done
        for layer in range(self.num_layers - 1, self.last_done(), -1):
            key = self.last_unheld(self.num_keys + layer)
            if key >= 0:
                return key
        return -1

    cdef bint prefers(self, int candidate, int resident) noexcept nogil:
        return (
            self.used_in[resident] < self.current
            and resident // self.num_experts <= self.last_done()
        )

    cdef void reset(self) noexcept nogil:
        cdef int layer
        for layer in range(self.num_layers):
            empty_list(self.nodes, self.num_keys + layer)
        self.current = 0
        self.lowest_layer = self.layer = -1

    cdef str audit(self):
        cdef int layer, listed = 0
        for layer in range(self.num_layers):
            keys = self.walk(self.num_keys + layer)
            if sorted(keys, key=self._stamp, reverse=True) != keys:
                return f"the keys of layer {layer} are not by recency"
            if any(key // self.num_experts != layer for key in keys):
                return f"a key in the list of layer {layer} is not of that layer"
            listed += len(keys)
        if listed != self.size:
            return f"{listed} keys in lists, {self.size} in all"
        return Policy.audit(self)

    cdef int last_done(self) noexcept nogil:
        # The last layer that this pass will not visit again; without steps there is no order.
        if self.layer < 0:
            return self.num_layers - 1
        return min(self.layer, self.num_layers - 1)


register(
    "least-stale",
    lambda part: LeastStaleCache(
        part.capacity, num_keys=part.num_keys, num_experts=part.num_experts
    ),
    for_replays=True,
)
