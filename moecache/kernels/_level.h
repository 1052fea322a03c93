/* The tiles of one level, for inputs of fp32: included once for each, with LEVEL(name), LANES,
 * TOKENS (inputs of a block) and, where the level has them, FMA and F16C defined.
 *
 * Rows of fp32, fp16 and bf16 lie as in the file: a register's lanes are columns, and a row's sum is
 * that of its lanes, by halves. In formats of blocks lanes are rows, so that there is nothing to sum
 * but blocks. The order of every sum depends on the number of columns alone. */

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

/* LANES columns of a row as fp32; `num` of them are there, the others are zero. */
INLINE vf LEVEL(load)(const uint8_t *at, int64_t num, int format)
{
    if (format == MC_F32) {
        vf values = {0};
        memcpy(&values, at, num == LANES ? sizeof values : (size_t)num * 4);
        return values;
    }
    vh raw = {0};
    memcpy(&raw, at, num == LANES ? sizeof raw : (size_t)num * 2);
    if (format == MC_F16)
        return LEVEL(halves)(raw);
    return (vf)(__builtin_convertvector(raw, vu) << 16);
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
    for (; k < columns; k += LANES) {
        int64_t left = columns - k < LANES ? columns - k : LANES;
        vf values[4];
        for (int r = 0; r < 4; r++)
            values[r] = LEVEL(load)(rows[r] + k * bytes, left, format);
        for (int t = 0; t < num; t++) {
            vf input = LEVEL(load)(inputs[t] + k * 4, left, MC_F32);
            for (int r = 0; r < 4; r++)
                sums[r][t] = LEVEL(fma)(values[r], input, sums[r][t]);
        }
    }
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

/* The four columns of a row side by side, which lie in pairs: see `_form.h`. */
INLINE vu LEVEL(by_rows)(vu lanes)
{
#define PAIRS(i) i, i + 1, i + 8, i + 9, i + 2, i + 3, i + 10, i + 11, \
        i + 4, i + 5, i + 12, i + 13, i + 6, i + 7, i + 14, i + 15
    vb bytes = (vb)lanes;
#if LANES == 16
    return (vu)__builtin_shufflevector(bytes, bytes, PAIRS(0), PAIRS(16), PAIRS(32), PAIRS(48));
#else
    return (vu)__builtin_shufflevector(bytes, bytes, PAIRS(0), PAIRS(16));
#endif
#undef PAIRS
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

#define FP32_TILES \
    {LEVEL(tile_f32), LEVEL(tile_f16), LEVEL(tile_bf16), LEVEL(tile_q8_0), LEVEL(tile_q4_0)}
