/* Products with many inputs of fp32, for numbers and FP8: included once for each level, behind its tiles.
 *
 * A row's sum has the order of a tile's. Values of 16 rows are made once for all inputs, some columns at a time, so that
 * they stay in the first cache; some rows meet some inputs in registers. */

/* Rows and inputs whose chains are in registers, and inputs where lanes are rows. */
#define MANY_INPUTS 3
#if VECTORS == 4
#define MANY_ROWS 4
#else
#define MANY_ROWS 2
#endif
#define MANY_FP8 (8 * LANES / MC_TILE)

/* Values: 16 KiB. */
typedef struct {
    const uint8_t *inputs[MC_MANY_CHUNK];
    float values[MC_TILE * STRETCH];
    vf sums[MC_MANY_CHUNK * MC_TILE]; /* of numbers: [inputs][rows]; of FP8 [inputs][rows / LANES] */
} LEVEL(room);

static int64_t LEVEL(room_bytes)(const mc_matrix *matrix, int64_t num)
{
    (void)matrix;
    (void)num;
    return (int64_t)(sizeof(LEVEL(room)) + 63) / 64 * 64;
}

static void LEVEL(pack_floats)(
    const mc_matrix *matrix, const uint8_t *const *inputs, int64_t num, uint8_t *room)
{
    (void)matrix;
    memcpy(room, inputs, (size_t)num * sizeof *inputs);
}

