/* Tiles of weights that are integers, for inputs of integers (`mc_planes`): included once for each level,
 * behind `_integers.h`, with DOT_AVX2, DOT_VNNI or DOT_NEON defined where it has such products.
 *
 * A register's lanes are rows. A block's sum of integers is exact, so it has no order: 32 products of at
 * most 255 * 16256 stay below 2^31, and so do those of 6 bits times a scale of 8. What follows is in
 * fp32, nothing fused, a block after the other in the order of the columns:
 *
 *     sum += (sum of the block * the input's scale) * the weights' scale
 *     sum += offset * (sum of the input's integers * its scale)
 *
 * With scales in two steps the first is an integer and multiplies the block's sum as one; the second
 * multiplies what 256 columns give. So all levels have the same bits: the generic one defines them. */

/* Four integers of an input, for all rows. */
INLINE vi LEVEL(four)(const int8_t *values)
{
    int32_t four;
    memcpy(&four, values, 4);
    return four - (vi){0};
}

#if defined(DOT_AVX2)
/* Without products of four bytes, 16 bits meet 16: all of an input at once, where two planes of bytes take
 * three or four instructions each. Numbers 0 and 2 of a lane are multiplied first, then 1 and 3. */
INLINE void LEVEL(widen_words)(vu words, int codes, vi *even, vi *odd)
{
    __m256i w = (__m256i)words;
    if (LEVEL(has_sign)(codes)) {
        *even = (vi)_mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8);
        *odd = (vi)_mm256_srai_epi16(w, 8);
    } else {
        *even = (vi)_mm256_and_si256(w, _mm256_set1_epi16(255));
        *odd = (vi)_mm256_srli_epi16(w, 8);
    }
}

/* Two integers of an input, for all rows. */
INLINE __m256i LEVEL(two)(const int16_t *values)
{
    int32_t two;
    memcpy(&two, values, 4);
    return _mm256_set1_epi32(two);
}

INLINE vi LEVEL(dots)(vi sum, vi even, vi odd, const int16_t *values)
{
    __m256i first = _mm256_madd_epi16((__m256i)even, LEVEL(two)(values));
    __m256i second = _mm256_madd_epi16((__m256i)odd, LEVEL(two)(values + 2));
    __m256i found = (__m256i)(sum + (vi)first + (vi)second);
    /* In this order: a compiler that adds up all products last keeps them all, in memory. */
    __asm__("" : "+x"(found));
    return (vi)found;
}
#elif defined(DOT_NEON)
enum { LEVEL(words_at_once) = 4 };

/* 16 columns: the input is loaded once, and each word is multiplied by four of its integers. */
INLINE vi LEVEL(dots)(vi sum, const vu *words, const int8_t *values)
{
    const int8x16_t *w = (const int8x16_t *)words, x = vld1q_s8(values);
    int32x4_t found = (int32x4_t)sum;
    found = vdotq_laneq_s32(found, w[0], x, 0);
    found = vdotq_laneq_s32(found, w[1], x, 1);
    found = vdotq_laneq_s32(found, w[2], x, 2);
    return (vi)vdotq_laneq_s32(found, w[3], x, 3);
}
#else
enum { LEVEL(words_at_once) = 1 };

INLINE vi LEVEL(dots)(vi sum, const vu *words, const int8_t *values)
{
    vi x = LEVEL(four)(values);
#if defined(DOT_VNNI)
    return DOT_VNNI(sum, *words, x);
#else
    for (int i = 0; i < 4; i++)
        sum += ((vi)(*words << (24 - 8 * i)) >> 24) * ((vi)((vu)x << (24 - 8 * i)) >> 24);
    return sum;
#endif
}
#endif

