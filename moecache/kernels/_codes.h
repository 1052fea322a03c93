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

/* Adds 16 columns, from `k` on, to the sums of the rows whose codes of 32 columns begin at `at`. */
INLINE void LEVEL(add_codes)(
    vf *sums, const uint8_t *at, int half, const uint8_t *const *inputs, int64_t k, int num)
{
    for (int chunk = 0; chunk < 4; chunk++) {
        vu lanes;
        memcpy(&lanes, at + (4 * half + chunk) * 64, sizeof lanes);
        lanes = LEVEL(by_rows)(lanes);
        for (int i = 0; i < 4; i++) {
            vf column = LEVEL(value)(lanes, 8 * i, MC_E4M3);
            for (int t = 0; t < num; t++)
                sums[t] = LEVEL(fma)(column, LEVEL(input)(inputs[t], k + 4 * chunk + i), sums[t]);
        }
    }
}

/* 16 rows with `num` inputs. */
INLINE void LEVEL(few)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int num, float *out,
    int unused)
{
    enum { PARTS = MC_TILE / LANES };
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
        for (int part = 0; part < PARTS; part++) {
            const uint8_t *place = at + part * LANES * 4;
            for (int half = 0; half < pair; half++) {
                vf block[TOKENS] = {{0}};
                for (int i = half; i < half + 3 - pair; i++)
                    LEVEL(add_codes)(block, place, i, inputs, k + 16 * i, num);
                vf scale = LEVEL(scales)(
                    scales + (half * MC_TILE + part * LANES) * scale_bytes, matrix->scale);
                for (int t = 0; t < num; t++)
                    sums[part][t] = LEVEL(fma)(block[t], scale, sums[part][t]);
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

MC_TILE_BY(LEVEL(tile_e4m3), LEVEL(few), TOKENS, 1, MC_E4M3)
