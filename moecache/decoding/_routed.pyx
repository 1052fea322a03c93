"""Routed: the experts that rows were routed to, computed from the cache's slots."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memset

from moecache.cache._cache cimport ExpertCache
from moecache.decoding._bound cimport Layer
from moecache.decoding._context cimport Context
from moecache.decoding._workspace cimport Workspace
from moecache.kernels._jobs cimport (
    MC_X_F32,
    MC_X_PLANES,
    mc_are_alike,
    mc_experts,
    mc_input_columns,
    mc_input_row_bytes,
    mc_input_type,
)
from moecache.kernels._processor cimport level_in_use, now_ns, run_experts


@cython.final
cdef class Routed:
    """Computes experts of the workspace's `ids` from `given` into `rows`, each once for all rows.

    Parameters
    ----------
    cache : ExpertCache
        Leases the slots of experts that are all resident; others' are leased by the caller.
    context : Context
        Names the rows' sequences.

    Raises
    ------
    MemoryError
    """

    def __cinit__(self, ExpertCache cache not None, Context context not None):
        cdef Workspace w = context.workspace
        cdef int64_t i, num = w.max_rows * w.top_k, layers = w.bound.num_layers, row_bytes = 0
        cdef Layer *layer
        self.cache, self.context, self.workspace = cache, context, w
        _, _, _, self.ids, _ = w.arrays
        for i in range(layers):
            layer = &w.bound.layers[i]
            if layer.has_experts:
                row_bytes = max(
                    row_bytes,
                    4 * ((layer.experts.down.first.columns + 63) & ~63),
                    mc_input_row_bytes(
                        MC_X_PLANES, (layer.experts.down.first.columns + 31) & ~31
                    ),
                )
        self.hidden = <uint8_t *>w.own(num * ((row_bytes + 63) & ~63))
        self.num_products = <int64_t *>w.own(3 * layers * sizeof(int64_t))
        self.num_single = self.num_products + layers
        self.busy_ns = self.num_single + layers
        self.slots = <int32_t *>w.own(num * sizeof(int32_t))
        self.some = <int32_t *>w.own(num * sizeof(int32_t))
        self.offsets = <int64_t *>w.own((num + 1) * sizeof(int64_t))
        self.pairs = <int64_t *>w.own(num * sizeof(int64_t))
        self.places = <int64_t *>w.own(cache.num_experts * sizeof(int64_t))
        self.inputs = <const uint8_t **>w.own(2 * num * sizeof(uint8_t *))
        self.hidden_inputs = <const uint8_t **>w.own(num * sizeof(uint8_t *))

    cdef bint compute_resident(self, int64_t at, observe) except -1:
        """Compute a layer's experts, and return `True`, if they are all in their slots."""
        cdef Workspace w = self.workspace
        cdef const Layer *layer = &w.bound.layers[at]
        cdef int64_t num = w.num_rows * w.top_k, found = 0, began
        if not self.cache.lease_resident(
            layer.number, w.ids, w.num_rows, w.top_k, self.context.names(), self.slots
        ):
            return False
        try:
            if observe is not None:
                observe(layer.number, self.ids[:w.num_rows], self.context.sequences)
            began = now_ns()
            with nogil:
                found = self._group(w, layer.choice.num_experts)
                self._compute(w, layer, found)
            if w.num_rows == 1:
                self.busy_ns[at] += now_ns() - began
                self.num_single[at] += found
        finally:
            self.cache.end_leases(self.slots, num)
        self.num_products[at] += found
        return True

    cdef int64_t compute(
        self, const Layer *layer, const int32_t *slots, list chosen
    ) except -1:
        """Compute some of a single row's experts from leased slots; return the nanoseconds."""
        cdef Workspace w = self.workspace
        cdef int64_t i, place, began, n = len(chosen), k = w.top_k
        for i in range(n):
            place = chosen[i]
            if not 0 <= place < k or slots[place] < 0:
                raise ValueError(f"expert {place} of {k} has no slot")
            self.some[i], self.pairs[i], self.offsets[i] = slots[place], place, i
        self.offsets[n] = n
        began = now_ns()
        with nogil:
            self._compute(w, layer, n)
        return now_ns() - began

    cdef list take_counts(self):
        """Return what `Program.take_counts` does."""
        cdef int64_t i, num = self.workspace.bound.num_layers
        cdef const Layer *layers = self.workspace.bound.layers
        found = [
            (layers[i].number, self.num_products[i], self.num_single[i], self.busy_ns[i])
            for i in range(num) if layers[i].has_experts
        ]
        memset(self.num_products, 0, 3 * <size_t>num * sizeof(int64_t))
        return found

    cdef int64_t _group(self, Workspace w, int64_t num_experts) noexcept nogil:
        """Put pairs in the order of their experts; return how many experts there are."""
        cdef const int32_t *ids = w.ids
        cdef int64_t i, place = 0, found = 0, num = w.num_rows * w.top_k
        if w.num_rows == 1:
            # As they were chosen: each is an expert of its own.
            for i in range(num):
                self.some[i], self.pairs[i], self.offsets[i] = self.slots[i], i, i
            self.offsets[num] = num
            return num
        memset(self.places, 0, <size_t>num_experts * sizeof(int64_t))
        for i in range(num):
            self.places[ids[i]] += 1
        for i in range(num_experts):
            if self.places[i]:
                self.offsets[found] = place
                place += self.places[i]
                self.places[i] = self.offsets[found]
                found += 1
        self.offsets[found] = place
        for i in range(num):
            self.pairs[self.places[ids[i]]] = i
            self.places[ids[i]] += 1
        for i in range(found):
            self.some[i] = self.slots[self.pairs[self.offsets[i]]]
        return found

    cdef void _compute(
        self, Workspace w, const Layer *layer, int64_t num_experts
    ) noexcept nogil:
        """Write the rows of the pairs that lie behind one another, expert by expert."""
        cdef mc_experts e = layer.experts
        cdef int64_t i, filled, written, num = self.offsets[num_experts]
        cdef int part, by = w.bound.product_type
        e.level = level_in_use()
        e.slots, e.offsets, e.pairs = self.some, self.offsets, self.pairs
        e.num_experts = num_experts
        e.out.data = <uint8_t *>w.rows
        e.out.row_bytes = w.expert_size * 4
        e.out.type = MC_X_F32
        e.hidden_type = mc_input_type(e.level, by, &e.down.first)
        e.hidden.type = MC_X_F32 if e.hidden_type == MC_X_PLANES else e.hidden_type
        for part in range(e.num_ups):
            e.input_types[part] = mc_input_type(e.level, by, &e.up[part].first)
            e.inputs[part] = self.inputs + part * num
            if part and mc_are_alike(&e.up[0].first, &e.up[1].first):
                e.inputs[1] = self.inputs
                break
            w.take(&e.up[part].first, e.input_types[part], w.given, w.num_rows, part)
            for i in range(num):
                self.inputs[part * num + i] = w.taken[self.pairs[i] // w.top_k]
        filled = mc_input_row_bytes(e.hidden.type, mc_input_columns(&e.down.first))
        filled = max(filled, mc_input_row_bytes(e.hidden_type, mc_input_columns(&e.down.first)))
        e.hidden.row_bytes = (filled + 63) & ~63
        written = mc_input_row_bytes(e.hidden.type, e.width)
        e.hidden.data = self.hidden
        for i in range(num):
            self.hidden_inputs[i] = self.hidden + i * e.hidden.row_bytes
            memset(
                <uint8_t *>self.hidden_inputs[i] + written, 0,
                <size_t>(e.hidden.row_bytes - written)
            )
        e.hidden_inputs = self.hidden_inputs
        run_experts(&e)
