/* Tiles for inputs of 8 bits (`mc_block8`): included once for each kind of integer product, with
 * DOT_GENERIC, DOT_AVX2 or DOT_VNNI defined.
 *
 * A block's sum of integers is exact: 32 products of at most 128 * 127 are below 2^24, so that it is
 * exact in fp32, too. Then (sum * the weights' scale) * the input's is added to the blocks before,
 * nothing fused. So all levels have the same bits. */

#define MANY 4

/* sum + a row's 4 columns times those of an input, for LANES rows. Weights of 4 bits are 0 to 15. */
INLINE vi LEVEL(dot)(vi sum, vi weights, vi input, int format)
{
#if defined(DOT_VNNI)
    /* Of unsigned and signed bytes, without saturation: Q8_0's weights are taken 128 larger. */
    if (format == MC_Q8_0)
        weights ^= (int32_t)0x80808080;
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)input);
#elif defined(DOT_AVX2)
    __m256i w = (__m256i)weights, x = (__m256i)input;
    /* vpmaddubsw adds two products in 16 bits. Of 4 bits, a block's 8 such sums, added up in 16 bits,
     * are at most 8 * 2 * 15 * 127 = 30480. */
    if (format == MC_Q4_0)
        return (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(w, x));
    /* Of 8 bits, two are at most 2 * 128 * 127 = 32512: sizes of weights are unsigned, 128 included,
     * and their signs go to the inputs, which have no -128. */
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return (vi)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
    (void)format;
    for (int i = 0; i < 4; i++)
        sum += ((vi)((vu)weights << (24 - 8 * i)) >> 24) * ((vi)((vu)input << (24 - 8 * i)) >> 24);
    return sum;
#endif
}

/* A block's sum, of what `dot` added up; `inputs` is the sum of its inputs. */
INLINE vi LEVEL(block_sum)(vi sum, int32_t inputs, int format)
{
#if defined(DOT_VNNI)
    return sum - (format == MC_Q8_0 ? 128 : 8) * inputs;
#elif defined(DOT_AVX2)
    if (format == MC_Q8_0)
        return sum;
    return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) - 8 * inputs;
#else
    return format == MC_Q8_0 ? sum : sum - 8 * inputs;
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
    int format)
{
    enum { PARTS = MC_TILE / LANES };
    const uint8_t *at = matrix->data + row / MC_TILE * matrix->row_bytes;
    int chunks = format == MC_Q4_0 ? 4 : 8;
    vf sums[PARTS][MANY] = {{{0}}};
    for (int64_t k = 0; k < matrix->columns / MC_BLOCK; k++, at += 2 * MC_TILE + chunks * 64) {
        int64_t x = k * (int64_t)sizeof(mc_block8), first = x + offsetof(mc_block8, values);
        for (int part = 0; part < PARTS; part++) {
            vi block[MANY] = {{0}};
#pragma GCC unroll 8
            for (int chunk = 0; chunk < chunks; chunk++) {
                vu weights;
                memcpy(&weights, at + 2 * MC_TILE + chunk * 64 + part * LANES * 4, sizeof weights);
                if (format == MC_Q8_0) {
                    weights = LEVEL(by_rows)(weights);
                    for (int t = 0; t < num; t++)
                        block[t] = LEVEL(dot)(block[t], (vi)weights,
                                              LEVEL(four)(inputs[t] + first + 4 * chunk), format);
                    continue;
                }
                vi low = (vi)(weights & 0x0f0f0f0f), high = (vi)(weights >> 4 & 0x0f0f0f0f);
                for (int t = 0; t < num; t++) {
                    const uint8_t *values = inputs[t] + first + 8 * chunk;
                    block[t] = LEVEL(dot)(block[t], low, LEVEL(four)(values), format);
                    block[t] = LEVEL(dot)(block[t], high, LEVEL(four)(values + 4), format);
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
                vi sum = LEVEL(block_sum)(block[t], total, format);
                sums[part][t] += __builtin_convertvector(sum, vf) * scale * input_scale;
            }
        }
    }
    for (int t = 0; t < num; t++)
        for (int part = 0; part < PARTS; part++)
            memcpy(out + t * MC_TILE + part * LANES, &sums[part][t], sizeof sums[part][t]);
}

INLINE void LEVEL(blocked_int8)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out,
    int format)
{
    int64_t t = 0;
    for (; t + MANY <= num; t += MANY)
        LEVEL(blocks_int8)(matrix, row, inputs + t, MANY, out + t * MC_TILE, format);
    for (; t < num; t++)
        LEVEL(blocks_int8)(matrix, row, inputs + t, 1, out + t * MC_TILE, format);
}

static void LEVEL(tile_q8_0_int8)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out)
{
    LEVEL(blocked_int8)(matrix, row, inputs, num, out, MC_Q8_0);
}

static void LEVEL(tile_q4_0_int8)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out)
{
    LEVEL(blocked_int8)(matrix, row, inputs, num, out, MC_Q4_0);
}

#undef MANY
