// The routed experts of a layer. For few tokens: the whole computation in one launch, and its parts
// as kernels of their own. For many tokens: the work around the matrix products.
//
// NVRTC compiles this at run time, so nothing is included. A pair p is choice p % top_k of token
// p / top_k. A slot holds gate_up [2 * width, hidden], gate's rows above up's, and down
// [hidden, width], each at its offset.
//
// A sum has one order whatever the grid, the alignment and the split into launches, and each
// operation says how it rounds: otherwise a compiler may contract one copy and not the other. That
// is why decode equals gate_up, down and combine_rows bit for bit.

#ifndef MOECACHE_EMULATED
__device__ inline float half_to_float(unsigned short bits)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ inline unsigned short float_to_half(float x)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif

typedef unsigned long long u64;

enum Activation { SILU, GELU, GELU_TANH, RELU };
enum IdsKind { IDS_INT32, IDS_INT64 };
enum WeightsKind { WEIGHTS_FLOAT32, WEIGHTS_AS_HIDDEN };

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr unsigned NOT_A_NUMBER = 0x7fc00000u;

struct F32 {
    using Bits = unsigned;
    static __device__ float widen(unsigned bits) { return __uint_as_float(bits); }
    static __device__ Bits narrow(float x) { return __float_as_uint(x); }
};

struct F16 {
    using Bits = unsigned short;
    static __device__ float widen(unsigned bits) { return half_to_float((unsigned short)bits); }
    static __device__ Bits narrow(float x) { return float_to_half(x); }
};

