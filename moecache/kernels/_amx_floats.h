/* Products of FP8 with inputs of bf16 by tiles of AMX (tdpbf16ps): one row of inputs or 16, with the same bits.
 *
 * Codes become bf16, which is exact. A product of tiles sums the even columns of 32 and the odd ones apart, each
 * in their order, and adds both to an fp32: it takes denormals as zeros. Columns that share a scale are
 * summed in the tile, then multiplied. Pairs of groups of 16 columns are left to vectors. */

/* 32 columns of 16 rows: two of each row, 16 times. */
typedef uint8_t mc_amx_pairs[16][4 * MC_TILE];

INLINE void mc_pairs_of(const uint8_t *at, const __m512i *sizes, uint8_t (*to)[4 * MC_TILE])
{
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512i first, second;
        mc_fp8_pairs(at + 64 * i, sizes, &first, &second);
        _mm512_store_si512(to[2 * i], first);
        _mm512_store_si512(to[2 * i + 1], second);
    }
}

/* 16 rows with one or two inputs. A block is multiplied while the one after the next is unpacked, so that its
 * bytes are in the cache by then; a group's sums are scaled one block later. */
INLINE void mc_few_tiles(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int num, float *out, int unused)
{
    enum { RING = 4 };
    /* Sums of two inputs, by turns; inputs; weights. */
    static const mc_tile_shapes shapes = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64}, {1, 1, 1, 1, 1, 1, 16}};
    const uint8_t *tile = matrix->data + row / MC_TILE * matrix->row_bytes;
    const uint8_t *at = tile + mc_factor_bytes(matrix->scale);
    uint32_t blocks = (uint32_t)mc_num_blocks(matrix), stretch = (uint32_t)(matrix->group / MC_BLOCK);
    _Alignas(64) mc_amx_pairs weights[RING];
    _Alignas(64) float products[RING][2][MC_TILE];
    __m512 scales[RING], sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    const __m512i sizes[4] = MC_SIZES;
    /* The group of block k and its place there, and of blocks before. */
    uint32_t group = 0, place = 0, groups[3] = {0}, places[2] = {0};
    (void)unused;
#define DOT(sum, number, t)                                                                    \
    {                                                                                          \
        TILE_LOAD(number, inputs[t] + 2 * MC_BLOCK * j, 64);                                   \
        if (places[1] == 0)                                                                    \
            TILE_ZERO(sum);                                                                    \
        TILE_DOT_BF16(sum, number, 6);                                                         \
        if (is_last)                                                                           \
            TILE_STORE(sum, products[groups[1] % RING][t], 64);                                \
    }
    mc_begin_tiles(&shapes);
    for (uint32_t k = 0; k < blocks + 3; k++) {
        if (k >= 3 && (places[1] == 0 || k == blocks + 2))
            for (int t = 0; t < num; t++)
                sums[t] = _mm512_fmadd_ps(_mm512_load_ps(products[groups[2] % RING][t]),
                                          scales[groups[2] % RING], sums[t]);
        if (k >= 2 && k < blocks + 2) {
            uint32_t j = k - 2;
            int is_last = places[0] == 0 || j == blocks - 1;
            TILE_LOAD(6, weights[j % RING][0], 64);
            if (groups[1] % 2 == 0) {
                DOT(0, 4, 0)
                if (num == 2)
                    DOT(1, 5, 1)
            } else {
                DOT(2, 4, 0)
                if (num == 2)
                    DOT(3, 5, 1)
            }
        }
        if (k < blocks) {
            if (place == 0) {
                scales[group % RING] = (__m512)mc_avx512_scales(at, matrix->scale);
                at += mc_head_bytes(matrix);
            }
            for (int line = 0; line < 512; line += 64)
                MC_FETCH(at + line, 2);
            mc_pairs_of(at, sizes, weights[k % RING]);
            at += 512;
        }
        groups[2] = groups[1];
        groups[1] = groups[0];
        groups[0] = group;
        places[1] = places[0];
        places[0] = place;
        place++;
        if (place == stretch) {
            place = 0;
            group++;
        }
    }
#undef DOT
    for (int t = 0; t < num; t++)
        _mm512_storeu_ps(
            out + t * MC_TILE, (__m512)mc_avx512_scaled((vf)sums[t], tile, matrix->scale));
}

MC_TILE_BY(mc_e4m3_few_tiles, mc_few_tiles, 2, 1, 0)

static void mc_tile_e4m3_amx(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out)
{
    mc_tile tile = mc_block_groups(matrix) == 2 ? mc_tile_e4m3_dp : mc_e4m3_few_tiles;
    tile(matrix, row, inputs, num, out);
}

