/* The tiles of one level, for inputs of fp32: included once for each, with LEVEL(name), LANES,
 * TOKENS (inputs of a block) and, where the level has them, FMA and F16C defined.
 *
 * Rows of fp32, fp16 and bf16 lie as in the file: a register's lanes are columns, and a row's sum is
 * that of its lanes, by halves. In formats of blocks lanes are rows, so that there is nothing to sum
 * but blocks. The order of every sum depends on the number of columns alone. */

#include "_vectors.h"

/* The last `num` columns of a row; the others are zero. */
INLINE vf LEVEL(load_tail)(const uint8_t *at, int64_t num, int format)
{
    uint8_t whole[LANES * 4] = {0};
    memcpy(whole, at, (size_t)(num * (format == MC_F32 ? 4 : 2)));
    return LEVEL(load)(whole, format);
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

/* 4 rows with `num` inputs. */
INLINE void LEVEL(block)(
    const uint8_t *const *rows, const uint8_t *const *inputs, int num, int64_t columns, int format,
    float *out)
{
    int64_t bytes = format == MC_F32 ? 4 : 2, k = 0;
    vf sums[4][TOKENS] = {{{0}}};
#define STEP(LOAD, ...)                                                        \
    {                                                                          \
        vf values[4];                                                          \
        for (int r = 0; r < 4; r++)                                            \
            values[r] = LOAD(rows[r] + k * bytes, ##__VA_ARGS__, format);      \
        for (int t = 0; t < num; t++) {                                        \
            vf input = LOAD(inputs[t] + k * 4, ##__VA_ARGS__, MC_F32);         \
            for (int r = 0; r < 4; r++)                                        \
                sums[r][t] = LEVEL(fma)(values[r], input, sums[r][t]);         \
        }                                                                      \
    }
    for (; k + LANES <= columns; k += LANES)
        STEP(LEVEL(load))
    if (k < columns)
        STEP(LEVEL(load_tail), columns - k)
#undef STEP
    for (int t = 0; t < num; t++)
        for (int r = 0; r < 4; r++)
            out[t * MC_TILE + r] = LEVEL(total)(sums[r][t]);
}

INLINE void LEVEL(dense)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out,
    int format)
{
    for (int64_t t = 0; t < num; t += TOKENS) {
        for (int r = 0; r < MC_TILE && row + r < matrix->rows; r += 4) {
            const uint8_t *rows[4];
            for (int i = 0; i < 4; i++) {
                int64_t there = row + r + i < matrix->rows ? row + r + i : matrix->rows - 1;
                rows[i] = matrix->data + there * matrix->row_bytes;
            }
            if (num - t >= TOKENS)
                LEVEL(block)(rows, inputs + t, TOKENS, matrix->columns, format, out + t * 16 + r);
            else
                for (int64_t i = t; i < num; i++)
                    LEVEL(block)(rows, inputs + i, 1, matrix->columns, format, out + i * 16 + r);
        }
    }
}

static void LEVEL(tile_f32)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out)
{
    LEVEL(dense)(matrix, row, inputs, num, out, MC_F32);
}

static void LEVEL(tile_f16)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out)
{
    LEVEL(dense)(matrix, row, inputs, num, out, MC_F16);
}

static void LEVEL(tile_bf16)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out)
{
    LEVEL(dense)(matrix, row, inputs, num, out, MC_BF16);
}

INLINE float LEVEL(input)(const uint8_t *input, int64_t column)
{
    float value;
    memcpy(&value, input + column * 4, 4);
    return value;
}

/* One column of LANES rows, of 4 bits: nibble `at` of each 32-bit lane, less 8. */
INLINE vf LEVEL(nibble)(vu lanes, int at)
{
    return __builtin_convertvector((vi)(lanes >> (4 * at) & 15) - 8, vf);
}

/* One column of LANES rows, of 8 bits. */
INLINE vf LEVEL(byte)(vu lanes, int at)
{
    return __builtin_convertvector((vi)(lanes << (24 - 8 * at)) >> 24, vf);
}

