/* Pseudo-random matrices of codes and inputs, the same on every machine. */
#ifndef RANDOM_FORMS_H
#define RANDOM_FORMS_H

#include "_products.h"

enum { MOST_ROWS = 48, MOST_COLUMNS = 544, NUM_INPUTS = 13, MOST_BYTES = 1 << 20 };

static _Alignas(64) uint8_t form[MOST_BYTES];
static uint64_t seed = 1;

static uint32_t random_bits(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) << 1 ^ (uint32_t)(seed >> 48);
}

static int random_int(int from, int to)
{
    return from + (int)(random_bits() % (uint32_t)(to - from + 1));
}

/* In [-1, 1). */
static float random_float(void) { return (float)random_int(-(1 << 23), (1 << 23) - 1) * 0x1p-23f; }

static void fill_random(uint8_t *at, int64_t num)
{
    for (int64_t i = 0; i < num; i++)
        at[i] = (uint8_t)(random_bits() >> 7);
}

/* A small finite number of a scale's type, denormals included; returns its end. */
static uint8_t *put_scale(uint8_t *at, int scale, int codes)
{
    uint32_t sign = random_bits() & 1, rest = random_bits();
    if (scale == MC_IN_STEPS) {
        int is_unsigned = codes == MC_U4 || codes == MC_U5;
        *at = (uint8_t)(codes == MC_I6 ? random_int(-128, 127)
                                       : is_unsigned ? random_int(0, 63) : random_int(-32, 31));
        return at + 1;
    }
    if (mc_has_factor(scale)) {
        *at = (uint8_t)random_int(0, 0x7e) | (uint8_t)(sign << 7);
        return at + 1;
    }
    if (scale == MC_F32) {
        float value = random_float() * 0.125f;
        memcpy(at, &value, 4);
        return at + 4;
    }
    uint16_t bits = scale == MC_F16
        ? (uint16_t)(sign << 15 | (uint32_t)random_int(0, 14) << 10 | (rest & 0x3ff))
        : (uint16_t)(sign << 15 | (uint32_t)random_int(115, 126) << 7 | (rest & 0x7f));
    memcpy(at, &bits, 2);
    return at + 2;
}

/* A zero point: a whole number. */
static uint8_t *put_zero(uint8_t *at, int scale, int codes)
{
    float value = (float)(codes == MC_I8 ? random_int(-127, 127) : random_int(-8, 8));
    uint32_t bits = mc_float_to_bits(value);
    uint16_t half = (uint16_t)(bits >> 16);
    if (scale == MC_F32) {
        memcpy(at, &value, 4);
        return at + 4;
    }
    if (scale == MC_F16)
        half = value ? (uint16_t)((bits >> 16 & 0x8000) | ((bits & 0x7fffffff) - 0x38000000) >> 13) : 0;
    memcpy(at, &half, 2);
    return at + 2;
}

/* Bytes of 16 rows in their compute form. */
static int64_t tile_bytes(const mc_matrix *m)
{
    int64_t columns = mc_input_columns(m), each = m->group < MC_BLOCK ? MC_BLOCK : m->group;
    int64_t heads = (columns + each - 1) / each * (1 + mc_has_terms(m));
    int64_t supers = m->scale == MC_IN_STEPS ? (columns + MC_SUPER - 1) / MC_SUPER : 0;
    return mc_factor_bytes(m->scale) + supers * mc_super_bytes(m) + heads * mc_head_bytes(m)
        + mc_code_bytes(m->codes, columns * MC_TILE);
}

/* A matrix whose form lies in `form`. */
static mc_matrix matrix_of(int codes, int scale, int flags, int64_t rows, int64_t columns, int64_t group)
{
    mc_matrix m = {.data = form, .rows = rows, .columns = columns, .codes = codes, .scale = scale};
    m.group = flags & MC_PAIRS ? 16 : flags & MC_SUPERS ? 32 : group;
    m.has_zeros = !!(flags & MC_ZEROS);
    m.has_offsets = !!(flags & MC_OFFSETS);
    m.row_bytes = tile_bytes(&m);
    return m;
}

/* Fills a form: all of its codes at random, FP8 but for NaN. */
static void fill_form(const mc_matrix *m, uint8_t *to)
{
    int is_super = m->scale == MC_IN_STEPS, pair = mc_block_groups(m);
    int64_t code_bytes = mc_code_bytes(m->codes, MC_BLOCK * MC_TILE);
    for (int64_t row = 0; row < m->rows; row += MC_TILE) {
        uint8_t *at = to + row / MC_TILE * m->row_bytes;
        float factor = 0.75f + 0.125f * random_float();
        if (mc_has_factor(m->scale)) {
            memset(at, 0, 64);
            memcpy(at, &factor, 4);
            at += 64;
        }
        for (int64_t k = 0; k < mc_input_columns(m); k += MC_BLOCK) {
            for (int i = 0; is_super && k % MC_SUPER == 0 && i < MC_TILE * (1 + m->has_offsets); i++)
                at = put_scale(at, MC_F16, m->codes);
            for (int i = 0; (pair == 2 || k % m->group == 0) && i < MC_TILE * pair; i++)
                at = put_scale(at, m->scale, m->codes);
            for (int i = 0; (pair == 2 || k % m->group == 0) && i < MC_TILE * pair; i++)
                if (mc_has_terms(m))
                    at = m->has_zeros ? put_zero(at, m->scale, m->codes)
                                      : put_scale(at, m->scale, m->codes);
            fill_random(at, code_bytes);
            for (int64_t i = 0; m->codes == MC_E4M3 && i < code_bytes; i++)
                at[i] = (at[i] & 0x7f) == 0x7f ? 0 : at[i];
            at += code_bytes;
        }
    }
}

/* A row of inputs, which are as they come in bf16: usual, small and large ones, zeros, no numbers. */
static void fill_input(float *row, int64_t columns, int kind)
{
    for (int64_t i = 0; i < columns; i++) {
        float value = random_float();
        if (kind == 1 && i % 32 == 5)
            value *= 100;
        if (kind == 2 || (kind == 3 && i / 32 % 2))
            value *= kind == 2 ? 0x1p-120f : -0.0f;
        if (kind == 4)
            value *= 0x1p120f;
        row[i] = mc_bf16_to_float(mc_float_to_bf16(value));
    }
    if (kind == 5)
        row[columns / 2] = mc_bits_to_float(0xff800000);
    if (kind == 6)
        row[columns - 1] = mc_bits_to_float(0x7fc00000);
}

#endif
