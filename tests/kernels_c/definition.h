/* Products of integers one number at a time, from the compute form and inputs of fp32: nothing is shared
 * with the kernels but the names of codes and where scales lie. */
#ifndef DEFINITION_H
#define DEFINITION_H

#include "_matrix.h"

/* The integer of a row and a column, of 16 rows and 32 columns at `at`. */
static int integer_at(const uint8_t *at, int codes, int row, int column)
{
    static const int iq4[] = {
        -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static const int fp4[] = {0, 1, 2, 3, 4, 6, 8, 12}, iq3x[] = {4, 12, 20, 28, 36, 44, 52, 62};
    static const int iq1[16] = {-9, -7, -1, 1, 7, 9}, iq2[16] = {-43, -25, -8, 8, 25, 43};
    int chunk = column / 8, place = column % 8, stored;
    uint32_t word;
    if (codes == MC_I8)
        return (int8_t)at[column / 4 * 64 + row / 4 * 16 + column / 2 % 2 * 8 + row % 4 * 2
                          + column % 2];
    memcpy(&word, at + chunk * 64 + row * 4, 4);
    stored = word >> 4 * (place / 2 + place % 2 * 4) & 15;
    if (mc_code_bits(codes) > 4) {
        int bits = mc_code_bits(codes) - 4, slot = (2 * chunk + place / 2 % 2) * bits;
        memcpy(&word, at + 256 + slot / 8 * 64 + row * 4, 4);
        stored |= (word >> (slot % 8 + place / 4 * 8 + place % 2 * 16) & ((1u << bits) - 1)) << 4;
    }
    switch (codes) {
    case MC_IQ4: return iq4[stored];
    case MC_IQ1: return iq1[stored];
    case MC_IQ2: return iq2[stored];
    case MC_IQ3: return 2 * stored - 15;
    case MC_IQ3X: return stored < 8 ? -iq3x[7 - stored] : iq3x[stored - 8];
    case MC_E2M1: return stored & 8 ? -fp4[stored & 7] : fp4[stored & 7];
    case MC_I4: return stored - 8;
    case MC_I5: return stored - 16;
    case MC_I6: return stored - 32;
    default: return stored;
    }
}

/* In what these integers count. */
static float unit_of(int codes)
{
    switch (codes) {
    case MC_E2M1: return 0.5f;
    case MC_IQ1: case MC_IQ2: return 0.125f;
    case MC_IQ3X: return 0.25f;
    default: return 1;
    }
}

static float number_at(const uint8_t *at, int scale, int index)
{
    float value;
    uint16_t half;
    if (scale == MC_IN_STEPS)
        return (int8_t)at[index];
    if (mc_has_factor(scale)) {
        int byte = at[index], exponent = byte >> 3 & 15, fraction = byte & 7;
        value = ldexpf((float)(exponent ? 8 + fraction : fraction), (exponent ? exponent : 1) - 10);
        return byte & 0x80 ? -value : value;
    }
    if (scale == MC_F32) {
        memcpy(&value, at + 4 * index, 4);
        return value;
    }
    memcpy(&half, at + 2 * index, 2);
    return scale == MC_F16 ? mc_f16_to_float(half) : mc_bf16_to_float(half);
}

/* 32 columns as integers, and their scale. */
static float round_block(const float *from, int codes, int64_t *integers)
{
    float most = 0;
    int is_number = 1;
    for (int i = 0; i < MC_BLOCK; i++) {
        integers[i] = 0;
        is_number &= isfinite(from[i]) != 0;
        most = fabsf(from[i]) > most ? fabsf(from[i]) : most;
    }
    if (!is_number || most < 0x1p-109f)
        return is_number ? 0 : NAN;
    float turns = 16256 / most;
    for (int i = 0; i < MC_BLOCK; i++)
        integers[i] = (int64_t)nearbyintf(from[i] * turns);
    return most / 16256 * unit_of(codes);
}

/* A row's product with an input that is padded with zeros to a whole block. */
static float product_of(const mc_matrix *m, int64_t row, const float *input)
{
    int is_super = m->scale == MC_IN_STEPS, pair = mc_block_groups(m), r = (int)(row % MC_TILE);
    const uint8_t *tile = m->data + row / MC_TILE * m->row_bytes, *at = tile, *by = tile, *scales = tile;
    int64_t head = mc_head_bytes(m), columns = mc_input_columns(m);
    float total = 0, scaled = 0, terms = 0;
    at += mc_factor_bytes(m->scale);
    for (int64_t k = 0; k < columns; k += MC_BLOCK) {
        int64_t integers[MC_BLOCK], weighted = 0;
        float scale = round_block(input + k, m->codes, integers);
        if (is_super && k % MC_SUPER == 0) {
            by = at;
            at += mc_super_bytes(m);
        }
        if (pair == 2 || k % m->group == 0) {
            scales = at;
            at += head * (1 + mc_has_terms(m));
        }
        for (int i = 0; i < pair; i++) {
            float factor = number_at(scales, m->scale, i * MC_TILE + r), term = 0;
            int64_t exact = 0, sum = 0;
            if (mc_has_terms(m))
                term = number_at(scales + head, m->scale, i * MC_TILE + r);
            for (int c = MC_BLOCK / pair * i; c < MC_BLOCK / pair * (i + 1); c++) {
                exact += (integer_at(at, m->codes, r, c) + (m->has_zeros ? (int)term : 0)) * integers[c];
                sum += integers[c];
            }
            if (is_super)
                weighted += exact * (int)factor;
            else
                total += ((float)exact * scale) * factor;
            if (m->has_offsets && is_super)
                terms += term * ((float)sum * scale);
            else if (m->has_offsets)
                total += term * ((float)sum * scale);
        }
        at += mc_code_bytes(m->codes, MC_BLOCK * MC_TILE);
        if (!is_super)
            continue;
        scaled += (float)weighted * scale;
        if ((k + MC_BLOCK) % MC_SUPER && k + MC_BLOCK < columns)
            continue;
        total += scaled * number_at(by, MC_F16, r);
        if (m->has_offsets)
            total += terms * number_at(by, MC_F16, MC_TILE + r);
        scaled = terms = 0;
    }
    if (!mc_has_factor(m->scale))
        return total;
    return m->scale == MC_TIMES ? total * mc_factor(tile) : total / mc_factor(tile);
}

#endif
