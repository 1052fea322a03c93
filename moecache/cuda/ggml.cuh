// ggml's formats, of blocks of 32 columns and of 256; moecache/formats has their definitions.

template <class F, unsigned COLUMNS, unsigned BYTES> struct Blocks : Quantized<F> {
    static constexpr bool HAS_OFFSETS = false;
    using At = const u8*;

    static __device__ long long row_bytes(int columns)
    {
        return columns / COLUMNS * (long long)BYTES;
    }

    static __device__ long long matrix_bytes(int rows, int columns)
    {
        return rows * row_bytes(columns);
    }

    static __device__ At row(const u8* matrix, long long index, int, int columns)
    {
        return matrix + index * row_bytes(columns);
    }

    // Blocks that are no multiple of 16 bytes are read word by word wherever they are.
    static __device__ bool is_aligned(At at) { return BYTES % 16 != 0 || (u64)at % 16 == 0; }

    static __device__ unsigned column(unsigned unit, unsigned run)
    {
        return unit * UNIT + run * RUN;
    }

    template <class Raw>
    static __device__ float add(const Raw& raw, unsigned run, float sum, float, float before)
    {
        return fma_rn(raw.scale(run), sum, before);
    }
};

__device__ inline unsigned word_of(const uint4& words, unsigned k)
{
    return k == 0 ? words.x : k == 1 ? words.y : k == 2 ? words.z : words.w;
}

// 32 nibbles: a run takes the lower ones of 16 bytes, or the upper ones.
__device__ inline unsigned nibbles_of(const uint4& words, unsigned k, unsigned run)
{
    return word_of(words, k) >> 4 * run & LOW_NIBBLES;
}

__device__ inline uint4 shifted(const uint4& words, unsigned shift)
{
    return make_uint4(words.x >> shift, words.y >> shift, words.z >> shift, words.w >> shift);
}

struct Q8_0 : Blocks<Q8_0, 32, 34> {
    static constexpr unsigned ROWS = 4; // eight were no faster

    struct Raw {
        uint4 bytes[2];
        float d;
        __device__ float scale(unsigned) const { return d; }
    };

    template <bool IS_ALIGNED> static __device__ Raw fetch(At row, unsigned unit, unsigned)
    {
        const u8* block = row + unit * 34;
        return {{load_bytes<false>(block + 2), load_bytes<false>(block + 18)}, f16_at(block)};
    }

    static __device__ void codes(const Raw& raw, unsigned run, float* codes)
    {
#pragma unroll
        for (unsigned k = 0; k < 4; k++)
            integers<1>(word_of(raw.bytes[run], k) ^ 0x80808080u, 128.0f, codes + 4 * k);
    }
};

struct Q4_0 : Blocks<Q4_0, 32, 18> {
    struct Raw {
        uint4 bytes;
        float d;
        __device__ float scale(unsigned) const { return d; }
    };

    template <bool IS_ALIGNED> static __device__ Raw fetch(At row, unsigned unit, unsigned)
    {
        const u8* block = row + unit * 18;
        return {load_bytes<false>(block + 2), f16_at(block)};
    }

    static __device__ void codes(const Raw& raw, unsigned run, float* codes)
    {
#pragma unroll
        for (unsigned k = 0; k < 4; k++)
            integers<1>(nibbles_of(raw.bytes, k, run), 8.0f, codes + 4 * k);
    }
};

// Twice FP4, times 2^(byte - 128).
struct Mxfp4Gguf : Blocks<Mxfp4Gguf, 32, 17> {
    struct Raw {
        uint4 bytes;
        unsigned power;

        __device__ float scale(unsigned) const
        {
            return __uint_as_float(power > 1 ? power - 1 << 23 : 0x00200000u << power);
        }
    };

    template <bool IS_ALIGNED> static __device__ Raw fetch(At row, unsigned unit, unsigned)
    {
        const u8* block = row + unit * 17;
        return {load_bytes<false>(block + 1), *block};
    }

    static __device__ void codes(const Raw& raw, unsigned run, float* codes)
    {
#pragma unroll
        for (unsigned k = 0; k < 4; k++) fp4<1>(nibbles_of(raw.bytes, k, run), codes + 4 * k);
    }

    static __device__ float add(const Raw& raw, unsigned run, float sum, float, float before)
    {
        return fma_rn(raw.scale(run), mul_rn(sum, 2 * FP4_FACTOR), before);
    }
};

