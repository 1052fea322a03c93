"""Workspace: memory for the rows of a call, and products and norms over them."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from moecache.decoding._bound cimport Bound, Layer, Linear, Norm
from moecache.decoding._steps cimport MC_MOST_TILE, mc_layer_norm, mc_norm
from moecache.kernels._jobs cimport (
    MC_X_F32,
    MC_X_PLANES,
    mc_are_alike,
    mc_input_columns,
    mc_input_row_bytes,
    mc_input_type,
    mc_matrix,
    mc_product,
)
from moecache.kernels._processor cimport convert_rows, level_in_use, run_product

import numpy as np

cnp.import_array()


@cython.final
cdef class Workspace:
    """Memory for any layer's results, of `max_rows` rows, allocated once.

    No part overlaps another, but that `given` is `normed` where no experts are given latents.

    Parameters
    ----------
    bound : Bound
    max_rows : int

    Raises
    ------
    MemoryError
    """

    def __cinit__(self, Bound bound not None, int64_t max_rows):
        self.bound, self.max_rows, self._owners = bound, max_rows, []
        self.hidden_size, self.expert_size = bound.hidden_size, bound.expert_size
        self.top_k = bound.top_k
        self._reserve()

    def __dealloc__(self):
        free(self.scores)

    cdef void *own(self, int64_t nbytes) except NULL:
        """Return zeros that begin with a cache line and live as long as the workspace."""
        cdef cnp.ndarray owner = np.zeros(nbytes + 63, np.uint8)
        self._owners.append(owner)
        return <void *>((<uintptr_t>cnp.PyArray_DATA(owner) + 63) & ~<uintptr_t>63)

    cdef float *_floats(self, int64_t width) except NULL:
        # Activations come in multiples of 16.
        return <float *>self.own(4 * self.max_rows * ((width + 15) & ~15))

    cdef int _reserve(self) except -1:
        cdef int64_t i, query = 0, key = 0, value = 0, mixed = 0, wide = 0, experts = 0
        cdef int64_t latents = 0, gates = 0, beside = 0
        cdef int64_t inputs = max(self.hidden_size, self.expert_size)
        cdef bint has_latents = False
        cdef Layer *layer
        for i in range(self.bound.num_layers):
            layer = &self.bound.layers[i]
            query = max(query, layer.query.matrix.rows)
            key = max(key, layer.key.matrix.rows)
            value = max(value, layer.value.matrix.rows)
            if not layer.value.is_there:
                value = max(value, layer.key.matrix.rows)
            mixed = max(mixed, layer.out.matrix.columns)
            wide = max(wide, layer.up.matrix.rows, layer.low.matrix.rows)
            wide = max(wide, layer.decay_low.matrix.rows, layer.gate_low.matrix.rows)
            experts = max(experts, layer.choice.num_experts)
            inputs = max(inputs, layer.query.matrix.columns, layer.out.matrix.columns)
            inputs = max(inputs, layer.down.matrix.columns)
            inputs = max(inputs, layer.decay.matrix.columns, layer.gates.matrix.columns)
            if layer.is_beside:
                beside = self.hidden_size
            if layer.is_gated:
                gates = max(gates, layer.out.matrix.columns)
            if layer.is_linear and not layer.is_scan and not layer.is_short:
                gates = max(gates, layer.out.matrix.columns)
                # Decays have no matrix of their own if it is the shares', too.
                key = max(key, layer.num_heads)
                latents = max(latents, layer.channels)
            if layer.is_latent:
                latents = max(latents, layer.num_heads * (layer.held + layer.value_held))
                gates = max(gates, layer.gates.matrix.rows)
            if layer.latent_down.is_there:
                has_latents = True
        self.queries, self.keys = self._floats(query), self._floats(key)
        self.values, self.mixed = self._floats(value), self._floats(mixed)
        self.wide, self.second = self._floats(wide), self._floats(wide)
        self.added = self._floats(max(self.hidden_size, self.expert_size))
        self.logits, self.scratch = self._floats(experts), self._floats(experts)
        self.weights, self.latents = self._floats(self.top_k), self._floats(latents)
        self.gates, self.beside = self._floats(gates), self._floats(beside)
        inputs = (inputs + 31) & ~31
        self.converted_bytes = max(
            mc_input_row_bytes(MC_X_F32, inputs), mc_input_row_bytes(MC_X_PLANES, inputs)
        )
        self.converted_bytes = (self.converted_bytes + 63) & ~63
        self.converted = <uint8_t *>self.own(2 * self.max_rows * self.converted_bytes)
        self.taken = <const uint8_t **>self.own(self.max_rows * sizeof(uint8_t *))
        return self._share(has_latents)

    cdef int _share(self, bint has_latents) except -1:
        """Allocate what the caller writes and reads."""
        cdef cnp.ndarray hidden = np.zeros((self.max_rows, self.hidden_size), np.float32)
        cdef cnp.ndarray normed = np.zeros((self.max_rows, self.hidden_size), np.float32)
        cdef cnp.ndarray given = normed
        cdef cnp.ndarray ids = np.zeros((self.max_rows, self.top_k), np.int32)
        cdef cnp.ndarray rows = np.zeros((self.max_rows * self.top_k, self.expert_size), np.float32)
        if has_latents:
            given = np.zeros((self.max_rows, self.expert_size), np.float32)
        self.arrays = hidden, normed, given, ids, rows
        self.hidden = <float *>cnp.PyArray_DATA(hidden)
        self.normed = <float *>cnp.PyArray_DATA(normed)
        self.given = <float *>cnp.PyArray_DATA(given)
        self.ids = <int32_t *>cnp.PyArray_DATA(ids)
        self.rows = <float *>cnp.PyArray_DATA(rows)
        return 0

    cdef int reserve_scores(self, int64_t num_rows, int64_t num_positions) except -1:
        """Have room for scores of that many rows, or of as many as attend at once."""
        cdef int64_t i, parts, most = 0
        cdef Layer *layer
        cdef float *scores
        for i in range(self.bound.num_layers):
            layer = &self.bound.layers[i]
            if layer.is_linear or not layer.has_attention:
                continue
            parts = num_parts(layer)
            most = max(most, 4 * layer.num_kv_heads * parts * min(
                num_rows + MC_MOST_TILE - 1, rows_at_once(parts)
            ))
        if most * num_positions > self.num_scores or self.scores == NULL:
            # Half as many again: a conversation goes on.
            i = most * num_positions * 3 // 2 + 1024
            scores = <float *>malloc(<size_t>i * sizeof(float))
            if scores == NULL:
                raise MemoryError(f"no memory for attention to {num_positions} positions")
            free(self.scores)
            self.scores, self.num_scores = scores, i
        return 0

    cdef void multiply(
        self, const Linear *linear, const float *given, int64_t num, float *out,
        const Linear *before=NULL
    ) noexcept nogil:
        """Write products of `num` inputs; both lie one behind the other.

        A product `before` had the same inputs: they are not converted again if both take the same.
        """
        cdef mc_product product
        memset(&product, 0, sizeof(product))
        product.level = level_in_use()
        product.matrix = linear.matrix
        product.out.data = <uint8_t *>out
        product.out.row_bytes = linear.matrix.rows * 4
        product.out.type = MC_X_F32
        product.bias = linear.bias
        product.num_inputs = num
        product.input_type = mc_input_type(
            product.level, self.bound.product_type, &linear.matrix
        )
        if before == NULL or not mc_are_alike(&before.matrix, &linear.matrix):
            self.take(&linear.matrix, product.input_type, given, num)
        product.inputs = self.taken
        run_product(&product)

    cdef void take(
        self, const mc_matrix *matrix, int wanted, const float *given, int64_t num, int part=0
    ) noexcept nogil:
        """Have `taken` point to rows as a matrix is multiplied by them.

        Converted rows stay until others are of the same `part`, 0 or 1.
        """
        cdef int64_t i
        cdef uint8_t *to = self.converted + part * self.max_rows * self.converted_bytes
        if wanted == MC_X_F32 and mc_input_columns(matrix) == matrix.columns:
            for i in range(num):
                self.taken[i] = <const uint8_t *>(given + i * matrix.columns)
            return
        for i in range(num):
            self.taken[i] = to + i * self.converted_bytes
        convert_rows(given, matrix.columns, num, wanted, matrix, to, self.converted_bytes)


cdef void norm_row(const Norm *norm, const float *x, float *out) noexcept nogil:
    if norm.bias == NULL:
        mc_norm(x, norm.weight, norm.type, norm.width, norm.epsilon, out)
    else:
        mc_layer_norm(x, norm.weight, norm.bias, norm.type, norm.width, norm.epsilon, out)


cdef void norm_rows(
    const Norm *norm, const float *x, float *out, int64_t num, int64_t step
) noexcept nogil:
    """Write the norms of rows that begin `step` numbers apart; the rows, if there is no norm."""
    cdef int64_t i
    if norm.weight == NULL:
        memcpy(out, x, <size_t>(num * step) * sizeof(float))
        return
    for i in range(num):
        norm_row(norm, x + i * step, out + i * step)


cdef void norm_parts(const Norm *norm, float *rows, int64_t num_floats) noexcept nogil:
    """Norm rows in place, in parts of the norm's own width, if there is such a norm."""
    if norm.weight != NULL:
        norm_rows(norm, rows, rows, num_floats // norm.width, norm.width)


cdef int64_t num_parts(const Layer *layer) noexcept nogil:
    """Return in how many parts the heads that share keys are computed."""
    if not layer.is_latent:
        return (layer.num_heads // layer.num_kv_heads + 3) // 4
    return layer.num_heads // 4 if layer.num_heads % 4 == 0 else layer.num_heads


cdef int64_t rows_at_once(int64_t parts) noexcept nogil:
    """Return how many rows have scores at once, in whole tiles: the more parts, the fewer."""
    return max(<int64_t>1, ROWS // parts // MC_MOST_TILE) * MC_MOST_TILE
