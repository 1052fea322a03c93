"""AccessProfiler: how often each expert is used, and how often it was resident."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

import numpy as np

cnp.import_array()


@cython.final
cdef class AccessProfiler:
    """Count accesses per (layer, expert) and what share of them were hits.

    Counters only: nothing is allocated per access.

    Parameters
    ----------
    num_layers, num_experts : int
        Shape of the model, each at least 1.
    """

    def __cinit__(self, int num_layers, int num_experts):
        if num_layers < 1 or num_experts < 1:
            raise ValueError(
                f"need at least 1 layer and 1 expert, got {num_layers} and {num_experts}"
            )
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.counts_owner = np.zeros((num_layers, num_experts), np.uint64)
        self.counts_view = self.counts_owner.view()
        self.counts_view.flags.writeable = False
        self.totals = <uint64_t*>cnp.PyArray_DATA(<cnp.ndarray>self.counts_owner)
        self.layer_hits = <uint64_t*>calloc(num_layers, sizeof(uint64_t))
        self.layer_misses = <uint64_t*>calloc(num_layers, sizeof(uint64_t))
        if self.layer_hits == NULL or self.layer_misses == NULL:
            raise MemoryError(f"no memory for the counters of {num_layers} layers")

    def __dealloc__(self):
        free(self.layer_hits)
        free(self.layer_misses)

    def record_hit(self, Py_ssize_t layer, Py_ssize_t expert) -> None:
        """Count an access to an expert that was resident."""
        self.checked(layer, expert)
        self.totals[layer * self.num_experts + expert] += 1
        self.layer_hits[layer] += 1
        self.hit_count += 1

    def record_miss(self, Py_ssize_t layer, Py_ssize_t expert) -> None:
        """Count an access to an expert that was not resident."""
        self.checked(layer, expert)
        count_miss(self, <int>layer, <int>(layer * self.num_experts + expert))

    @property
    def counts(self) -> np.ndarray:
        """Accesses, uint64 [num_layers, num_experts]: a live, read-only view."""
        return self.counts_view

    @property
    def num_hits(self) -> int:
        """Accesses whose expert was resident."""
        return self.hit_count

    @property
    def num_misses(self) -> int:
        """Accesses whose expert was not resident."""
        return self.miss_count

    @property
    def hit_rate(self) -> float:
        """Share of accesses that were hits; 0.0 before the first."""
        return _rate(self.hit_count, self.miss_count)

    def layer_hit_rate(self, Py_ssize_t layer) -> float:
        """Return the share of hits among a layer's accesses; 0.0 before the first."""
        self.checked(layer, 0)
        return _rate(self.layer_hits[layer], self.layer_misses[layer])

    @property
    def hits_by_layer(self) -> np.ndarray:
        """Hits of each layer, uint64 [num_layers]: a copy."""
        return _copied(self.layer_hits, self.num_layers)

    @property
    def misses_by_layer(self) -> np.ndarray:
        """Misses of each layer, uint64 [num_layers]: a copy."""
        return _copied(self.layer_misses, self.num_layers)

    def access_count(self, Py_ssize_t layer, Py_ssize_t expert) -> int:
        """Return how often an expert was accessed."""
        self.checked(layer, expert)
        return self.totals[layer * self.num_experts + expert]

    def layer_access_count(self, Py_ssize_t layer) -> int:
        """Return how often a layer's experts were accessed."""
        self.checked(layer, 0)
        return self.layer_hits[layer] + self.layer_misses[layer]

    def top_experts(self, Py_ssize_t layer, Py_ssize_t n) -> list[int]:
        """Return the layer's `n` most accessed experts that were accessed at all.

        The most accessed comes first; ties go to the lower id.
        """
        self.checked(layer, 0)
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        row = self.counts_owner[layer]
        # A stable sort of the negated counts, as int64: uint64 would wrap.
        order = np.argsort(-row.astype(np.int64), kind="stable")[:n]
        return [int(expert) for expert in order if row[expert]]

    def record_warm_pin(self, pairs) -> None:
        """Note which (layer, expert) pairs were pinned, and split the rates from here.

        The second and later calls change nothing.
        """
        if self.pinned_pairs is not None:
            return
        pinned = tuple([(int(layer), int(expert)) for layer, expert in pairs])
        for layer, expert in pinned:
            self.checked(layer, expert)
        self.warm_hits = self.hit_count
        self.warm_misses = self.miss_count
        self.pinned_pairs = pinned

    @property
    def warm_pinned(self) -> tuple[tuple[int, int], ...]:
        """The (layer, expert) pairs of `record_warm_pin`; empty before it."""
        return () if self.pinned_pairs is None else self.pinned_pairs

    @property
    def pre_warm_hit_rate(self) -> float:
        """Hit rate before `record_warm_pin`; the overall rate if there was none."""
        if self.pinned_pairs is None:
            return self.hit_rate
        return _rate(self.warm_hits, self.warm_misses)

    @property
    def post_warm_hit_rate(self) -> float:
        """Hit rate since `record_warm_pin`; 0.0 if there was none."""
        if self.pinned_pairs is None:
            return 0.0
        return _rate(self.hit_count - self.warm_hits, self.miss_count - self.warm_misses)

    def record_miss_stall(self, Py_ssize_t nanoseconds) -> None:
        """Count a stall: time in which a step had nothing to compute and waited for a read."""
        if nanoseconds < 0:
            raise ValueError(f"a stall cannot last {nanoseconds} ns")
        self.stall_ns += <uint64_t>nanoseconds
        self.stall_count += 1
        self.stall_buckets[_stall_bucket(<uint64_t>nanoseconds)] += 1

    @property
    def stall_histogram(self) -> tuple[int, ...]:
        """Number of stalls by length, one count per bucket; see `stall_bucket_ns`."""
        cdef int bucket
        return tuple([self.stall_buckets[bucket] for bucket in range(NUM_STALL_BUCKETS)])

    @property
    def miss_stall_ns(self) -> int:
        """Total of the stalls, in nanoseconds."""
        return self.stall_ns

    @property
    def num_miss_stalls(self) -> int:
        """Number of stalls."""
        return self.stall_count

    def report(self) -> str:
        """Return a text: overall, stalls, the warm-pin split, then a line per layer."""
        cdef int layer
        accesses = self.hit_count + self.miss_count
        lines = [
            f"hit rate {self.hit_rate:.1%}: {self.hit_count} of {accesses} accesses",
            f"stalls {self.stall_count}, {self.stall_ns / 1e6:.1f} ms in all",
        ]
        if self.pinned_pairs is not None:
            lines.append(
                f"warm pin: {len(self.pinned_pairs)} experts, hit rate "
                f"{self.pre_warm_hit_rate:.1%} before, {self.post_warm_hit_rate:.1%} since"
            )
            pinned: dict[int, list[int]] = {}
            for pinned_layer, expert in self.pinned_pairs:
                pinned.setdefault(pinned_layer, []).append(expert)
            for pinned_layer in sorted(pinned):
                ids = ", ".join(map(str, pinned[pinned_layer]))
                lines.append(f"  layer {pinned_layer} pinned: {ids}")
        for layer in range(self.num_layers):
            if not self.layer_access_count(layer):
                lines.append(f"layer {layer}: no accesses recorded")
                continue
            top = ", ".join(
                f"{expert} ({self.access_count(layer, expert)})"
                for expert in self.top_experts(layer, 3)
            )
            lines.append(f"layer {layer}: hit rate {self.layer_hit_rate(layer):.1%}, top {top}")
        return "\n".join(lines)

    @property
    def num_resets(self) -> int:
        """How often `reset` was called: counts from before and after it cannot be compared."""
        return self.generation

    def reset(self) -> None:
        """Set every counter to zero and forget the warm pin."""
        memset(self.totals, 0, self.num_layers * self.num_experts * sizeof(uint64_t))
        memset(self.layer_hits, 0, self.num_layers * sizeof(uint64_t))
        memset(self.layer_misses, 0, self.num_layers * sizeof(uint64_t))
        memset(self.stall_buckets, 0, sizeof(self.stall_buckets))
        self.hit_count = self.miss_count = self.stall_ns = self.stall_count = 0
        self.warm_hits = self.warm_misses = 0
        self.pinned_pairs = None
        # A policy that keeps counts in order has to read them again.
        self.generation += 1

    cdef int checked(self, Py_ssize_t layer, Py_ssize_t expert) except -1:
        if layer < 0 or layer >= self.num_layers:
            raise ValueError(f"layer {layer} is not in [0, {self.num_layers})")
        if expert < 0 or expert >= self.num_experts:
            raise ValueError(f"expert {expert} is not in [0, {self.num_experts})")
        return 0


