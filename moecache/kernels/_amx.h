/* Products with many inputs by tiles of AMX: integers, a form of weights after the other.
 *
 * 16 rows are unpacked once, to integers of 8 bits with their scales as fp32, and multiplied with 16 inputs
 * at a time, which are packed once for all rows. Sums of integers are exact, and what follows is in the order of
 * `_planes.h`, so that the bits are those of one input. Sums of both planes become one fp32 by
 * fma(high, 128, low), which rounds once: so does the conversion of an integer.
 *
 * A product of tiles takes 16 cycles, and 52 until it can be stored: each is made while those before are
 * stored and scaled. */

/* 16 inputs, 32 columns after the other, the higher plane first. Sums are those of the first 16 columns, of
 * the others, of all. */
typedef int8_t mc_amx_planes[2][MC_GROUP][MC_BLOCK];
typedef struct {
    mc_amx_planes *planes;
    float (*scales)[MC_GROUP], (*totals)[3][MC_GROUP];
    int32_t (*sums)[3][MC_GROUP];
} mc_packed;

/* 16 rows: four columns of each, eight times for 32 columns. These have one factor, or 16 of them one: scales,
 * or the integers that are the first of two steps. A term is an offset, or an integer, a zero point. `times`
 * are the second step, and what multiplies terms. */
typedef int8_t mc_amx_weights[8][4 * MC_TILE];
typedef struct {
    mc_amx_weights *weights;
    vf *factors, *terms, *times;
} mc_unpacked;

/* Whether a sum of 32 products, without its scale, may be no fp32: codes of more than 5 bits. */
INLINE int mc_is_wide(int codes) { return codes == MC_IQ4 || codes == MC_IQ2 || codes == MC_IQ3X; }

INLINE int64_t mc_num_blocks(const mc_matrix *matrix) { return mc_input_columns(matrix) / MC_BLOCK; }

/* Parts of a room: unpacked rows, then packed inputs. */
INLINE int64_t mc_unpacked_bytes(const mc_matrix *matrix)
{
    int64_t blocks = mc_num_blocks(matrix), supers = (blocks * MC_BLOCK + MC_SUPER - 1) / MC_SUPER;
    return blocks * (int64_t)(sizeof(mc_amx_weights) + 4 * sizeof(vf))
        + supers * 2 * (int64_t)sizeof(vf);
}

INLINE int64_t mc_group_bytes(const mc_matrix *matrix)
{
    return mc_num_blocks(matrix) * (int64_t)(sizeof(mc_amx_planes) + 7 * MC_GROUP * 4);
}

static int64_t mc_room_bytes(const mc_matrix *matrix, int64_t num)
{
    return mc_unpacked_bytes(matrix) + (num + MC_GROUP - 1) / MC_GROUP * mc_group_bytes(matrix);
}

INLINE mc_unpacked mc_unpacked_in(const mc_matrix *matrix, uint8_t *room)
{
    int64_t blocks = mc_num_blocks(matrix);
    mc_unpacked rows = {(mc_amx_weights *)room, NULL, NULL, NULL};
    rows.factors = (vf *)(rows.weights + blocks);
    rows.terms = rows.factors + 2 * blocks;
    rows.times = rows.terms + 2 * blocks;
    return rows;
}

INLINE mc_packed mc_packed_in(const mc_matrix *matrix, uint8_t *room, int64_t group)
{
    int64_t blocks = mc_num_blocks(matrix);
    uint8_t *at = room + mc_unpacked_bytes(matrix) + group * mc_group_bytes(matrix);
    mc_packed inputs = {(mc_amx_planes *)at, NULL, NULL, NULL};
    inputs.scales = (float (*)[MC_GROUP])(inputs.planes + blocks);
    inputs.totals = (float (*)[3][MC_GROUP])(inputs.scales + blocks);
    inputs.sums = (int32_t (*)[3][MC_GROUP])(inputs.totals + blocks);
    return inputs;
}

