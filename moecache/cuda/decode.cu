// The routed experts of few tokens: the whole computation in one launch, `decode`, and its parts as
// kernels of their own, `gate_up` and `down`, which `combine_rows` ends.
//
// All ways take the same dot products, of one row each, and add them in the order of a token's
// choices: `decode` equals its parts bit for bit.

constexpr unsigned GATE_UP_ROWS = 2 * GateUp::ELEMENTS; // that a warp takes
constexpr unsigned ELEMENTS = GATE_UP_ROWS / ROWS_OF_H; // of h, for which these are
constexpr unsigned BLOCKS = GateUp::BLOCKS < Down::BLOCKS ? GateUp::BLOCKS : Down::BLOCKS;

// Tasks of an expert's first half: a warp takes ELEMENTS of h.
__device__ inline unsigned num_gate_tasks(const LayerGate& gate)
{
    return (gate.width + ELEMENTS - 1) / ELEMENTS;
}

// Elements of h from `first` on, by one warp, each into `h` by a lane; none beyond the last.
__device__ inline void compute_h(
    const LayerGate& how, const Slots& slots, Row<Hidden> x, int slot, unsigned first, float* h)
{
    const int width = how.width, hidden = how.hidden;
    const u8* matrix = slots.at(slot, how.offset);
    GateUp::At rows[GATE_UP_ROWS];
#pragma unroll
    for (unsigned r = 0; r < GATE_UP_ROWS; r++) {
        const unsigned at = first + r / ROWS_OF_H, part = at < (unsigned)width ? at : width - 1;
        const bool is_gate = r % ROWS_OF_H == 0;
        rows[r] = gate_up_row(
            matrix, row_of_h(part, is_gate, width, how.is_interleaved), hidden, width);
    }
    float sums[GATE_UP_ROWS];
    GateUp::dots<Hidden>(rows, x, hidden, sums);
    using Sums = RowSums<GATE_UP_ROWS>;
    float value = Sums::total(sums);
    float up = IS_GATED ? __shfl_xor_sync(ALL_LANES, value, Sums::LANES) : 0.0f;
    const unsigned part = first + Sums::row() / ROWS_OF_H;
    if (!Sums::is_first() || Sums::row() % ROWS_OF_H || part >= (unsigned)width) return;
    const u8* bias = slots.at(slot, how.bias_offset);
    const int row = row_of_h(part, true, width, how.is_interleaved);
    value = with_bias(value, bias, how.bias_kind, row);
    if constexpr (IS_GATED)
        up = with_bias(up, bias, how.bias_kind, row_of_h(part, false, width, how.is_interleaved));
    h[Order<Down::H>::place(part, width)] =
        element_of_h(value, up, how.activation, how.alpha, how.limit);
}

constexpr unsigned DOWN_ROWS = Down::ROWS; // rows of an expert's down that a warp takes

using DownSums = RowSums<DOWN_ROWS>;

// An expert's output from row `first` on, by one warp; beyond the last row it is that one's.
__device__ inline float down_rows(
    const u8* matrix, Row<Down::H> h, int first, int hidden, int width)
{
    Down::At rows[DOWN_ROWS];
#pragma unroll
    for (int r = 0; r < (int)DOWN_ROWS; r++)
        rows[r] = Down::row(matrix, first + r < hidden ? first + r : hidden - 1, hidden, width);
    float sums[DOWN_ROWS];
    Down::dots<Down::H>(rows, h, width, sums);
    return DownSums::total(sums);
}

// One warp's task: one of the `parts` of an item. Neighbours go to different multiprocessors, so
// that a few tasks occupy the whole device.
struct Task {
    unsigned item, part;

    __device__ explicit Task(unsigned parts)
    {
        const unsigned warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
        item = warp / parts;
        part = warp % parts;
    }

    __device__ void advance(unsigned parts)
    {
        const unsigned num_warps = blockDim.x / 32 * gridDim.x;
        item += num_warps / parts;
        part += num_warps % parts;
        if (part < parts) return;
        part -= parts;
        item++;
    }
};