def stall_bucket_ns(int bucket) -> int:
    """Return the longest stall that a bucket of `AccessProfiler.stall_histogram` holds, in ns.

    It is less than 12.5 % above the bucket's shortest. The last bucket also holds all longer ones.
    """
    if bucket < 0 or bucket >= NUM_STALL_BUCKETS:
        raise ValueError(f"bucket {bucket} is not in [0, {NUM_STALL_BUCKETS})")
    if bucket < 8:
        return bucket
    return ((<uint64_t>(8 + bucket % 8) + 1) << (bucket // 8 - 1)) - 1


cdef int _stall_bucket(uint64_t nanoseconds) noexcept nogil:
    cdef int doublings = 0
    while nanoseconds >= 16:
        nanoseconds >>= 1
        doublings += 1
    return <int>min(<uint64_t>(8 * doublings) + nanoseconds, <uint64_t>(NUM_STALL_BUCKETS - 1))


cdef object _copied(const uint64_t* counts, int length):
    copy = np.empty(length, np.uint64)
    memcpy(cnp.PyArray_DATA(<cnp.ndarray>copy), counts, length * sizeof(uint64_t))
    return copy


cdef double _rate(uint64_t hits, uint64_t misses) noexcept nogil:
    return <double>hits / <double>(hits + misses) if hits + misses else 0.0