/* Inputs for all rows of a matrix. */
static void mc_pack_planes(
    const mc_matrix *matrix, const uint8_t *const *inputs, int64_t num, uint8_t *room)
{
    int64_t blocks = mc_num_blocks(matrix);
    for (int64_t first = 0; first < num; first += MC_GROUP) {
        mc_packed to = mc_packed_in(matrix, room, first / MC_GROUP);
        int count = num - first < MC_GROUP ? (int)(num - first) : MC_GROUP;
        if (count < MC_GROUP)
            memset(to.planes, 0, (size_t)mc_group_bytes(matrix));
        for (int t = 0; t < count; t++) {
            const mc_planes *x = (const mc_planes *)inputs[first + t];
            for (int64_t k = 0; k < blocks; k++) {
                memcpy(to.planes[k][0][t], x[k].high, MC_BLOCK);
                memcpy(to.planes[k][1][t], x[k].low, MC_BLOCK);
                to.scales[k][t] = x[k].scale;
                for (int i = 0; i < 3; i++) {
                    to.totals[k][i][t] = x[k].totals[i];
                    to.sums[k][i][t] = x[k].sums[i];
                }
            }
        }
    }
}

/* 16 rows of a form: their integers and scales, and what multiplies 256 columns of them. */
INLINE void mc_unpack_rows(
    const mc_matrix *matrix, int64_t row, mc_unpacked rows, int kind)
{
    int codes = kind & 255, is_super = !!(kind & MC_SUPERS), pair = kind & MC_PAIRS ? 2 : 1;
    int has_zeros = !!(kind & MC_ZEROS), has_offsets = !!(kind & MC_OFFSETS);
    int scale_type = is_super ? MC_IN_STEPS : matrix->scale;
    const uint8_t *at = matrix->data + row / MC_TILE * matrix->row_bytes
        + mc_factor_bytes(matrix->scale), *scales = at;
    int64_t blocks = mc_num_blocks(matrix);
    int64_t scale_bytes = mc_scale_bytes(scale_type), head = MC_TILE * pair * scale_bytes;
    int64_t stretch = is_super ? MC_SUPER / MC_BLOCK : pair == 2 ? 1 : matrix->group / MC_BLOCK;
    __m512i bias = _mm512_set1_epi8((char)LEVEL(bias)(codes));
    for (int64_t k = 0; k < blocks;) {
        int64_t end = k + stretch < blocks ? k + stretch : blocks;
        for (int i = 0; is_super && i <= has_offsets; i++)
            *rows.times++ = LEVEL(load)(at + i * MC_TILE * 2, MC_F16);
        at += is_super ? mc_super_bytes(matrix) : 0;
        scales = at;
        at += is_super ? 0 : head * (1 + (has_zeros | has_offsets));
        for (; k < end; k++) {
            if (is_super) {
                scales = at;
                at += head * (1 + has_offsets);
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                vu words[4];
                LEVEL(unpack)(at, half, codes, words);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    _mm512_store_si512(
                        rows.weights[k][4 * half + j], _mm512_sub_epi8((__m512i)words[j], bias));
            }
            at += mc_code_bytes(codes, MC_BLOCK * MC_TILE);
#pragma GCC unroll 2
            for (int i = 0; i < pair; i++) {
                const uint8_t *here = scales + i * MC_TILE * scale_bytes;
                vi whole = is_super ? (vi)(LEVEL(widen)(here) << 24) >> 24 : (vi){0};
                if (!is_super)
                    *rows.factors++ = LEVEL(scales)(here, scale_type);
                else
                    *rows.factors++ =
                        mc_is_wide(codes) ? (vf)whole : __builtin_convertvector(whole, vf);
                if (has_offsets)
                    *rows.terms++ = LEVEL(scales)(here + head, scale_type);
                if (has_zeros)
                    *rows.terms++ = (vf)__builtin_convertvector(
                        LEVEL(scales)(here + head, scale_type), vi);
            }
        }
    }
}

