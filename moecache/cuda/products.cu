// The products of many tokens: all experts of a wave in one launch, by the tensor cores.
//
// A block computes 64 rows of inputs with 128 rows of a matrix, 32 columns at a time: a unit of the
// matrix' format, which is brought to `Hidden`, as the inputs are, in shared memory. Sums are in
// float32. A result is summed over the units in their order, with any others in its tile, so it
// does not depend on the wave that an expert comes in.
//
// A tile is three numbers: slot, first of the wave's pairs, how many of them, 64 at most.

constexpr unsigned TILE_ROWS = 64, SET_ROWS = 64, NUM_SETS = 2;
// Rows are 80 bytes apart, so that the eight rows that a warp reads at once are in different banks.
constexpr unsigned TILE_STRIDE = UNIT + 8, STRIDE_WORDS = TILE_STRIDE / 2;

struct alignas(16) Tiles {
    Hidden::Bits inputs[TILE_ROWS][TILE_STRIDE];
    Hidden::Bits weights[NUM_SETS * SET_ROWS][TILE_STRIDE];
};

struct Words8 {
    uint4 first, second;
};

__device__ inline unsigned pack(float low, float high)
{
    return (unsigned)Hidden::narrow(low) | (unsigned)Hidden::narrow(high) << 16;
}

// 16 weights of a row, in `Hidden`; zeros beyond the row.
template <class F, bool IS_ALIGNED> struct Run {
    static __device__ Words8
    load(const typename F::At& row, unsigned unit, unsigned run, unsigned n)
    {
        float values[RUN];
        F::template values<IS_ALIGNED>(row, unit, run, n, values);
        unsigned words[RUN / 2];
#pragma unroll
        for (unsigned i = 0; i < RUN / 2; i++) words[i] = pack(values[2 * i], values[2 * i + 1]);
        return {
            make_uint4(words[0], words[1], words[2], words[3]),
            make_uint4(words[4], words[5], words[6], words[7])};
    }
};

// Numbers that are `Hidden` already.
template <> struct Run<Plain<Hidden>, true> {
    static __device__ Words8 load(Row<Hidden> row, unsigned unit, unsigned run, unsigned)
    {
        const auto chunks = (const uint4*)(row + unit * UNIT + run * RUN);
        return {chunks[0], chunks[1]};
    }
};

// Words that each lane has of its own, read by the others.
#ifndef MOECACHE_EMULATED
template <unsigned N> struct WordsOfLanes {
    const unsigned (&own)[N];
    __device__ explicit WordsOfLanes(const unsigned (&own)[N]) : own(own) {}
    __device__ unsigned word(unsigned index, unsigned lane) const
    {
        return __shfl_sync(ALL_LANES, own[index], lane);
    }
};
#endif

// d += a * b of 16 x 16 and 16 x 8 numbers, spread over the lanes: lane 4 * g + t has rows g and
// g + 8 of a and d, column g of b, pairs t and t + 4 of a and b, columns 2t and 2t + 1 of d.
__device__ inline void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
#if !defined(MOECACHE_EMULATED) && __CUDA_ARCH__ >= 800
    if constexpr (Hidden::IS_BRAIN)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    // Before sm_80, and on a CPU: lanes exchange their numbers.
    const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    const WordsOfLanes lanes(own);
#pragma unroll
    for (unsigned half = 0; half < 2; half++)
        for (unsigned pair = 0; pair < 4; pair++) {
            const unsigned rows[2] = {
                lanes.word(2 * half, 4 * g + pair), lanes.word(2 * half + 1, 4 * g + pair)};
            const unsigned columns[2] = {
                lanes.word(4 + half, 8 * t + pair), lanes.word(4 + half, 8 * t + 4 + pair)};
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                const unsigned x = rows[i / 2], y = columns[i % 2];
                d[i] = fma_rn(Hidden::widen(x & 0xffffu), Hidden::widen(y & 0xffffu), d[i]);
                d[i] = fma_rn(Hidden::widen(x >> 16), Hidden::widen(y >> 16), d[i]);
            }
        }
#endif
}

