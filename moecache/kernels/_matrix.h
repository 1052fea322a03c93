/* Matrices, inputs and activations as the kernels take them. */
#ifndef MOECACHE_MATRIX_H
#define MOECACHE_MATRIX_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_numbers.h"

/* Rows that a tile has, and rows that lie interleaved in the compute form. */
#define MC_TILE 16
/* Columns whose codes lie together. */
#define MC_BLOCK 32
/* Columns that share a number by which their integer scales are multiplied. */
#define MC_SUPER 256

/* Codes of weights, a row each: name, what Python calls it, bits, what is added to a stored integer, whether
 * they are integers (2: a table of such), and in which unit these count. I have half of their range added, U
 * are as they are, E2M1 and E4M3 are OCP's FP4 and FP8, IQ an index of a table. A new one needs a row here and
 * its forms in `MC_FORMS`. */
#define MC_CODES(X)                 \
    X(I8, "i8", 8, 0, 1, 1.0f)      \
    X(I4, "i4", 4, 8, 1, 1.0f)      \
    X(E4M3, "e4m3", 8, 0, 0, 1.0f)  \
    X(E2M1, "e2m1", 4, 0, 2, 0.5f)  \
    X(U4, "u4", 4, 0, 1, 1.0f)      \
    X(IQ4, "iq4", 4, 0, 2, 1.0f)    \
    X(I5, "i5", 5, 16, 1, 1.0f)     \
    X(U5, "u5", 5, 0, 1, 1.0f)      \
    X(I6, "i6", 6, 32, 1, 1.0f)     \
    X(IQ1, "iq1", 4, 0, 2, 0.125f)  \
    X(IQ2, "iq2", 4, 0, 2, 0.125f)  \
    X(IQ3, "iq3", 4, 0, 2, 1.0f)    \
    X(IQ3X, "iq3x", 4, 0, 2, 0.25f)

/* What codes of 4 bits mean, in their unit; NULL: a number. A table's first entry is 0 or what a file's zero
 * bytes mean. Those of IQ1 to IQ3 are the products of ggml's code books and signs; of IQ1 with its delta. */
#define MC_TABLES(X)                                                                              \
    X(E2M1, 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)                              \
    X(IQ4, -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)              \
    X(IQ1, -9, -7, -1, 1, 7, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)                                     \
    X(IQ2, -43, -25, -8, 8, 25, 43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)                                 \
    X(IQ3, -15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15)                          \
    X(IQ3X, -62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62)

/* How weights are stored: as numbers, or as codes that have a scale. MC_E8M0 are scales of a file. MC_IN_STEPS
 * are integers of 8 bits, which a number of 256 columns multiplies; MC_TIMES and MC_DIVIDED are scales of FP8
 * that a number of the whole matrix multiplies or divides. */
enum {
    MC_F32, MC_F16, MC_BF16,
#define MC_ENUM(name, ...) MC_##name,
    MC_CODES(MC_ENUM)
#undef MC_ENUM
    MC_NUM_CODES, MC_E8M0, MC_IN_STEPS, MC_TIMES, MC_DIVIDED
};
enum { MC_X_F32, MC_X_BF16, MC_X_PLANES };

/* What forms have beside their codes: scales of 16 columns, zero points, offsets, scales in two steps. */
enum { MC_PAIRS = 256, MC_ZEROS = 512, MC_OFFSETS = 1024, MC_SUPERS = 2048, MC_FLAGS = 16 };

