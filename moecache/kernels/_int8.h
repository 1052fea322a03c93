/* Tiles for inputs of 8 bits (`mc_block8`): included once for each kind of integer product, with
 * DOT_GENERIC, DOT_AVX2 or DOT_VNNI defined.
 *
 * A block's sum of integers is exact: 32 products of at most 128 * 127 are below 2^24, so that it is
 * exact in fp32, too. Then (sum * the weights' scale) * the input's is added to the blocks before,
 * nothing fused. So all levels have the same bits. */

#define MANY 4

/* sum + a row's 4 columns times those of an input, for LANES rows. Weights of 4 bits are 0 to 15. */
INLINE vi LEVEL(dot)(vi sum, vi weights, vi input, int codes)
{
#if defined(DOT_VNNI)
    /* Multiplies unsigned by signed bytes, without saturation: weights of 8 bits are taken 128 larger. */
    if (codes == MC_I8)
        weights ^= (int32_t)0x80808080;
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)input);
#elif defined(DOT_AVX2)
    __m256i w = (__m256i)weights, x = (__m256i)input;
    /* vpmaddubsw adds two products in 16 bits. With weights of 4 bits, a block's 8 such sums, added up
     * in 16 bits, are at most 8 * 2 * 15 * 127 = 30480. */
    if (codes == MC_I4)
        return (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(w, x));
    /* With 8 bits, two products are at most 2 * 128 * 127 = 32512: sizes of weights are unsigned, 128
     * included, and their signs go to the inputs, which have no -128. */
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return (vi)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
    (void)codes;
    for (int i = 0; i < 4; i++)
        sum += ((vi)((vu)weights << (24 - 8 * i)) >> 24) * ((vi)((vu)input << (24 - 8 * i)) >> 24);
    return sum;
#endif
}

/* A block's sum, from the sums of `dot`; `inputs` is the sum of its inputs. */
INLINE vi LEVEL(block_sum)(vi sum, int32_t inputs, int codes)
{
#if defined(DOT_VNNI)
    return sum - (codes == MC_I8 ? 128 : 8) * inputs;
#elif defined(DOT_AVX2)
    if (codes == MC_I8)
        return sum;
    return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) - 8 * inputs;
#else
    return codes == MC_I8 ? sum : sum - 8 * inputs;
#endif
}

/* 4 columns of an input, for all rows. */
INLINE vi LEVEL(four)(const uint8_t *values)
{
    int32_t four;
    memcpy(&four, values, 4);
    return four - (vi){0};
}

/* 16 rows with `num` inputs. */
INLINE void LEVEL(blocks_int8)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int num, float *out,
    int codes)
{
    enum { PARTS = MC_TILE / LANES };
    const uint8_t *at = matrix->data + row / MC_TILE * matrix->row_bytes;
    int chunks = codes == MC_I4 ? 4 : 8;
    vf sums[PARTS][MANY] = {{{0}}};
    for (int64_t k = 0; k < mc_input_columns(matrix) / MC_BLOCK; k++, at += 2 * MC_TILE + chunks * 64) {
        int64_t x = k * (int64_t)sizeof(mc_block8), first = x + offsetof(mc_block8, values);
        for (int part = 0; part < PARTS; part++) {
            vi block[MANY] = {{0}};
#pragma GCC unroll 8
            for (int chunk = 0; chunk < chunks; chunk++) {
                vu weights;
                memcpy(&weights, at + 2 * MC_TILE + chunk * 64 + part * LANES * 4, sizeof weights);
                if (codes == MC_I8) {
                    weights = LEVEL(by_rows)(weights);
                    for (int t = 0; t < num; t++)
                        block[t] = LEVEL(dot)(block[t], (vi)weights,
                                              LEVEL(four)(inputs[t] + first + 4 * chunk), codes);
                    continue;
                }
                vi low = (vi)(weights & 0x0f0f0f0f), high = (vi)(weights >> 4 & 0x0f0f0f0f);
                for (int t = 0; t < num; t++) {
                    const uint8_t *values = inputs[t] + first + 8 * chunk;
                    block[t] = LEVEL(dot)(block[t], low, LEVEL(four)(values), codes);
                    block[t] = LEVEL(dot)(block[t], high, LEVEL(four)(values + 4), codes);
                }
            }
            vh raw;
            memcpy(&raw, at + part * LANES * 2, sizeof raw);
            vf scale = LEVEL(halves)(raw);
            for (int t = 0; t < num; t++) {
                float input_scale;
                int32_t total;
                memcpy(&input_scale, inputs[t] + x + offsetof(mc_block8, scale), 4);
                memcpy(&total, inputs[t] + x + offsetof(mc_block8, sum), 4);
                vi sum = LEVEL(block_sum)(block[t], total, codes);
                sums[part][t] += __builtin_convertvector(sum, vf) * scale * input_scale;
            }
        }
    }
    for (int t = 0; t < num; t++)
        for (int part = 0; part < PARTS; part++)
            memcpy(out + t * MC_TILE + part * LANES, &sums[part][t], sizeof sums[part][t]);
}

MC_TILE_BY(LEVEL(tile_i8_int8), LEVEL(blocks_int8), MANY, 1, MC_I8)
MC_TILE_BY(LEVEL(tile_i4_int8), LEVEL(blocks_int8), MANY, 1, MC_I4)

#undef MANY