// Eight inputs of a row, zeros beyond it.
__device__ inline uint4 load_chunk(Row<Hidden> row, unsigned column, unsigned n, bool is_aligned)
{
    if (is_aligned) return *(const uint4*)(row + column);
    unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
    for (unsigned i = 0; i < 8; i++)
        if (column + i < n) words[i / 2] |= (unsigned)row[column + i] << i % 2 * 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

using Sums = float[NUM_SETS][2][2][4]; // of a lane: sets, parts of 16 rows, of 8 columns

// All products of a tile of inputs with two sets of a matrix' rows. A thread brings 16 weights of
// `weights_row`, which is row threadIdx / 2 of both sets, and 8 inputs of `inputs_row`, which is
// row threadIdx / 4, or nullptr for zeros.
template <class F>
__device__ inline void multiply_tile(
    const typename F::At& weights_row, Row<Hidden> inputs_row, unsigned n, unsigned num_rows,
    Sums& sums)
{
    auto& shared = block_memory<Tiles>();
    const unsigned thread = threadIdx.x, lane = thread % 32;
    const unsigned num_units = F::num_units(n);
    const bool is_whole = n % UNIT == 0;
    const bool has_aligned_weights = is_whole && F::is_aligned(weights_row);
    const bool has_aligned_inputs = is_whole && (u64)inputs_row % CHUNK_BYTES == 0;
    const unsigned run = thread % 2, chunk = thread % 4;
    // A warp's first rows of the inputs and of a set.
    const unsigned first_row = thread / 32 % 2 * 32, first_column = thread / 64 * 16;
    Words8 weights;
    uint4 inputs;
    auto load = [&](unsigned unit) {
        weights = has_aligned_weights ? Run<F, true>::load(weights_row, unit, run, n)
                                      : Run<F, false>::load(weights_row, unit, run, n);
        inputs = make_uint4(0, 0, 0, 0);
        const unsigned column = F::column(unit, chunk / 2) + chunk % 2 * 8;
        if (inputs_row) inputs = load_chunk(inputs_row, column, n, has_aligned_inputs);
    };
    load(0);
#pragma unroll 1
    for (unsigned unit = 0; unit < num_units; unit++) {
        __syncthreads();
        *(uint4*)&shared.inputs[thread / 4][chunk * 8] = inputs;
        *(uint4*)&shared.weights[thread / 2][run * RUN] = weights.first;
        *(uint4*)&shared.weights[thread / 2][run * RUN + 8] = weights.second;
        __syncthreads();
        // The next unit is on its way while this one is multiplied.
        if (unit + 1 < num_units) load(unit + 1);
        if (first_row >= num_rows) continue;
        const auto input_words = (const unsigned*)shared.inputs + lane % 4;
        const auto weight_words = (const unsigned*)shared.weights + lane % 4;
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            unsigned a[2][4];
#pragma unroll
            for (unsigned m = 0; m < 2; m++)
#pragma unroll
                for (unsigned i = 0; i < 4; i++)
                    a[m][i] = input_words
                        [(first_row + 16 * m + i % 2 * 8 + lane / 4) * STRIDE_WORDS + 8 * half
                         + i / 2 * 4];
#pragma unroll
            for (unsigned set = 0; set < NUM_SETS; set++)
#pragma unroll
                for (unsigned j = 0; j < 2; j++) {
                    const unsigned row = set * SET_ROWS + first_column + 8 * j + lane / 4;
                    const unsigned at = row * STRIDE_WORDS + 8 * half;
                    const unsigned b[2] = {weight_words[at], weight_words[at + 4]};
#pragma unroll
                    for (unsigned m = 0; m < 2; m++) multiply_add(sums[set][m][j], a[m], b);
                }
        }
    }
}

// Calls result(row, column, sum of the first set, sum of the second) for each of the lane's sums.
template <class Result>
__device__ inline void each_result(const Sums& sums, unsigned num_rows, const Result& result)
{
    const unsigned lane = threadIdx.x % 32;
    const unsigned first_row = threadIdx.x / 32 % 2 * 32, first_column = threadIdx.x / 64 * 16;
#pragma unroll
    for (unsigned m = 0; m < 2; m++)
#pragma unroll
        for (unsigned j = 0; j < 2; j++)
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                const unsigned row = first_row + 16 * m + i / 2 * 8 + lane / 4;
                if (row < num_rows)
                    result(
                        row, first_column + 8 * j + lane % 4 * 2 + i % 2, sums[0][m][j][i],
                        sums[1][m][j][i]);
            }
}

// A function of its own: inlined for each of a lane's sums it is most of the code.
__device__ __noinline__ float element_apart(
    float first, float second, int activation, float alpha, float limit)
{
    return element_of_h(first, second, activation, alpha, limit);
}

// The kernels' arguments; STRUCTS of _structs.py has the same fields. No __grid_constant__: with one
// the compiler makes a single loop of results, which looks at each for the kind of biases.
struct MultiplyGateUpArguments {
    const Hidden::Bits* x;
    const int *tiles, *pairs;
    const u8* first_slot;
    Hidden::Bits* h;
    int num_tiles, top_k;
    LayerGate gate;
};