/* Forms of integers that have tiles: codes, a suffix of names, flags. Others are refused. */
#define MC_FORMS(X)                                                   \
    X(I8, plain, 0)                                                   \
    X(I8, pairs, MC_PAIRS)                                            \
    X(I8, zeros, MC_ZEROS)                                            \
    X(I4, plain, 0)                                                   \
    X(I4, pairs, MC_PAIRS)                                            \
    X(I4, zeros, MC_ZEROS)                                            \
    X(I4, super_pairs, MC_SUPERS | MC_PAIRS)                          \
    X(E2M1, plain, 0)                                                 \
    X(E2M1, pairs, MC_PAIRS)                                          \
    X(U4, offsets, MC_OFFSETS)                                        \
    X(U4, super_offsets, MC_SUPERS | MC_OFFSETS)                      \
    X(U4, super_offsets_pairs, MC_SUPERS | MC_OFFSETS | MC_PAIRS)     \
    X(IQ4, plain, 0)                                                  \
    X(IQ4, super, MC_SUPERS)                                          \
    X(I5, plain, 0)                                                   \
    X(U5, offsets, MC_OFFSETS)                                        \
    X(U5, super_offsets, MC_SUPERS | MC_OFFSETS)                      \
    X(I6, super_pairs, MC_SUPERS | MC_PAIRS)                          \
    X(IQ1, super, MC_SUPERS)                                          \
    X(IQ1, super_pairs, MC_SUPERS | MC_PAIRS)                         \
    X(IQ2, super, MC_SUPERS)                                          \
    X(IQ2, super_pairs, MC_SUPERS | MC_PAIRS)                         \
    X(IQ3, super, MC_SUPERS)                                          \
    X(IQ3X, super, MC_SUPERS)

/* 32 columns of an input for weights that are integers: column i is scale * (128 * high[i] + low[i]), the
 * nearest of 15 bits, ties to even; the scale is max|x| / 16256 times the unit of the codes. A block with an
 * infinity or a NaN has a scale of NaN and zeros. A block with max|x| < 2^-109, whose scale would be denormal
 * in some unit, is all zero. For weights of less than 8 bits each 8 columns are in the order 0, 4,
 * 1, 5, 2, 6, 3, 7: that of the low and high nibbles of a row's 4 bytes, see `kernels/forms.py`. */
typedef struct {
    float scale;
    float totals[3]; /* sums * scale */
    int32_t sums[3]; /* of the integers: the first 16 columns, the others, all */
    union {
        struct {
            int8_t high[MC_BLOCK], low[MC_BLOCK];
        };
        /* 128 * high + low, for a level that multiplies 16 bits by 16: of each four the first, the third,
         * the second and the fourth. */
        int16_t whole[MC_BLOCK];
    };
} mc_planes;

/* A weight matrix [rows, columns]. Codes lie in their compute form (`formats/form.py`), in groups of 16
 * rows. A group begins with a factor of all scales, if any. Every 256 columns begin with a number for scales
 * and one for offsets, if any. Every `group` columns have 16 scales, then 16 zero points or offsets, if any,
 * then the codes of 16 rows. */
typedef struct {
    const uint8_t *data;
    int64_t rows, columns;
    int64_t row_bytes; /* from a row to the next; for codes, from 16 rows to the next */
    int64_t group;     /* for codes: columns that share a scale, 16 or a multiple of 32 */
    int codes;
    int scale;     /* MC_F32, MC_F16 or MC_BF16, for zero points, too; or MC_IN_STEPS and beyond */
    int has_zeros; /* a value is (code + zero point) * scale */
    int has_offsets; /* or code * scale + offset */
} mc_matrix;

/* How a file orders the codes of 32 columns: bytes, or bytes with 128 added; two columns in a byte, the
 * even one in its low nibble; or the first 16 columns in low nibbles, the others in high ones (ggml).
 *
 * GPTQ has words of 32 bits with 4, 8 or 16 columns of a row; words of the same columns lie row by row. AWQ
 * has words with 8 rows of a column, rows 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on. Both have zero
 * points, in words of as many rows. ggml's blocks are halves that have FP4 with one zero, and the blocks of
 * `_blocks.h`, with their scales. SUPER32 and SUPER16 are no file's: a float16, integers of 8 bits for each 32 or
 * 16 columns, then halves. */