/* 16 rows with `num` inputs: each block's sum, times its scale, is added to those before. */
INLINE void LEVEL(blocks)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int num, float *out,
    int format)
{
    enum { PARTS = MC_TILE / LANES };
    const uint8_t *at = matrix->data + row / MC_TILE * matrix->row_bytes;
    int chunks = format == MC_Q4_0 ? 4 : 8, width = MC_BLOCK / chunks;
    vf sums[PARTS][TOKENS] = {{{0}}};
    for (int64_t k = 0; k < matrix->columns; k += MC_BLOCK) {
        const uint8_t *values = at + 2 * MC_TILE;
        for (int part = 0; part < PARTS; part++) {
            vf block[TOKENS] = {{0}};
            for (int chunk = 0; chunk < chunks; chunk++) {
                vu lanes;
                memcpy(&lanes, values + chunk * 64 + part * LANES * 4, sizeof lanes);
                if (format == MC_Q8_0)
                    lanes = LEVEL(by_rows)(lanes);
                for (int i = 0; i < width; i++) {
                    /* Of 4 bits, the lower word has the even columns, the upper one the odd. */
                    vf column = format == MC_Q4_0 ? LEVEL(nibble)(lanes, i / 2 + i % 2 * 4)
                                                  : LEVEL(byte)(lanes, i);
                    for (int t = 0; t < num; t++) {
                        float input = LEVEL(input)(inputs[t], k + chunk * width + i);
                        block[t] = LEVEL(fma)(column, LEVEL(all)(input), block[t]);
                    }
                }
            }
            vh raw;
            memcpy(&raw, at + part * LANES * 2, sizeof raw);
            vf scale = LEVEL(halves)(raw);
            for (int t = 0; t < num; t++)
                sums[part][t] = LEVEL(fma)(block[t], scale, sums[part][t]);
        }
        at = values + chunks * 64;
    }
    for (int t = 0; t < num; t++)
        for (int part = 0; part < PARTS; part++)
            memcpy(out + t * MC_TILE + part * LANES, &sums[part][t], sizeof sums[part][t]);
}

INLINE void LEVEL(blocked)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out,
    int format)
{
    int64_t t = 0;
    for (; t + TOKENS <= num; t += TOKENS)
        LEVEL(blocks)(matrix, row, inputs + t, TOKENS, out + t * MC_TILE, format);
    for (; t < num; t++)
        LEVEL(blocks)(matrix, row, inputs + t, 1, out + t * MC_TILE, format);
}

static void LEVEL(tile_q8_0)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out)
{
    LEVEL(blocked)(matrix, row, inputs, num, out, MC_Q8_0);
}

static void LEVEL(tile_q4_0)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out)
{
    LEVEL(blocked)(matrix, row, inputs, num, out, MC_Q4_0);
}

