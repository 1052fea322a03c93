/* Tiles of weights that are codes, for inputs of fp32: included once for each level.
 *
 * A register's lanes are rows, so that there is nothing to sum but columns. A block of 32 columns, or a
 * group of 16, is summed without its scale, which then multiplies the sum: sums of a block do not wait
 * for those of the one before. Zero points and offsets come at the beginning of a group, times the sum of
 * its inputs. The order depends on the number of columns alone. */

/* LANES codes as numbers, each from bit `at` of 32 on; those of 5 and 6 bits are put together before. All
 * are exact: exponents of few bits become those of fp32 by a product with a power of two, denormals
 * included. */
INLINE vf LEVEL(value)(vu lanes, int at, int codes)
{
    if (codes == MC_I8)
        return __builtin_convertvector((vi)(lanes << (24 - at)) >> 24, vf);
#ifdef PICK
    static const float fp4[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    if (codes == MC_E2M1 || codes == MC_IQ4 || (LANES == 16 && mc_code_bits(codes) == 4)) {
        /* Of 8 lanes, by 3 bits: the fourth is FP4's sign, or says which half of a table it is. */
        float table[16];
        for (int i = 0; i < 16; i++)
            table[i] = codes == MC_IQ4 ? mc_iq4[i] : codes == MC_E2M1 ? fp4[i] : i - mc_bias(codes);
        vf low, high;
        memcpy(&low, table, sizeof low);
        vf picked = PICK(low, lanes >> at);
        if (LANES == 16)
            return picked;
        if (codes == MC_E2M1)
            return (vf)((vu)picked | (lanes >> at & 8) << 28);
        memcpy(&high, table + 8, sizeof high);
        vi is_high = (vi)(lanes << (28 - at)) >> 31;
        return (vf)((is_high & (vi)PICK(high, lanes >> at)) | (~is_high & (vi)picked));
    }
#endif
    if (codes == MC_IQ4) {
        vi values;
        for (int i = 0; i < LANES; i++)
            values[i] = mc_iq4[lanes[i] >> at & 15];
        return __builtin_convertvector(values, vf);
    }
    if (codes == MC_E2M1) {
        vf size = (vf)((lanes >> at & 7) << 22) * LEVEL(all)(0x1p126f);
        return (vf)((vu)size | (lanes >> at & 8) << 28);
    }
    if (codes != MC_E4M3) {
        uint32_t mask = (1u << mc_code_bits(codes)) - 1;
        return __builtin_convertvector((vi)(lanes >> at & mask) - mc_bias(codes), vf);
    }
    /* Sign, then 7 bits from the 26th on; all of these set are no number. */
    vi bits = (vi)(lanes << (24 - at)) >> 4 & (int32_t)0x87f00000;
    vi is_nan = (bits & 0x07f00000) == 0x07f00000;
    return (vf)((vi)((vf)bits * LEVEL(all)(0x1p120f)) | is_nan);
}

/* 16 rows' scales or what is added, or LANES of them, without what multiplies them all. */
INLINE vf LEVEL(scales)(const uint8_t *at, int scale)
{
    if (scale == MC_IN_STEPS)
        return __builtin_convertvector((vi)(LEVEL(widen)(at) << 24) >> 24, vf);
    if (mc_has_factor(scale))
        return LEVEL(value)(LEVEL(widen)(at), 0, MC_E4M3);
    return LEVEL(load)(at, scale);
}

INLINE vf LEVEL(scaled)(vf values, const uint8_t *tile, int scale)
{
    if (!mc_has_factor(scale))
        return values;
    vf factor = LEVEL(all)(mc_factor(tile));
    return scale == MC_DIVIDED ? values / factor : values * factor;
}

INLINE vf LEVEL(input)(const uint8_t *input, int64_t column)
{
    float value;
    memcpy(&value, input + column * 4, 4);
    return LEVEL(all)(value);
}

/* Adds 16 columns, from `k` on, to the sums of the rows whose codes of 32 columns begin at `at`. */
INLINE void LEVEL(add_codes)(
    vf *sums, const uint8_t *at, int half, const uint8_t *const *inputs, int64_t k, int num, int codes)
{
    int bits = mc_code_bits(codes), width = bits == 8 ? 4 : 8;
    const uint8_t *first = at + half * 16 / width * 64;
    vu above = {0};
    if (bits == 5 || bits == 6)
        memcpy(&above, at + 256 + (bits - 5) * half * 64, sizeof above);
    if (bits == 5)
        above >>= 4 * half;
    for (int chunk = 0; chunk < 16 / width; chunk++) {
        vu lanes;
        memcpy(&lanes, first + chunk * 64, sizeof lanes);
        if (bits == 8)
            lanes = LEVEL(by_rows)(lanes);
        /* Of 5 and 6 bits, four columns' codes at a time, a byte each. */
        vu four[2] = {lanes, lanes};
        for (int i = 0; i < 2 && (bits == 5 || bits == 6); i++)
            four[i] = (lanes >> 4 * i & 0x0f0f0f0f)
                | (above >> (bits - 4) * (2 * chunk + i) & (bits == 5 ? 0x01010101 : 0x03030303)) << 4;
        for (int i = 0; i < width; i++) {
            /* Of 4 bits, the lower word has the even columns, the upper one the odd. */
            int bit = bits == 8 ? 8 * i : bits == 4 ? 4 * (i / 2) + i % 2 * 16 : 8 * (i / 4) + i % 2 * 16;
            vf column = LEVEL(value)(four[i / 2 % 2], bit, codes);
            for (int t = 0; t < num; t++)
                sums[t] = LEVEL(fma)(column, LEVEL(input)(inputs[t], k + chunk * width + i), sums[t]);
        }
    }
}

/* Sums of each group of an input, the last one as far as there are columns: what zero points and offsets
 * are multiplied by. */
static void LEVEL(sum)(const uint8_t *from, int type, int64_t columns, int64_t group, float *to)
{
    for (int64_t k = 0; k < columns;) {
        vf sum = {0};
        for (int64_t end = k + group; k < end && k < columns; k += LANES)
            sum += LEVEL(load)(from + k * mc_input_bytes(type), type == MC_X_BF16 ? MC_BF16 : MC_F32);
        *to++ = LEVEL(total)(sum);
    }
}

/* 16 rows with `num` inputs. */
INLINE void LEVEL(few)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int num, float *out,
    int codes)
{
    enum { PARTS = MC_TILE / LANES };
    const uint8_t *tile = matrix->data + row / MC_TILE * matrix->row_bytes;
    const uint8_t *at = tile + mc_factor_bytes(matrix->scale), *scales = at;
    int64_t columns = mc_input_columns(matrix), scale_bytes = mc_scale_bytes(matrix->scale);
    int64_t head = mc_head_bytes(matrix), index = 0;
    int pair = mc_block_groups(matrix), is_super = matrix->scale == MC_IN_STEPS;
    vf sums[PARTS][TOKENS] = {{{0}}}, by[2][PARTS] = {{{0}}}; /* of 256 columns */
    for (int64_t k = 0, group = 0; k < columns; k += MC_BLOCK) {
        if (is_super && k % MC_SUPER == 0) {
            for (int i = 0; i <= matrix->has_offsets; i++)
                for (int part = 0; part < PARTS; part++)
                    by[i][part] = LEVEL(load)(at + (i * MC_TILE + part * LANES) * 2, MC_F16);
            at += mc_super_bytes(matrix);
        }
        if (k == group) {
            scales = at;
            at += head * (1 + mc_has_terms(matrix));
            group += pair * matrix->group;
            for (int half = 0; half < pair && mc_has_terms(matrix); half++, index++)
                for (int part = 0; part < PARTS; part++) {
                    int64_t place = (half * MC_TILE + part * LANES) * scale_bytes;
                    vf term = LEVEL(scales)(scales + head + place, matrix->scale);
                    if (matrix->has_zeros)
                        term *= LEVEL(scales)(scales + place, matrix->scale);
                    if (is_super)
                        term *= by[1][part];
                    for (int t = 0; t < num; t++)
                        sums[part][t] = LEVEL(fma)(
                            term, LEVEL(all)(mc_sums(matrix, MC_X_F32, inputs[t])[index]),
                            sums[part][t]);
                }
        }
        for (int part = 0; part < PARTS; part++) {
            const uint8_t *place = at + part * LANES * 4;
            for (int half = 0; half < pair; half++) {
                vf block[TOKENS] = {{0}};
                for (int i = half; i < half + 3 - pair; i++)
                    LEVEL(add_codes)(block, place, i, inputs, k + 16 * i, num, codes);
                vf scale = LEVEL(scales)(
                    scales + (half * MC_TILE + part * LANES) * scale_bytes, matrix->scale);
                if (is_super)
                    scale *= by[0][part];
                for (int t = 0; t < num; t++)
                    sums[part][t] = LEVEL(fma)(block[t], scale, sums[part][t]);
            }
        }
        at += mc_code_bytes(codes, MC_BLOCK * MC_TILE);
    }
    for (int t = 0; t < num; t++)
        for (int part = 0; part < PARTS; part++) {
            vf sum = LEVEL(scaled)(sums[part][t], tile, matrix->scale);
            memcpy(out + t * MC_TILE + part * LANES, &sum, sizeof sum);
        }
}

