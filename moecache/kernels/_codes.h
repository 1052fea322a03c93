/* Tiles of FP8 for inputs of fp32: included once for each level.
 *
 * A register's lanes are rows, so that there is nothing to sum but columns. A block of 32 columns, or a
 * group of 16, is summed without its scale, which then multiplies the sum: sums of a block do not wait
 * for those of the one before. The order depends on the number of columns alone. */

INLINE vf LEVEL(input)(const uint8_t *input, int64_t column)
{
    float value;
    memcpy(&value, input + column * 4, 4);
    return LEVEL(all)(value);
}

/* Registers that the sums of 16 rows take. */
#define PARTS (MC_TILE / LANES)

/* Whether a bit is set. */
INLINE int LEVEL(any)(vu lanes)
{
#ifdef ANY
    return ANY(lanes);
#else
    uint32_t all = 0;
    for (int i = 0; i < LANES; i++)
        all |= lanes[i];
    return all != 0;
#endif
}

/* Adds 16 columns, from `k` on, to the sums of 16 rows whose codes of 32 columns begin at `at`: of all registers in
 * turn, as each waits for its own sum. */
INLINE void LEVEL(add_codes)(
    vf (*sums)[TOKENS], const uint8_t *at, int half, const uint8_t *const *inputs, int64_t k,
    int num)
{
    for (int chunk = 0; chunk < 4; chunk++) {
        vu lanes[PARTS], not_numbers = {0};
        for (int part = 0; part < PARTS; part++) {
            memcpy(&lanes[part], at + (4 * half + chunk) * 64 + part * LANES * 4, sizeof *lanes);
            lanes[part] = LEVEL(by_rows)(lanes[part]);
            not_numbers |= (vu)(((vb)lanes[part] & 0x7f) == 0x7f);
        }
#define ADD(VALUE)                                                                               \
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)                                          \
        _Pragma("GCC unroll 4") for (int part = 0; part < PARTS; part++)                         \
        {                                                                                        \
            vf column = VALUE(lanes[part], 8 * i);                                               \
            for (int t = 0; t < num; t++)                                                        \
                sums[part][t] = LEVEL(fma)(                                                      \
                    column, LEVEL(input)(inputs[t], k + 4 * chunk + i), sums[part][t]);          \
        }
        /* To look for them all at once pays with one input. */
        if (num > 1 || LEVEL(any)(not_numbers))
            ADD(LEVEL(fp8))
        else
            ADD(LEVEL(fp8_number))
#undef ADD
    }
}

/* 16 rows with `num` inputs. */
INLINE void LEVEL(few)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int num, float *out,
    int unused)
{
    const uint8_t *tile = matrix->data + row / MC_TILE * matrix->row_bytes;
    const uint8_t *at = tile + mc_factor_bytes(matrix->scale), *scales = at;
    int64_t columns = mc_input_columns(matrix), scale_bytes = mc_scale_bytes(matrix->scale);
    int pair = mc_block_groups(matrix);
    vf sums[PARTS][TOKENS] = {{{0}}};
    (void)unused;
    for (int64_t k = 0, group = 0; k < columns; k += MC_BLOCK) {
        if (k == group) {
            scales = at;
            at += mc_head_bytes(matrix);
            group += pair * matrix->group;
        }
        for (int line = 0; line < MC_BLOCK * MC_TILE; line += 64)
            MC_FETCH(at + line, num);
        for (int half = 0; half < pair; half++) {
            vf block[PARTS][TOKENS] = {{{0}}};
            for (int i = half; i < half + 3 - pair; i++)
                LEVEL(add_codes)(block, at, i, inputs, k + 16 * i, num);
            for (int part = 0; part < PARTS; part++) {
                vf scale = LEVEL(scales)(
                    scales + (half * MC_TILE + part * LANES) * scale_bytes, matrix->scale);
                for (int t = 0; t < num; t++)
                    sums[part][t] = LEVEL(fma)(block[part][t], scale, sums[part][t]);
            }
        }
        at += mc_code_bytes(MC_E4M3, MC_BLOCK * MC_TILE);
    }
    for (int t = 0; t < num; t++)
        for (int part = 0; part < PARTS; part++) {
            vf sum = LEVEL(scaled)(sums[part][t], tile, matrix->scale);
            memcpy(out + t * MC_TILE + part * LANES, &sum, sizeof sum);
        }
}

#undef PARTS

MC_TILE_BY(LEVEL(tile_e4m3), LEVEL(few), TOKENS, 1, MC_E4M3)