#define MC_ORDERS(X)                          \
    X(BYTES, "bytes", form_of)                \
    X(OFFSET_BYTES, "offset bytes", form_of)  \
    X(NIBBLES, "nibbles", form_of)            \
    X(HALVES, "halves", form_of)              \
    X(HALVES_FP4, "halves fp4", form_of)      \
    X(GPTQ2, "gptq2", form_words)             \
    X(GPTQ4, "gptq4", form_words)             \
    X(GPTQ8, "gptq8", form_words)             \
    X(AWQ, "awq", form_words)                 \
    X(Q4_1, "q4_1", form_blocks)              \
    X(Q5_0, "q5_0", form_blocks)              \
    X(Q5_1, "q5_1", form_blocks)              \
    X(Q2_K, "q2_k", form_blocks)              \
    X(Q3_K, "q3_k", form_blocks)              \
    X(Q4_K, "q4_k", form_blocks)              \
    X(Q5_K, "q5_k", form_blocks)              \
    X(Q6_K, "q6_k", form_blocks)              \
    X(IQ4_XS, "iq4_xs", form_blocks)          \
    X(SUPER32, "super32", form_blocks)        \
    X(SUPER16, "super16", form_blocks)
typedef enum {
#define MC_ENUM(name, ...) MC_##name,
    MC_ORDERS(MC_ENUM)
#undef MC_ENUM
    MC_NUM_ORDERS
} mc_order;

/* Names as Python has them. */
static const char *const mc_code_names[] = {
#define MC_NAME(name, text, ...) text,
    MC_CODES(MC_NAME)
};
static const char *const mc_order_names[] = {
    MC_ORDERS(MC_NAME)
#undef MC_NAME
};

/* A matrix of codes in the order of a file: rows one after the other, scales apart or between. */
typedef struct {
    const uint8_t *codes, *scales;
    int64_t rows, columns, group;
    int64_t row_bytes, block_bytes; /* from a row to the next; from 32 columns to the next */
    int64_t scale_rows;             /* rows that share their scales */
    int64_t scale_row_bytes, scale_step; /* from such rows to the next; from a scale to the next */
    int64_t num_scales;                  /* in a row */
    mc_order order;
    int scale;                           /* that of a matrix, or MC_E8M0 */
    uint32_t largest; /* scale that makes no code infinite: bits, without the sign, as in the form */
    const uint8_t *factor;               /* of MC_TIMES and MC_DIVIDED */
    int zero;                            /* byte of codes that mean zero */
    /* For words, `row_bytes` leads from the words of some columns to the next, `scale_row_bytes` and
     * `zero_row_bytes` from a group to the next. */
    const uint8_t *zeros;
    int64_t zero_row_bytes;
    const uint32_t *zero_points; /* for each stored integer, the bits of a number of the scale's type */
} mc_file;

enum {
    MC_SILU,
    MC_GELU,
    MC_GELU_TANH,
    MC_SWIGLU,
    MC_RELU,
    MC_RELU2,
    MC_CLAMPED_SILU,
    MC_NUM_ACTIVATIONS
};

typedef struct {
    int kind;
    float alpha, limit; /* of MC_SWIGLU; the limit of MC_CLAMPED_SILU, too */
} mc_activation;

static inline int mc_is_coded(const mc_matrix *matrix) { return matrix->codes >= MC_I8; }

/* A property of codes. */
#define MC_BITS(name, text, bits, bias, is_integer, unit) case MC_##name: return bits;
static inline int mc_code_bits(int codes)
{
    switch (codes) { MC_CODES(MC_BITS) }
    return 0;
}
#undef MC_BITS

/* Whether inputs are integers, too. */
#define MC_INTEGER(name, text, bits, bias, is_integer, unit) case MC_##name: return is_integer;
static inline int mc_is_integer(int codes)
{
    switch (codes) { MC_CODES(MC_INTEGER) }
    return 0;
}
#undef MC_INTEGER

/* In what a code's integers count: a power of two. */
#define MC_UNIT(name, text, bits, bias, is_integer, unit) case MC_##name: return unit;
static inline float mc_unit(int codes)
{
    switch (codes) { MC_CODES(MC_UNIT) }
    return 1;
}
#undef MC_UNIT

/* What 16 codes mean, or NULL. */
#define MC_TABLE(name, ...) case MC_##name: { static const int8_t table[16] = {__VA_ARGS__}; return table; }
static inline const int8_t *mc_table(int codes)
{
    switch (codes) { MC_TABLES(MC_TABLE) }
    return NULL;
}
#undef MC_TABLE