MC_TILE_BY(LEVEL(tile_i8), LEVEL(few), TOKENS, 1, MC_I8)
MC_TILE_BY(LEVEL(tile_i4), LEVEL(few), TOKENS, 1, MC_I4)
MC_TILE_BY(LEVEL(tile_e4m3), LEVEL(few), TOKENS, 1, MC_E4M3)
MC_TILE_BY(LEVEL(tile_e2m1), LEVEL(few), TOKENS, 1, MC_E2M1)
MC_TILE_BY(LEVEL(tile_u4), LEVEL(few), TOKENS, 1, MC_U4)
MC_TILE_BY(LEVEL(tile_iq4), LEVEL(few), TOKENS, 1, MC_IQ4)
MC_TILE_BY(LEVEL(tile_i5), LEVEL(few), TOKENS, 1, MC_I5)
MC_TILE_BY(LEVEL(tile_u5), LEVEL(few), TOKENS, 1, MC_U5)
MC_TILE_BY(LEVEL(tile_i6), LEVEL(few), TOKENS, 1, MC_I6)

/* Tiles for inputs of bf16, or NULL, come last; those for 8 bits have the names `int8(tile)`. */
#define LEVEL_OF(name, int8, ...) \
    {name, \
     {{LEVEL(tile_f32), LEVEL(tile_f16), LEVEL(tile_bf16), LEVEL(tile_i8), LEVEL(tile_i4), \
       LEVEL(tile_e4m3), LEVEL(tile_e2m1), LEVEL(tile_u4), LEVEL(tile_iq4), LEVEL(tile_i5), \
       LEVEL(tile_u5), LEVEL(tile_i6)}, \
      {__VA_ARGS__}, \
      {NULL, NULL, NULL, int8(tile_i8_int8), int8(tile_i4_int8)}}, \
     LEVEL(activate), LEVEL(quantize), LEVEL(sum), LEVEL(form), LEVEL(expand), LEVEL(read)}