/* Adds the products of a stretch of columns, from `first` on. */
INLINE void LEVEL(add_stretch)(
    const float *values, const uint8_t *const *inputs, int num, int64_t first, int64_t width,
    vf *sums)
{
    vf chains[MANY_ROWS][MANY_INPUTS][CHAINS] = {{{{0}}}};
    int64_t j = 0;
#define STEP(chain, LOAD, ...)                                                              \
    {                                                                                       \
        vf given[MANY_INPUTS];                                                              \
        for (int t = 0; t < num; t++) {                                                     \
            given[t] = LOAD(inputs[t] + (first + j + (chain) * LANES) * 4, ##__VA_ARGS__, MC_F32); \
            KEEP(given[t]);                                                                 \
        }                                                                                   \
        for (int r = 0; r < MANY_ROWS; r++) {                                               \
            vf value;                                                                       \
            memcpy(&value, values + r * STRETCH + j + (chain) * LANES, sizeof value);       \
            KEEP(value);                                                                    \
            for (int t = 0; t < num; t++)                                                   \
                chains[r][t][chain] = LEVEL(fma)(value, given[t], chains[r][t][chain]);     \
        }                                                                                   \
    }
    for (; j + CHAINS * LANES <= width; j += CHAINS * LANES)
        for (int chain = 0; chain < CHAINS; chain++)
            STEP(chain, LEVEL(load))
    for (; j + LANES <= width; j += LANES)
        STEP(0, LEVEL(load))
    if (j < width)
        STEP(0, LEVEL(load_tail), width - j)
#undef STEP
    for (int t = 0; t < num; t++)
        for (int r = 0; r < MANY_ROWS; r++)
            sums[t * MC_TILE + r] += chains[r][t][0] + chains[r][t][1];
}

/* 16 rows of numbers with all inputs of a room. Rows beyond the matrix have any value, and so have their sums. */
INLINE void LEVEL(many_numbers)(
    const mc_matrix *matrix, int64_t row, int64_t num, LEVEL(room) *room, float *out, int format)
{
    int64_t num_rows = matrix->rows - row < MC_TILE ? matrix->rows - row : MC_TILE;
    int64_t bytes = format == MC_F32 ? 4 : 2;
    memset(room->sums, 0, (size_t)(num * MC_TILE) * sizeof(vf));
    for (int64_t k = 0; k < matrix->columns; k += STRETCH) {
        int64_t left = matrix->columns - k, width = left < STRETCH ? left : STRETCH;
        for (int64_t r = 0; r < num_rows; r++) {
            const uint8_t *from = matrix->data + (row + r) * matrix->row_bytes + k * bytes;
            float *to = room->values + r * STRETCH;
            int64_t j = 0;
            for (; j + LANES <= width; j += LANES) {
                vf value = LEVEL(load)(from + j * bytes, format);
                memcpy(to + j, &value, sizeof value);
            }
            if (j < width) {
                vf value = LEVEL(load_tail)(from + j * bytes, width - j, format);
                memcpy(to + j, &value, sizeof value);
            }
        }
        int64_t t = 0;
#define BLOCKS(some)                                                                        \
    for (; t + (some) <= num; t += (some))                                                  \
        for (int64_t r = 0; r < num_rows; r += MANY_ROWS)                                   \
            LEVEL(add_stretch)(room->values + r * STRETCH, room->inputs + t, some, k, width, \
                             room->sums + t * MC_TILE + r);
        BLOCKS(MANY_INPUTS)
        BLOCKS(1)
#undef BLOCKS
    }
    for (int64_t i = 0; i < num * MC_TILE; i += LANES) {
        vf totals = LEVEL(totals)(room->sums + i);
        memcpy(out + i, &totals, sizeof totals);
    }
}

/* Registers that 16 rows take. */
#define PARTS (MC_TILE / LANES)

/* The numbers of 32 columns of 16 rows, without scales: 16 of each column. */
INLINE void LEVEL(fp8_numbers)(const uint8_t *at, float *to)
{
    for (int chunk = 0; chunk < 8; chunk++)
        for (int part = 0; part < PARTS; part++) {
            vu lanes;
            memcpy(&lanes, at + chunk * 64 + part * LANES * 4, sizeof lanes);
            lanes = LEVEL(by_rows)(lanes);
            UNROLL(4)
            for (int i = 0; i < 4; i++) {
                vf column = LEVEL(fp8)(lanes, 8 * i);
                memcpy(to + (4 * chunk + i) * MC_TILE + part * LANES, &column, sizeof column);
            }
        }
}

/* Adds some inputs' products of 32 columns, or of two groups of 16, to their sums. */
INLINE void LEVEL(add_fp8)(
    const float *values, const vf (*scales)[PARTS], int pair, const uint8_t *const *inputs, int num,
    int64_t first, vf *sums)
{
    for (int half = 0; half < pair; half++) {
        vf block[MANY_FP8][PARTS] = {{{0}}};
        for (int64_t j = half * 16; j < half * 16 + MC_BLOCK / pair; j++) {
            vf column[PARTS];
            for (int part = 0; part < PARTS; part++)
                memcpy(&column[part], values + j * MC_TILE + part * LANES, sizeof *column);
            for (int t = 0; t < num; t++) {
                vf given = LEVEL(input)(inputs[t], first + j);
                for (int part = 0; part < PARTS; part++)
                    block[t][part] = LEVEL(fma)(column[part], given, block[t][part]);
            }
        }
        for (int t = 0; t < num; t++)
            for (int part = 0; part < PARTS; part++)
                sums[t * PARTS + part] =
                    LEVEL(fma)(block[t][part], scales[half][part], sums[t * PARTS + part]);
    }
}

/* 16 rows of FP8 with all inputs of a room. */
INLINE void LEVEL(many_fp8)(
    const mc_matrix *matrix, int64_t row, int64_t num, LEVEL(room) *room, float *out, int pair)
{
    const uint8_t *tile = matrix->data + row / MC_TILE * matrix->row_bytes;
    const uint8_t *at = tile + mc_factor_bytes(matrix->scale);
    int64_t columns = mc_input_columns(matrix), scale_bytes = mc_scale_bytes(matrix->scale);
    vf scales[2][PARTS] = {{{0}}};
    memset(room->sums, 0, (size_t)(num * MC_TILE) * sizeof(float));
    for (int64_t k = 0, group = 0; k < columns; k += MC_BLOCK) {
        if (k == group) {
            for (int half = 0; half < pair; half++)
                for (int part = 0; part < PARTS; part++)
                    scales[half][part] = LEVEL(scales)(
                        at + (half * MC_TILE + part * LANES) * scale_bytes, matrix->scale);
            at += mc_head_bytes(matrix);
            group += pair * matrix->group;
        }
        LEVEL(fp8_numbers)(at, room->values);
        at += mc_code_bytes(MC_E4M3, MC_BLOCK * MC_TILE);
        int64_t t = 0;
#define INPUTS(some)                                                                        \
    for (; t + (some) <= num; t += (some))                                                  \
        LEVEL(add_fp8)(room->values, scales, pair, room->inputs + t, some, k,               \
                       room->sums + t * PARTS);
        INPUTS(MANY_FP8)
        INPUTS(MANY_FP8 / 2)
        INPUTS(1)
#undef INPUTS
    }
    for (int64_t t = 0; t < num; t++)
        for (int part = 0; part < PARTS; part++) {
            vf sum = LEVEL(scaled)(room->sums[t * PARTS + part], tile, matrix->scale);
            memcpy(out + t * MC_TILE + part * LANES, &sum, sizeof sum);
        }
}

#undef PARTS

static void LEVEL(multiply_floats)(
    const mc_matrix *matrix, int64_t row, int64_t num, uint8_t *room, float *out)
{
    LEVEL(room) *own = (LEVEL(room) *)room;
    if (matrix->codes == MC_F32)
        LEVEL(many_numbers)(matrix, row, num, own, out, MC_F32);
    else if (matrix->codes == MC_F16)
        LEVEL(many_numbers)(matrix, row, num, own, out, MC_F16);
    else if (matrix->codes == MC_BF16)
        LEVEL(many_numbers)(matrix, row, num, own, out, MC_BF16);
    else if (mc_block_groups(matrix) == 2)
        LEVEL(many_fp8)(matrix, row, num, own, out, 2);
    else
        LEVEL(many_fp8)(matrix, row, num, own, out, 1);
}

static const mc_many LEVEL(many_floats) = {
    LEVEL(room_bytes), LEVEL(pack_floats), LEVEL(multiply_floats)};
