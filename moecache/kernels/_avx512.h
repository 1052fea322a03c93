/* Tiles of bf16 and FP8 for inputs of bf16, by the processor's own products of bf16 (AVX512-BF16).
 *
 * vdpbf16ps adds two columns at a time, the odd one first, to an fp32 sum, and takes denormals as
 * zeros. FP8 is exact in bf16, so that there is no error but that of the sums. */

typedef __m512bh mc_bh;

INLINE __m512 mc_dp(__m512 sum, __m512i weights, __m512i inputs)
{
    return _mm512_dpbf16_ps(sum, (mc_bh)weights, (mc_bh)inputs);
}

/* The sums of 16 registers, each by halves, as the lanes of one. */
INLINE __m512 mc_totals(const __m512 *sums)
{
    __m512 two[8], four[4];
    for (int i = 0; i < 8; i++)
        two[i] = _mm512_add_ps(_mm512_unpacklo_ps(sums[2 * i], sums[2 * i + 1]),
                               _mm512_unpackhi_ps(sums[2 * i], sums[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(two[2 * i]), b = _mm512_castps_pd(two[2 * i + 1]);
        four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
#define LANES_OF(a, b) \
    _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd))
    __m512 low = LANES_OF(four[0], four[1]), high = LANES_OF(four[2], four[3]);
    return LANES_OF(low, high);
#undef LANES_OF
}

/* 16 rows with one input: rows one after the other, as the memory likes best. */
INLINE __m512 mc_rows_bf16(
    const uint8_t *row, int64_t row_bytes, int num_rows, const uint8_t *input, int64_t columns)
{
    __m512 sums[MC_TILE];
    __mmask32 tail = (__mmask32)((1ull << (columns % 32)) - 1);
#pragma GCC unroll 16
    for (int r = 0; r < MC_TILE; r++) {
        const uint8_t *at = row + (r < num_rows ? r : num_rows - 1) * row_bytes;
        __m512 sum = _mm512_setzero_ps();
        int64_t k = 0;
#pragma GCC unroll 4
        for (; k + 32 <= columns; k += 32) {
            MC_FETCH(at + 2 * k, 1);
            sum = mc_dp(sum, _mm512_loadu_si512(at + 2 * k), _mm512_loadu_si512(input + 2 * k));
        }
        if (tail)
            sum = mc_dp(sum, _mm512_maskz_loadu_epi16(tail, at + 2 * k),
                        _mm512_maskz_loadu_epi16(tail, input + 2 * k));
        sums[r] = sum;
    }
    return mc_totals(sums);
}

/* 4 rows with 4 inputs. */
INLINE __m512 mc_block_bf16(
    const uint8_t *const *rows, const uint8_t *const *inputs, int64_t columns)
{
    __m512 sums[16];
    __mmask32 tail = (__mmask32)((1ull << (columns % 32)) - 1);
    for (int i = 0; i < 16; i++)
        sums[i] = _mm512_setzero_ps();
    int64_t k = 0;
#define STEP(LOAD)                                          \
    __m512i weights[4];                                     \
    for (int r = 0; r < 4; r++)                             \
        weights[r] = LOAD(rows[r] + 2 * k);                 \
    for (int t = 0; t < 4; t++) {                           \
        __m512i input = LOAD(inputs[t] + 2 * k);            \
        for (int r = 0; r < 4; r++)                         \
            sums[t * 4 + r] = mc_dp(sums[t * 4 + r], weights[r], input); \
    }
#define PART(at) _mm512_maskz_loadu_epi16(tail, at)
    for (; k + 32 <= columns; k += 32) {
        STEP(_mm512_loadu_si512)
    }
    if (tail) {
        STEP(PART)
    }
#undef PART
#undef STEP
    return mc_totals(sums);
}

static void mc_tile_bf16_dp(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out)
{
    int num_rows = matrix->rows - row < MC_TILE ? (int)(matrix->rows - row) : MC_TILE;
    const uint8_t *first = matrix->data + row * matrix->row_bytes;
    int64_t t = 0;
    for (; t + 4 <= num; t += 4)
        for (int r = 0; r < num_rows; r += 4) {
            const uint8_t *rows[4];
            for (int i = 0; i < 4; i++)
                rows[i] = first + (r + i < num_rows ? r + i : num_rows - 1) * matrix->row_bytes;
            __m512 sums = mc_block_bf16(rows, inputs + t, matrix->columns);
#define STORE(i) _mm_storeu_ps(out + (t + i) * MC_TILE + r, _mm512_extractf32x4_ps(sums, i))
            STORE(0);
            STORE(1);
            STORE(2);
            STORE(3);
#undef STORE
        }
    for (; t < num; t++)
        _mm512_storeu_ps(
            out + t * MC_TILE,
            mc_rows_bf16(first, matrix->row_bytes, num_rows, inputs[t], matrix->columns));
}

/* Two columns of an input, for all rows. */
INLINE __m512i mc_pair(const uint8_t *input, int64_t column)
{
    int32_t pair;
    memcpy(&pair, input + 2 * column, 4);
    return _mm512_set1_epi32(pair);
}

/* See `_fp8.h`. */
struct mc_fp8_sizes mc_sizes;

static void mc_fill_tables(void)
{
    uint64_t floats = mc_own_floats();
    for (int i = 0; i < 128; i++) {
        /* Exponents of few bits become those of fp32 by a product with a power of two. */
        uint16_t size = mc_float_to_bf16(mc_bits_to_float((uint32_t)i << 20) * 0x1p120f);
        if (i == 127)
            size = 0x7fc0;
        mc_sizes.low[i] = (uint8_t)size;
        mc_sizes.high[i] = (uint8_t)(size >> 8);
    }
    mc_restore_floats(floats);
}

/* 16 rows with `num` inputs: as in `_codes.h`, but two columns at a time, and 16 columns as two sums that
 * do not wait for each other. A chain has four products at most: others can overtake it in that time. */
INLINE void mc_few_dp(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int num, float *out,
    int pair)
{
    const uint8_t *tile = matrix->data + row / MC_TILE * matrix->row_bytes;
    const uint8_t *at = tile + mc_factor_bytes(matrix->scale), *scales = at;
    int64_t columns = mc_input_columns(matrix), head = mc_head_bytes(matrix), group = 0;
    __m512i sizes[4] = MC_SIZES;
    __m512 sums[6], block[6], other[6];
    for (int t = 0; t < num; t++)
        sums[t] = _mm512_setzero_ps();
    for (int64_t k = 0; k < columns; k += MC_BLOCK) {
        if (k == group) {
            scales = at;
            at += head;
            group += pair * matrix->group;
        }
        __m512 scale = (__m512)mc_avx512_scales(scales, matrix->scale);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            for (int t = 0; t < num; t++)
                block[t] = other[t] = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int chunk = 0; chunk < 4; chunk++, at += 64) {
                MC_FETCH(at, num);
                __m512i first, second;
                mc_fp8_pairs(at, sizes, &first, &second);
                int64_t column = k + 16 * half + 4 * chunk;
                for (int t = 0; t < num; t++) {
                    block[t] = mc_dp(block[t], first, mc_pair(inputs[t], column));
                    other[t] = mc_dp(other[t], second, mc_pair(inputs[t], column + 2));
                }
            }
            if (half && pair == 2)
                scale = (__m512)mc_avx512_scales(scales + head / 2, matrix->scale);
            for (int t = 0; t < num; t++)
                sums[t] = _mm512_fmadd_ps(_mm512_add_ps(block[t], other[t]), scale, sums[t]);
        }
    }
    for (int t = 0; t < num; t++)
        _mm512_storeu_ps(
            out + t * MC_TILE, (__m512)mc_avx512_scaled((vf)sums[t], tile, matrix->scale));
}

MC_TILE_BY(mc_e4m3_plain_dp, mc_few_dp, 6, 2, 1)
MC_TILE_BY(mc_e4m3_pairs_dp, mc_few_dp, 6, 2, 2)

void mc_tile_e4m3_dp(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out)
{
    mc_tile tile = mc_block_groups(matrix) == 2 ? mc_e4m3_pairs_dp : mc_e4m3_plain_dp;
    tile(matrix, row, inputs, num, out);
}
