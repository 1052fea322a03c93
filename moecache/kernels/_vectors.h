/* Vectors of LANES numbers and the operations that tiles share: included once for each level, before
 * its tiles. */

typedef float LEVEL(vf) __attribute__((vector_size(LANES * 4)));
typedef int32_t LEVEL(vi) __attribute__((vector_size(LANES * 4)));
typedef uint32_t LEVEL(vu) __attribute__((vector_size(LANES * 4)));
typedef uint16_t LEVEL(vh) __attribute__((vector_size(LANES * 2)));
typedef uint8_t LEVEL(vb) __attribute__((vector_size(LANES * 4)));
#define vf LEVEL(vf)
#define vi LEVEL(vi)
#define vu LEVEL(vu)
#define vh LEVEL(vh)
#define vb LEVEL(vb)
#define INLINE static inline __attribute__((always_inline))
/* Never inlined: many call it, and copies gain little. */
#define SHARED static __attribute__((noinline))
/* Plain C takes many instructions for what is one elsewhere: its loops are no faster for being unrolled, and compile
 * five times as long. */
#ifdef ROLLED
#define UNROLL(number) MC_PRAGMA(GCC unroll 1)
#else
#define UNROLL(number) MC_PRAGMA(GCC unroll number)
#endif

INLINE vf LEVEL(all)(float value) { return value - (vf){0}; }

INLINE vf LEVEL(fma)(vf a, vf b, vf c)
{
#ifdef FMA
    return FMA(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE vf LEVEL(halves)(vh raw)
{
#ifdef F16C
    return F16C(raw);
#else
    vu bits = __builtin_convertvector(raw, vu);
    vu rest = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
    vu finite = (vu)((vf)rest * LEVEL(all)(0x1p112f)), large = rest + 0x70000000;
    vu is_large = (vu)(rest >= 0x0f800000);
    return (vf)(((is_large & large) | (~is_large & finite)) | sign);
#endif
}

/* Has a vector stay in a register: a compiler reads it again for each use, and a processor multiplies faster than it
 * reads. */
#if defined(__x86_64__)
#define KEEP(vector) __asm__("" : "+v"(vector))
#elif defined(__aarch64__)
#define KEEP(vector) __asm__("" : "+w"(vector))
#else
#define KEEP(vector) (void)(vector)
#endif

/* LANES bytes, each in 32 bits. */
INLINE vu LEVEL(widen)(const uint8_t *raw)
{
#ifdef WIDEN
    return WIDEN(raw);
#else
    vu words = {0};
    for (int i = 0; i < LANES; i++)
        words[i] = raw[i];
    return words;
#endif
}

/* The low halves of words below 2^16. */
INLINE vh LEVEL(narrow)(vu words)
{
#ifdef NARROW
    return NARROW(words);
#else
    return __builtin_convertvector(words, vh);
#endif
}

/* LANES words, each in 32 bits. */
INLINE vu LEVEL(lengthen)(vh raw)
{
#ifdef LENGTHEN
    return LENGTHEN(raw);
#else
    return __builtin_convertvector(raw, vu);
#endif
}

/* LANES columns of a row as fp32. */
INLINE vf LEVEL(load)(const uint8_t *at, int format)
{
    if (format == MC_F32) {
        vf values;
        memcpy(&values, at, sizeof values);
        return values;
    }
    vh raw;
    memcpy(&raw, at, sizeof raw);
    if (format == MC_F16)
        return LEVEL(halves)(raw);
    return (vf)(LEVEL(lengthen)(raw) << 16);
}

/* The sum of a register's lanes, by halves. */
INLINE float LEVEL(total)(vf sum)
{
    float lanes[LANES];
    memcpy(lanes, &sum, sizeof sum);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

/* The four columns of a row side by side, which lie in pairs: see `kernels/forms.py`. */
INLINE vu LEVEL(by_rows)(vu lanes)
{
#define PAIRS(i) i, i + 1, i + 8, i + 9, i + 2, i + 3, i + 10, i + 11, \
        i + 4, i + 5, i + 12, i + 13, i + 6, i + 7, i + 14, i + 15
    vb bytes = (vb)lanes;
#if LANES == 16
    return (vu)__builtin_shufflevector(bytes, bytes, PAIRS(0), PAIRS(16), PAIRS(32), PAIRS(48));
#elif LANES == 8
    return (vu)__builtin_shufflevector(bytes, bytes, PAIRS(0), PAIRS(16));
#else
    return (vu)__builtin_shufflevector(bytes, bytes, PAIRS(0));
#endif
#undef PAIRS
}
