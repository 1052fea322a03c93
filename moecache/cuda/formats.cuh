// Quantised matrices as files have them, dequantised in registers; moecache/formats defines and
// checks the meaning of the bytes.
//
// A lane takes units of 32 columns, in two runs of 16 that have a scale each. It first sums code
// times x over a run, then multiplies by the scale once: sum = scale * (code * x + ...) + sum, all
// of it fused. So a single column's product is the format's value, rounded as the format says.
//
// A read of 16 bytes from any address takes whole words that contain one of these bytes.

constexpr unsigned UNIT = 32, RUN = 16;

template <bool IS_ALIGNED> __device__ inline uint4 load_bytes(const u8* at)
{
    if (IS_ALIGNED) return __ldcs((const uint4*)at);
    const unsigned shift = (u64)at % 4 * 8;
    const auto words = (const unsigned*)(at - (u64)at % 4);
    const unsigned last = shift ? words[4] : 0;
    const unsigned w0 = words[0], w1 = words[1], w2 = words[2], w3 = words[3];
    return make_uint4(
        __funnelshift_r(w0, w1, shift), __funnelshift_r(w1, w2, shift),
        __funnelshift_r(w2, w3, shift), __funnelshift_r(w3, last, shift));
}

// The same for the `left` bytes that exist, then zeros.
__device__ inline uint4 load_last_bytes(const u8* at, unsigned left)
{
    unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
    for (unsigned i = 0; i < 16; i++)
        if (i < left) words[i / 4] |= (unsigned)at[i] << i % 4 * 8;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ inline unsigned short load_half(const u8* at) { return *(const unsigned short*)at; }
__device__ inline float f16_at(const u8* at) { return half_to_float(load_half(at)); }

// Four bytes as the floats `byte - bias`: below 2^23 a float's low bits are an integer.
template <unsigned STEP>
__device__ inline void integers(unsigned bytes, float bias, float* codes)
{
#pragma unroll
    for (unsigned i = 0; i < 4; i++) {
        const unsigned bits = __byte_perm(bytes, 0x4b000000u, 0x7440u | i);
        codes[i * STEP] = add_rn(__uint_as_float(bits), -(8388608.0f + bias));
    }
}

// Four bytes as the upper bytes of halves.
template <unsigned STEP> __device__ inline void upper_halves(unsigned bytes, float* codes)
{
#pragma unroll
    for (unsigned i = 0; i < 4; i += 2) {
        const unsigned word = __byte_perm(bytes, 0, i ? 0x3424 : 0x1404);
        halves_to_floats(word, codes[i * STEP], codes[(i + 1) * STEP]);
    }
}

// Four FP4 in the lower halves of bytes, 2^-14 times their value: a half's exponent has a bias of
// 15, FP4's a bias of 1, and both have subnormal numbers.
template <unsigned STEP> __device__ inline void fp4(unsigned nibbles, float* codes)
{
    upper_halves<STEP>((nibbles & 0x08080808u) << 4 | (nibbles & 0x07070707u) << 1, codes);
}

constexpr unsigned LOW_NIBBLES = 0x0f0f0f0fu;
constexpr float FP4_FACTOR = 16384.0f;

// 16 codes of the formats of safetensors: FACTOR times `read` is their value.
struct E4M3 {
    static constexpr unsigned BITS = 8;
    static constexpr float FACTOR = 1.0f;

    static __device__ void read(const unsigned* words, float* codes)
    {
#if !defined(MOECACHE_EMULATED) && __CUDA_ARCH__ >= 890
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            unsigned pairs[2];
            asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; "
                "cvt.rn.f16x2.e4m3x2 %1, h; }"
                : "=r"(pairs[0]), "=r"(pairs[1])
                : "r"(words[k]));
            halves_to_floats(pairs[0], codes[4 * k], codes[4 * k + 1]);
            halves_to_floats(pairs[1], codes[4 * k + 2], codes[4 * k + 3]);
        }
#else
        // As floats, whose exponent has a bias of 127, not 7.
        unsigned all_set = 0;
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            const unsigned size = words[k] & 0x7f7f7f7fu;
            all_set |= size + 0x01010101u;
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                const unsigned byte = words[k] >> 8 * i & 0xffu;
                const unsigned bits = (byte & 0x80u) << 24 | (byte & 0x7fu) << 20;
                codes[4 * k + i] = mul_rn(__uint_as_float(bits), 0x1p120f);
            }
        }
        // A code that is NaN makes the run's sum NaN, wherever it is.
        if (all_set & 0x80808080u) codes[0] = __uint_as_float(NOT_A_NUMBER);