/* A room has the weights of 16 rows, scales of groups, and inputs: 32 columns of 16 after the other. */
INLINE int64_t mc_pairs_bytes(const mc_matrix *matrix)
{
    int64_t blocks = mc_num_blocks(matrix);
    return blocks * (int64_t)(sizeof(mc_amx_pairs) + sizeof(__m512));
}

static int64_t mc_float_room_bytes(const mc_matrix *matrix, int64_t num)
{
    if (matrix->codes != MC_E4M3 || mc_block_groups(matrix) == 2)
        return 0;
    return mc_pairs_bytes(matrix)
        + (num + MC_GROUP - 1) / MC_GROUP * mc_num_blocks(matrix) * (int64_t)sizeof(mc_amx_pairs);
}

static void mc_pack_floats(
    const mc_matrix *matrix, const uint8_t *const *inputs, int64_t num, uint8_t *room)
{
    int64_t blocks = mc_num_blocks(matrix);
    mc_amx_pairs *to = (mc_amx_pairs *)(room + mc_pairs_bytes(matrix));
    for (int64_t first = 0; first < num; first += MC_GROUP, to += blocks)
        for (int64_t t = 0; t < MC_GROUP; t++)
            for (int64_t k = 0; k < blocks; k++)
                if (first + t < num)
                    memcpy(to[k][t], inputs[first + t] + 2 * MC_BLOCK * k, sizeof to[k][t]);
                else
                    memset(to[k][t], 0, sizeof to[k][t]);
}

/* Each tile of weights is loaded once for all inputs. */
static void mc_multiply_floats(
    const mc_matrix *matrix, int64_t row, int64_t num, uint8_t *room, float *out)
{
    static const mc_tile_shapes shapes = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16}};
    const uint8_t *tile = matrix->data + row / MC_TILE * matrix->row_bytes;
    const uint8_t *at = tile + mc_factor_bytes(matrix->scale), *next = tile + matrix->row_bytes;
    int64_t blocks = mc_num_blocks(matrix), stretch = matrix->group / MC_BLOCK;
    int groups = (int)((num + MC_GROUP - 1) / MC_GROUP);
    mc_amx_pairs *weights = (mc_amx_pairs *)room;
    const mc_amx_pairs *inputs = (const mc_amx_pairs *)(room + mc_pairs_bytes(matrix));
    const __m512i sizes[4] = MC_SIZES;
    __m512 *scales = (__m512 *)(weights + blocks), sums[MC_MANY_CHUNK];
    /* A register each for the sums of 16 inputs. */
    _Alignas(64) float products[MC_MANY_CHUNK][MC_TILE];
    _Static_assert(MC_MANY_CHUNK == 4 * MC_GROUP, "EACH_GROUP");
    for (int64_t k = 0; k < blocks; k++, at += 512) {
        if (k % stretch == 0) {
            scales[k / stretch] = (__m512)mc_avx512_scales(at, matrix->scale);
            at += mc_head_bytes(matrix);
        }
        mc_pairs_of(at, sizes, weights[k]);
    }
    for (int t = 0; t < groups * MC_GROUP; t++)
        sums[t] = _mm512_setzero_ps();
    mc_begin_tiles(&shapes);
#define EACH_GROUP(DO)                                                                         \
    DO(0, 4) if (groups > 1) DO(1, 5) if (groups > 2) DO(2, 4) if (groups > 3) DO(3, 5)
#define ZERO(group, number) TILE_ZERO(group);
#define DOT(group, number)                                                                     \
    {                                                                                          \
        TILE_LOAD(number, inputs[group * blocks + j][0], 64);                                  \
        TILE_DOT_BF16(group, number, 6);                                                       \
    }
#define STORE(group, number) TILE_STORE(group, products[group * MC_GROUP], 64);
    for (int64_t k = 0, end; k < blocks; k = end) {
        __m512 scale = scales[k / stretch];
        end = k + stretch < blocks ? k + stretch : blocks;
        EACH_GROUP(ZERO)
        for (int64_t j = k; j < end; j++) {
            for (int line = 0; line < 512; line += 64, next += 64)
                __builtin_prefetch(next, 0, 2);
            TILE_LOAD(6, weights[j][0], 64);
            EACH_GROUP(DOT)
        }
        EACH_GROUP(STORE)
        for (int t = 0; t < groups * MC_GROUP; t++)
            sums[t] = _mm512_fmadd_ps(_mm512_load_ps(products[t]), scale, sums[t]);
    }
#undef STORE
#undef DOT
#undef ZERO
#undef EACH_GROUP
    for (int t = 0; t < num; t++)
        _mm512_storeu_ps(
            out + t * MC_TILE, (__m512)mc_avx512_scaled((vf)sums[t], tile, matrix->scale));
}