struct Routing {
    const void* ids;
    int ids_kind;
    const int* slot_table;
    int num_experts, num_slots;

    // The pair's expert, or -1 if no expert has that number.
    __device__ long long id_of(long long pair) const
    {
        const long long id =
            ids_kind == IDS_INT32 ? ((const int*)ids)[pair] : ((const long long*)ids)[pair];
        return id >= 0 && id < num_experts ? id : -1;
    }

    // The pair's slot, or -1 where there is none to read.
    __device__ int slot_of(long long pair) const
    {
        const long long id = id_of(pair);
        if (id < 0) return -1;
        const int slot = slot_table[id];
        return slot < num_slots ? slot : -1;
    }
};

// A block takes groups of DOWN_ROWS rows of the output, all experts of a token at once, a warp for
// each expert. With few choices there are several groups, with more than eight several rounds.
struct Reduction {
    // Twice: a round's values are read while those of the next are written.
    float values[2][NUM_WARPS][DOWN_ROWS];
};

// The row that a thread ends. Only the first threads end one.
struct Ending {
    unsigned group, token, row;

    __device__ Ending(unsigned start, unsigned num_groups, unsigned groups_of_token)
    {
        const unsigned place = threadIdx.x / DOWN_ROWS;
        group = place < num_groups ? start + place : ~0u;
        token = group / groups_of_token;
        row = group % groups_of_token * DOWN_ROWS + threadIdx.x % DOWN_ROWS;
    }

    __device__ bool is_one(unsigned all_groups, int hidden) const
    {
        return group < all_groups && row < (unsigned)hidden;
    }
};

__device__ inline void reduce_experts(
    const Routing& routing, const void* weights, int weights_kind, const Slots& slots,
    const LayerDown& down, Row<Down::H> h, int num_tokens, int top_k, Hidden::Bits* out)
{
    const int hidden = down.hidden, width = down.width;
    auto& shared = block_memory<Reduction>();
    const unsigned per_group = top_k < (int)NUM_WARPS ? top_k : NUM_WARPS;
    const unsigned num_groups = NUM_WARPS / per_group;
    const unsigned groups_of_token = (hidden + DOWN_ROWS - 1) / DOWN_ROWS;
    const unsigned all_groups = num_tokens * groups_of_token;
    unsigned turn = 0;
    for (unsigned start = blockIdx.x * num_groups; start < all_groups;
         start += num_blocks() * num_groups) {
        float sum = 0.0f; // of the row that one of the first threads ends
        for (int first = 0; first < top_k; first += per_group, turn ^= 1) {
            const unsigned warp = threadIdx.x / 32, group = start + warp / per_group;
            const int choice = first + warp % per_group;
            if (warp < num_groups * per_group && group < all_groups && choice < top_k) {
                const long long pair = (long long)(group / groups_of_token) * top_k + choice;
                const int row = group % groups_of_token * DOWN_ROWS, slot = routing.slot_of(pair);
                float* values = shared.values[turn][warp];
                if (slot < 0) {
                    if (threadIdx.x % 32 < DOWN_ROWS)
                        values[threadIdx.x % 32] = __uint_as_float(NOT_A_NUMBER);
                } else {
                    const u8* bias = slots.at(slot, down.bias_offset);
                    const u8* matrix = slots.at(slot, down.offset);
                    const float sum = down_rows(matrix, h + pair * width, row, hidden, width);
                    const int own = DownSums::row();
                    if (DownSums::is_first() && row + own < hidden)
                        values[own] = with_bias(sum, bias, down.bias_kind, row + own);
                }
            }
            __syncthreads();
            const Ending ending(start, num_groups, groups_of_token);
            const bool is_ending = ending.is_one(all_groups, hidden);
            for (int k = 0; is_ending && k < (int)per_group && first + k < top_k; k++) {
                const float weight = weight_of<Hidden>(
                    weights, weights_kind, (long long)ending.token * top_k + first + k);
                const float* values = shared.values[turn][threadIdx.x / DOWN_ROWS * per_group + k];
                sum = add_weighted(sum, weight, values[threadIdx.x % DOWN_ROWS]);
            }
        }
        const Ending ending(start, num_groups, groups_of_token);
        if (ending.is_one(all_groups, hidden))
            out[(long long)ending.token * hidden + ending.row] = Hidden::narrow(sum);
    }
}

