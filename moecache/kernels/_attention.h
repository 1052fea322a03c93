/* Attention of some queries to the keys and values that they share: included once for each level.
 *
 * A query's bits depend on the widths, on the positions that it sees and on these alone: not on the queries beside
 * it. Keys, and values, are read once for four queries, and a few at a time, so that they stay in the first caches
 * until all queries have met them. */

/* Queries, keys and registers of values that are multiplied side by side: as many as there are registers for. */
#define QUERIES 4
#define KEYS (LANES == 8 ? 2 : 4)
#define VALUES (LANES == 16 ? 4 : 2)
/* Positions that all queries meet, one after the other. */
#define POSITIONS 64

/* The sums of LANES registers, each by halves as `total` does it, as the lanes of one. */
INLINE vf LEVEL(totals)(vf *sums)
{
/* Halves of both lie beside one another: a[i] and b[i] where they were, then the others, crossed. */
#define HALVES(n)                                                                                                \
    for (int i = 0; i < (n); i++) {                                                                              \
        vf a = sums[i], b = sums[i + (n)];                                                                       \
        sums[i] = __builtin_shufflevector(a, b, STAYS) + __builtin_shufflevector(a, b, CROSSES);                 \
    }
#if LANES == 16
#define STAYS 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31
#define CROSSES 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23
    HALVES(8)
#undef STAYS
#undef CROSSES
#define STAYS 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31
#define CROSSES 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27
    HALVES(4)
#undef STAYS
#undef CROSSES
#define STAYS 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31
#define CROSSES 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29
    HALVES(2)
#undef STAYS
#undef CROSSES
#define STAYS 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31
#define CROSSES 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30
#elif LANES == 8
#define STAYS 0, 1, 2, 3, 12, 13, 14, 15
#define CROSSES 4, 5, 6, 7, 8, 9, 10, 11
    HALVES(4)
#undef STAYS
#undef CROSSES
#define STAYS 0, 1, 10, 11, 4, 5, 14, 15
#define CROSSES 2, 3, 8, 9, 6, 7, 12, 13
    HALVES(2)
#undef STAYS
#undef CROSSES
#define STAYS 0, 9, 2, 11, 4, 13, 6, 15
#define CROSSES 1, 8, 3, 10, 5, 12, 7, 14
#else
#define STAYS 0, 1, 6, 7
#define CROSSES 2, 3, 4, 5
    HALVES(2)
#undef STAYS
#undef CROSSES
#define STAYS 0, 5, 2, 7
#define CROSSES 1, 4, 3, 6
#endif
    HALVES(1)
#undef STAYS
#undef CROSSES
#undef HALVES
    return sums[0];
}