#endif
    }
};

struct E2M1 {
    static constexpr unsigned BITS = 4;
    static constexpr float FACTOR = FP4_FACTOR;

    static __device__ void read(const unsigned* words, float* codes)
    {
#pragma unroll
        for (unsigned k = 0; k < 2; k++) {
            fp4<2>(words[k] & LOW_NIBBLES, codes + 8 * k);
            fp4<2>(words[k] >> 4 & LOW_NIBBLES, codes + 8 * k + 1);
        }
    }
};

struct Int4 {
    static constexpr unsigned BITS = 4;
    static constexpr float FACTOR = 1.0f;

    static __device__ void read(const unsigned* words, float* codes)
    {
#pragma unroll
        for (unsigned k = 0; k < 2; k++) {
            integers<2>(words[k] & LOW_NIBBLES, 8.0f, codes + 8 * k);
            integers<2>(words[k] >> 4 & LOW_NIBBLES, 8.0f, codes + 8 * k + 1);
        }
    }
};

struct Int8 {
    static constexpr unsigned BITS = 8;
    static constexpr float FACTOR = 1.0f;

    static __device__ void read(const unsigned* words, float* codes)
    {
#pragma unroll
        for (unsigned k = 0; k < 4; k++) integers<1>(words[k], 128.0f, codes + 4 * k);
    }
};

template <class D> struct PlainScale {
    static constexpr unsigned BYTES = sizeof(typename D::Bits);
    static __device__ float read(const u8* at) { return D::widen(*(const typename D::Bits*)at); }
};

// 2^(byte - 127), or NaN if the byte is 255.
struct PowerScale {
    static constexpr unsigned BYTES = 1;
    static __device__ float read(const u8* at)
    {
        if (*at == 255) return __uint_as_float(NOT_A_NUMBER);
        return __uint_as_float(*at ? (unsigned)*at << 23 : 0x00400000u);
    }
};

struct E4M3Scale {
    static constexpr unsigned BYTES = 1;
    static __device__ float read(const u8* at)
    {
        if ((*at & 0x7f) == 0x7f) return __uint_as_float(NOT_A_NUMBER);
        const unsigned bits = (*at & 0x80u) << 8 | (*at & 0x7fu) << 7;
        return mul_rn(half_to_float((unsigned short)bits), 256.0f);
    }
};

// A row of h as quantised rows of down want it: the first four numbers of all runs, then the next
// four of all, and so on. Lanes have runs of their own: with runs one behind the other, each lane's
// four would lie in a line of the cache of its own.
struct SpreadF32 : F32 {};

template <class D> struct Order {
    static constexpr unsigned TOGETHER = RUN; // numbers of a run that lie side by side
    static __device__ unsigned place(unsigned column, unsigned) { return column; }
};

template <> struct Order<SpreadF32> {
    static constexpr unsigned TOGETHER = 4;
    static __device__ unsigned place(unsigned column, unsigned n)
    {
        if (n % RUN) return column;
        const unsigned in_run = column % RUN;
        return in_run / TOGETHER * (n / TOGETHER) + column / RUN * TOGETHER + in_run % TOGETHER;
    }
};

// The inputs of a run, whose first is `column`; zeros beyond the row.
template <bool IS_ALIGNED, class X>
__device__ inline void load_inputs(Row<X> x, unsigned column, unsigned n, float* inputs)
{
    constexpr unsigned TOGETHER = Order<X>::TOGETHER;
    if constexpr (IS_ALIGNED) {
#pragma unroll
        for (unsigned i = 0; i < RUN; i += TOGETHER)
            load<X, TOGETHER>(x + Order<X>::place(column + i, n), inputs + i);
    } else
#pragma unroll
        for (unsigned i = 0; i < RUN; i++)
            inputs[i] = column + i < n ? X::widen(x[Order<X>::place(column + i, n)]) : 0.0f;
}