/* A row as blocks of 8 bits, see `mc_block8`; it may be written over itself. */
static void LEVEL(quantize)(
    const uint8_t *from, int type, int64_t columns, int format, uint8_t *to)
{
    enum { PARTS = MC_BLOCK / LANES };
    int64_t bytes = type == MC_X_BF16 ? 2 : 4;
    for (int64_t k = 0; k < columns; k += MC_BLOCK, to += sizeof(mc_block8)) {
        mc_block8 block = {0};
        vf values[PARTS];
        vi most = {0};
        for (int i = 0; i < PARTS; i++) {
            values[i] = LEVEL(load)(
                from + (k + i * LANES) * bytes, type == MC_X_BF16 ? MC_BF16 : MC_F32);
            /* Sizes are in the order of their bits, NaN and infinities the largest. */
            vi size = (vi)values[i] & 0x7fffffff, larger = size > most;
            most = (larger & size) | (~larger & most);
        }
        uint32_t bits = 0;
        for (int i = 0; i < LANES; i++)
            bits = (uint32_t)most[i] > bits ? (uint32_t)most[i] : bits;
        float max = mc_bits_to_float(bits);
        if (bits >= 0x7f800000) {
            block.scale = mc_bits_to_float(0x7fc00000);
        } else if (max >= 127 * FLT_MIN) {
            int32_t whole[MC_BLOCK];
            float turns = 127 / max;
            block.scale = max / 127;
            for (int i = 0; i < PARTS; i++) {
                /* To the nearest integer, ties to even, by the sum with 1.5 * 2^23. */
                vf nearest = (values[i] * turns + 12582912.0f) - 12582912.0f;
                vi part = __builtin_convertvector(nearest, vi);
                memcpy(whole + i * LANES, &part, sizeof part);
            }
            for (int i = 0; i < MC_BLOCK; i++)
                block.sum += whole[i];
            if (format == MC_Q4_0)
                for (int i = 0; i < MC_BLOCK; i++)
                    block.values[i] = (int8_t)whole[(i & ~7) + (i & 7) / 2 + (i & 1) * 4];
            else
                for (int i = 0; i < MC_BLOCK; i++)
                    block.values[i] = (int8_t)whole[i];
        }
        memcpy(to, &block, sizeof block);
    }
}

/* e^x, within 2 units of the last place, and the same on every level: nothing is fused here.
 * Polynomial of degree 6 (Cody and Waite's reduction by ln 2 in two parts). */
INLINE vf LEVEL(exp)(vf x)
{
    vf high = LEVEL(all)(88.5f), low = LEVEL(all)(-87.0f);
    vi is_nan = x != x, above = x > high, below = x < low;
    vf y = (vf)((above & (vi)high) | (below & (vi)low) | (~(above | below | is_nan) & (vi)x));
    vf turns = y * 1.44269504f;
    /* To the nearest integer, by the sum with 1.5 * 2^23. */
    vf n = (turns + 12582912.0f) - 12582912.0f;
    vf r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
    vf value = 1.98756915e-4f - (vf){0};
    value = value * r + 1.39819995e-3f;
    value = value * r + 8.33345200e-3f;
    value = value * r + 4.16657968e-2f;
    value = value * r + 1.66666657e-1f;
    value = value * r + 5.00000012e-1f;
    value = (value * (r * r) + r) + 1.0f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    value = value * (vf)power;
    vf infinite = LEVEL(all)(mc_bits_to_float(0x7f800000));
    vi is_finite = ~(above | below | is_nan);
    return (vf)((is_finite & (vi)value) | (above & (vi)infinite) | (is_nan & (vi)x));
}

INLINE vf LEVEL(act)(vf x, int activation)
{
    if (activation == MC_RELU || activation == MC_RELU2) {
        vf kept = (vf)(~(vi)(x <= 0) & (vi)x);
        return activation == MC_RELU ? kept : kept * kept;
    }
    if (activation == MC_GELU) {
        float lanes[LANES];
        memcpy(lanes, &x, sizeof x);
        for (int i = 0; i < LANES; i++)
            lanes[i] = 0.5f * lanes[i] * (1.0f + erff(lanes[i] * 0.70710678f));
        memcpy(&x, lanes, sizeof x);
        return x;
    }
    /* gelu by tanh is x * sigmoid(2 z), z the argument of tanh. */
    vf z = x;
    if (activation == MC_GELU_TANH)
        z = (x + x * x * x * 0.044715f) * 1.5957691f;
    return x / (1.0f + LEVEL(exp)(-z));
}

