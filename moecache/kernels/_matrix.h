/* Matrices and activations as the kernels take them, and the tables of a level's functions. */
#ifndef MOECACHE_MATRIX_H
#define MOECACHE_MATRIX_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Rows that a tile has, and rows that lie interleaved in the compute form. */
#define MC_TILE 16
/* Columns whose codes lie together. */
#define MC_BLOCK 32
/* Columns that share a number by which their integer scales are multiplied. */
#define MC_SUPER 256

/* What weights are stored as: numbers, or codes that have a scale. Those of 4 to 6 bits are integers with
 * half of their range added (I) or as they are (U), OCP's FP4, or an index of `mc_iq4`; those of 8 bits
 * signed integers, or OCP's FP8. MC_E8M0 are scales of a file. MC_IN_STEPS are integers of 8 bits, which a
 * number of 256 columns multiplies; MC_TIMES and MC_DIVIDED are scales of FP8 that a number of the whole
 * matrix multiplies or divides. */
enum {
    MC_F32, MC_F16, MC_BF16, MC_I8, MC_I4, MC_E4M3, MC_E2M1, MC_U4, MC_IQ4, MC_I5, MC_U5, MC_I6,
    MC_NUM_CODES, MC_E8M0, MC_IN_STEPS, MC_TIMES, MC_DIVIDED
};
static const int8_t mc_iq4[16] = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
};
enum { MC_X_F32, MC_X_BF16, MC_X_INT8, MC_NUM_INPUTS };

/* 32 columns of an input of MC_X_INT8: column i is scale * values[i]. As ggml's Q8_0, but for the
 * scale in fp32: max|x| / 127, and integers to the nearest, ties to even. What has an infinity or a
 * NaN is a scale of NaN and zeros; where max|x| < 127 * 2^-126, whose scale would be denormal, all is
 * zero. For weights of 4 bits each 8 values are in the order 0, 4, 1, 5, 2, 6, 3, 7: that of the
 * low and high nibbles of a row's 4 bytes, see `kernels/forms.py`. */
typedef struct {
    float scale;
    int32_t sum; /* of values */
    int8_t values[MC_BLOCK];
} mc_block8;

/* A weight matrix [rows, columns]. Codes lie in their compute form (`formats/form.py`): groups of 16
 * rows; in each, maybe a factor of all scales, for every 256 columns maybe a number for scales and one for
 * offsets, and for every `group` columns, 16 scales, maybe 16 zero points or offsets, and then the codes
 * of 16 rows. */
typedef struct {
    const uint8_t *data;
    int64_t rows, columns;
    int64_t row_bytes; /* from a row to the next; of codes, from 16 rows to the next */
    int64_t group;     /* of codes: columns that share a scale, 16 or a multiple of 32 */
    int codes;
    int scale;     /* MC_F32, MC_F16 or MC_BF16; of zero points, too; or MC_IN_STEPS and beyond */
    int has_zeros; /* a value is (code + zero point) * scale */
    int has_offsets; /* or code * scale + offset */
} mc_matrix;

/* How a file orders the codes of 32 columns: bytes, or bytes with 128 added; two columns in a byte, the
 * even one in its low nibble; or the first 16 columns in low nibbles, the others in high ones (ggml).
 *
 * Or in words of 32 bits, which have 4, 8 or 16 columns of a row, and lie row by row for each such columns
 * (GPTQ); or 8 rows of a column, rows 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on (AWQ). These have
 * zero points, in words of as many rows. Or as ggml's blocks: halves that have FP4 with one zero, and
 * those of `_blocks.h`, with their scales. */
enum {
    MC_BYTES, MC_OFFSET_BYTES, MC_NIBBLES, MC_HALVES, MC_HALVES_FP4, MC_GPTQ2, MC_GPTQ4, MC_GPTQ8, MC_AWQ,
    MC_Q4_1, MC_Q5_0, MC_Q5_1, MC_Q2_K, MC_Q3_K, MC_Q4_K, MC_Q5_K, MC_Q6_K, MC_IQ4_XS
};

/* A matrix of codes in the order of a file: rows one after the other, scales apart or between. */
typedef struct {
    const uint8_t *codes, *scales;
    int64_t rows, columns, group;
    int64_t row_bytes, block_bytes; /* from a row to the next; from 32 columns to the next */
    int64_t scale_rows;             /* rows that share their scales */
    int64_t scale_row_bytes, scale_step; /* from such rows to the next; from a scale to the next */
    int64_t num_scales;                  /* in a row */
    int order, scale;                    /* that of a matrix, or MC_E8M0 */
    const uint8_t *factor;               /* of MC_TIMES and MC_DIVIDED */
    int zero;                            /* byte of codes that mean zero */
    /* Of words: `row_bytes` is from such of some columns to the next; `scale_row_bytes` and
     * `zero_row_bytes` are from a group to the next. */
    const uint8_t *zeros;
    int64_t zero_row_bytes;
    const uint32_t *zero_points; /* by what is stored: the bits of a number of the scale's type */
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

/* Writes the products of rows [row, row + 16) with `num` inputs: out[i * 16 + r], fp32.
 * Rows beyond the matrix have any value. An input is `columns` numbers,
 * with zeros up to a whole block if weights are codes, or as many as `mc_block8`; behind them their sums
 * of each group, in fp32, if the matrix has zero points or offsets. */
typedef void (*mc_tile)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out);

/* Defines a tile that multiplies weights of one kind with `many` inputs at a time, then with `fewer`,
 * then with one: as many as registers hold. */
