/* Attention of one query over the keys and values of a head: included once for each level.
 *
 * The order of every sum depends on the widths and on how many positions are seen, on nothing else. */

/* The product of a query with one key. */
INLINE float LEVEL(dot)(const float *query, const uint8_t *key, int64_t width, int type)
{
    int64_t bytes = type == MC_F32 ? 4 : 2, k = 0;
    vf sums[2] = {{0}};
    for (; k + 2 * LANES <= width; k += 2 * LANES)
        for (int i = 0; i < 2; i++)
            sums[i] = LEVEL(fma)(
                LEVEL(load)(key + (k + i * LANES) * bytes, type),
                LEVEL(load)((const uint8_t *)(query + k + i * LANES), MC_F32), sums[i]);
    for (; k + LANES <= width; k += LANES)
        sums[0] = LEVEL(fma)(
            LEVEL(load)(key + k * bytes, type), LEVEL(load)((const uint8_t *)(query + k), MC_F32),
            sums[0]);
    if (k < width)
        sums[0] = LEVEL(fma)(
            LEVEL(load_tail)(key + k * bytes, width - k, type),
            LEVEL(load_tail)((const uint8_t *)(query + k), width - k, MC_F32), sums[0]);
    return LEVEL(total)(sums[0] + sums[1]);
}

/* out[c] = sum over t of shares[t] * values[t][c], for `num` times LANES columns. */
INLINE void LEVEL(mix)(
    const mc_attention *a, const float *shares, int64_t column, int num, int64_t rest, int type,
    float *out)
{
    int64_t bytes = type == MC_F32 ? 4 : 2;
    const uint8_t *value = a->values + a->first * a->value_step + column * bytes;
    vf sums[4] = {{0}};
    for (int64_t t = 0; t < a->last - a->first; t++, value += a->value_step) {
        vf share = LEVEL(all)(shares[t]);
        for (int i = 0; i < num; i++)
            sums[i] = LEVEL(fma)(
                share,
                rest ? LEVEL(load_tail)(value, rest, type)
                     : LEVEL(load)(value + i * LANES * bytes, type),
                sums[i]);
    }
    memcpy(out + column, sums, rest ? (size_t)rest * 4 : (size_t)num * sizeof *sums);
}

INLINE void LEVEL(attend_as)(
    const mc_attention *a, const float *query, float sink, float *scores, float *out, int type)
{
    int64_t num = a->last - a->first;
    float most = sink;
    for (int64_t t = 0; t < num; t++) {
        float score =
            LEVEL(dot)(query, a->keys + (a->first + t) * a->key_step, a->width, type) * a->scale;
        scores[t] = score;
        /* A NaN stays the largest: it reaches all of the row. */
        if (!(score <= most))
            most = score;
    }
    vf sum = {0};
    for (int64_t t = 0; t < num; t += LANES) {
        vf part = {0};
        memcpy(&part, scores + t, (size_t)(num - t < LANES ? num - t : LANES) * 4);
        part = LEVEL(exp)(part - most);
        if (num - t < LANES)
            memset((float *)&part + (num - t), 0, (size_t)(LANES - (num - t)) * 4);
        memcpy(scores + t, &part, (size_t)(num - t < LANES ? num - t : LANES) * 4);
        sum += part;
    }
    /* A sink takes its share and has no value. */
    vf own = LEVEL(exp)(LEVEL(all)(sink - most));
    float total = LEVEL(total)(sum) + (sink > -INFINITY ? own[0] : 0.0f), turns = 1.0f / total;
    for (int64_t t = 0; t < num; t++)
        scores[t] *= turns;
    int64_t c = 0;
    for (; c + 4 * LANES <= a->value_width; c += 4 * LANES)
        LEVEL(mix)(a, scores, c, 4, 0, type, out);
    for (; c + LANES <= a->value_width; c += LANES)
        LEVEL(mix)(a, scores, c, 1, 0, type, out);
    if (c < a->value_width)
        LEVEL(mix)(a, scores, c, 1, a->value_width - c, type, out);
}

/* Writes the values' mean, weighted by the softmax of their keys' products; see `mc_attention`. */
static void LEVEL(attend)(
    const mc_attention *a, const float *query, float sink, float *scores, float *out)
{
    if (a->type == MC_F32)
        LEVEL(attend_as)(a, query, sink, scores, out, MC_F32);
    else if (a->type == MC_F16)
        LEVEL(attend_as)(a, query, sink, scores, out, MC_F16);
    else
        LEVEL(attend_as)(a, query, sink, scores, out, MC_BF16);
}