#define MC_UNPACK(codes, suffix, flags)                                                        \
    static void mc_unpack_##codes##_##suffix(                                                  \
        const mc_matrix *matrix, int64_t row, mc_unpacked rows)                                \
    {                                                                                          \
        mc_unpack_rows(matrix, row, rows, MC_##codes | (flags));                               \
    }
MC_FORMS(MC_UNPACK)
#undef MC_UNPACK

/* Sums of the products of some blocks by turns: of all or of half of their columns, of both planes. */
typedef struct {
    vi of[4][2][MC_GROUP];
} mc_amx_products;

/* Adds a block to the sum of an input. */
INLINE vf mc_add_block(
    vf sum, const mc_amx_products *products, mc_unpacked rows, mc_packed inputs, int64_t k, int t,
    int kind, int is_wide)
{
    int is_super = !!(kind & MC_SUPERS), pair = kind & MC_PAIRS ? 2 : 1;
    int has_zeros = !!(kind & MC_ZEROS), has_offsets = !!(kind & MC_OFFSETS);
    vf highs = {0}, lows = {0}, some = {0}, scale = LEVEL(all)(inputs.scales[k][t]);
    vi block = {0};
#pragma GCC unroll 2
    for (int i = 0; i < pair; i++) {
        vi high = products->of[(pair * k + i) & 3][0][t], low = products->of[(pair * k + i) & 3][1][t];
        int which = pair == 2 ? i : 2;
        vf factor = rows.factors[pair * k + i];
        if (has_zeros || is_wide) {
            vi whole = (high << 7) + low;
            if (has_zeros)
                whole += (vi)rows.terms[pair * k + i] * inputs.sums[k][which][t];
            if (is_wide)
                block = (vi)((vu)block + (vu)whole * (vu)factor);
            some = __builtin_convertvector(whole, vf);
        } else {
            vf h = __builtin_convertvector(high, vf), l = __builtin_convertvector(low, vf);
            if (is_super && pair == 2) {
                highs = i ? LEVEL(fma)(h, factor, highs) : h * factor;
                lows = i ? LEVEL(fma)(l, factor, lows) : l * factor;
            } else {
                some = LEVEL(fma)(h, LEVEL(all)(128), l);
            }
        }
        if (!is_super)
            sum += some * scale * factor;
        if (!is_super && has_offsets)
            sum += rows.terms[pair * k + i] * inputs.totals[k][which][t];
    }
    if (!is_super)
        return sum;
    if (is_wide)
        some = __builtin_convertvector(block, vf);
    else if (pair == 2)
        some = LEVEL(fma)(highs, LEVEL(all)(128), lows);
    else
        some *= rows.factors[k];
    return sum + some * scale;
}

/* The sums of the offsets of some blocks, of all inputs: they do not wait for each other. */
INLINE void mc_add_terms(
    vf *sums, mc_unpacked rows, mc_packed inputs, int64_t first, int64_t last, int pair)
{
    for (int64_t k = first; k < last; k++)
        for (int i = 0; i < pair; i++) {
            vf term = rows.terms[pair * k + i];
            const float *totals = inputs.totals[k][pair == 2 ? i : 2];
#pragma GCC unroll 16
            for (int t = 0; t < MC_GROUP; t++)
                sums[t] += term * totals[t];
        }
}

/* Multiplies 16 unpacked rows with 16 inputs; asks for the rows that come next. */
INLINE void mc_multiply_group(
    vf *out, mc_unpacked rows, mc_packed inputs, int64_t blocks, const uint8_t *next,
    int64_t next_bytes, int kind, int is_wide)
{
    enum { SUPER = MC_SUPER / MC_BLOCK };
    int is_super = !!(kind & MC_SUPERS), pair = kind & MC_PAIRS ? 2 : 1;
    int has_offsets = !!(kind & MC_OFFSETS);
    int64_t lines = (next_bytes / 64 + blocks - 1) / blocks;
    _Alignas(64) mc_amx_products products;
    /* `sums` are those of 256 columns, if a number multiplies these. */
    vf sums[MC_GROUP] = {{0}}, all[MC_GROUP] = {{0}};
#define LOAD(i)                                                                                   \
    {                                                                                             \
        TILE_LOAD(6, rows.weights[k][4 * (i)], 64);                                               \
        TILE_LOAD(4, inputs.planes[k][0][0] + 16 * (i), MC_BLOCK);                                \
        TILE_LOAD(5, inputs.planes[k][1][0] + 16 * (i), MC_BLOCK);                                \
    }
#define DOT(sum, plane)                                                                           \
    {                                                                                             \
        TILE_ZERO(sum);                                                                           \
        TILE_DOT(sum, plane, 6);                                                                  \
    }
#define STORE(i, plane, sum) TILE_STORE(sum, products.of[(pair * (k - 1) + (i)) & 3][plane], 64);
#define ADD(first)                                                                                \
    if (k >= 2) {                                                                                 \
        _Pragma("GCC unroll 4") for (int t = first; t < (first) + 4; t++)                         \
            sums[t] = mc_add_block(sums[t], &products, rows, inputs, k - 2, t, kind, is_wide);    \
    }
/* A block's products are stored while those of the next are made, and added while those of the one after. */
#define BLOCK(h, l, h_before, l_before)                                                           \
    {                                                                                             \
        int is_inside = k < blocks, has_before = k > 0 && k <= blocks;                            \
        for (int64_t line = 0; line < lines; line++, next += 64)                                  \
            __builtin_prefetch(next, 0, 2);                                                       \
        if (pair == 1) {                                                                          \
            if (is_inside) {                                                                      \
                LOAD(0)                                                                           \
                DOT(h, 4)                                                                         \
            }                                                                                     \
            ADD(0)                                                                                \
            if (is_inside)                                                                        \
                DOT(l, 5)                                                                         \
            ADD(4)                                                                                \
            if (has_before)                                                                       \
                STORE(0, 0, h_before)                                                             \
            ADD(8)                                                                                \
            if (has_before)                                                                       \
                STORE(0, 1, l_before)                                                             \
            ADD(12)                                                                               \
        } else {                                                                                  \
            if (has_before) {                                                                     \
                STORE(0, 0, 0)                                                                    \
                STORE(0, 1, 1)                                                                    \
            }                                                                                     \
            if (is_inside) {                                                                      \
                LOAD(0)                                                                           \
                DOT(0, 4)                                                                         \
                DOT(1, 5)                                                                         \
            }                                                                                     \
            ADD(0)                                                                                \
            ADD(4)                                                                                \
            if (has_before) {                                                                     \
                STORE(1, 0, 2)                                                                    \
                STORE(1, 1, 3)                                                                    \
            }                                                                                     \
            if (is_inside) {                                                                      \
                LOAD(1)                                                                           \
                DOT(2, 4)                                                                         \
                DOT(3, 5)                                                                         \
            }                                                                                     \
            ADD(8)                                                                                \
            ADD(12)                                                                               \
        }                                                                                         \
        if (is_super && k >= 2 && ((k - 1) % SUPER == 0 || k == blocks + 1)) {                    \
            int64_t from = (k - 2) / SUPER * SUPER;                                               \
            _Pragma("GCC unroll 16") for (int t = 0; t < MC_GROUP; t++)                           \
            {                                                                                     \
                all[t] += sums[t] * rows.times[0];                                                \
                sums[t] = (vf){0};                                                                \
            }                                                                                     \
            if (has_offsets) {                                                                    \
                vf terms[MC_GROUP] = {{0}};                                                       \
                mc_add_terms(terms, rows, inputs, from, k - 1, pair);                             \
                _Pragma("GCC unroll 16") for (int t = 0; t < MC_GROUP; t++)                       \
                    all[t] += terms[t] * rows.times[1];                                           \
            }                                                                                     \
            rows.times += 1 + has_offsets;                                                        \
        }                                                                                         \
        k++;                                                                                      \
    }
    for (int64_t k = 0; k < blocks + 2;) {
        BLOCK(0, 1, 2, 3)
        if (k < blocks + 2)
            BLOCK(2, 3, 0, 1)
    }
#undef BLOCK
#undef ADD
#undef STORE
#undef DOT
#undef LOAD
#pragma GCC unroll 16
    for (int t = 0; t < MC_GROUP; t++)
        out[t] = is_super ? all[t] : sums[t];
}

#define MC_GROUP_OF(name, kind, is_wide)                                                          \
    static void mc_group_##name(                                                                  \
        vf *out, mc_unpacked rows, mc_packed inputs, int64_t blocks, const uint8_t *next,         \
        int64_t next_bytes)                                                                       \
    {                                                                                             \
        mc_multiply_group(out, rows, inputs, blocks, next, next_bytes, kind, is_wide);            \
    }