#define MC_TILE_BY(name, few, many, fewer, codes)                                             \
    static void name(                                                                         \
        const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num,      \
        float *out)                                                                           \
    {                                                                                         \
        int64_t t = 0;                                                                        \
        for (; t + (many) <= num; t += (many))                                                \
            few(matrix, row, inputs + t, many, out + t * MC_TILE, codes);                     \
        for (; t + (fewer) <= num; t += (fewer))                                              \
            few(matrix, row, inputs + t, fewer, out + t * MC_TILE, codes);                    \
        if ((fewer) > 1 && t < num)                                                           \
            few(matrix, row, inputs + t, 1, out + t * MC_TILE, codes);                        \
    }

typedef struct {
    const char *name;
    mc_tile tiles[MC_NUM_INPUTS][MC_NUM_CODES]; /* NULL: inputs are converted to fp32 first */
    void (*activate)(float *gate, const float *up, int64_t num, const mc_activation *how);
    void (*quantize)(const uint8_t *from, int type, int64_t columns, int codes, uint8_t *to);
    void (*sum)(const uint8_t *from, int type, int64_t columns, int64_t group, float *to);
    uint8_t *(*form)(const mc_file *file, int64_t row, uint8_t *out, int *wrong);
    void (*expand)(
        const mc_matrix *matrix, int64_t row, int type, uint8_t *out, int64_t out_row_bytes);
    uint32_t (*read)(const uint8_t *at, int64_t num);
} mc_level;

static inline int mc_is_coded(const mc_matrix *matrix) { return matrix->codes >= MC_I8; }

static inline int mc_code_bits(int codes)
{
    if (codes == MC_I8 || codes == MC_E4M3)
        return 8;
    return codes == MC_I6 ? 6 : codes == MC_I5 || codes == MC_U5 ? 5 : 4;
}

/* Bytes of so many codes: of 5 and 6 bits, the nibbles of 32 columns, then what is above them. */
static inline int64_t mc_code_bytes(int codes, int64_t num) { return num * mc_code_bits(codes) / 8; }

/* What is added to integers that are stored. */
static inline int mc_bias(int codes)
{
    return codes == MC_I4 ? 8 : codes == MC_I5 ? 16 : codes == MC_I6 ? 32 : 0;
}

static inline int mc_has_factor(int scale) { return scale >= MC_TIMES; }

static inline int64_t mc_scale_bytes(int scale)
{
    return scale == MC_F32 ? 4 : scale >= MC_IN_STEPS ? 1 : 2;
}

/* Bytes of the factor at the beginning of 16 rows. */
static inline int64_t mc_factor_bytes(int scale) { return mc_has_factor(scale) ? 64 : 0; }

/* What multiplies or divides scales, or sums of products with them. */
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

/* Bytes of the scales before the codes, of zero points or offsets behind them as many. */
static inline int64_t mc_head_bytes(const mc_matrix *matrix)
{
    return MC_TILE * mc_scale_bytes(matrix->scale) * mc_block_groups(matrix);
}

/* Bytes of the numbers before 256 columns. */
static inline int64_t mc_super_bytes(const mc_matrix *matrix)
{
    return 2 * MC_TILE * (1 + matrix->has_offsets);
}

/* Columns of an input: of codes, whole blocks. */
static inline int64_t mc_input_columns(const mc_matrix *matrix)
{
    int64_t filled = (matrix->columns + MC_BLOCK - 1) & ~(int64_t)(MC_BLOCK - 1);
    return mc_is_coded(matrix) ? filled : matrix->columns;
}

/* Whether there are inputs of 8 bits: for ggml's blocks of integers. */
static inline int mc_takes_int8(const mc_matrix *matrix)
{
    return (matrix->codes == MC_I8 || matrix->codes == MC_I4) && matrix->scale == MC_F16
        && matrix->group == MC_BLOCK && !mc_has_terms(matrix);
}

static inline int64_t mc_input_bytes(int type) { return type == MC_X_F32 ? 4 : 2; }

/* Bytes of an input. */
static inline int64_t mc_input_row_bytes(int type, int64_t columns)
{
    if (type == MC_X_INT8)
        return columns / MC_BLOCK * (int64_t)sizeof(mc_block8);
    return columns * mc_input_bytes(type);
}

/* The sums behind an input. */
static inline const float *mc_sums(const mc_matrix *matrix, int type, const uint8_t *input)
{
    return (const float *)(input + mc_input_row_bytes(type, mc_input_columns(matrix)));
}

/* Bytes of an input with its sums. */
static inline int64_t mc_given_bytes(int type, const mc_matrix *matrix)
{
    int64_t columns = mc_input_columns(matrix);
    int64_t num_sums = mc_has_terms(matrix) ? (columns + matrix->group - 1) / matrix->group : 0;
    return mc_input_row_bytes(type, columns) + 4 * num_sums;
}

static inline float mc_bits_to_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t mc_float_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float mc_bf16_to_float(uint16_t bits) { return mc_bits_to_float((uint32_t)bits << 16); }

/* To the nearest, ties to even; a NaN stays one. */
static inline uint16_t mc_float_to_bf16(float value)
{
    uint32_t bits = mc_float_to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Exact, as every fp16 is an fp32; denormals by a product with 2^112. */
static inline float mc_f16_to_float(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7fff) << 13;
    float value = mc_bits_to_float(rest) * 0x1p112f;
    if (rest >= 0x0f800000) /* infinities and NaN */
        value = mc_bits_to_float(rest + 0x70000000);
    return mc_bits_to_float(mc_float_to_bits(value) | sign);
}

#endif
