/* Attention of a few queries over the keys and values that they share: included once for each level.
 *
 * The order of every sum depends on the widths and on how many positions are seen, on nothing else. */

/* Queries that are multiplied by a key that was read once. */
#define QUERIES 4

/* The sums of LANES registers, each by halves as `total` does it, as the lanes of one. */
INLINE vf LEVEL(totals)(vf *sums)
{
#define HALVES(n)                                                                            \
    for (int i = 0; i < (n); i++) {                                                          \
        vf a = sums[i], b = sums[i + (n)];                                                   \
        sums[i] = __builtin_shufflevector(a, b, LOW) + __builtin_shufflevector(a, b, HIGH);  \
    }
#if LANES == 16
#define LOW 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
    HALVES(8)
#undef LOW
#undef HIGH
#define LOW 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
    HALVES(4)
#undef LOW
#undef HIGH
#define LOW 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
    HALVES(2)
#undef LOW
#undef HIGH
#define LOW 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#elif LANES == 8
#define LOW 0, 1, 2, 3, 8, 9, 10, 11
#define HIGH 4, 5, 6, 7, 12, 13, 14, 15
    HALVES(4)
#undef LOW
#undef HIGH
#define LOW 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH 2, 3, 10, 11, 6, 7, 14, 15
    HALVES(2)
#undef LOW
#undef HIGH
#define LOW 0, 8, 2, 10, 4, 12, 6, 14
#define HIGH 1, 9, 3, 11, 5, 13, 7, 15
#else
#define LOW 0, 1, 4, 5
#define HIGH 2, 3, 6, 7
    HALVES(2)
#undef LOW
#undef HIGH
#define LOW 0, 4, 2, 6
#define HIGH 1, 5, 3, 7
#endif
    HALVES(1)
#undef LOW
#undef HIGH
#undef HALVES
    return sums[0];
}