// q4_k, and q5_k, whose fifth bits lie apart. The first 32 of each 64 columns are low nibbles; a
// unit is half of both, so that each byte is loaded once. 32 columns have six bits of scale and six
// of offset.
template <class F, unsigned BYTES> struct Q45K : Blocks<F, 256, BYTES> {
    static constexpr bool HAS_OFFSETS = true, HAS_FIFTH = BYTES == 176;
    using At = const u8*;

    struct Raw {
        uint4 low, fifth;
        float scales[2], offsets[2];
    };

    static __device__ unsigned column(unsigned unit, unsigned run)
    {
        return unit / 8 * 256 + unit % 8 / 2 * 64 + run * 32 + unit % 2 * RUN;
    }

    template <bool IS_ALIGNED> static __device__ Raw fetch(At row, unsigned unit, unsigned)
    {
        const u8* block = row + unit / 8 * BYTES;
        const unsigned chunk = unit % 8 / 2, half = unit % 2 * 16;
        const uint4 head = IS_ALIGNED ? *(const uint4*)block : load_bytes<false>(block);
        Raw raw;
        raw.low = load_bytes<IS_ALIGNED>(block + BYTES - 128 + chunk * 32 + half);
        if (HAS_FIFTH) raw.fifth = shifted(load_bytes<IS_ALIGNED>(block + 16 + half), 2 * chunk);
        const float d = half_to_float((unsigned short)(head.x & 0xffffu));
        const float d_min = half_to_float((unsigned short)(head.x >> 16));
#pragma unroll
        for (unsigned run = 0; run < 2; run++) {
            const unsigned shift = (2 * chunk + run) % 4 * 8;
            unsigned scale = head.y >> shift & 0xffu, offset = head.z >> shift & 0xffu;
            const unsigned both = head.w >> shift & 0xffu;
            const bool is_first = chunk < 2;
            scale = is_first ? scale & 63 : (both & 15) | scale >> 6 << 4;
            offset = is_first ? offset & 63 : both >> 4 | offset >> 6 << 4;
            // Exact: 11 bits times 6.
            raw.scales[run] = mul_rn(d, (float)scale);
            raw.offsets[run] = mul_rn(d_min, (float)-(int)offset);
        }
        return raw;
    }

    static __device__ void codes(const Raw& raw, unsigned run, float* codes)
    {
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            unsigned bytes = nibbles_of(raw.low, k, run);
            if (HAS_FIFTH) bytes |= (word_of(raw.fifth, k) >> run & 0x01010101u) << 4;
            integers<1>(bytes, 0.0f, codes + 4 * k);
        }
    }

    static __device__ float add(
        const Raw& raw, unsigned run, float sum, float input_sum, float before)
    {
        return fma_rn(
            raw.offsets[run], input_sum, fma_rn(raw.scales[run], sum, before));
    }
};

struct Q4K : Q45K<Q4K, 144> {};
struct Q5K : Q45K<Q5K, 176> {
    static constexpr unsigned ROWS = 4, ELEMENTS = 2; // all that the registers hold
};

// The first 64 of each 128 columns are low nibbles of 64 bytes; two more bits of each code lie in
// 32 bytes, for 32 columns in turn. 16 columns share a scale of 8 bits.
struct Q6K : Blocks<Q6K, 256, 210> {
    static constexpr unsigned ROWS = 4, ELEMENTS = 2; // all that the registers hold

    struct Raw {
        uint4 low, high;
        float scales[2];
        __device__ float scale(unsigned run) const { return scales[run]; }
    };

    static __device__ unsigned column(unsigned unit, unsigned run)
    {
        return unit / 4 * 128 + unit % 4 * RUN + run * 64;
    }

    template <bool IS_ALIGNED> static __device__ Raw fetch(At row, unsigned unit, unsigned)
    {
        const u8* block = row + unit / 8 * 210;
        const unsigned half = unit % 8 / 4, part = unit % 4;
        const float d = f16_at(block + 208);
        const auto scales = (const signed char*)block + 192 + 8 * half + part;
        return {
            load_bytes<false>(block + 64 * half + 16 * part),
            shifted(load_bytes<false>(block + 128 + 32 * half + part % 2 * 16), part / 2 * 2),
            {mul_rn(d, (float)scales[0]), mul_rn(d, (float)scales[4])}};
    }

    static __device__ void codes(const Raw& raw, unsigned run, float* codes)
    {
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            const unsigned upper = word_of(raw.high, k) >> 4 * run & 0x03030303u;
            integers<1>(nibbles_of(raw.low, k, run) | upper << 4, 32.0f, codes + 4 * k);
        }
    }
};