struct BF16 {
    using Bits = unsigned short;
    static __device__ float widen(unsigned bits) { return __uint_as_float(bits << 16); }
    static __device__ Bits narrow(float x)
    {
        const unsigned bits = __float_as_uint(x);
        // A NaN whose set bits are all in the lower half would become infinite.
        if (x != x) return (Bits)(bits >> 16 | 0x40u);
        return (Bits)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
};

template <class D> using Row = const typename D::Bits*;

// What one lane loads at once. Lanes take chunks whether rows are aligned or not, so that the order
// of a sum does not depend on alignment.
constexpr int CHUNK_BYTES = 16;
template <class D> constexpr unsigned PER_CHUNK = CHUNK_BYTES / sizeof(typename D::Bits);

template <class D, class... Pointers> __device__ inline bool is_chunked(unsigned n, Pointers... rows)
{
    return n % PER_CHUNK<D> == 0 && (... && ((u64)rows % CHUNK_BYTES == 0));
}

template <class D> __device__ inline float element(const uint4& chunk, unsigned i)
{
    constexpr unsigned per_word = 4 / sizeof(typename D::Bits);
    const unsigned k = i / per_word;
    const unsigned word = k == 0 ? chunk.x : k == 1 ? chunk.y : k == 2 ? chunk.z : chunk.w;
    if (per_word == 1) return D::widen(word);
    return D::widen(i % 2 ? word >> 16 : word & 0xffffu);
}

// N elements, one or whole chunks, as floats.
template <class D, unsigned N> __device__ inline void load(Row<D> row, float* values)
{
    if (N == 1) values[0] = D::widen(*row);
    for (unsigned i = 0; N > 1 && i < N; i++)
        values[i] = element<D>(((const uint4*)row)[i / PER_CHUNK<D>], i % PER_CHUNK<D>);
}

// N elements, one or one chunk.
template <class D, unsigned N> __device__ inline void store(typename D::Bits* row, const float* values)
{
    unsigned words[4] = {0, 0, 0, 0};
    for (unsigned i = 0; i < N; i++)
        words[i * 4 / N] |= (unsigned)D::narrow(values[i]) << (i * 4 % N * 32 / N);
    if (N == 1)
        *row = (typename D::Bits)words[0];
    else
        *(uint4*)row = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ inline float activated(float x, int activation)
{
    switch (activation) {
    case SILU: {
        // exp of a negative number only: no infinity over infinity for large |x|.
        const float small = expf(-fabsf(x));
        return __fdiv_rn(__fmul_rn(x, x >= 0.0f ? 1.0f : small), __fadd_rn(1.0f, small));
    }
    case GELU: {
        const float share = __fadd_rn(1.0f, erff(__fmul_rn(x, 0.70710678f)));
        return __fmul_rn(__fmul_rn(0.5f, x), share);
    }
    case GELU_TANH: {
        const float cube = __fmul_rn(__fmul_rn(x, x), x);
        const float inner = __fmul_rn(0.79788456f, __fmaf_rn(0.044715f, cube, x));
        return __fmul_rn(__fmul_rn(0.5f, x), __fadd_rn(1.0f, tanhf(inner)));
    }
    case RELU:
        return x < 0.0f ? 0.0f : x; // fmaxf loses a NaN
    default:
        return __uint_as_float(NOT_A_NUMBER);
    }
}

template <class D> __device__ inline float weight_of(const void* weights, int kind, long long pair)
{
    if (kind == WEIGHTS_FLOAT32) return ((const float*)weights)[pair];
    return D::widen(((Row<D>)weights)[pair]);
}

__device__ inline float add_weighted(float sum, float weight, float row)
{
    return __fadd_rn(sum, __fmul_rn(weight, row));
}

// Chunks of each of two rows that a lane has under way: enough to hide the latency of memory. More
// do not fit into 64 registers, which is what four blocks per multiprocessor leave a thread.
constexpr unsigned IN_FLIGHT = 2;

struct Two {
    float first, second;
};

// The dot products of two rows, each with its vector, by one warp; every lane has them.
template <class D, class X>
__device__ inline Two dot_two(Row<D> first, Row<D> second, Row<X> x, Row<X> x_second, unsigned n)
{
    constexpr unsigned per_chunk = PER_CHUNK<D>;
    const unsigned lane = threadIdx.x % 32;
    // 0 if the rows are not aligned to chunks: their elements are then read one by one.
    const unsigned num_chunks = is_chunked<D>(n, first, second, x, x_second) ? n / per_chunk : 0;
    Two sums = {0.0f, 0.0f};
    for (unsigned start = lane; start < num_chunks; start += 32 * IN_FLIGHT) {
        uint4 rows[IN_FLIGHT][2];
#pragma unroll
        for (unsigned k = 0; k < IN_FLIGHT; k++)
            if (const unsigned chunk = start + 32 * k; chunk < num_chunks) {
                // Weights are used once per step: the cache is for x and h.
                rows[k][0] = __ldcs((const uint4*)first + chunk);
                rows[k][1] = __ldcs((const uint4*)second + chunk);
            }
#pragma unroll
        for (unsigned k = 0; k < IN_FLIGHT; k++)
            if (const unsigned chunk = start + 32 * k; chunk < num_chunks) {
                float values[2][per_chunk];
                load<X, per_chunk>(x + chunk * per_chunk, values[0]);
                load<X, per_chunk>(x_second + chunk * per_chunk, values[1]);
                for (unsigned i = 0; i < per_chunk; i++) {
                    sums.first = __fmaf_rn(element<D>(rows[k][0], i), values[0][i], sums.first);
                    sums.second = __fmaf_rn(element<D>(rows[k][1], i), values[1][i], sums.second);
                }
            }
    }
#pragma unroll 1
    for (unsigned start = lane * per_chunk; num_chunks == 0 && start < n; start += 32 * per_chunk)
#pragma unroll 1
        for (unsigned i = start; i < n && i < start + per_chunk; i++) {
            sums.first = __fmaf_rn(D::widen(first[i]), X::widen(x[i]), sums.first);
            sums.second = __fmaf_rn(D::widen(second[i]), X::widen(x_second[i]), sums.second);
        }
    for (int distance = 16; distance > 0; distance /= 2) {
        sums.first = __fadd_rn(sums.first, __shfl_xor_sync(ALL_LANES, sums.first, distance));
        sums.second = __fadd_rn(sums.second, __shfl_xor_sync(ALL_LANES, sums.second, distance));
    }
    return sums;
}

// One element of h.
template <class D>
__device__ inline float gated(
    Row<D> x, const unsigned char* gate_up, long long row, int hidden, int width, int activation)
{
    const auto gate = (Row<D>)gate_up + row * hidden;
    const Two dots = dot_two<D, D>(gate, gate + (long long)width * hidden, x, x, hidden);
    return __fmul_rn(activated(dots.first, activation), dots.second);
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

    // The pair's slot, or -1 where there is none to read.
    __device__ int slot_of(long long pair) const
    {
        const long long id =
            ids_kind == IDS_INT32 ? ((const int*)ids)[pair] : ((const long long*)ids)[pair];
        if (id < 0 || id >= num_experts) return -1;
        const int slot = slot_table[id];
        return slot < num_slots ? slot : -1;
    }
};

// One element of a token's output; NaN where an expert of the token is not resident.
template <class D>
__device__ inline float routed_sum(
    const Routing& routing, const void* weights, int weights_kind, const unsigned char* down_row,
    long long slot_stride, Row<F32> h, int first_pair, int top_k, int width)
{
    float sum = 0.0f;
    for (int j = 0; j < top_k; j += 2) {
        const int next = j + 1 < top_k ? j + 1 : j;
        const int slot = routing.slot_of(first_pair + j);
        const int next_slot = routing.slot_of(first_pair + next);
        if (slot < 0 || next_slot < 0) return __uint_as_float(NOT_A_NUMBER);
        const Two dots = dot_two<D, F32>(
            (Row<D>)(down_row + slot * slot_stride), (Row<D>)(down_row + next_slot * slot_stride),
            h + j * width, h + next * width, width);
        sum = add_weighted(sum, weight_of<D>(weights, weights_kind, first_pair + j), dots.first);
        if (next == j) break;
        sum = add_weighted(
            sum, weight_of<D>(weights, weights_kind, first_pair + next), dots.second);
    }
    return sum;
}

// Every block has come this far before any goes on. The upper half of the counter is the number of
// barriers passed; the lower half is zero between them, so launches may differ in their grids.
__device__ inline void grid_barrier(u64* barrier)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const u64 share = blockIdx.x == 0 ? (1ull << 32) - (gridDim.x - 1) : 1;
        const u64 before = atomicAdd(barrier, share);
        while (*(volatile u64*)barrier >> 32 == before >> 32) __nanosleep(32);
        __threadfence();
    }
    __syncthreads();
}