/* 16 rows with `num` inputs. */
INLINE void LEVEL(planes)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int num, float *out,
    int kind)
{
    enum { PARTS = MC_TILE / LANES };
    int codes = kind & 255, is_super = !!(kind & MC_SUPERS), pair = kind & MC_PAIRS ? 2 : 1;
    int has_zeros = !!(kind & MC_ZEROS), has_offsets = !!(kind & MC_OFFSETS);
    int scale_type = is_super ? MC_IN_STEPS : matrix->scale;
#ifndef DOT_AVX2
    int step = LEVEL(words_at_once);
#endif
    const uint8_t *tile = matrix->data + row / MC_TILE * matrix->row_bytes;
    const uint8_t *at = tile + mc_factor_bytes(matrix->scale), *scales = at;
    int64_t blocks = mc_input_columns(matrix) / MC_BLOCK;
    int block_bytes = (int)mc_code_bytes(codes, MC_BLOCK * MC_TILE);
    int64_t scale_bytes = mc_scale_bytes(scale_type), head = MC_TILE * pair * scale_bytes;
    int64_t stretch = is_super ? MC_SUPER / MC_BLOCK : pair == 2 ? 1 : matrix->group / MC_BLOCK;
    /* `scaled` and `terms` are sums of 256 columns, if a number multiplies these. */
    vf sums[PARTS][PLANES_MANY] = {{{0}}};
    for (int64_t k = 0; k < blocks;) {
        int64_t end = k + stretch < blocks ? k + stretch : blocks;
        const uint8_t *by = at;
        vf scaled[PARTS][PLANES_MANY] = {{{0}}}, terms[PARTS][PLANES_MANY] = {{{0}}};
        at += is_super ? mc_super_bytes(matrix) : 0;
        scales = at;
        at += is_super ? 0 : head * (1 + (has_zeros | has_offsets));
        for (; k < end; k++) {
            for (int line = 0; line < block_bytes; line += 64)
                MC_FETCH(at + line, num);
            if (is_super) {
                scales = at;
                at += head * (1 + has_offsets);
            }
UNROLL(4)
            for (int part = 0; part < PARTS; part++) {
                const uint8_t *place = scales + part * LANES * scale_bytes;
#ifdef DOT_AVX2
                vi whole_sums[2][PLANES_MANY] = {{{0}}};
#else
                vi high[2][PLANES_MANY] = {{{0}}}, low[2][PLANES_MANY] = {{{0}}};
#endif
UNROLL(2)
                for (int half = 0; half < 2; half++) {
                    vu words[4];
                    LEVEL(unpack)(at + part * LANES * 4, half, codes, words);
#ifdef DOT_AVX2
UNROLL(4)
                    for (int j = 0; j < 4; j++) {
                        vi even, odd;
                        LEVEL(widen_words)(words[j], codes, &even, &odd);
                        for (int t = 0; t < num; t++) {
                            const mc_planes *x = (const mc_planes *)inputs[t] + k;
                            int i = half * (pair - 1);
                            whole_sums[i][t] =
                                LEVEL(dots)(whole_sums[i][t], even, odd, x->whole + 16 * half + 4 * j);
                        }
                    }
#else
UNROLL(4)
                    for (int j = 0; j < 4; j += step)
                        for (int t = 0; t < num; t++) {
                            const mc_planes *x = (const mc_planes *)inputs[t] + k;
                            int i = half * (pair - 1), first = 16 * half + 4 * j;
                            high[i][t] = LEVEL(dots)(high[i][t], words + j, x->high + first);
                            low[i][t] = LEVEL(dots)(low[i][t], words + j, x->low + first);
                        }
#endif
                }
                vf factor[2], term[2];
                vi whole[2];
                for (int i = 0; i < pair; i++) {
                    const uint8_t *here = place + i * MC_TILE * scale_bytes;
                    if (is_super)
                        whole[i] = (vi)(LEVEL(widen)(here) << 24) >> 24;
                    else
                        factor[i] = LEVEL(scales)(here, scale_type);
                    if (has_offsets)
                        term[i] = LEVEL(scales)(here + head, scale_type);
                    if (has_zeros)
                        whole[i] = __builtin_convertvector(LEVEL(scales)(here + head, scale_type), vi);
                }
                for (int t = 0; t < num; t++) {
                    const mc_planes *x = (const mc_planes *)inputs[t] + k;
                    vi block = {0};
                    for (int i = 0; i < pair; i++) {
                        int which = pair == 2 ? i : 2;
#ifdef DOT_AVX2
                        vi sum = whole_sums[i][t];
#else
                        vi sum = (high[i][t] << 7) + low[i][t];
#endif
                        if (LEVEL(bias)(codes))
                            sum -= LEVEL(bias)(codes) * (x->sums[which] - (vi){0});
                        if (has_zeros)
                            sum += whole[i] * x->sums[which];
                        if (is_super) {
                            block = (vi)((vu)block + (vu)sum * (vu)whole[i]);
                        } else {
                            vf some = __builtin_convertvector(sum, vf) * x->scale;
                            sums[part][t] += some * factor[i];
                        }
                        if (has_offsets && is_super)
                            terms[part][t] += term[i] * x->totals[which];
                        else if (has_offsets)
                            sums[part][t] += term[i] * x->totals[which];
                    }
                    if (is_super)
                        scaled[part][t] += __builtin_convertvector(block, vf) * x->scale;
                }
            }
            at += block_bytes;
        }
        for (int part = 0; part < PARTS && is_super; part++)
            for (int i = 0; i <= has_offsets; i++) {
                vf times = LEVEL(load)(by + (i * MC_TILE + part * LANES) * 2, MC_F16);
                for (int t = 0; t < num; t++)
                    sums[part][t] += (i ? terms[part][t] : scaled[part][t]) * times;
            }
    }
    for (int t = 0; t < num; t++)
        for (int part = 0; part < PARTS; part++) {
            vf sum = LEVEL(scaled)(sums[part][t], tile, matrix->scale);
            memcpy(out + t * MC_TILE + part * LANES, &sum, sizeof sum);
        }
}

#define MC_PLANES_TILE(codes, suffix, flags)                                                   \
    MC_TILE_BY(LEVEL(tile_##codes##_##suffix), LEVEL(planes), PLANES_MANY, PLANES_FEWER, MC_##codes | (flags))
MC_FORMS(MC_PLANES_TILE)
#undef MC_PLANES_TILE

/* The table of these tiles. */
#define MC_PLANES_OF(codes, suffix, flags) \
    [MC_##codes][(flags) >> 8] = LEVEL(tile_##codes##_##suffix),
static const mc_tile LEVEL(all_planes)[MC_NUM_CODES][MC_FLAGS] = {MC_FORMS(MC_PLANES_OF)};
#undef MC_PLANES_OF