// Dot products, by a format F's functions for its units: fetch, column, codes, add.
template <class F> struct Quantized {
    using H = SpreadF32; // rows of h
    // More than plain numbers have: inputs are loaded and widened once for all rows, and a row alone
    // has few bytes to be under way. That takes the registers of a third block, and some pointers
    // lie in memory; on an H200 four rows, which need none there, took up to an eighth longer.
    static constexpr unsigned ROWS = 8, ELEMENTS = 3, BLOCKS = 2;

    // The dot products of some rows with x, by one warp: a lane has the sums of its columns.
    template <class X, unsigned ROWS, class At>
    static __device__ inline void dots(
        const At (&rows)[ROWS], Row<X> x, unsigned n, float (&sums)[ROWS])
    {
        bool is_aligned = n % UNIT == 0 && (u64)x % CHUNK_BYTES == 0;
#pragma unroll
        for (unsigned r = 0; r < ROWS; r++) {
            sums[r] = 0.0f;
            is_aligned = is_aligned && F::is_aligned(rows[r]);
        }
        if (is_aligned)
            add_units<true, X>(rows, x, n, sums);
        else
            add_unaligned<X>(rows, x, n, sums);
    }

    // Rows that are not aligned are rare, and take more registers than others: in a function that is
    // called, so that the kernel keeps its own in registers. What it is given lies in memory.
    template <unsigned ROWS, class At> struct Call {
        At rows[ROWS];
        float sums[ROWS];
    };

    template <class X, unsigned ROWS, class At>
    static __device__ __noinline__ void call_unaligned(
        Call<ROWS, At>& call, Row<X> x, unsigned n)
    {
        At rows[ROWS];
        float sums[ROWS];
#pragma unroll
        for (unsigned r = 0; r < ROWS; r++) {
            rows[r] = call.rows[r];
            sums[r] = 0.0f;
        }
        add_units<false, X>(rows, x, n, sums);
#pragma unroll
        for (unsigned r = 0; r < ROWS; r++) call.sums[r] = sums[r];
    }

    template <class X, unsigned ROWS, class At>
    static __device__ inline void add_unaligned(
        const At (&rows)[ROWS], Row<X> x, unsigned n, float (&sums)[ROWS])
    {
        Call<ROWS, At> call;
#pragma unroll
        for (unsigned r = 0; r < ROWS; r++) call.rows[r] = rows[r];
        call_unaligned<X>(call, x, n);
#pragma unroll
        for (unsigned r = 0; r < ROWS; r++) sums[r] = call.sums[r];
    }

    static __device__ unsigned num_units(unsigned n) { return (n + UNIT - 1) / UNIT; }

    // The values of a run, zeros where it is beyond the row.
    template <bool IS_ALIGNED, class At>
    static __device__ inline void values(
        const At& row, unsigned unit, unsigned run, unsigned n, float* found)
    {
#pragma unroll
        for (unsigned i = 0; i < RUN; i++) found[i] = 0.0f;
        if (F::column(unit, run) >= n) return;
        const auto raw = F::template fetch<IS_ALIGNED>(row, unit, n);
        float codes[RUN];
        // Not raw[run]: a lane's registers have no addresses.
        if (run == 0)
            F::codes(raw, 0, codes);
        else
            F::codes(raw, 1, codes);
#pragma unroll
        for (unsigned i = 0; i < RUN; i++)
            found[i] = run == 0 ? F::add(raw, 0, codes[i], 1.0f, 0.0f)
                                : F::add(raw, 1, codes[i], 1.0f, 0.0f);
    }

    template <bool IS_ALIGNED, class X, unsigned ROWS, class At>
    static __device__ inline void add_units(
        const At (&rows)[ROWS], Row<X> x, unsigned n, float (&sums)[ROWS])
    {
#pragma unroll 1
        for (unsigned unit = threadIdx.x % 32; unit < num_units(n); unit += 32) {
            typename F::Raw raw[ROWS];
#pragma unroll
            for (unsigned r = 0; r < ROWS; r++)
                raw[r] = F::template fetch<IS_ALIGNED>(rows[r], unit, n);
#pragma unroll
            for (unsigned run = 0; run < 2; run++) {
                const unsigned column = F::column(unit, run);
                if (column >= n) break;
                float inputs[RUN], input_sum = 0.0f;
                load_inputs<IS_ALIGNED, X>(x, column, n, inputs);
                if constexpr (F::HAS_OFFSETS)
#pragma unroll
                    for (unsigned i = 0; i < RUN; i++) input_sum = add_rn(input_sum, inputs[i]);
#pragma unroll
                for (unsigned r = 0; r < ROWS; r++) {
                    float codes[RUN], sum = 0.0f;
                    F::codes(raw[r], run, codes);
#pragma unroll
                    for (unsigned i = 0; i < RUN; i++) sum = fma_rn(codes[i], inputs[i], sum);
                    sums[r] = F::add(raw[r], run, sum, input_sum, sums[r]);
                }
            }
        }
    }
};

enum Global { NONE, DIVIDES, MULTIPLIES };

