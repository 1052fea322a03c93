/* Tiles of weights that are codes, for inputs of fp32: included once for each level.
 *
 * A register's lanes are rows, so that there is nothing to sum but columns. A block of 32 columns, or a
 * group of 16, is summed without its scale, which then multiplies the sum: sums of a block do not wait
 * for those of the one before. To it comes the zero point times the sum of the block's inputs. The order
 * depends on the number of columns alone. */

/* LANES codes as numbers, each from bit `at` of 32 on. All are exact: exponents of few bits become those
 * of fp32 by a product with a power of two, denormals included. */
INLINE vf LEVEL(value)(vu lanes, int at, int codes)
{
    if (codes == MC_I8)
        return __builtin_convertvector((vi)(lanes << (24 - at)) >> 24, vf);
#ifdef PICK
    static const float fp4[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    static const float i4[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    if (codes == MC_E2M1 || (codes == MC_I4 && LANES == 16)) {
        vf table;
        memcpy(&table, codes == MC_I4 ? i4 : fp4, sizeof table);
        vf picked = PICK(table, lanes >> at);
        /* Of 8 lanes, by 3 bits: the fourth is the sign. */
        return LANES == 16 ? picked : (vf)((vu)picked | (lanes >> at & 8) << 28);
    }
#endif
    if (codes == MC_I4)
        return __builtin_convertvector((vi)(lanes >> at & 15) - 8, vf);
    if (codes == MC_E2M1) {
        vf size = (vf)((lanes >> at & 7) << 22) * LEVEL(all)(0x1p126f);
        return (vf)((vu)size | (lanes >> at & 8) << 28);
    }
    /* Sign, then 7 bits from the 26th on; all of these set are no number. */
    vi bits = (vi)(lanes << (24 - at)) >> 4 & (int32_t)0x87f00000;
    vi is_nan = (bits & 0x07f00000) == 0x07f00000;
    return (vf)((vi)((vf)bits * LEVEL(all)(0x1p120f)) | is_nan);
}

/* 16 rows' scales, or LANES of them, without the matrix's factor. */
INLINE vf LEVEL(scales)(const uint8_t *at, int scale)
{
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

/* Adds 16 columns, from `k` on, to the sums of the rows whose codes begin at `at`. */
INLINE void LEVEL(add_codes)(
    vf *sums, const uint8_t *at, const uint8_t *const *inputs, int64_t k, int num, int codes)
{
    int is_half = codes == MC_I4 || codes == MC_E2M1, width = is_half ? 8 : 4;
    for (int chunk = 0; chunk < 16 / width; chunk++) {
        vu lanes;
        memcpy(&lanes, at + chunk * 64, sizeof lanes);
        if (!is_half)
            lanes = LEVEL(by_rows)(lanes);
        for (int i = 0; i < width; i++) {
            /* Of 4 bits, the lower word has the even columns, the upper one the odd. */
            int bit = is_half ? 4 * (i / 2) + i % 2 * 16 : 8 * i;
            vf column = LEVEL(value)(lanes, bit, codes);
            for (int t = 0; t < num; t++)
                sums[t] = LEVEL(fma)(column, LEVEL(input)(inputs[t], k + chunk * width + i), sums[t]);
        }
    }
}

/* The sum of a block of inputs. */
INLINE vf LEVEL(sum_of)(const uint8_t *input)
{
    vf sum, next;
    memcpy(&sum, input, sizeof sum);
    for (int i = LANES; i < MC_BLOCK; i += LANES) {
        memcpy(&next, input + i * 4, sizeof next);
        sum += next;
    }
    return LEVEL(all)(LEVEL(total)(sum));
}

/* 16 rows with `num` inputs. */
INLINE void LEVEL(few)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int num, float *out,
    int codes)
{
    enum { PARTS = MC_TILE / LANES };
    const uint8_t *tile = matrix->data + row / MC_TILE * matrix->row_bytes;
    const uint8_t *at = tile + mc_factor_bytes(matrix->scale);
    int64_t columns = mc_input_columns(matrix), scale_bytes = mc_scale_bytes(matrix->scale);
    /* Groups of 16 columns come in pairs: two times the scales, then the codes. */
    int pair = matrix->group < MC_BLOCK ? 2 : 1;
    const uint8_t *scales = at;
    vf sums[PARTS][TOKENS] = {{{0}}};
    for (int64_t k = 0, group = 0; k < columns;) {
        if (k == group) {
            scales = at;
            at += mc_head_bytes(matrix);
            group += pair * matrix->group;
        }
        vf totals[TOKENS] = {{0}};
        for (int t = 0; t < num && matrix->has_zeros; t++)
            totals[t] = LEVEL(sum_of)(inputs[t] + k * 4);
        for (int half = 0; half < pair; half++) {
            vf block[PARTS][TOKENS] = {{{0}}};
            for (int64_t end = k + MC_BLOCK / pair; k < end; k += 16) {
                for (int part = 0; part < PARTS; part++) {
                    vf few[TOKENS];
                    memcpy(few, block[part], sizeof few);
                    LEVEL(add_codes)(few, at + part * LANES * 4, inputs, k, num, codes);
                    memcpy(block[part], few, sizeof few);
                }
                at += mc_code_bytes(codes, 16 * MC_TILE);
            }
            for (int part = 0; part < PARTS; part++) {
                vf scale = LEVEL(scales)(
                    scales + (half * MC_TILE + part * LANES) * scale_bytes, matrix->scale);
                if (matrix->has_zeros) {
                    vf zero = LEVEL(scales)(
                        scales + (MC_TILE + part * LANES) * scale_bytes, matrix->scale);
                    for (int t = 0; t < num; t++)
                        block[part][t] = LEVEL(fma)(zero, totals[t], block[part][t]);
                }
                for (int t = 0; t < num; t++)
                    sums[part][t] = LEVEL(fma)(block[part][t], scale, sums[part][t]);
            }
        }
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

/* Tiles for inputs of bf16, or NULL, come last; those for 8 bits have the names `int8(tile)`. */
#define LEVEL_OF(name, int8, ...) \
    {name, \
     {{LEVEL(tile_f32), LEVEL(tile_f16), LEVEL(tile_bf16), LEVEL(tile_i8), LEVEL(tile_i4), \
       LEVEL(tile_e4m3), LEVEL(tile_e2m1)}, \
      {__VA_ARGS__}, \
      {NULL, NULL, NULL, int8(tile_i8_int8), int8(tile_i4_int8)}}, \
     LEVEL(activate), LEVEL(quantize), LEVEL(form), LEVEL(expand), LEVEL(read)}
