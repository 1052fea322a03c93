/* Tiles for inputs of bf16, by the processor's own products of bf16 (AVX512-BF16).
 *
 * vdpbf16ps adds two columns at a time, the odd one first, to an fp32 sum, and takes denormals as
 * zeros. Weights of 4 and 8 bits are exact in bf16, so that there is no error but that of the sums. */

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
        for (; k + 32 <= columns; k += 32)
            sum = mc_dp(sum, _mm512_loadu_si512(at + 2 * k), _mm512_loadu_si512(input + 2 * k));
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

/* What codes mean, in bf16: of 8 bits the sizes alone, as low bytes and high bytes; of others by 6 bits,
 * of which those beyond the code's do not count. By `codes - MC_I8`; filled once. */
static struct {
    uint8_t low[128], high[128];
    uint16_t small[64];
} mc_tables[MC_NUM_CODES - MC_I8];

static void mc_fill_tables(void)
{
    for (int codes = MC_I8; codes < MC_NUM_CODES; codes++)
        for (int i = 0; i < 128; i++) {
            /* Exponents of few bits become those of fp32 by a product with a power of two. */
            float fp8 = mc_bits_to_float((uint32_t)i << 20) * 0x1p120f;
            float fp4 = mc_bits_to_float((uint32_t)(i & 7) << 22) * 0x1p126f;
            uint16_t size = mc_float_to_bf16(codes == MC_I8 ? (float)i : fp8);
            if (codes == MC_E4M3 && i == 127)
                size = 0x7fc0;
            mc_tables[codes - MC_I8].low[i] = (uint8_t)size;
            mc_tables[codes - MC_I8].high[i] = (uint8_t)(size >> 8);
            int code = i & ((1 << mc_code_bits(codes)) - 1);
            float value = (float)(code - mc_bias(codes));
            if (codes == MC_E2M1)
                value = i & 8 ? -fp4 : fp4;
            if (codes == MC_IQ4)
                value = mc_iq4[i & 15];
            mc_tables[codes - MC_I8].small[i & 63] = mc_float_to_bf16(value);
        }
}

typedef struct {
    __m512i low[2], high[2];
} mc_bytes;

/* bf16 of codes of 8 bits, as low and high bytes. */
INLINE void mc_widen(__m512i values, mc_bytes bytes, __m512i *low, __m512i *high, int codes)
{
    __m512i sign = _mm512_set1_epi8(-128);
    __m512i size = codes == MC_I8 ? _mm512_abs_epi8(values) : values;
    *low = _mm512_permutex2var_epi8(bytes.low[0], size, bytes.low[1]);
    *high = _mm512_permutex2var_epi8(bytes.high[0], size, bytes.high[1]);
    *high = _mm512_ternarylogic_epi64(*high, values, sign, 0xf8);
    /* Of -128, whose size has 8 bits, the table had that of 0. */
    if (codes == MC_I8)
        *high = _mm512_mask_mov_epi8(
            *high, _mm512_cmpeq_epi8_mask(values, sign), _mm512_set1_epi8((char)0xc3));
}

/* bf16 of codes below 8 bits, from the lowest bits of 16 on. */
INLINE __m512i mc_look_up(__m512i codes, const __m512i *table, int bits)
{
    if (bits == 6)
        return _mm512_permutex2var_epi16(table[0], codes, table[1]);
    return _mm512_permutexvar_epi16(codes, table[0]);
}

/* Adds 16 columns, from `k` on, to two sums: those of each first pair of columns, and of each second. */
INLINE void mc_add_dp(
    __m512 *block, __m512 *other, const uint8_t *at, int half, const uint8_t *const *inputs,
    int64_t k, int num, const __m512i *table, mc_bytes bytes, int codes)
{
    int bits = mc_code_bits(codes), width = bits == 8 ? 4 : 8;
    const uint8_t *first_at = at + half * 16 / width * 64;
    __m512i low_nibbles = _mm512_set1_epi8(15), above = low_nibbles;
    if (bits == 5 || bits == 6)
        above = _mm512_loadu_si512(at + 256 + (bits - 5) * half * 64);
    if (bits == 5 && !half)
        above = _mm512_slli_epi16(above, 4);
#pragma GCC unroll 4
    for (int chunk = 0; chunk < 16 / width; chunk++) {
        __m512i values = _mm512_loadu_si512(first_at + 64 * chunk), pairs[4];
        if (bits == 8) {
            __m512i low, high;
            mc_widen(values, bytes, &low, &high, codes);
            pairs[0] = _mm512_unpacklo_epi8(low, high);
            pairs[1] = _mm512_unpackhi_epi8(low, high);
        } else if (bits == 4) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                pairs[i] = mc_look_up(_mm512_srli_epi16(values, (unsigned)(4 * i)), table, bits);
        } else {
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                /* What is above two nibbles of a word, brought to bits 4 and 12. */
                int slot = 2 * chunk + i, left = bits == 5 ? -slot : 4 - 2 * slot;
                __m512i code = left > 0 ? _mm512_slli_epi16(above, (unsigned)left)
                                        : _mm512_srli_epi16(above, (unsigned)-left);
                __m512i nibbles = i ? _mm512_srli_epi16(values, 4) : values;
                code = _mm512_ternarylogic_epi64(low_nibbles, nibbles, code, 0xca);
                pairs[i] = mc_look_up(code, table, bits);
                pairs[2 + i] = mc_look_up(_mm512_srli_epi16(code, 8), table, bits);
            }
        }
