"""EchoCache: evicts the key that is least likely to be used, by ECHO's predictions."""

cimport cython
from libc.math cimport INFINITY, powf
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from moecache.policies._echo cimport Echo
from moecache.policies._echo_loops cimport ECHO_TIME_DISCOUNT, echo_lowest_bit
from moecache.policies._policy cimport RESIDENT, Node, Policy, settle

from moecache.policies.registry import register


@cython.final
cdef class EchoCache(Policy):
    """Evict the key whose predicted use, discounted by the time until its layer comes, is lowest.

    Values change only when their layer is visited, so one minimum per layer is kept
    and the victim is exact: O(num_layers + num_experts) per eviction, without a
    heap and without sampling. `touch` and `admit` teach it nothing; `echo` must
    observe each request before its accesses, as `ExpertCache` does.

    Parameters
    ----------
    capacity : int
        Most keys in the cache, at least 1.
    num_keys : int
        Keys are in [0, num_keys): layer * num_experts + expert, or with `layer` the expert.
    echo : Echo
        The predictor. Caches of single layers share one: `clear` of any of them makes it
        forget everything, and only the cache of layer 0 tells it that a sequence begins.
    layer : int, optional
        The only layer that this cache is for.

    Raises
    ------
    ValueError
        If a number is out of range, or `num_keys` is not what `echo` has.
    """

    def __cinit__(self, int capacity, *, int num_keys, Echo echo not None, layer=None):
        cdef int i
        self.hold_at_most(capacity)
        if layer is not None and not 0 <= layer < echo.num_layers:
            raise ValueError(f"layer {layer} is not in [0, {echo.num_layers})")
        self.echo = echo
        self.first_layer = 0 if layer is None else layer
        self.num_layers = echo.num_layers if layer is None else 1
        self.num_experts = echo.num_experts
        if num_keys != self.num_layers * self.num_experts:
            raise ValueError(
                f"num_keys is {num_keys}, but there are {self.num_layers} x {self.num_experts} "
                "experts"
            )
        self.discounts = <float*>calloc(echo.num_layers + 1, sizeof(float))
        self.seen = <uint32_t*>calloc(self.num_layers, sizeof(uint32_t))
        self.lowest = <int*>calloc(self.num_layers, sizeof(int))
        self.minima = <float*>calloc(self.num_layers, sizeof(float))
        self.present = <uint64_t*>calloc(
            <size_t>self.num_layers * echo.num_words, sizeof(uint64_t)
        )
        if (
            self.discounts == NULL or self.seen == NULL or self.lowest == NULL
            or self.minima == NULL or self.present == NULL
        ):
            raise MemoryError(f"no memory for the minima of {self.num_layers} layers")
        for i in range(echo.num_layers + 1):
            self.discounts[i] = powf(ECHO_TIME_DISCOUNT, <float>i / echo.num_layers)
        for i in range(self.num_layers):
            self.lowest[i] = -1
            self.minima[i] = INFINITY

    def __dealloc__(self):
        free(self.discounts)
        free(self.seen)
        free(self.lowest)
        free(self.minima)
        free(self.present)

    cdef void begin_step(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* sequences,
    ) noexcept nogil:
        self.echo.observe_rows(layer, ids, wide, rows, k, sequences)

    cdef const int* worths(self, int layer) noexcept nogil:
        # One sequence has none: a prompt's use says little about its decoding. Floats
        # from 0 to 1 are in the order of their bits.
        if self.echo.sequences.num_current < 2:
            return NULL
        return <const int*>(self.echo.outlook.values + <Py_ssize_t>layer * self.num_experts)

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        settle(self, key, RESIDENT)
        self.present[self.word(key)] |= <uint64_t>1 << (key % self.num_experts & 63)
        self.consider(key)

    cdef void access(self, int key) noexcept nogil:
        # Only for the order of `keys`: `echo` has observed the step itself.
        self.clock += 1
        self.nodes[key].stamp = self.clock

    cdef void remove(self, int key) noexcept nogil:
        cdef int layer = key // self.num_experts
        self.forget(key)
        self.present[self.word(key)] &= ~(<uint64_t>1 << (key % self.num_experts & 63))
        if self.lowest[layer] == key:
            self.rescan(layer)

    cdef int victim(self) noexcept nogil:
        # A minimum that is held is still a bound: only the lowest of all must be looked at again.
        cdef int layer, ahead, best
        cdef float value, lowest
        for layer in range(self.num_layers):
            if self.seen[layer] != self.echo.versions[self.first_layer + layer]:
                self.rescan(layer)
        while True:
            best, lowest = -1, INFINITY
            ahead = self.first_layer - self.echo.layer
            for layer in range(self.num_layers):
                value = self.minima[layer] * (
                    self.discounts[ahead if ahead > 0 else ahead + self.echo.num_layers]
                )
                ahead += 1
                if value < lowest:
                    best, lowest = layer, value
            if best < 0:
                return -1
            if not self.nodes[self.lowest[best]].blocked:
                return self.lowest[best]
            self.rescan(best)

    cdef bint prefers(self, int candidate, int resident) noexcept nogil:
        return self.value(candidate) > self.value(resident)

    cdef void unpin_key(self, int key) noexcept nogil:
        Policy.unpin_key(self, key)
        if self.nodes[key].segment:
            self.consider(key)

    cdef void unpark(self, int key) noexcept nogil:
        self.consider(key)

    cdef void begin_sequence(self) noexcept nogil:
        # One of the caches that share it is enough.
        if self.first_layer == 0:
            self.echo.sequences.between = True

    cdef void reset(self) noexcept nogil:
        cdef int layer
        for layer in range(self.num_layers):
            self.lowest[layer] = -1
            self.minima[layer] = INFINITY
        memset(
            self.present, 0, <size_t>self.num_layers * self.echo.num_words * sizeof(uint64_t)
        )
        self.echo.forget_all()

    cdef str audit(self):
        cdef int layer, key, best
        for layer in range(self.num_layers):
            if self.lowest[layer] < 0 and self.minima[layer] != INFINITY:
                return f"layer {layer} has a lowest value, and no key of it"
            if self.seen[layer] != self.echo.versions[self.first_layer + layer]:
                continue
            best = -1
            for key in range(layer * self.num_experts, (layer + 1) * self.num_experts):
                bit = self.present[self.word(key)] >> (key % self.num_experts & 63) & 1
                if bit != (self.nodes[key].segment != 0):
                    return f"key {key} is in the cache: {bit == 0}, noted is {bit == 1}"
                if self.nodes[key].segment and not self.nodes[key].blocked:
                    if best < 0 or self.value(key) < self.value(best):
                        best = key
            key = self.lowest[layer]
            if key != best and (key < 0 or not self.nodes[key].blocked):
                return f"layer {layer}: the lowest value is that of {best}, noted is {key}"
        return Policy.audit(self)

    cdef void rescan(self, int layer) noexcept nogil:
        cdef int w, key, base = layer * self.num_experts, best = -1
        cdef float lowest = INFINITY
        cdef uint64_t bits
        cdef Node* nodes = self.nodes + base
        cdef const uint64_t* present = self.present + <Py_ssize_t>layer * self.echo.num_words
        cdef const float* values = (
            self.echo.outlook.values + <Py_ssize_t>(self.first_layer + layer) * self.num_experts
        )
        for w in range(self.echo.num_words):
            bits = present[w]
            while bits:
                key = 64 * w + echo_lowest_bit(bits)
                bits &= bits - 1
                if nodes[key].blocked:
                    # Comes back by `unpark`, or `unpin_key`.
                    nodes[key].parked = 1
                elif values[key] < lowest:
                    # Ties to the lower key: the victim depends on the keys, not on how they came.
                    best, lowest = base + key, values[key]
        self.lowest[layer] = best
        self.minima[layer] = lowest
        self.seen[layer] = self.echo.versions[self.first_layer + layer]

    cdef void consider(self, int key) noexcept nogil:
        cdef int layer = key // self.num_experts
        cdef float value = self.echo.outlook.values[
            <Py_ssize_t>self.first_layer * self.num_experts + key
        ]
        # Values that have changed since are compared when a victim is wanted.
        if self.nodes[key].blocked or (
            self.seen[layer] != self.echo.versions[self.first_layer + layer]
        ):
            return
        if value < self.minima[layer] or (
            value == self.minima[layer] and key < self.lowest[layer]
        ):
            self.lowest[layer] = key
            self.minima[layer] = value

    cdef Py_ssize_t word(self, int key) noexcept nogil:
        return (
            <Py_ssize_t>(key // self.num_experts) * self.echo.num_words
            + (key % self.num_experts >> 6)
        )

    cdef float value(self, int key) noexcept nogil:
        cdef int layer = self.first_layer + key // self.num_experts
        cdef int ahead = layer - self.echo.layer
        if ahead <= 0:
            ahead += self.echo.num_layers
        key += self.first_layer * self.num_experts
        return self.echo.outlook.values[key] * self.discounts[ahead]


def _make(part, ring=True):
    # Layers share what is learned about tokens.
    echo = part.shared.get("echo")
    if echo is None:
        echo = part.shared["echo"] = Echo(part.num_layers, part.num_experts, ring=ring)
    return EchoCache(part.capacity, num_keys=part.num_keys, echo=echo, layer=part.layer)


register("echo", _make)
register("haz2", lambda part: _make(part, ring=False))
