// The contents of a slot: an expert's matrices and biases.
//
// The text before this file defines `Hidden`, the type of x and of the result; `GateUp` and `Down`,
// the formats of the matrices; and `NUM_GATE_UPS`. It is 2 where gate [width, hidden] and up are
// matrices of their own, one behind the other. It is 1 where they are one [2 * width, hidden]:
// gate's rows lie above up's or, if interleaved, in turns with them. It is 0 where there is no gate:
// what is called gate_up is up [width, hidden] then. A slot holds gate_up, down [hidden, width] and
// biases, each at its offset.

constexpr bool IS_GATED = NUM_GATE_UPS > 0;
constexpr unsigned ROWS_OF_H = IS_GATED ? 2 : 1; // of gate_up, for each element of h

// What all launches over a layer's experts have alike: of the first matrix and what becomes of its
// products, and of down. The kernels' arguments end with these; _structs.py has them, too.
struct LayerGate {
    long long slot_stride, offset, bias_offset;
    int bias_kind, is_interleaved, hidden, width, activation;
    float alpha, limit;
};

struct LayerDown {
    long long slot_stride, offset, bias_offset;
    int bias_kind, hidden, width;
};

// Addresses in the slots of a pool.
struct Slots {
    const u8* first;
    long long stride;

    __device__ const u8* at(int slot, long long offset) const
    {
        return first + slot * stride + offset;
    }
};

__device__ inline float with_bias(float sum, const u8* bias, int kind, int index)
{
    if (kind == NO_BIAS) return sum;
    float value;
    if (kind == BIAS_F32)
        value = ((const float*)bias)[index];
    else if (kind == BIAS_F16)
        value = F16::widen(((Row<F16>)bias)[index]);
    else
        value = BF16::widen(((Row<BF16>)bias)[index]);
    return add_rn(sum, value);
}

// The row of gate_up that an element of h has of gate, or else of up.
__device__ inline int row_of_h(int part, bool is_gate, int width, int is_interleaved)
{
    if (!IS_GATED) return part;
    if (is_interleaved) return 2 * part + !is_gate;
    return is_gate ? part : width + part;
}

// The place of a row of gate_up, among the first `width` ones or those behind them.
__device__ inline GateUp::At gate_up_row(const u8* matrix, int row, int hidden, int width)
{
    if (NUM_GATE_UPS < 2) return GateUp::row(matrix, row, (int)ROWS_OF_H * width, hidden);
    if (row >= width) matrix += GateUp::matrix_bytes(width, hidden);
    return GateUp::row(matrix, row < width ? row : row - width, width, hidden);
}

// An element of h from its products with gate and up, biases among them; without a gate `first` is
// that with up.
__device__ inline float element_of_h(
    float first, float second, int activation, float alpha, float limit)
{
    if constexpr (IS_GATED)
        return gated(first, second, activation, alpha, limit);
    else
        return activated(first, activation);
}