/* Bytes of `num` codes. Codes of 5 and 6 bits: the nibbles of 32 columns, then the bits above them. */
static inline int64_t mc_code_bytes(int codes, int64_t num) { return num * mc_code_bits(codes) / 8; }

/* The number added to integers that are stored. */
#define MC_ADDED(name, text, bits, bias, is_integer, unit) case MC_##name: return bias;
static inline int mc_bias(int codes)
{
    switch (codes) { MC_CODES(MC_ADDED) }
    return 0;
}
#undef MC_ADDED

static inline int mc_has_factor(int scale) { return scale >= MC_TIMES; }

static inline int64_t mc_scale_bytes(int scale)
{
    return scale == MC_F32 ? 4 : scale >= MC_IN_STEPS ? 1 : 2;
}

/* Bytes of the factor at the beginning of 16 rows. */
static inline int64_t mc_factor_bytes(int scale) { return mc_has_factor(scale) ? 64 : 0; }

/* The number that multiplies or divides scales, or sums of products with them. */
static inline float mc_factor(const uint8_t *tile)
{
    float factor;
    memcpy(&factor, tile, 4);
    return factor;
}

static inline int mc_has_terms(const mc_matrix *matrix)
{
    return matrix->has_zeros || matrix->has_offsets;
}

/* Groups of 16 columns come in pairs: two times the scales, two times the offsets, then the codes. */
static inline int mc_block_groups(const mc_matrix *matrix) { return matrix->group < MC_BLOCK ? 2 : 1; }

/* Bytes of the scales before the codes; zero points or offsets behind them take as many. */
static inline int64_t mc_head_bytes(const mc_matrix *matrix)
{
    return MC_TILE * mc_scale_bytes(matrix->scale) * mc_block_groups(matrix);
}

/* Bytes of the numbers before 256 columns. */
static inline int64_t mc_super_bytes(const mc_matrix *matrix)
{
    return 2 * MC_TILE * (1 + matrix->has_offsets);
}

/* Columns of an input: whole blocks if weights are codes. */
static inline int64_t mc_input_columns(const mc_matrix *matrix)
{
    int64_t filled = (matrix->columns + MC_BLOCK - 1) & ~(int64_t)(MC_BLOCK - 1);
    return mc_is_coded(matrix) ? filled : matrix->columns;
}

static inline int64_t mc_input_bytes(int type) { return type == MC_X_F32 ? 4 : 2; }

/* Bytes of an input. */
static inline int64_t mc_input_row_bytes(int type, int64_t columns)
{
    if (type == MC_X_PLANES)
        return columns / MC_BLOCK * (int64_t)sizeof(mc_planes);
    return columns * mc_input_bytes(type);
}

/* Which of a code's tiles multiplies a matrix of integers. */
static inline int mc_flags(const mc_matrix *matrix)
{
    return (mc_block_groups(matrix) == 2 ? MC_PAIRS : 0) | (matrix->has_zeros ? MC_ZEROS : 0)
        | (matrix->has_offsets ? MC_OFFSETS : 0) | (matrix->scale == MC_IN_STEPS ? MC_SUPERS : 0);
}

/* Whether two matrices of as many columns multiply the same inputs. */
static inline int mc_are_alike(const mc_matrix *a, const mc_matrix *b)
{
    return a->codes == b->codes && mc_flags(a) == mc_flags(b);
}

/* Numbers of a type of inputs, to fp32 and from it. */
static inline void mc_to_f32(const uint8_t *from, int type, int64_t num, float *to)
{
    if (type == MC_X_F32) {
        memcpy(to, from, (size_t)num * 4);
        return;
    }
    for (int64_t i = 0; i < num; i++) {
        uint16_t bits;
        memcpy(&bits, from + 2 * i, 2);
        to[i] = mc_bf16_to_float(bits);
    }
}

static inline void mc_from_f32(const float *from, int64_t num, int type, uint8_t *to)
{
    if (type == MC_X_F32) {
        memcpy(to, from, (size_t)num * 4);
        return;
    }
    for (int64_t i = 0; i < num; i++) {
        uint16_t bits = mc_float_to_bf16(from[i]);
        memcpy(to + 2 * i, &bits, 2);
    }
}

#endif
