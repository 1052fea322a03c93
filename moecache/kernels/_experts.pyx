"""Feed-forwards of the experts in slots, and sums of what they give."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t
from libc.stdlib cimport malloc
from libc.string cimport memset

from moecache.kernels._inputs cimport Inputs, Rows
from moecache.kernels._jobs cimport (
    MC_X_F32,
    MC_X_PLANES,
    mc_are_alike,
    mc_experts,
    mc_input_columns,
    mc_input_row_bytes,
    mc_input_type,
    mc_level,
    mc_rows,
    mc_sum,
)
from moecache.kernels._matrix cimport Matrix
from moecache.kernels._processor cimport level_in_use, run_experts, run_sum

from moecache.errors import ConfigError
from moecache.kernels._inputs import INPUTS as _INPUTS

# In the order of their numbers in C.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu", "relu", "relu2", "clamped_silu")


@cython.final
cdef class Experts:
    """Gated feed-forwards of the experts in slots: down(act(gate(x)) * up(x)).

    Parameters
    ----------
    ups : sequence of Matrix
        Gate and up, of `width` rows each, in formats of their own; or one: up without a gate, or
        rows of gate and up in turns. These and `down` are those of slot 0.
    up_slot_bytes : int
        From a slot's matrices to the next one's.
    down : Matrix
    down_slot_bytes : int
    width : int
        Rows of gate.
    is_interleaved : bool
        Whether the one matrix has rows of gate and up in turns.
    activation : str
        One of `ACTIVATIONS`; "swiglu" is gpt-oss's, with `alpha` and `limit`; "clamped_silu"
        limits gate and up alike, and is silu(gate) * up then.
    up_bias, down_bias : (int, int, str), optional
        Address of slot 0's, bytes to the next, type.
    owner : object
        Kept alive.
    """

    def __cinit__(
        self, ups, int64_t up_slot_bytes, Matrix down not None, int64_t down_slot_bytes,
        int64_t width, *, bint is_interleaved=False, str activation="silu", float alpha=1.702,
        float limit=7.0, up_bias=None, down_bias=None, owner=None
    ):
        cdef Matrix up
        cdef mc_rows *bias
        cdef int i
        if activation not in ACTIVATIONS:
            raise ConfigError(
                f"activation {activation!r} has no kernel; {', '.join(ACTIVATIONS)} have"
            )
        self.ups, self.down, self.owner = tuple(ups), down, owner
        if not 1 <= len(self.ups) <= 2 - is_interleaved:
            raise ConfigError(
                "an expert has gate and up, or up, or one matrix of both in turns; got "
                f"{len(self.ups)} matrices{' in turns' if is_interleaved else ''}"
            )
        for up in self.ups:
            if up is None:
                raise TypeError("a matrix is None")
            if (
                width < 0 or down.columns != width or up.rows != width * (1 + is_interleaved)
                or up.columns != (<Matrix>self.ups[0]).columns
            ):
                raise ConfigError(
                    f"experts of width {width} do not fit: up is {up.rows} x {up.columns}, down "
                    f"has {down.columns} columns"
                )
        if activation in ("swiglu", "clamped_silu") and len(self.ups) == 1 and not is_interleaved:
            raise ConfigError("experts without a gate have one input of the activation alone")
        memset(&self.experts, 0, sizeof(self.experts))
        self.experts.num_ups = len(self.ups)
        for i in range(self.experts.num_ups):
            up = self.ups[i]
            self.experts.up[i].first = up.matrix
            self.experts.up[i].slot_bytes = up_slot_bytes
            bias = &self.experts.up[i].bias
            _set_bias(bias, up_bias)
            if bias.data != NULL:
                bias.data += i * width * mc_input_row_bytes(bias.type, 1)
        self.multiplies_alike = len(self.ups) == 1 or mc_are_alike(
            &self.experts.up[0].first, &self.experts.up[1].first
        )
        self.experts.down.first = down.matrix
        self.experts.down.slot_bytes = down_slot_bytes
        self.experts.width = width
        self.experts.is_interleaved = is_interleaved
        self.experts.activation.kind = ACTIVATIONS.index(activation)
        self.experts.activation.alpha = alpha
        self.experts.activation.limit = limit
        _set_bias(&self.experts.down.bias, down_bias)

    def inputs(
        self, uintptr_t inputs, str input_type, int64_t num_tokens, int64_t input_row_bytes,
        str product_type=None
    ):
        """Return a step's hidden states as `compute` takes them, for all waves of the step.

        Each row is converted once, where the experts multiply another type.

        Parameters
        ----------
        inputs : int
            Address of the hidden states [num_tokens, columns]; they stay there meanwhile.
        input_type : {"f32", "bf16"}
        num_tokens : int
        input_row_bytes : int
            From a row to the next.
        product_type : {"f32", "bf16"}, optional
            Type of the inputs of weights that are no integers, and of the activations between,
            where the processor has such products; by default `input_type`.

        Raises
        ------
        MemoryError
            If there is none for what they are converted to.
        """
        cdef Inputs found = Inputs.__new__(Inputs)
        cdef int given = _INPUTS.index(input_type)
        cdef int product = given if product_type is None else _INPUTS.index(product_type)
        num_tokens = max(0, num_tokens)
        found.fill(
            <const uint8_t *>inputs, given, product, num_tokens, input_row_bytes,
            &self.experts.up[0].first
        )
        if not self.multiplies_alike:
            found.more = Inputs.__new__(Inputs)
            found.more.fill(
                <const uint8_t *>inputs, given, product, num_tokens, input_row_bytes,
                &self.experts.up[1].first
            )
        return found

    def compute(
        self, const int32_t[::1] slots, const int64_t[::1] offsets, const int64_t[::1] pairs,
        int64_t top_k, Inputs inputs not None, uintptr_t out, str out_type, int64_t out_row_bytes
    ):
        """Write the rows that a wave covers: out[p], for each of its pairs.

        Parameters
        ----------
        slots : int32 [n]
        offsets : int64 [n + 1]
        pairs : int64 [m]
            As a `Wave` has them.
        top_k : int
            Pair p is of token p // top_k.
        inputs : Inputs
            The tokens' hidden states, of experts with the same columns in the same format.
        out : int
            Address of the rows [num_tokens * top_k, hidden_size].
        out_type : {"f32", "bf16"}
        out_row_bytes : int
            From a row to the next.

        Raises
        ------
        MemoryError
            If there is none for the activations.
        """
        cdef mc_experts e = self.experts
        cdef Inputs of_part
        cdef Rows rows, hidden
        cdef list kept = []
        cdef uint8_t *scratch
        cdef int64_t i, filled, written, num = pairs.shape[0]
        cdef int part
        cdef const mc_level *level = level_in_use()
        if offsets.shape[0] != slots.shape[0] + 1 or top_k < 1:
            raise ValueError("a wave has one offset more than slots, and a positive top_k")
        if offsets[0] != 0 or offsets[slots.shape[0]] != num:
            raise ValueError(
                f"offsets go from {offsets[0]} to {offsets[slots.shape[0]]}, but there are {num} "
                "pairs"
            )
        if num == 0:
            return
        for i in range(slots.shape[0]):
            if offsets[i] > offsets[i + 1]:
                raise ValueError(f"offsets fall from {offsets[i]} to {offsets[i + 1]}")
        for i in range(num):
            if not 0 <= pairs[i] < inputs.num * top_k:
                raise ValueError(f"pair {pairs[i]} is not in [0, {inputs.num * top_k})")
        e.level = level
        e.slots = &slots[0]
        e.offsets = &offsets[0]
        e.pairs = &pairs[0]
        e.num_experts = slots.shape[0]
        e.out.data = <uint8_t *>out
        e.out.row_bytes = out_row_bytes
        e.out.type = _INPUTS.index(out_type)
        e.hidden_type = mc_input_type(level, inputs.product_type, &e.down.first)
        e.hidden.type = MC_X_F32 if e.hidden_type == MC_X_PLANES else e.hidden_type
        for part in range(e.num_ups):
            e.input_types[part] = mc_input_type(level, inputs.product_type, &e.up[part].first)
            of_part = inputs if part == 0 or self.multiplies_alike else inputs.more
            if (
                of_part is None or of_part.wanted != e.input_types[part]
                or of_part.codes != e.up[part].first.codes
                or of_part.columns != e.up[part].first.columns
            ):
                raise ValueError("these inputs were made for other experts, or for another level")
            if part == 0 or of_part is not inputs:
                rows = Rows(num)
                kept.append(rows)
                for i in range(num):
                    rows.rows[i] = of_part.first + pairs[i] // top_k * of_part.row_bytes
            e.inputs[part] = rows.rows
        hidden = Rows(num)
        filled = mc_input_row_bytes(e.hidden.type, mc_input_columns(&e.down.first))
        written = mc_input_row_bytes(e.hidden.type, e.width)
        e.hidden.row_bytes = (filled + 63) & ~63
        hidden.scratch = <uint8_t *>malloc(max(1, num * e.hidden.row_bytes))
        if hidden.scratch == NULL:
            raise MemoryError(f"no memory for the activations of {num} pairs")
        scratch = hidden.scratch
        e.hidden.data = scratch
        for i in range(num):
            hidden.rows[i] = scratch + i * e.hidden.row_bytes
            # Behind the activations: codes are multiplied by whole blocks.
            memset(<uint8_t *>hidden.rows[i] + written, 0, <size_t>(filled - written))
        e.hidden_inputs = hidden.rows
        with nogil:
            run_experts(&e)


def combine(
    uintptr_t rows, int64_t num_tokens, int64_t top_k, int64_t columns, uintptr_t weights,
    str weight_type, int64_t weight_row_bytes, uintptr_t out, str out_type, int64_t out_row_bytes
):
    """Write each token's weighted sum of rows: out[t] = sum of weights[t, j] * rows[t * top_k + j].

    Parameters
    ----------
    rows, weights, out : int
        Addresses: fp32 [num_tokens * top_k, columns] without gaps, [num_tokens, top_k],
        [num_tokens, columns].
    weight_type, out_type : {"f32", "bf16"}
    weight_row_bytes, out_row_bytes : int
        From a row to the next.
    """
    cdef mc_sum job
    job.rows = <const float *>rows
    job.num_tokens = num_tokens
    job.top_k = top_k
    job.columns = columns
    job.weights.data = <uint8_t *>weights
    job.weights.type = _INPUTS.index(weight_type)
    job.weights.row_bytes = weight_row_bytes
    job.out.data = <uint8_t *>out
    job.out.type = _INPUTS.index(out_type)
    job.out.row_bytes = out_row_bytes
    with nogil:
        run_sum(&job)


cdef int _set_bias(mc_rows *rows, bias) except -1:
    if bias is not None:
        address, stride, kind = bias
        rows.data = <uint8_t *><uintptr_t>address
        rows.row_bytes = stride
        rows.type = _INPUTS.index(kind)
    return 0