// N elements at a time of a token's rows, weighted and summed. Without `place`, row p is pair p's;
// a pair whose place is negative was dropped.
template <class D, class X, unsigned N>
__device__ inline void combine_tokens(
    Row<X> rows, const int* place, const void* weights, int weights_kind, int num_tokens,
    int top_k, int hidden, typename D::Bits* out)
{
    for (long long token = blockIdx.x; token < num_tokens; token += gridDim.x)
        for (unsigned k = threadIdx.x * N; k < (unsigned)hidden; k += blockDim.x * N) {
            float sums[N] = {};
            for (long long pair = token * top_k; pair < (token + 1) * top_k; pair++) {
                const long long row = place ? place[pair] : pair;
                if (row < 0) continue;
                const float weight = weight_of<D>(weights, weights_kind, pair);
                float values[N];
                load<X, N>(rows + row * hidden + k, values);
                for (unsigned i = 0; i < N; i++) sums[i] = add_weighted(sums[i], weight, values[i]);
            }
            store<D, N>(out + token * hidden + k, sums);
        }
}

template <class D, unsigned N>
__device__ inline void activate_rows(
    Row<D> both, long long num_rows, int width, int activation, typename D::Bits* out)
{
    for (long long row = blockIdx.x; row < num_rows; row += gridDim.x)
        for (unsigned k = threadIdx.x * N; k < (unsigned)width; k += blockDim.x * N) {
            float gate[N], up[N];
            load<D, N>(both + row * 2 * width + k, gate);
            load<D, N>(both + row * 2 * width + width + k, up);
            for (unsigned i = 0; i < N; i++) gate[i] = __fmul_rn(activated(gate[i], activation), up[i]);
            store<D, N>(out + row * width + k, gate);
        }
}

template <class T>
__device__ inline void gather_rows(
    const T* x, const int* pairs, int num_pairs, int top_k, int row_length, T* out)
{
    for (long long i = blockIdx.x; i < num_pairs; i += gridDim.x) {
        const T* from = x + (long long)(pairs[i] / top_k) * row_length;
        for (int k = threadIdx.x; k < row_length; k += blockDim.x)
            out[i * row_length + k] = from[k];
    }
}

// Defines name_f32, name_f16 and name_bf16; D is the type in parameters and body.
#define KERNEL(name, ...) \
    KERNEL_OF(f32, F32, name, __VA_ARGS__) \
    KERNEL_OF(f16, F16, name, __VA_ARGS__) \
    KERNEL_OF(bf16, BF16, name, __VA_ARGS__)
#define KERNEL_OF(suffix, type, name, parameters, ...) \
    namespace suffix { \
    using D = type; \
    extern "C" __global__ void __launch_bounds__(256, 4) name##_##suffix parameters __VA_ARGS__ \
    }