/* Products of `num` queries with `there` keys, at most LANES of them: scores[q][0] is the first. */
INLINE void LEVEL(score_few)(
    const mc_attention *a, const float *const *queries, int num, const uint8_t *key, const uint8_t *more,
    int64_t there, float *const *scores, int type)
{
    enum { MOST = QUERIES * 4 };
    int64_t bytes = type == MC_F32 ? 4 : 2;
    int keys = num == 1 ? 4 : KEYS;
    vf sums[QUERIES][LANES];
    for (int64_t p = 0; p < LANES; p += keys) {
        vf own[MOST] = {{0}};
#define STEP(LOAD, ...)                                                                          \
    {                                                                                            \
        vf values[4];                                                                            \
        _Pragma("GCC unroll 4") for (int i = 0; i < keys; i++)                                   \
            values[i] = LOAD(from[i] + k * bytes, ##__VA_ARGS__, type);                          \
        _Pragma("GCC unroll 4") for (int q = 0; q < num; q++) {                                  \
            vf some = LOAD((const uint8_t *)(queries[q] + begin + k), ##__VA_ARGS__, MC_F32);    \
            _Pragma("GCC unroll 4") for (int i = 0; i < keys; i++)                               \
                own[q * keys + i] = LEVEL(fma)(values[i], some, own[q * keys + i]);              \
        }                                                                                        \
    }
/* Behind the last key it is read again; such products are not stored. */
#define PART(FROM, BYTES, BEGIN, WIDTH)                                                          \
    {                                                                                            \
        const uint8_t *from[4];                                                                  \
        int64_t k = 0, begin = BEGIN;                                                            \
        for (int i = 0; i < keys; i++)                                                           \
            from[i] = FROM + (p + i < there ? p + i : there - 1) * (BYTES);                      \
        for (; k + LANES <= (WIDTH); k += LANES)                                                 \
            STEP(LEVEL(load))                                                                    \
        if (k < (WIDTH))                                                                         \
            STEP(LEVEL(load_tail), (WIDTH) - k)                                                  \
    }
        if (p < there) {
            PART(key, a->key_step, 0, a->width)
            if (a->more_width)
                PART(more, a->more_step, a->width, a->more_width)
        }
#undef PART
#undef STEP
        for (int q = 0; q < num; q++)
            for (int i = 0; i < keys; i++)
                sums[q][p + i] = own[q * keys + i];
    }
    for (int q = 0; q < num; q++) {
        vf some = LEVEL(totals)(sums[q]) * a->scale;
        if (there == LANES)
            memcpy(scores[q], &some, sizeof some);
        else
            memcpy(scores[q], &some, (size_t)there * 4);
    }
}

/* scores[q][t - first] = scale * (query q . key t), for `num` queries and keys [first, last). */
INLINE void LEVEL(score_as)(
    const mc_attention *a, const float *const *queries, int num, int64_t first, int64_t last,
    float *const *scores, int type)
{
    for (int64_t t = first; t < last; t += LANES) {
        float *own[QUERIES];
        for (int q = 0; q < num; q++)
            own[q] = scores[q] + (t - first);
        LEVEL(score_few)(a, queries, num, a->keys + t * a->key_step,
                         a->more_width ? a->more + t * a->more_step : NULL,
                         last - t < LANES ? last - t : LANES, own, type);
    }
}

/* Makes shares of a query's scores: their softmax. A sink takes its share and has no value. */
SHARED void LEVEL(soften)(float *scores, int64_t num, float sink)
{
    int64_t whole = num / LANES * LANES, rest = num - whole;
    vf part, best = LEVEL(all)(sink), last = LEVEL(all)(-INFINITY), sum = {0};
    memcpy(&last, scores + whole, (size_t)rest * 4);
    /* A NaN is no larger number: it reaches the row by its share. */
    for (int64_t t = 0; t <= whole; t += LANES) {
        if (t < whole)
            memcpy(&part, scores + t, sizeof part);
        else
            part = last;
        vi is_larger = part > best;
        best = (vf)((is_larger & (vi)part) | (~is_larger & (vi)best));
    }
    float lanes[LANES], most = sink;
    memcpy(lanes, &best, sizeof lanes);
    for (int i = 0; i < LANES; i++)
        most = lanes[i] > most ? lanes[i] : most;
    for (int64_t t = 0; t < whole; t += LANES) {
        memcpy(&part, scores + t, sizeof part);
        part = LEVEL(exp)(part - most);
        memcpy(scores + t, &part, sizeof part);
        sum += part;
    }
    if (rest) {
        part = LEVEL(exp)(last - most);
        memcpy(scores + whole, &part, (size_t)rest * 4);
        memset((char *)&part + rest * 4, 0, (size_t)(LANES - rest) * 4);
        sum += part;
    }
    vf own = LEVEL(exp)(LEVEL(all)(sink - most));
    float turns = 1.0f / (LEVEL(total)(sum) + (sink > -INFINITY ? own[0] : 0.0f));
    for (int64_t t = 0; t < num; t++)
        scores[t] *= turns;
}

/* out[q][c] += sum over t of shares[q][t - first] * value t[c], t after t, for `num` queries and `registers` times
 * LANES columns, or for the `rest` of them. */
INLINE void LEVEL(mix_few)(
    const mc_attention *a, const float *const *shares, int num, int64_t first, int64_t last, int64_t column,
    int registers, int64_t rest, int type, float *const *out)
{
    enum { MOST = QUERIES * 4 };
    int64_t bytes = type == MC_F32 ? 4 : 2;
    size_t size = (size_t)(rest ? rest : LANES) * 4;
    const uint8_t *value = a->values + first * a->value_step + column * bytes;
    vf sums[MOST] = {{0}};
    for (int q = 0; q < num; q++)
        for (int i = 0; i < registers; i++)
            memcpy(&sums[q * registers + i], out[q] + column + i * LANES, size);
    for (int64_t t = 0; t < last - first; t++, value += a->value_step) {
        vf values[4];
        _Pragma("GCC unroll 4") for (int i = 0; i < registers; i++)
            values[i] = rest ? LEVEL(load_tail)(value, rest, type)
                             : LEVEL(load)(value + i * LANES * bytes, type);
        _Pragma("GCC unroll 4") for (int q = 0; q < num; q++) {
            vf share = LEVEL(all)(shares[q][t]);
            _Pragma("GCC unroll 4") for (int i = 0; i < registers; i++)
                sums[q * registers + i] = LEVEL(fma)(values[i], share, sums[q * registers + i]);
        }
    }
    for (int q = 0; q < num; q++)
        for (int i = 0; i < registers; i++)
            memcpy(out[q] + column + i * LANES, &sums[q * registers + i], size);
}

/* The values' sums for `num` queries, weighted by their shares, added to what is there. */
INLINE void LEVEL(mix_as)(
    const mc_attention *a, const float *const *shares, int num, int64_t first, int64_t last, int type,
    float *const *out)
{
    int64_t c = 0;
    for (; c + VALUES * LANES <= a->value_width; c += VALUES * LANES)
        LEVEL(mix_few)(a, shares, num, first, last, c, VALUES, 0, type, out);
    for (; c + LANES <= a->value_width; c += LANES)
        LEVEL(mix_few)(a, shares, num, first, last, c, 1, 0, type, out);
    if (c < a->value_width)
        LEVEL(mix_few)(a, shares, num, first, last, c, 1, a->value_width - c, type, out);
}

/* Functions for four queries and for one, by the type of keys and values. */
#define AS(num, type, NAME)                                                                                      \
    SHARED void LEVEL(score_##NAME)(                                                                             \
        const mc_attention *a, const float *const *queries, int64_t first, int64_t last, float *const *scores)   \
    {                                                                                                            \
        LEVEL(score_as)(a, queries, num, first, last, scores, type);                                             \
    }                                                                                                            \
    SHARED void LEVEL(mix_##NAME)(                                                                               \
        const mc_attention *a, const float *const *shares, int64_t first, int64_t last, float *const *out)       \
    {                                                                                                            \
        LEVEL(mix_as)(a, shares, num, first, last, type, out);                                                   \
    }
AS(QUERIES, MC_F32, four_f32)
AS(1, MC_F32, one_f32)
AS(QUERIES, MC_BF16, four_bf16)
AS(1, MC_BF16, one_bf16)
#undef AS

/* One of these functions. */
typedef void (*LEVEL(meets))(
    const mc_attention *a, const float *const *given, int64_t first, int64_t last, float *const *out);

/* The scores, or the sums of values, of `num` queries with positions [first, last), which all of them see. */
INLINE void LEVEL(meet)(
    LEVEL(meets) meets, const mc_attention *a, const mc_query *queries, int num, int64_t first, int64_t last,
    float *scores, int64_t step, int is_mixing)
{
    const float *given[QUERIES];
    float *out[QUERIES];
    if (first >= last)
        return;
    for (int q = 0; q < num; q++) {
        float *score = scores + q * step + (first - queries[q].first);
        given[q] = is_mixing ? score : queries[q].query;
        out[q] = is_mixing ? queries[q].out : score;
    }
    meets(a, given, first, last, out);
}

/* The same of up to four queries, as far as each sees these positions: together where all four do. */
INLINE void LEVEL(meet_some)(
    const mc_attention *a, const mc_query *queries, int num, int64_t first, int64_t last, float *scores,
    int64_t step, int is_mixing)
{
    int is_f32 = a->type == MC_F32;
    LEVEL(meets) four = is_mixing ? (is_f32 ? LEVEL(mix_four_f32) : LEVEL(mix_four_bf16))
                                  : (is_f32 ? LEVEL(score_four_f32) : LEVEL(score_four_bf16));
    LEVEL(meets) one = is_mixing ? (is_f32 ? LEVEL(mix_one_f32) : LEVEL(mix_one_bf16))
                                 : (is_f32 ? LEVEL(score_one_f32) : LEVEL(score_one_bf16));
    int64_t begin = first, end = last;
    for (int q = 0; q < num; q++) {
        begin = queries[q].first > begin ? queries[q].first : begin;
        end = queries[q].last < end ? queries[q].last : end;
    }
    if (num < QUERIES || end < begin)
        begin = end = last;
    /* Values' sums go on from position to position. */
    for (int q = 0; q < num; q++)
        LEVEL(meet)(one, a, queries + q, 1, queries[q].first > first ? queries[q].first : first,
                    queries[q].last < begin ? queries[q].last : begin, scores + q * step, step, is_mixing);
    LEVEL(meet)(four, a, queries, QUERIES, begin, end, scores, step, is_mixing);
    for (int q = 0; q < num; q++)
        LEVEL(meet)(one, a, queries + q, 1, queries[q].first > end ? queries[q].first : end,
                    queries[q].last < last ? queries[q].last : last, scores + q * step, step, is_mixing);
}

/* Writes the values' means for some queries, weighted by the softmax of their keys' products. */
static void LEVEL(attend)(
    const mc_attention *a, const mc_query *queries, int64_t num, float *scores, int64_t step)
{
    int64_t first = queries[0].first, last = queries[0].last;
    for (int64_t q = 1; q < num; q++) {
        first = queries[q].first < first ? queries[q].first : first;
        last = queries[q].last > last ? queries[q].last : last;
    }
    for (int is_mixing = 0; is_mixing < 2; is_mixing++) {
        for (int64_t t = first; t < last; t += POSITIONS)
            for (int64_t q = 0; q < num; q += QUERIES)
                LEVEL(meet_some)(a, queries + q, num - q < QUERIES ? (int)(num - q) : QUERIES, t,
                                 last - t < POSITIONS ? last : t + POSITIONS, scores + q * step, step,
                                 is_mixing);
        for (int64_t q = 0; q < num && !is_mixing; q++) {
            LEVEL(soften)(scores + q * step, queries[q].last - queries[q].first, queries[q].sink);
            memset(queries[q].out, 0, (size_t)a->value_width * 4);
        }
    }
}

/* Writes some queries' products with the first `num` keys; and sums of values that have these shares. */
static void LEVEL(score)(
    const mc_attention *a, const float *const *queries, int64_t num_queries, int64_t num, float *const *scores)
{
    int is_f32 = a->type == MC_F32;
    int64_t q = 0;
    for (; q + QUERIES <= num_queries; q += QUERIES)
        (is_f32 ? LEVEL(score_four_f32) : LEVEL(score_four_bf16))(a, queries + q, 0, num, scores + q);
    for (; q < num_queries; q++)
        (is_f32 ? LEVEL(score_one_f32) : LEVEL(score_one_bf16))(a, queries + q, 0, num, scores + q);
}

static void LEVEL(mix)(
    const mc_attention *a, const float *const *shares, int64_t num_queries, int64_t num, float *const *out)
{
    int is_f32 = a->type == MC_F32;
    int64_t q = 0;
    for (; q < num_queries; q++)
        memset(out[q], 0, (size_t)a->value_width * 4);
    for (q = 0; q + QUERIES <= num_queries; q += QUERIES)
        (is_f32 ? LEVEL(mix_four_f32) : LEVEL(mix_four_bf16))(a, shares + q, 0, num, out + q);
    for (; q < num_queries; q++)
        (is_f32 ? LEVEL(mix_one_f32) : LEVEL(mix_one_bf16))(a, shares + q, 0, num, out + q);
}
#undef QUERIES
#undef KEYS
#undef VALUES
#undef POSITIONS