struct MultiplyDownArguments {
    const Hidden::Bits* h;
    const int *tiles, *pairs;
    const u8* first_slot;
    Hidden::Bits* rows;
    int num_tiles;
    LayerDown down;
};

// h[i] = activation(gate(x)) * up(x), of the wave's i-th pair; without a gate activation(up(x)). The
// two sets are rows of gate and of up for the same elements of h, or up's for one set and the next.
extern "C" __global__ void __launch_bounds__(256, 2) multiply_gate_up(
    const MultiplyGateUpArguments given)
{
    const LayerGate& how = given.gate;
    const Slots slots = {given.first_slot, how.slot_stride};
    const int hidden = how.hidden, width = how.width, is_interleaved = how.is_interleaved;
    constexpr int elements = NUM_SETS * SET_ROWS / ROWS_OF_H;
    const unsigned num_parts = (width + elements - 1) / elements;
    for (unsigned task = blockIdx.x; task < given.num_tiles * num_parts; task += gridDim.x) {
        const int* tile = given.tiles + task / num_parts * 3;
        const int slot = tile[0], first = tile[1], num_rows = tile[2];
        const int first_part = task % num_parts * elements;
        // Beyond the last row a thread repeats the last; nothing of that is stored.
        const int row = threadIdx.x / 2 % elements;
        const int part = first_part + row < width ? first_part + row : width - 1;
        const int weights_row =
            row_of_h(part, threadIdx.x / 2 < SET_ROWS, width, is_interleaved);
        const int own = threadIdx.x / 4;
        const Row<Hidden> inputs =
            own < num_rows
                ? given.x + (long long)(given.pairs[first + own] / given.top_k) * hidden
                : nullptr;
        Sums sums = {};
        multiply_tile<GateUp>(
            gate_up_row(slots.at(slot, how.offset), weights_row, hidden, width), inputs, hidden,
            num_rows, sums);
        const u8* bias = slots.at(slot, how.bias_offset);
        each_result(sums, num_rows, [&](int i, int column, float low, float high) {
            Hidden::Bits* h = given.h + (long long)(first + i) * width;
            const int found = first_part + column, other = found + (int)SET_ROWS;
            auto finish = [&](int element, float one, float two) {
                h[element] = Hidden::narrow(
                    element_apart(one, two, how.activation, how.alpha, how.limit));
            };
            if (found >= width) return;
            low = with_bias(
                low, bias, how.bias_kind, row_of_h(found, true, width, is_interleaved));
            if constexpr (IS_GATED) {
                high = with_bias(
                    high, bias, how.bias_kind, row_of_h(found, false, width, is_interleaved));
                finish(found, low, high);
            } else {
                finish(found, low, 0.0f);
                if (other < width) finish(other, with_bias(high, bias, how.bias_kind, other), 0.0f);
            }
        });
    }
}

// rows[p] = down(h[i]), of the wave's i-th pair, p.
extern "C" __global__ void __launch_bounds__(256, 2) multiply_down(
    const MultiplyDownArguments given)
{
    constexpr int both = NUM_SETS * SET_ROWS;
    const LayerDown& how = given.down;
    const Slots slots = {given.first_slot, how.slot_stride};
    const int hidden = how.hidden, width = how.width;
    const unsigned num_parts = (hidden + both - 1) / both;
    for (unsigned task = blockIdx.x; task < given.num_tiles * num_parts; task += gridDim.x) {
        const int* tile = given.tiles + task / num_parts * 3;
        const int slot = tile[0], first = tile[1], num_rows = tile[2];
        const int first_row = task % num_parts * both, row = first_row + threadIdx.x / 2;
        const int own = threadIdx.x / 4;
        const Row<Hidden> inputs =
            own < num_rows ? given.h + (long long)(first + own) * width : nullptr;
        const Down::At weights_row = Down::row(
            slots.at(slot, how.offset), row < hidden ? row : hidden - 1, hidden, width);
        Sums sums = {};
        multiply_tile<Down>(weights_row, inputs, width, num_rows, sums);
        const u8* bias = slots.at(slot, how.bias_offset);
        each_result(sums, num_rows, [&](int i, int column, float low, float high) {
            Hidden::Bits* out = given.rows + (long long)given.pairs[first + i] * hidden;
            const int found = first_row + column, other = found + (int)SET_ROWS;
            low = with_bias(low, bias, how.bias_kind, found < hidden ? found : 0);
            high = with_bias(high, bias, how.bias_kind, other < hidden ? other : 0);
            if (found < hidden) out[found] = Hidden::narrow(low);
            if (other < hidden) out[other] = Hidden::narrow(high);
        });
    }
}