#define MC_GROUPS(X)                                                                              \
    X(plain, 0, 0)                                                                                \
    X(pairs, MC_PAIRS, 0)                                                                         \
    X(zeros, MC_ZEROS, 0)                                                                         \
    X(offsets, MC_OFFSETS, 0)                                                                     \
    X(super, MC_SUPERS, 0)                                                                        \
    X(super_pairs, MC_SUPERS | MC_PAIRS, 0)                                                       \
    X(super_offsets, MC_SUPERS | MC_OFFSETS, 0)                                                   \
    X(super_offsets_pairs, MC_SUPERS | MC_OFFSETS | MC_PAIRS, 0)                                  \
    X(wide, MC_SUPERS, 1)                                                                         \
    X(wide_pairs, MC_SUPERS | MC_PAIRS, 1)
MC_GROUPS(MC_GROUP_OF)
#undef MC_GROUP_OF

typedef void (*mc_unpacking)(const mc_matrix *matrix, int64_t row, mc_unpacked rows);
typedef void (*mc_grouping)(
    vf *out, mc_unpacked rows, mc_packed inputs, int64_t blocks, const uint8_t *next,
    int64_t next_bytes);

/* Rows [row, row + 16) with packed inputs, as a tile gives them. */
static void mc_multiply_planes(
    const mc_matrix *matrix, int64_t row, int64_t num, uint8_t *room, float *out)
{
#define MC_UNPACK_OF(codes, suffix, flags) [MC_##codes][(flags) >> 8] = mc_unpack_##codes##_##suffix,
    static const mc_unpacking unpackings[MC_NUM_CODES][MC_FLAGS] = {MC_FORMS(MC_UNPACK_OF)};
#undef MC_UNPACK_OF
#define MC_GROUP_AT(name, kind, is_wide) [is_wide][(kind) >> 8] = mc_group_##name,
    static const mc_grouping groupings[2][MC_FLAGS] = {MC_GROUPS(MC_GROUP_AT)};
#undef MC_GROUP_AT
    /* Inputs, by halves of a block in their second rows, weights, sums. */
    static const mc_tile_shapes shapes[2] = {
        {1, 0, {0}, {64, 64, 64, 64, 32, 32, 64}, {16, 16, 16, 16, 16, 16, 8}},
        {1, 0, {0}, {64, 64, 64, 64, 16, 16, 64}, {16, 16, 16, 16, 16, 16, 4}},
    };
    vf sums[MC_GROUP];
    int flags = mc_flags(matrix) >> 8;
    const uint8_t *tile = matrix->data + row / MC_TILE * matrix->row_bytes;
    mc_unpacked rows = mc_unpacked_in(matrix, room);
    mc_grouping group = groupings[!!(flags & MC_SUPERS >> 8) && mc_is_wide(matrix->codes)][flags];
    unpackings[matrix->codes][flags](matrix, row, rows);
    mc_begin_tiles(&shapes[mc_block_groups(matrix) - 1]);
    for (int64_t first = 0; first < num; first += MC_GROUP) {
        group(sums, rows, mc_packed_in(matrix, room, first / MC_GROUP), mc_num_blocks(matrix),
              tile + matrix->row_bytes, first ? 0 : matrix->row_bytes);
        for (int t = 0; t < MC_GROUP && first + t < num; t++) {
            vf sum = LEVEL(scaled)(sums[t], tile, matrix->scale);
            memcpy(out + (first + t) * MC_TILE, &sum, sizeof sum);
        }
    }
}

static const mc_many mc_many_planes = {mc_room_bytes, mc_pack_planes, mc_multiply_planes};