#pragma GCC unroll 2
        for (int i = 0; i < width / 2; i += 2) {
            int64_t column = k + width * chunk + 2 * i;
            for (int t = 0; t < num; t++) {
                block[t] = mc_dp(block[t], pairs[i], mc_pair(inputs[t], column));
                other[t] = mc_dp(other[t], pairs[i + 1], mc_pair(inputs[t], column + 2));
            }
        }
    }
}

/* 16 rows' scales, or what is added. */
INLINE __m512 mc_scales(const uint8_t *at, int scale)
{
    if (scale == MC_IN_STEPS)
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
    return (__m512)mc_avx512_scales(at, scale);
}

/* What tells forms apart beside the bits of their codes: so much is known as they are compiled, as a branch
 * in each block would cost as much as its products. */
enum { MC_TERMS = 256, MC_SUPERS = 512, MC_PAIRS = 1024 };

/* 16 rows with `num` inputs: as in `_codes.h`, but two columns at a time, and 16 columns as two sums that
 * do not wait for each other. Four products in a row are as many as their time lets others overtake. */
INLINE void mc_few_dp(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int num, float *out,
    int kind)
{
    const uint8_t *tile = matrix->data + row / MC_TILE * matrix->row_bytes;
    const uint8_t *at = tile + mc_factor_bytes(matrix->scale), *scales = at;
    int64_t columns = mc_input_columns(matrix), head = mc_head_bytes(matrix), index = 0;
    int codes = kind & 255, has_terms = kind & MC_TERMS, is_super = kind & MC_SUPERS;
    int pair = kind & MC_PAIRS ? 2 : 1, scale_type = is_super ? MC_IN_STEPS : matrix->scale;
    int64_t stretch = is_super ? MC_SUPER : pair * matrix->group;
    /* Scaled sums of a stretch, and of terms: what is left of 256 columns is to be multiplied. */
    __m512 sums[8], scaled[8], terms[8], block[8], other[8];
    __m512i table[2];
    mc_bytes bytes;
    for (int i = 0; i < 2; i++) {
        table[i] = _mm512_loadu_si512(mc_tables[matrix->codes - MC_I8].small + 32 * i);
        bytes.low[i] = _mm512_loadu_si512(mc_tables[matrix->codes - MC_I8].low + 64 * i);
        bytes.high[i] = _mm512_loadu_si512(mc_tables[matrix->codes - MC_I8].high + 64 * i);
    }
    for (int t = 0; t < num; t++)
        sums[t] = scaled[t] = terms[t] = _mm512_setzero_ps();
    for (int64_t k = 0, begin = 0; k < columns; begin = k) {
        int64_t end = k + stretch < columns ? k + stretch : columns;
        const uint8_t *by = at;
        at += is_super ? mc_super_bytes(matrix) : 0;
        for (int t = 0; t < num && is_super; t++)
            scaled[t] = terms[t] = _mm512_setzero_ps();
        for (; k < end; k += MC_BLOCK) {
            if (is_super || k == begin) {
                scales = at;
                at += head * (has_terms ? 2 : 1);
                for (int half = 0; half < pair && has_terms; half++, index++) {
                    int64_t place = half * head / pair;
                    __m512 term = mc_scales(scales + head + place, scale_type);
                    if (!is_super && matrix->has_zeros)
                        term = _mm512_mul_ps(term, mc_scales(scales + place, scale_type));
                    for (int t = 0; t < num; t++)
                        terms[t] = _mm512_fmadd_ps(
                            term, _mm512_set1_ps(mc_sums(matrix, MC_X_BF16, inputs[t])[index]),
                            terms[t]);
                }
            }
            __m512 scale = mc_scales(scales, scale_type);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                for (int t = 0; t < num; t++)
                    block[t] = other[t] = _mm512_setzero_ps();
                mc_add_dp(block, other, at, half, inputs, k + 16 * half, num, table, bytes, codes);
                if (half && pair == 2)
                    scale = mc_scales(scales + head / 2, scale_type);
                for (int t = 0; t < num; t++)
                    scaled[t] = _mm512_fmadd_ps(_mm512_add_ps(block[t], other[t]), scale, scaled[t]);
            }
            at += mc_code_bytes(codes, MC_BLOCK * MC_TILE);
        }
        for (int i = 0; i <= !!has_terms && is_super; i++) {
            __m512 times = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(by + 32 * i)));
            for (int t = 0; t < num; t++)
                sums[t] = _mm512_fmadd_ps(i ? terms[t] : scaled[t], times, sums[t]);
        }
    }
    for (int t = 0; t < num && !is_super; t++)
        sums[t] = has_terms ? _mm512_add_ps(scaled[t], terms[t]) : scaled[t];
    for (int t = 0; t < num; t++)
        _mm512_storeu_ps(
            out + t * MC_TILE, (__m512)mc_avx512_scaled((vf)sums[t], tile, matrix->scale));
}

