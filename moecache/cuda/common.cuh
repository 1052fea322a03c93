// Common to all kernels: types, loads and stores, activations, the barrier of a grid.
//
// NVRTC compiles these files at run time, one behind the other, so nothing is included. A pair p is
// choice p % top_k of token p / top_k.
//
// A sum has one order, which does not depend on the grid, the alignment, or the split into launches
// and into waves. Each operation says how it rounds, in PTX: CuPy compiles with -ftz=true, which
// would make numbers below 2^-126 zero in every operation of C++ and in __fmaf_rn and its like, and
// has no say in what asm gives. It is compiled with -fmad=false besides: a product and a sum that
// some later line leaves to the compiler are rounded twice in every kernel.

#ifndef MOECACHE_EMULATED
__device__ inline float half_to_float(unsigned short bits)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// The lower and the upper half of a word.
__device__ inline void halves_to_floats(unsigned word, float& low, float& high)
{
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(low), "=f"(high)
        : "r"(word));
}

__device__ inline unsigned short float_to_half(float x)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ inline float fma_rn(float a, float b, float c)
{
    float x;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(a), "f"(b), "f"(c));
    return x;
}

__device__ inline float mul_rn(float a, float b)
{
    float x;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}

__device__ inline float add_rn(float a, float b)
{
    float x;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}

__device__ inline float div_rn(float a, float b)
{
    float x;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}

__device__ inline bool is_less(float a, float b)
{
    unsigned found;
    asm("{ .reg .pred p; setp.lt.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(found)
        : "f"(a), "f"(b));
    return found;
}
#endif

typedef unsigned char u8;
typedef unsigned long long u64;

enum Activation { SILU, GELU, GELU_TANH, RELU, RELU2, SWIGLU, CLAMPED_SILU };
enum IdsKind { IDS_INT32, IDS_INT64 };
enum WeightsKind { WEIGHTS_FLOAT32, WEIGHTS_AS_HIDDEN };
enum BiasKind { NO_BIAS, BIAS_F32, BIAS_F16, BIAS_BF16 };

constexpr unsigned NUM_WARPS = 8; // of a block
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr unsigned NOT_A_NUMBER = 0x7fc00000u;

struct F32 {
    using Bits = unsigned;
    static __device__ float widen(unsigned bits) { return __uint_as_float(bits); }
    static __device__ Bits narrow(float x) { return __float_as_uint(x); }
};

struct F16 {
    using Bits = unsigned short;
    static constexpr bool IS_BRAIN = false;
    static __device__ float widen(unsigned bits) { return half_to_float((unsigned short)bits); }
    static __device__ Bits narrow(float x) { return float_to_half(x); }
};

struct BF16 {
    using Bits = unsigned short;
    static constexpr bool IS_BRAIN = true;
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

// A lane loads one chunk at once. Lanes take chunks whether rows are aligned or not, so that the
// order of a sum does not depend on alignment.
constexpr int CHUNK_BYTES = 16;
template <class D> constexpr unsigned PER_CHUNK = CHUNK_BYTES / sizeof(typename D::Bits);

template <class D, class... Pointers>
__device__ inline bool is_chunked(unsigned n, Pointers... rows)
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
    if constexpr (N == 1)
        values[0] = D::widen(*row);
    else
#pragma unroll
        for (unsigned first = 0; first < N; first += PER_CHUNK<D>) {
            // A copy: through a reference to memory the compiler loads the words one by one.
            const uint4 chunk = *(const uint4*)(row + first);
            for (unsigned i = 0; i < PER_CHUNK<D>; i++) values[first + i] = element<D>(chunk, i);
        }
}

// N elements, one or one chunk.
template <class D, unsigned N>
__device__ inline void store(typename D::Bits* row, const float* values)
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
        return div_rn(mul_rn(x, x >= 0.0f ? 1.0f : small), add_rn(1.0f, small));
    }
    case GELU: {
        const float share = add_rn(1.0f, erff(mul_rn(x, 0.70710678f)));
        return mul_rn(mul_rn(0.5f, x), share);
    }
    case GELU_TANH: {
        const float cube = mul_rn(mul_rn(x, x), x);
        const float inner = mul_rn(0.79788456f, fma_rn(0.044715f, cube, x));
        return mul_rn(mul_rn(0.5f, x), add_rn(1.0f, tanhf(inner)));
    }
    case RELU:
    case RELU2: {
        const float kept = is_less(x, 0.0f) ? 0.0f : x; // fmaxf loses a NaN
        return activation == RELU ? kept : mul_rn(kept, kept);
    }
    default:
        return __uint_as_float(NOT_A_NUMBER);
    }
}

// act(gate) * up. gpt-oss's SWIGLU and CLAMPED_SILU limit both, gate from above alone; a NaN passes.
__device__ inline float gated(float gate, float up, int activation, float alpha, float limit)
{
    if (activation < SWIGLU) return mul_rn(activated(gate, activation), up);
    gate = is_less(limit, gate) ? limit : gate;
    up = is_less(limit, up) ? limit : is_less(up, -limit) ? -limit : up;
    if (activation == CLAMPED_SILU) return mul_rn(activated(gate, SILU), up);
    const float share = add_rn(1.0f, expf(mul_rn(-alpha, gate)));
    return mul_rn(div_rn(gate, share), add_rn(up, 1.0f));
}

template <class D> __device__ inline float weight_of(const void* weights, int kind, long long pair)
{
    if (kind == WEIGHTS_FLOAT32) return ((const float*)weights)[pair];
    return D::widen(((Row<D>)weights)[pair]);
}

__device__ inline float add_weighted(float sum, float weight, float row)
{
    return add_rn(sum, mul_rn(weight, row));
}

// Blocks of the launch, looked up anew at each call: `decode` has no register to keep it in.
__device__ inline unsigned num_blocks()
{
#ifdef MOECACHE_EMULATED
    return gridDim.x;
#else
    unsigned number;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(number));
    return number;
#endif
}

// Every block has come this far before any goes on. The upper half of the counter is the number of
// barriers passed; the lower half is zero between them, so launches may differ in their grids.
__device__ inline void grid_barrier(u64* barrier)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const u64 share = blockIdx.x == 0 ? (1ull << 32) - (num_blocks() - 1) : 1;
        const u64 before = atomicAdd(barrier, share);
        while (*(volatile u64*)barrier >> 32 == before >> 32) __nanosleep(32);
        __threadfence();
    }
    __syncthreads();
}

// Memory of a block, one object for each type.
#ifndef MOECACHE_EMULATED
template <class T> __device__ inline T& block_memory()
{
    __shared__ T memory;
    return memory;
}
#endif