/* scores[q][t] = scale * (query q . key t), for `num` queries. */
INLINE void LEVEL(score)(
    const mc_attention *a, const float *queries, int num, float *scores, int64_t step, int type)
{
    int64_t bytes = type == MC_F32 ? 4 : 2, length = a->last - a->first;
    int64_t whole = a->width + a->more_width;
    const uint8_t *key = a->keys + a->first * a->key_step;
    const uint8_t *more = a->more + a->first * a->more_step;
    for (int64_t t = 0; t < length; t += LANES) {
        int64_t there = length - t < LANES ? length - t : LANES;
        vf sums[QUERIES][LANES];
        for (int64_t p = 0; p < LANES; p++) {
            vf own[QUERIES] = {{0}};
#define STEP(LOAD, ...)                                                                          \
    {                                                                                            \
        vf values = LOAD(from + k * bytes, ##__VA_ARGS__, type);                                 \
        for (int q = 0; q < num; q++)                                                            \
            own[q] = LEVEL(fma)(                                                                 \
                values,                                                                          \
                LOAD((const uint8_t *)(query + q * whole + k), ##__VA_ARGS__, MC_F32), own[q]);  \
    }
#define PART(FROM, QUERY, WIDTH)                                                                 \
    {                                                                                            \
        const uint8_t *from = FROM;                                                              \
        const float *query = QUERY;                                                              \
        int64_t k = 0;                                                                           \
        for (; k + LANES <= (WIDTH); k += LANES)                                                 \
            STEP(LEVEL(load))                                                                    \
        if (k < (WIDTH))                                                                         \
            STEP(LEVEL(load_tail), (WIDTH) - k)                                                  \
    }
            if (p < there) {
                PART(key, queries, a->width)
                if (a->more_width)
                    PART(more, queries + a->width, a->more_width)
                key += a->key_step;
                more += a->more_step;
            }
#undef PART
#undef STEP
            for (int q = 0; q < num; q++)
                sums[q][p] = own[q];
        }
        for (int q = 0; q < num; q++) {
            vf some = LEVEL(totals)(sums[q]) * a->scale;
            memcpy(scores + q * step + t, &some, (size_t)there * 4);
        }
    }
}

/* Makes shares of a query's scores: their softmax. A sink takes its share and has no value. */
INLINE void LEVEL(soften)(float *scores, int64_t num, float sink)
{
    float most = sink;
    for (int64_t t = 0; t < num; t++)
        /* A NaN stays the largest: it reaches all of the row. */
        if (!(scores[t] <= most))
            most = scores[t];
    vf sum = {0};
    for (int64_t t = 0; t < num; t += LANES) {
        int64_t there = num - t < LANES ? num - t : LANES;
        vf part = {0};
        memcpy(&part, scores + t, (size_t)there * 4);
        part = LEVEL(exp)(part - most);
        memset((char *)&part + there * 4, 0, (size_t)(LANES - there) * 4);
        memcpy(scores + t, &part, (size_t)there * 4);
        sum += part;
    }
    vf own = LEVEL(exp)(LEVEL(all)(sink - most));
    float turns = 1.0f / (LEVEL(total)(sum) + (sink > -INFINITY ? own[0] : 0.0f));
    for (int64_t t = 0; t < num; t++)
        scores[t] *= turns;
}

/* out[q][c] = sum over t of shares[q][t] * value t[c], for `num` queries and `registers` times LANES
 * columns, or for the `rest` of them. */
INLINE void LEVEL(mix)(
    const mc_attention *a, const float *shares, int64_t step, int num, int64_t column,
    int registers, int64_t rest, int type, float *out)
{
    int64_t bytes = type == MC_F32 ? 4 : 2;
    const uint8_t *value = a->values + a->first * a->value_step + column * bytes;
    vf sums[QUERIES][2] = {{{0}}};
    for (int64_t t = 0; t < a->last - a->first; t++, value += a->value_step)
        for (int i = 0; i < registers; i++) {
            vf some = rest ? LEVEL(load_tail)(value, rest, type)
                           : LEVEL(load)(value + i * LANES * bytes, type);
            for (int q = 0; q < num; q++)
                sums[q][i] = LEVEL(fma)(some, LEVEL(all)(shares[q * step + t]), sums[q][i]);
        }
    for (int q = 0; q < num; q++)
        memcpy(out + q * a->value_width + column, sums[q],
               (size_t)(rest ? rest : registers * LANES) * 4);
}

/* The values' sums for `num` queries, weighted by their shares. */
INLINE void LEVEL(mix_all)(
    const mc_attention *a, const float *shares, int64_t step, int num, int type, float *out)
{
    int64_t c = 0;
    for (; c + 2 * LANES <= a->value_width; c += 2 * LANES)
        LEVEL(mix)(a, shares, step, num, c, 2, 0, type, out);
    for (; c + LANES <= a->value_width; c += LANES)
        LEVEL(mix)(a, shares, step, num, c, 1, 0, type, out);
    if (c < a->value_width)
        LEVEL(mix)(a, shares, step, num, c, 1, a->value_width - c, type, out);
}

INLINE void LEVEL(attend_some)(
    const mc_attention *a, const float *queries, int num, const float *sinks, float *scores,
    int64_t step, int type, float *out)
{
    LEVEL(score)(a, queries, num, scores, step, type);
    for (int q = 0; q < num; q++)
        LEVEL(soften)(scores + q * step, a->last - a->first, sinks ? sinks[q] : -INFINITY);
    LEVEL(mix_all)(a, scores, step, num, type, out);
}

INLINE void LEVEL(attend_as)(
    const mc_attention *a, const float *queries, int64_t num, const float *sinks, float *scores,
    int64_t step, int type, float *out)
{
    int64_t q = 0, whole = a->width + a->more_width;
    for (; q + QUERIES <= num; q += QUERIES)
        LEVEL(attend_some)(a, queries + q * whole, QUERIES, sinks ? sinks + q : NULL, scores,
                           step, type, out + q * a->value_width);
    for (; q < num; q++)
        LEVEL(attend_some)(a, queries + q * whole, 1, sinks ? sinks + q : NULL, scores, step,
                           type, out + q * a->value_width);
}

/* Writes the values' means for some queries, weighted by the softmax of their keys' products; see
 * `mc_attention`. */
static void LEVEL(attend)(
    const mc_attention *a, const float *queries, int64_t num, const float *sinks, float *scores,
    int64_t step, float *out)
{
    if (a->type == MC_F32)
        LEVEL(attend_as)(a, queries, num, sinks, scores, step, MC_F32, out);
    else
        LEVEL(attend_as)(a, queries, num, sinks, scores, step, MC_BF16, out);
}

/* Of one query, the products with keys, and the sum of values whose shares are given. */
static void LEVEL(score_one)(const mc_attention *a, const float *query, float *scores)
{
    if (a->type == MC_F32)
        LEVEL(score)(a, query, 1, scores, 0, MC_F32);
    else
        LEVEL(score)(a, query, 1, scores, 0, MC_BF16);
}

static void LEVEL(mix_one)(const mc_attention *a, const float *shares, float *out)
{
    if (a->type == MC_F32)
        LEVEL(mix_all)(a, shares, 0, 1, MC_F32, out);
    else
        LEVEL(mix_all)(a, shares, 0, 1, MC_BF16, out);
}
#undef QUERIES