KERNEL(decode, (
    const D::Bits* x, const void* ids, int ids_kind, const int* slot_table, const void* weights,
    int weights_kind, const unsigned char* slots, long long slot_stride, long long gate_up_offset,
    long long down_offset, int num_tokens, int top_k, int num_experts, int num_slots, int hidden,
    int width, int activation, float* h, D::Bits* out, u64* barrier),
{
    const bool is_writer = threadIdx.x % 32 == 0;
    const Routing routing = {ids, ids_kind, slot_table, num_experts, num_slots};
    const unsigned num_pairs = num_tokens * top_k;
    for (Task task(width); task.item < num_pairs; task.advance(width)) {
        const int slot = routing.slot_of(task.item);
        if (slot < 0) continue;
        const float value = gated<D>(
            x + (long long)(task.item / top_k) * hidden,
            slots + slot * slot_stride + gate_up_offset, task.part, hidden, width, activation);
        if (is_writer) h[(long long)task.item * width + task.part] = value;
    }

    grid_barrier(barrier);

    for (Task task(hidden); task.item < (unsigned)num_tokens; task.advance(hidden)) {
        const long long row_bytes = width * (long long)sizeof(D::Bits);
        const float sum = routed_sum<D>(
            routing, weights, weights_kind, slots + down_offset + task.part * row_bytes,
            slot_stride, (Row<F32>)h + (long long)task.item * top_k * width, task.item * top_k, top_k,
            width);
        if (is_writer) out[(long long)task.item * hidden + task.part] = D::narrow(sum);
    }
})

KERNEL(gate_up, (
    const D::Bits* x, const int* pair_slots, const int* pairs, int num_pairs,
    const unsigned char* slots, long long slot_stride, long long gate_up_offset, int top_k,
    int hidden, int width, int activation, float* h),
{
    for (Task task(width); task.item < (unsigned)num_pairs; task.advance(width)) {
        const int pair = pairs[task.item];
        const float value = gated<D>(
            x + (long long)(pair / top_k) * hidden,
            slots + pair_slots[task.item] * slot_stride + gate_up_offset, task.part, hidden, width,
            activation);
        if (threadIdx.x % 32 == 0) h[(long long)pair * width + task.part] = value;
    }
})

KERNEL(down, (
    const int* pair_slots, const int* pairs, int num_pairs, const unsigned char* slots,
    long long slot_stride, long long down_offset, int hidden, int width, const float* h,
    float* rows),
{
    const int num_twos = hidden / 2 + hidden % 2;
    for (Task task(num_twos); task.item < (unsigned)num_pairs; task.advance(num_twos)) {
        const long long pair = pairs[task.item];
        const long long n = task.part * 2;
        const long long next = n + 1 < hidden ? n + 1 : n;
        const auto matrix = (Row<D>)(slots + pair_slots[task.item] * slot_stride + down_offset);
        const auto inner = (Row<F32>)h + pair * width;
        const Two dots = dot_two<D, F32>(
            matrix + n * width, matrix + next * width, inner, inner, width);
        if (threadIdx.x % 32 != 0) continue;
        rows[pair * hidden + n] = dots.first;
        rows[pair * hidden + next] = dots.second;
    }
})

KERNEL(combine_rows, (
    const float* rows, const void* weights, int weights_kind, int num_tokens, int top_k,
    int hidden, D::Bits* out),
{
    combine_tokens<D, F32, 1>(
        (Row<F32>)rows, nullptr, weights, weights_kind, num_tokens, top_k, hidden, out);
})

KERNEL(combine, (
    const D::Bits* rows, const int* place, const void* weights, int weights_kind, int num_tokens,
    int top_k, int hidden, D::Bits* out),
{
    if (is_chunked<D>(hidden, rows, out))
        combine_tokens<D, D, PER_CHUNK<D>>(
            rows, place, weights, weights_kind, num_tokens, top_k, hidden, out);
    else
        combine_tokens<D, D, 1>(
            rows, place, weights, weights_kind, num_tokens, top_k, hidden, out);
})

KERNEL(gather, (
    const D::Bits* x, const int* pairs, int num_pairs, int top_k, int hidden, D::Bits* out),
{
    if (is_chunked<D>(hidden, x, out))
        gather_rows((const uint4*)x, pairs, num_pairs, top_k, hidden / PER_CHUNK<D>, (uint4*)out);
    else
        gather_rows(x, pairs, num_pairs, top_k, hidden, out);
})

KERNEL(activate, (
    const D::Bits* both, long long num_rows, int width, int activation, D::Bits* out),
{
    if (is_chunked<D>(width, both, out))
        activate_rows<D, PER_CHUNK<D>>(both, num_rows, width, activation, out);
    else
        activate_rows<D, 1>(both, num_rows, width, activation, out);
})