// Codes row by row, scales of blocks (0 rows or columns means all), a number of the whole matrix.
template <class Code, int BLOCK_ROWS, int BLOCK_COLUMNS, class Scale, Global GLOBAL = NONE>
struct Scaled : Quantized<Scaled<Code, BLOCK_ROWS, BLOCK_COLUMNS, Scale, GLOBAL>> {
    static constexpr unsigned UNIT_BYTES = UNIT * Code::BITS / 8, WORDS = UNIT_BYTES / 4;
    static constexpr bool HAS_OFFSETS = false;
#if !defined(MOECACHE_EMULATED) && __CUDA_ARCH__ >= 1000
    // Eight rows of bytes spill there.
    static constexpr unsigned ROWS = Code::BITS == 8 ? 6 : 8;
#endif

    struct At {
        const u8 *codes, *scales;
        float whole;
    };

    struct Raw {
        unsigned words[WORDS];
        float scales[2];
    };

    static __device__ long long blocks(int size, int step)
    {
        return step ? (size + step - 1) / step : 1;
    }

    static __device__ long long code_bytes(int rows, int columns)
    {
        return (long long)rows * columns / 8 * Code::BITS
            + (long long)rows * columns % 8 * Code::BITS / 8;
    }

    static __device__ long long scale_bytes(int rows, int columns)
    {
        return blocks(rows, BLOCK_ROWS) * blocks(columns, BLOCK_COLUMNS) * Scale::BYTES;
    }

    static __device__ long long matrix_bytes(int rows, int columns)
    {
        return code_bytes(rows, columns) + scale_bytes(rows, columns) + (GLOBAL ? 4 : 0);
    }

    static __device__ At row(const u8* matrix, long long index, int rows, int columns)
    {
        const u8* scales = matrix + code_bytes(rows, columns);
        const u8* whole = scales + scale_bytes(rows, columns);
        const long long block = BLOCK_ROWS ? index / (BLOCK_ROWS ? BLOCK_ROWS : 1) : 0;
        return {
            matrix + index * (columns / 8 * Code::BITS + columns % 8 * Code::BITS / 8),
            scales + block * blocks(columns, BLOCK_COLUMNS) * Scale::BYTES,
            GLOBAL ? *(const float*)whole : 1.0f};
    }

    static __device__ bool is_aligned(const At& at) { return (u64)at.codes % 16 == 0; }
    static __device__ unsigned column(unsigned unit, unsigned run)
    {
        return unit * UNIT + run * RUN;
    }

    template <bool IS_ALIGNED> static __device__ Raw fetch(const At& at, unsigned unit, unsigned n)
    {
        Raw raw;
        const u8* first = at.codes + unit * UNIT_BYTES;
#pragma unroll
        for (unsigned k = 0; k < UNIT_BYTES / 16; k++) {
            const unsigned left = n * Code::BITS / 8 - (unit * UNIT_BYTES + k * 16);
            // Beyond the row the unsigned difference is large: nothing is loaded there below.
            const bool is_whole = IS_ALIGNED || (left >= 16 && left <= n);
            const uint4 found = is_whole ? load_bytes<IS_ALIGNED>(first + k * 16)
                                         : load_last_bytes(first + k * 16, left > n ? 0 : left);
            raw.words[4 * k] = found.x;
            raw.words[4 * k + 1] = found.y;
            raw.words[4 * k + 2] = found.z;
            raw.words[4 * k + 3] = found.w;
        }
        raw.scales[0] = scale(at, column(unit, 0));
        raw.scales[1] = raw.scales[0];
        if (BLOCK_COLUMNS % UNIT != 0 && column(unit, 1) < n)
            raw.scales[1] = scale(at, column(unit, 1));
        return raw;
    }

    static __device__ float scale(const At& at, unsigned column)
    {
        const unsigned block = BLOCK_COLUMNS ? column / (BLOCK_COLUMNS ? BLOCK_COLUMNS : 1) : 0;
        const float found = Scale::read(at.scales + block * Scale::BYTES);
        if (GLOBAL == DIVIDES) return div_rn(found, at.whole);
        return GLOBAL == MULTIPLIES ? mul_rn(found, at.whole) : found;
    }

    static __device__ void codes(const Raw& raw, unsigned run, float* codes)
    {
        Code::read(raw.words + run * WORDS / 2, codes);
    }

    static __device__ float add(const Raw& raw, unsigned run, float sum, float, float before)
    {
        if (Code::FACTOR != 1.0f) sum = mul_rn(sum, Code::FACTOR);
        return fma_rn(raw.scales[run], sum, before);
    }
};