/* gate = act(gate) * up, or act(gate) if there is no up; `num` is a multiple of 16. */
static void LEVEL(activate)(float *gate, const float *up, int64_t num, const mc_activation *how)
{
    for (int64_t i = 0; i < num; i += LANES) {
        vf g, u = {0};
        memcpy(&g, gate + i, sizeof g);
        if (up)
            memcpy(&u, up + i, sizeof u);
        if (how->kind == MC_SWIGLU) {
            /* Comparisons that a NaN passes through. */
            vf limit = LEVEL(all)(how->limit);
            vi over = g > limit, up_over = u > limit, up_below = u < -limit;
            g = (vf)((over & (vi)limit) | (~over & (vi)g));
            u = (vf)((up_over & (vi)limit) | (up_below & (vi)-limit)
                     | (~(up_over | up_below) & (vi)u));
            g = (g / (1.0f + LEVEL(exp)(-(g * how->alpha)))) * (u + 1.0f);
        } else {
            g = LEVEL(act)(g, how->kind);
            if (up)
                g = g * u;
        }
        memcpy(gate + i, &g, sizeof g);
    }
}

typedef uint16_t LEVEL(v8) __attribute__((vector_size(16)));
typedef uint8_t LEVEL(v16) __attribute__((vector_size(16)));
typedef uint32_t LEVEL(v4) __attribute__((vector_size(16)));

/* The values of a block of 16 rows, Q8_0: of each 4 rows, pairs of columns are put side by side. */
INLINE void LEVEL(form_q8_0)(const uint8_t *const *blocks, uint8_t *out)
{
    for (int r = 0; r < MC_TILE; r += 4)
        for (int half = 0; half < 2; half++) {
            LEVEL(v8) rows[4], two[4];
            for (int i = 0; i < 4; i++)
                memcpy(&rows[i], blocks[r + i] + 2 + 16 * half, 16);
            for (int i = 0; i < 2; i++) {
                two[i] = __builtin_shufflevector(rows[2 * i], rows[2 * i + 1],
                                                 0, 8, 1, 9, 2, 10, 3, 11);
                two[2 + i] = __builtin_shufflevector(rows[2 * i], rows[2 * i + 1],
                                                     4, 12, 5, 13, 6, 14, 7, 15);
            }
            for (int i = 0; i < 2; i++) {
                LEVEL(v8) low = __builtin_shufflevector(two[2 * i], two[2 * i + 1],
                                                        0, 1, 8, 9, 2, 3, 10, 11);
                LEVEL(v8) high = __builtin_shufflevector(two[2 * i], two[2 * i + 1],
                                                         4, 5, 12, 13, 6, 7, 14, 15);
                memcpy(out + (4 * half + 2 * i) * 64 + r * 4, &low, 16);
                memcpy(out + (4 * half + 2 * i + 1) * 64 + r * 4, &high, 16);
            }
        }
}

/* The words of one row of Q4_0, 8 columns each: nibbles of even columns, then of odd ones. */
INLINE LEVEL(v4) LEVEL(words_q4_0)(const uint8_t *block)
{
    LEVEL(v16) bytes, low, high;
    memcpy(&bytes, block + 2, 16);
    /* Bytes of columns 0, 4, 1, 5 and 2, 6, 3, 7 of each 8, for the low and the high nibbles. */
    LEVEL(v16) one = __builtin_shufflevector(
        bytes, bytes, 0, 4, 1, 5, 8, 12, 9, 13, 0, 4, 1, 5, 8, 12, 9, 13);
    LEVEL(v16) two = __builtin_shufflevector(
        bytes, bytes, 2, 6, 3, 7, 10, 14, 11, 15, 2, 6, 3, 7, 10, 14, 11, 15);
    low = (one & 15) | (LEVEL(v16))((LEVEL(v8))(two & 15) << 4);
    high = ((LEVEL(v16))((LEVEL(v8))one >> 4) & 15) | (two & 0xf0);
    return (LEVEL(v4))__builtin_shufflevector(
        low, high, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31);
}