/* Codes of as many bits differ in their tables alone. */
MC_TILE_BY(mc_i8_dp, mc_few_dp, 6, 2, MC_I8)
MC_TILE_BY(mc_i8_pairs_dp, mc_few_dp, 6, 2, MC_I8 | MC_PAIRS)
MC_TILE_BY(mc_i8_terms_dp, mc_few_dp, 6, 2, MC_I8 | MC_TERMS)
MC_TILE_BY(mc_e4m3_dp, mc_few_dp, 6, 2, MC_E4M3)
MC_TILE_BY(mc_e4m3_pairs_dp, mc_few_dp, 6, 2, MC_E4M3 | MC_PAIRS)
MC_TILE_BY(mc_4_dp, mc_few_dp, 6, 2, MC_I4)
MC_TILE_BY(mc_4_pairs_dp, mc_few_dp, 6, 2, MC_I4 | MC_PAIRS)
MC_TILE_BY(mc_4_terms_dp, mc_few_dp, 6, 2, MC_I4 | MC_TERMS)
MC_TILE_BY(mc_4_super_dp, mc_few_dp, 6, 2, MC_I4 | MC_SUPERS)
MC_TILE_BY(mc_4_super_pairs_dp, mc_few_dp, 6, 2, MC_I4 | MC_SUPERS | MC_PAIRS)
MC_TILE_BY(mc_4_super_terms_dp, mc_few_dp, 6, 2, MC_I4 | MC_SUPERS | MC_TERMS)
MC_TILE_BY(mc_4_all_dp, mc_few_dp, 6, 2, MC_I4 | MC_SUPERS | MC_TERMS | MC_PAIRS)
MC_TILE_BY(mc_5_dp, mc_few_dp, 6, 2, MC_I5)
MC_TILE_BY(mc_5_terms_dp, mc_few_dp, 6, 2, MC_I5 | MC_TERMS)
MC_TILE_BY(mc_5_super_terms_dp, mc_few_dp, 6, 2, MC_I5 | MC_SUPERS | MC_TERMS)
MC_TILE_BY(mc_6_super_pairs_dp, mc_few_dp, 6, 2, MC_I6 | MC_SUPERS | MC_PAIRS)

/* Takes the tile for a form: in turns with offsets, in groups of 16, with both; then of 256 columns. */
#define MC_TILE_OF(name, plain, pairs, terms, ...)                                             \
    static void name(                                                                          \
        const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num,       \
        float *out)                                                                            \
    {                                                                                          \
        static const mc_tile tiles[8] = {plain, terms, pairs, NULL, __VA_ARGS__};              \
        tiles[(matrix->scale == MC_IN_STEPS) * 4 + (mc_block_groups(matrix) == 2) * 2          \
              + mc_has_terms(matrix)](matrix, row, inputs, num, out);                          \
    }
MC_TILE_OF(mc_tile_i8_dp, mc_i8_dp, mc_i8_pairs_dp, mc_i8_terms_dp, NULL)
MC_TILE_OF(mc_tile_e4m3_dp, mc_e4m3_dp, mc_e4m3_pairs_dp, NULL, NULL)
MC_TILE_OF(mc_tile_4_dp, mc_4_dp, mc_4_pairs_dp, mc_4_terms_dp, mc_4_super_dp, mc_4_super_terms_dp,
           mc_4_super_pairs_dp, mc_4_all_dp)
MC_TILE_OF(mc_tile_5_dp, mc_5_dp, NULL, mc_5_terms_dp, NULL, mc_5_super_terms_dp)
MC_TILE_OF(mc_tile_6_dp, NULL, NULL, NULL, NULL, NULL, mc_6_super_pairs_dp)