// The kernels' arguments, each one struct: numbers cost the host time one by one. STRUCTS of
// _structs.py has the same fields. As a __grid_constant__ a struct takes no registers.
struct DecodeArguments {
    const Hidden::Bits* x;
    const void* ids;
    const int* slot_table;
    const void* weights;
    const u8* first_slot;
    float* h;
    Hidden::Bits* out;
    u64* barrier;
    const StepGate* step_gate;
    int ids_kind, weights_kind, num_tokens, top_k, num_experts, num_slots;
    LayerGate gate;
    LayerDown down;
};

struct GateUpArguments {
    const Hidden::Bits* x;
    const int *pair_slots, *pairs;
    const u8* first_slot;
    float* h;
    int num_pairs, top_k;
    LayerGate gate;
};

struct DownArguments {
    const int *pair_slots, *pairs;
    const u8* first_slot;
    const float* h;
    float* rows;
    int num_pairs;
    LayerDown down;
};

extern "C" __global__ void __launch_bounds__(256, BLOCKS) decode(
    const __grid_constant__ DecodeArguments given)
{
    const Routing routing = {
        given.ids, given.ids_kind, given.slot_table, given.num_experts, given.num_slots};
    if (!enter_step(given.step_gate, routing, given.num_tokens, given.top_k)) return;
    const Slots slots = {given.first_slot, given.gate.slot_stride};
    const int top_k = given.top_k, hidden = given.gate.hidden, width = given.gate.width;
    const unsigned num_pairs = given.num_tokens * top_k;
    const unsigned parts = num_gate_tasks(given.gate);
    for (Task task(parts); task.item < num_pairs; task.advance(parts)) {
        const int slot = routing.slot_of(task.item);
        if (slot < 0) continue;
        const Row<Hidden> row = given.x + (long long)(task.item / top_k) * hidden;
        compute_h(
            given.gate, slots, row, slot, task.part * ELEMENTS,
            given.h + (long long)task.item * width);
    }

    grid_barrier(given.barrier);

    reduce_experts(
        routing, given.weights, given.weights_kind, slots, given.down, (Row<Down::H>)given.h,
        given.num_tokens, top_k, given.out);
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS) gate_up(
    const __grid_constant__ GateUpArguments given)
{
    const Slots slots = {given.first_slot, given.gate.slot_stride};
    const unsigned parts = num_gate_tasks(given.gate);
    for (Task task(parts); task.item < (unsigned)given.num_pairs; task.advance(parts)) {
        const int pair = given.pairs[task.item];
        compute_h(
            given.gate, slots, given.x + (long long)(pair / given.top_k) * given.gate.hidden,
            given.pair_slots[task.item], task.part * ELEMENTS,
            given.h + (long long)pair * given.gate.width);
    }
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS) down(
    const __grid_constant__ DownArguments given)
{
    const LayerDown& how = given.down;
    const Slots slots = {given.first_slot, how.slot_stride};
    const int hidden = how.hidden, width = how.width;
    const int num_groups = (hidden + DOWN_ROWS - 1) / DOWN_ROWS;
    for (Task task(num_groups); task.item < (unsigned)given.num_pairs; task.advance(num_groups)) {
        const long long pair = given.pairs[task.item];
        const int slot = given.pair_slots[task.item], first = task.part * DOWN_ROWS;
        const Row<Down::H> h = (Row<Down::H>)given.h + pair * width;
        const float sum = down_rows(slots.at(slot, how.offset), h, first, hidden, width);
        const int row = first + DownSums::row();
        if (!DownSums::is_first() || row >= hidden) continue;
        given.rows[pair * hidden + row] =
            with_bias(sum, slots.at(slot, how.bias_offset), how.bias_kind, row);
    }
}
