/* Attention of many queries, a page of a prompt: included for each level, and once more with PAIRS where the
 * processor multiplies pairs of bf16. PAGE(name), PAIRS and VECTORS are defined before.
 *
 * Queries that share keys are rows. 64 keys and values at a time are brought into an order in which a
 * register's lanes are keys, or columns of values; rows meet them in groups of six, in registers. A number of
 * 4 bytes is one of fp32, or a pair of bf16. Softmax goes along, as in FlashAttention (Dao et al., 2022):
 * sums so far are scaled when a larger product comes.
 *
 * A row's bits depend on its own query, on the keys that it sees and on their positions modulo 64: not on
 * other rows, and not on keys that it does not see, if these are finite. */

enum { PAGE(keys) = 64, PAGE(rows) = 6, PAGE(step) = VECTORS * LANES };

#if PAIRS
#define MULTIPLY_ADD(sum, a, b) (vf) _mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b))
#else
#define MULTIPLY_ADD(sum, a, b) LEVEL(fma)((vf)(a), (vf)(b), sum)
#endif

/* sums[r] += the products of `num` numbers of row r with `num` steps of columns. */
INLINE void PAGE(multiply)(
    const float *rows, int64_t row_step, const float *columns, int64_t num, vf sums[][VECTORS])
{
    for (int64_t k = 0; k < num; k++) {
        vf values[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            memcpy(&values[v], columns + k * PAGE(step) + v * LANES, sizeof values[v]);
#pragma GCC unroll 6
        for (int r = 0; r < PAGE(rows); r++) {
            int32_t bits;
            memcpy(&bits, rows + r * row_step + k, sizeof bits);
            vi own = bits - (vi){0};
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = MULTIPLY_ADD(sums[r][v], values[v], own);
        }
    }
}

/* A row of `width` numbers as numbers of 4 bytes, `depth` of them, with zeros behind. */
INLINE void PAGE(take)(const uint8_t *from, int type, int64_t width, int64_t depth, float *to)
{
    int64_t k = 0;
#if PAIRS
    memcpy(to, from, (size_t)width * 2);
    memset((char *)to + width * 2, 0, (size_t)(depth * 4 - width * 2));
    (void)k, (void)type;
#else
    for (; k + LANES <= width; k += LANES) {
        vf values = LEVEL(load)(from + k * mc_input_bytes(type), type == MC_X_BF16 ? MC_BF16 : MC_F32);
        memcpy(to + k, &values, sizeof values);
    }
    mc_to_f32(from + k * mc_input_bytes(type), type, width - k, to + k);
    memset(to + width, 0, (size_t)(depth - width) * 4);
#endif
}

/* Keys [first, first + there): a step's keys side by side, number after number. */
INLINE void PAGE(take_keys)(const mc_page *p, const uint8_t *keys, int64_t there, int64_t depth, float *to)
{
    float key[LANES][MC_MOST_WIDTH];
    for (int64_t j = 0; j < PAGE(keys); j += LANES) {
        for (int lane = 0; lane < LANES; lane++)
            if (j + lane < there)
                PAGE(take)(keys + (j + lane) * p->key_step, p->type, p->width, depth, key[lane]);
            else
                memset(key[lane], 0, (size_t)depth * 4);
        float *place = to + j / PAGE(step) * depth * PAGE(step) + j % PAGE(step);
        for (int64_t k = 0; k < depth; k++)
            for (int lane = 0; lane < LANES; lane++)
                place[k * PAGE(step) + lane] = key[lane][k];
    }
}

/* Values of these keys: a step's columns side by side, key after key, or two keys at a time. */
INLINE void PAGE(take_values)(const mc_page *p, const uint8_t *values, int64_t there, int64_t wide, float *to)
{
    float value[1 + PAIRS][MC_MOST_WIDTH];
    for (int64_t j = 0; j < PAGE(keys) / (1 + PAIRS); j++) {
        for (int i = 0; i <= PAIRS; i++) {
            int64_t at = j * (1 + PAIRS) + i;
            if (at < there)
                PAGE(take)(values + at * p->value_step, p->type, p->value_width, wide, value[i]);
            else
                memset(value[i], 0, (size_t)wide * 4);
        }
        for (int64_t c = 0; c < wide; c += PAGE(step)) {
            float *place = to + (c / PAGE(step) * (PAGE(keys) / (1 + PAIRS)) + j) * PAGE(step);
#if PAIRS
            const uint16_t *first = (const uint16_t *)value[0] + c;
            const uint16_t *second = (const uint16_t *)value[1] + c;
            uint32_t pairs[PAGE(step)];
            for (int i = 0; i < PAGE(step); i++)
                pairs[i] = first[i] | (uint32_t)second[i] << 16;
            memcpy(place, pairs, sizeof pairs);
#else
            memcpy(place, value[0] + c, PAGE(step) * 4);
#endif
        }
    }
}

/* Which of the keys [first, first + there) a query sees, a bit each. */
static uint64_t PAGE(seen)(const mc_page *p, int64_t query, int64_t first, int64_t there)
{
    uint64_t all = there < PAGE(keys) ? ((uint64_t)1 << there) - 1 : ~(uint64_t)0, found = 0;
    if (!p->mask) {
        int64_t last = p->num_keys - p->num_queries + query - first;
        return last < 0 ? 0 : last + 1 < PAGE(keys) ? all & (((uint64_t)1 << (last + 1)) - 1) : all;
    }
    const uint8_t *mask = p->mask + query * p->mask_step + first;
    for (int64_t j = 0; j < there; j++)
        found |= (uint64_t)(mask[j] != 0) << j;
    return found;
}

/* e^x of numbers that are at most 0, or NaN; within 2 units of the last place, and 0 below -87. */
INLINE vf PAGE(exp)(vf x)
{
    vi is_low = x < LEVEL(all)(-87.0f);
    vf turns = LEVEL(fma)(x, LEVEL(all)(1.44269504f), LEVEL(all)(12582912.0f));
    vf n = turns - 12582912.0f;
    vf r = LEVEL(fma)(n, LEVEL(all)(-0.693359375f), x);
    r = LEVEL(fma)(n, LEVEL(all)(2.12194440e-4f), r);
    vf value = LEVEL(fma)(LEVEL(all)(1.98756915e-4f), r, LEVEL(all)(1.39819995e-3f));
    value = LEVEL(fma)(value, r, LEVEL(all)(8.33345200e-3f));
    value = LEVEL(fma)(value, r, LEVEL(all)(4.16657968e-2f));
    value = LEVEL(fma)(value, r, LEVEL(all)(1.66666657e-1f));
    value = LEVEL(fma)(value, r, LEVEL(all)(5.00000012e-1f));
    value = LEVEL(fma)(value, r * r, r) + 1.0f;
    /* The integer is in the lowest bits of the sum with 1.5 * 2^23. */
    value *= (vf)(((vi)turns - 0x4b400000 + 127) << 23);
    return (vf)(~is_low & (vi)value);
}

INLINE float PAGE(largest)(vf values)
{
    float lanes[LANES];
    memcpy(lanes, &values, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    return lanes[0];
}

/* Makes shares of six rows' products with 64 keys, and of `factors` by what the sums so far are multiplied.
 * Rows that see none of the keys stay as they are. */
INLINE void PAGE(soften)(
    float (*scores)[PAGE(keys)], const uint64_t *seen, float scale, float *most, float *sums,
    float *factors)
{
    enum { PARTS = PAGE(keys) / LANES, ROUND = (PAGE(rows) + LANES - 1) / LANES * LANES };
    float bases[ROUND] = {0}, steps[ROUND] = {0};
    for (int i = 0; i < PAGE(rows); i++) {
        vf best = LEVEL(all)(-INFINITY);
        for (int part = 0; part < PARTS; part++) {
            vf some;
            memcpy(&some, scores[i] + part * LANES, sizeof some);
            some *= scale;
            if (seen[i] != ~(uint64_t)0)
                for (int lane = 0; lane < LANES; lane++)
                    if (!(seen[i] >> (part * LANES + lane) & 1))
                        some[lane] = -INFINITY;
            memcpy(scores[i] + part * LANES, &some, sizeof some);
            /* A NaN is no larger number: it reaches the row by its share. */
            vi is_larger = some > best;
            best = (vf)((is_larger & (vi)some) | (~is_larger & (vi)best));
        }
        float largest = PAGE(largest)(best);
        largest = largest > most[i] ? largest : most[i];
        /* -inf if all that was seen is NaN or -inf. */
        bases[i] = largest > -INFINITY ? largest : 0.0f;
        steps[i] = most[i] - bases[i];
        most[i] = largest;
    }
    for (int i = 0; i < ROUND; i += LANES) {
        vf some;
        memcpy(&some, steps + i, sizeof some);
        some = PAGE(exp)(some);
        memcpy(steps + i, &some, sizeof some);
    }
    for (int i = 0; i < PAGE(rows); i++) {
        vf sum, found = {0};
        for (int part = 0; part < PARTS; part++) {
            vf some;
            memcpy(&some, scores[i] + part * LANES, sizeof some);
            some = PAGE(exp)(some - bases[i]);
            found += some;
#if PAIRS
            __m256bh halves = _mm512_cvtneps_pbh((__m512)some);
            memcpy((uint16_t *)scores[i] + part * LANES, &halves, sizeof halves);
#else
            memcpy(scores[i] + part * LANES, &some, sizeof some);
#endif
        }
        factors[i] = steps[i];
        memcpy(&sum, sums + i * LANES, sizeof sum);
        sum = sum * factors[i] + found;
        memcpy(sums + i * LANES, &sum, sizeof sum);
    }
}

/* Queries [first, first + num) of the heads that share the keys of one; false without memory. */
static int PAGE(attend)(const mc_page *p, int64_t head, int64_t first, int64_t num)
{
    int64_t shared = p->num_heads / p->num_kv_heads, rows = num * shared;
    int64_t padded = (rows + PAGE(rows) - 1) / PAGE(rows) * PAGE(rows);
    int64_t depth = (p->width + PAIRS) / (1 + PAIRS);
    int64_t wide = (p->value_width + PAGE(step) - 1) / PAGE(step) * PAGE(step);
    int64_t elements = PAGE(keys) / (1 + PAIRS), bytes = mc_input_bytes(p->type);
    size_t num_queries = (size_t)(padded * depth), num_keys = (size_t)(PAGE(keys) * depth);
    size_t num_values = (size_t)(elements * wide), num_out = (size_t)(padded * wide);
    float *memory = malloc((num_queries + num_keys + num_values + num_out + (size_t)padded * (1 + LANES)) * 4);
    uint64_t *seen = malloc((size_t)padded * sizeof *seen);
    if (!memory || !seen) {
        free(memory);
        free(seen);
        return 0;
    }
    float *queries = memory, *keys = queries + num_queries, *values = keys + num_keys;
    float *out = values + num_values, *most = out + num_out, *sums = most + padded;
    memset(out, 0, num_out * 4);
    memset(sums, 0, (size_t)padded * LANES * 4);
    for (int64_t r = 0; r < padded; r++) {
        most[r] = -INFINITY;
        seen[r] = 0;
        if (r < rows)
            PAGE(take)(p->queries + (first + r / shared) * p->query_step
                           + (head * shared + r % shared) * p->query_head_step,
                       p->type, p->width, depth, queries + r * depth);
        else
            memset(queries + r * depth, 0, (size_t)depth * 4);
    }
    for (int64_t k = 0; k < p->num_keys; k += PAGE(keys)) {
        int64_t there = p->num_keys - k < PAGE(keys) ? p->num_keys - k : PAGE(keys);
        uint64_t any = 0;
        for (int64_t r = 0; r < rows; r++) {
            seen[r] = r % shared ? seen[r - 1] : PAGE(seen)(p, first + r / shared, k, there);
            any |= seen[r];
        }
        if (!any)
            continue;
        PAGE(take_keys)(p, p->keys + head * p->key_head_step + k * p->key_step, there, depth, keys);
        PAGE(take_values)(p, p->values + head * p->value_head_step + k * p->value_step, there, wide, values);
        for (int64_t r = 0; r < padded; r += PAGE(rows)) {
            float scores[PAGE(rows)][PAGE(keys)], before[PAGE(rows)];
            any = 0;
            for (int i = 0; i < PAGE(rows); i++)
                any |= seen[r + i];
            if (!any)
                continue;
            for (int64_t j = 0; j < PAGE(keys); j += PAGE(step)) {
                vf products[PAGE(rows)][VECTORS] = {{{0}}};
                PAGE(multiply)(queries + r * depth, depth, keys + j * depth, depth, products);
                for (int i = 0; i < PAGE(rows); i++)
                    memcpy(scores[i] + j, products[i], sizeof products[i]);
            }
            PAGE(soften)(scores, seen + r, p->scale, most + r, sums + r * LANES, before);
            for (int64_t c = 0; c < wide; c += PAGE(step)) {
                vf means[PAGE(rows)][VECTORS];
                for (int i = 0; i < PAGE(rows); i++)
                    for (int v = 0; v < VECTORS; v++) {
                        memcpy(&means[i][v], out + (r + i) * wide + c + v * LANES, sizeof means[i][v]);
                        means[i][v] *= before[i];
                    }
                PAGE(multiply)(scores[0], PAGE(keys), values + c * elements, elements, means);
                for (int i = 0; i < PAGE(rows); i++)
                    memcpy(out + (r + i) * wide + c, means[i], sizeof means[i]);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        vf sum;
        memcpy(&sum, sums + r * LANES, sizeof sum);
        float total = LEVEL(total)(sum), turns = total == 0 ? 0.0f : 1.0f / total;
        uint8_t *place = p->out + (first + r / shared) * p->out_step
            + (head * shared + r % shared) * p->value_width * bytes;
        for (int64_t c = 0; c < p->value_width; c++)
            out[r * wide + c] *= turns;
        mc_from_f32(out + r * wide, p->value_width, p->type, place);
    }
    free(memory);
    free(seen);
    return 1;
}

#undef MULTIPLY_ADD
#undef PAGE
#undef PAIRS
