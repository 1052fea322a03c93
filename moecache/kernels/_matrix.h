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
/* Columns that share a scale. */
#define MC_BLOCK 32

enum { MC_F32, MC_F16, MC_BF16, MC_Q8_0, MC_Q4_0, MC_NUM_FORMATS };
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

/* A weight matrix [rows, columns]. Formats of blocks lie in their compute form: groups of 16 rows,
 * in each for every 32 columns 16 scales (fp16), then the values of 16 rows (see `kernels/forms.py`). */
typedef struct {
    const uint8_t *data;
    int64_t rows, columns;
    int64_t row_bytes; /* from a row to the next; of formats of blocks, from a group to the next */
    int format;
} mc_matrix;

enum { MC_SILU, MC_GELU, MC_GELU_TANH, MC_SWIGLU, MC_RELU, MC_RELU2, MC_NUM_ACTIVATIONS };

typedef struct {
    int kind;
    float alpha, limit; /* of MC_SWIGLU */
} mc_activation;

/* Writes the products of rows [row, row + 16) with `num` inputs: out[i * 16 + r], fp32.
 * Rows beyond the matrix have any value. An input is `columns` numbers, or
 * as many as `mc_block8`. */
typedef void (*mc_tile)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out);

typedef struct {
    const char *name;
    mc_tile tiles[MC_NUM_INPUTS][MC_NUM_FORMATS]; /* NULL: inputs are converted to fp32 first */
    void (*activate)(float *gate, const float *up, int64_t num, const mc_activation *how);
    void (*quantize)(const uint8_t *from, int type, int64_t columns, int format, uint8_t *to);
    void (*form)(const uint8_t *data, int64_t row_bytes, int64_t rows, int64_t columns, int64_t row,
                 int format, uint8_t *out);
    uint32_t (*read)(const uint8_t *at, int64_t num);
} mc_level;

/* Bytes of a number, or of a block of 32 in the file. */
static inline int64_t mc_block_bytes(int format)
{
    static const int64_t bytes[MC_NUM_FORMATS] = {4, 2, 2, 34, 18};
    return bytes[format];
}

static inline int mc_is_blocked(int format) { return format >= MC_Q8_0; }

/* Bytes of an input. */
static inline int64_t mc_input_row_bytes(int type, int64_t columns)
{
    if (type == MC_X_INT8)
        return columns / MC_BLOCK * (int64_t)sizeof(mc_block8);
    return columns * (type == MC_X_F32 ? 4 : 2);
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