/* Of Q4_0: of each 4 rows, words of the same columns are put side by side. */
INLINE void LEVEL(form_q4_0)(const uint8_t *const *blocks, uint8_t *out)
{
    for (int r = 0; r < MC_TILE; r += 4) {
        LEVEL(v4) rows[4], two[4], words[4];
        for (int i = 0; i < 4; i++)
            rows[i] = LEVEL(words_q4_0)(blocks[r + i]);
        for (int i = 0; i < 2; i++) {
            two[i] = __builtin_shufflevector(rows[i], rows[i + 2], 0, 4, 1, 5);
            two[2 + i] = __builtin_shufflevector(rows[i], rows[i + 2], 2, 6, 3, 7);
        }
        for (int i = 0; i < 2; i++) {
            words[2 * i] = __builtin_shufflevector(two[2 * i], two[2 * i + 1], 0, 4, 1, 5);
            words[2 * i + 1] = __builtin_shufflevector(two[2 * i], two[2 * i + 1], 2, 6, 3, 7);
        }
        for (int i = 0; i < 4; i++)
            memcpy(out + i * 64 + r * 4, &words[i], 16);
    }
}

/* The compute form of a block of `num` rows; those beyond are zero. */
INLINE void LEVEL(form_block)(
    const uint8_t *first, int64_t row_bytes, int64_t num, int format, uint8_t *out)
{
    static const uint8_t nothing[2 + MC_BLOCK];
    const uint8_t *blocks[MC_TILE];
#pragma GCC unroll 16
    for (int r = 0; r < MC_TILE; r++) {
        blocks[r] = r < num ? first + r * row_bytes : nothing;
        memcpy(out + 2 * r, blocks[r], 2);
    }
    if (format == MC_Q8_0)
        LEVEL(form_q8_0)(blocks, out + 2 * MC_TILE);
    else
        LEVEL(form_q4_0)(blocks, out + 2 * MC_TILE);
}

/* The compute form of rows [row, row + 16) of `rows`, from the file's order. */
static void LEVEL(form)(
    const uint8_t *data, int64_t row_bytes, int64_t rows, int64_t columns, int64_t row, int format,
    uint8_t *out)
{
    int64_t block_bytes = mc_block_bytes(format);
    data += row * row_bytes;
    const uint8_t *next = data + MC_TILE * row_bytes;
    for (int64_t k = 0; k < columns / MC_BLOCK; k++) {
        /* The next 16 rows, in the order of memory: 16 places at once are too many to be foreseen. */
        for (int64_t line = 0; line < MC_TILE * block_bytes; line += 64)
            __builtin_prefetch(next + line);
        next += MC_TILE * block_bytes;
        if (rows - row >= MC_TILE)
            LEVEL(form_block)(data, row_bytes, MC_TILE, format, out);
        else
            LEVEL(form_block)(data, row_bytes, rows - row, format, out);
        data += block_bytes;
        out += MC_TILE * block_bytes;
    }
}

/* Reads all whole 256 bytes and does nothing else: how fast that is, is what a product can reach. */
static uint32_t LEVEL(read)(const uint8_t *at, int64_t num)
{
    enum { STEPS = 256 / (LANES * 4) };
    vu all[STEPS] = {{0}}, total = {0};
    for (int64_t i = 0; i + 256 <= num; i += 256)
        for (int j = 0; j < STEPS; j++) {
            vu values;
            memcpy(&values, at + i + j * LANES * 4, sizeof values);
            all[j] ^= values;
        }
    for (int j = 0; j < STEPS; j++)
        total ^= all[j];
    return total[0] ^ total[LANES - 1];
}

/* Tiles for inputs of bf16, or NULL, come last; those for 8 bits have the names `int8(tile)`. */
#define LEVEL_OF(name, int8, ...) \
    {name, \
     {{LEVEL(tile_f32), LEVEL(tile_f16), LEVEL(tile_bf16), LEVEL(tile_q8_0), LEVEL(tile_q4_0)}, \
      {__VA_ARGS__}, \
      {NULL, NULL, NULL, int8(tile_q8_0_int8), int8(tile_q4_0_int8)}}, \
     LEVEL(activate), LEVEL(quantize), LEVEL(form), LEVEL(read)}
