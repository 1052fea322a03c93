/* ECHO's loops over the experts of a layer and over the tokens of the ring.
 *
 * Written for the compiler's vectoriser. Compiled twice on x86-64, the second time for AVX2 and
 * POPCNT; multiply and add are never contracted (setup.py), so that both give the same bits.
 */
#ifndef MOECACHE_ECHO_H
#define MOECACHE_ECHO_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ECHO_RING 256
#define ECHO_AGES 16
#define ECHO_TIME_DISCOUNT 0.6f /* per token */
#define ECHO_ALWAYS_INLINE static inline __attribute__((always_inline))

/* Index of the half-octave of a positive number, as a difference to that of 1. */
ECHO_ALWAYS_INLINE int32_t echo_half_octave(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (int32_t)(bits >> 22) - (int32_t)(0x3f800000u >> 22);
}

/* Decay each token's score and add the overlap of its request of this layer with this one. */
ECHO_ALWAYS_INLINE void echo_match_body(
    const uint64_t *restrict masks, const uint64_t *restrict request, int words,
    float decay, float gain, float *restrict scores)
{
    int32_t common[ECHO_RING];
    if (words == 1) {
        for (int u = 0; u < ECHO_RING; u++)
            common[u] = __builtin_popcountll(masks[u] & request[0]);
    } else if (words == 2) {
        for (int u = 0; u < ECHO_RING; u++)
            common[u] = __builtin_popcountll(masks[2 * u] & request[0])
                + __builtin_popcountll(masks[2 * u + 1] & request[1]);
    } else {
        for (int u = 0; u < ECHO_RING; u++) {
            int32_t count = 0;
            for (int w = 0; w < words; w++)
                count += __builtin_popcountll(masks[(size_t)u * words + w] & request[w]);
            common[u] = count;
        }
    }
    for (int u = 0; u < ECHO_RING; u++)
        scores[u] = decay * scores[u] + gain * (float)common[u];
}

/* Moving averages of a layer's experts, their last use, and their cells: popularity by age, both
 * in half-octaves. An age is in tokens of one sequence: `per_row` is 1 over the step's rows if
 * these are of several. */
ECHO_ALWAYS_INLINE void echo_average_body(
    int n, const float *restrict wanted, float fast_rate, float slow_rate, float scale,
    int32_t token, float per_row, int32_t *restrict last, float *restrict fast,
    float *restrict slow, uint8_t *restrict cells)
{
    for (int e = 0; e < n; e++) {
        slow[e] += slow_rate * (wanted[e] - slow[e]);
        fast[e] += fast_rate * (wanted[e] - fast[e]);
        int32_t popularity = echo_half_octave(slow[e] * scale) + 7;
        int32_t used = wanted[e] != 0.0f ? token : last[e];
        /* An older row comes after a newer one where a layer is visited twice. */
        int32_t ago = token > used ? token - used : 0;
        int32_t age = echo_half_octave((float)ago * per_row + 1.0f);
        last[e] = used;
        popularity = popularity < 0 ? 0 : popularity;
        popularity = popularity > 11 ? 11 : popularity;
        age = age > ECHO_AGES - 1 ? ECHO_AGES - 1 : age;
        cells[e] = (uint8_t)(ECHO_AGES * popularity + age);
    }
}

/* Probabilities of use by the experts' own history. */
ECHO_ALWAYS_INLINE void echo_own_body(
    int n, const float *restrict history, const float *restrict fast, float *restrict own)
{
    for (int e = 0; e < n; e++) {
        /* Clamped: an expert used at every token would give 0 / 0. */
        float h = history[e] < 1e-4f ? 1e-4f : history[e];
        h = h > 0.999f ? 0.999f : h;
        float m = fast[e] + 5e-4f;
        m = m > 0.999f ? 0.999f : m;
        float yes = sqrtf(m * h);
        float no = sqrtf((1.0f - m) * (1.0f - h));
        own[e] = yes / (yes + no);
    }
}

/* Probabilities of use at the next opportunity, and the discounted next use. */
ECHO_ALWAYS_INLINE void echo_value_body(
    int n, const float *restrict own, const float *restrict votes, float total, float prior,
    float discount, float *restrict next, float *restrict values)
{
    for (int e = 0; e < n; e++) {
        float p = own[e];
        float q = (votes[e] + prior * p) / (total + prior);
        next[e] = q;
        values[e] = q + (1.0f - q) * (discount * p / (1.0f - discount + discount * p));
    }
}

/* Multiply `unused` by one sequence's probabilities of not using each expert. */
ECHO_ALWAYS_INLINE void echo_spare_body(
    int n, const float *restrict own, const float *restrict votes, float total, float prior,
    float *restrict unused)
{
    for (int e = 0; e < n; e++) {
        float spared = 1.0f - (votes[e] + prior * own[e]) / (total + prior);
        unused[e] *= spared > 0.0f ? spared : 0.0f;
    }
}

/* `echo_value` for experts that any of several sequences uses. */
ECHO_ALWAYS_INLINE void echo_union_body(
    int n, const float *restrict own, const float *restrict unused, int sequences,
    float discount, float *restrict next, float *restrict values)
{
    for (int e = 0; e < n; e++) {
        float spared = 1.0f, power = 1.0f - own[e];
        for (int bits = sequences; bits; bits >>= 1) {
            spared *= bits & 1 ? power : 1.0f;
            power *= power;
        }
        float p = 1.0f - spared;
        float q = 1.0f - unused[e];
        next[e] = q;
        values[e] = q + (1.0f - q) * (discount * p / (1.0f - discount + discount * p));
    }
}

#define ECHO_DEFINE(suffix, attribute)                                                        \
    attribute static inline void echo_match##suffix(                                          \
        const uint64_t *restrict masks, const uint64_t *restrict request, int words,          \
        float decay, float gain, float *restrict scores)                                      \
    {                                                                                         \
        echo_match_body(masks, request, words, decay, gain, scores);                          \
    }                                                                                         \
    attribute static inline void echo_average##suffix(                                        \
        int n, const float *restrict wanted, float fast_rate, float slow_rate, float scale,   \
        int32_t token, float per_row, int32_t *restrict last, float *restrict fast,           \
        float *restrict slow, uint8_t *restrict cells)                                        \
    {                                                                                         \
        echo_average_body(n, wanted, fast_rate, slow_rate, scale, token, per_row, last, fast, \
            slow, cells);                                                                     \
    }                                                                                         \
    attribute static inline void echo_own##suffix(                                            \
        int n, const float *restrict history, const float *restrict fast,                     \
        float *restrict own)                                                                  \
    {                                                                                         \
        echo_own_body(n, history, fast, own);                                                 \
    }                                                                                         \
    attribute static inline void echo_value##suffix(                                          \
        int n, const float *restrict own, const float *restrict votes, float total,           \
        float prior, float discount, float *restrict next, float *restrict values)            \
    {                                                                                         \
        echo_value_body(n, own, votes, total, prior, discount, next, values);                 \
    }                                                                                         \
    attribute static inline void echo_spare##suffix(                                          \
        int n, const float *restrict own, const float *restrict votes, float total,           \
        float prior, float *restrict unused)                                                  \
    {                                                                                         \
        echo_spare_body(n, own, votes, total, prior, unused);                                 \
    }                                                                                         \
    attribute static inline void echo_union##suffix(                                          \
        int n, const float *restrict own, const float *restrict unused, int sequences,        \
        float discount, float *restrict next, float *restrict values)                         \
    {                                                                                         \
        echo_union_body(n, own, unused, sequences, discount, next, values);                   \
    }

typedef struct {
    void (*match)(const uint64_t *, const uint64_t *, int, float, float, float *);
    void (*average)(
        int, const float *, float, float, float, int32_t, float, int32_t *, float *, float *,
        uint8_t *);
    void (*own)(int, const float *, const float *, float *);
    void (*value)(
        int, const float *, const float *, float, float, float, float *, float *);
    void (*spare)(int, const float *, const float *, float, float, float *);
    void (*unite)(int, const float *, const float *, int, float, float *, float *);
} EchoLoops;

ECHO_DEFINE(, )
#if defined(__x86_64__) && defined(__GNUC__)
ECHO_DEFINE(_avx2, __attribute__((target("avx2,popcnt"))))
#endif

/* The fastest loops for this processor. */
static inline EchoLoops echo_loops(void)
{
    EchoLoops loops = {
        echo_match, echo_average, echo_own, echo_value, echo_spare, echo_union};
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt")) {
        EchoLoops fast = {echo_match_avx2, echo_average_avx2, echo_own_avx2, echo_value_avx2,
            echo_spare_avx2, echo_union_avx2};
        loops = fast;
    }
#endif
    return loops;
}

static inline int echo_lowest_bit(uint64_t bits)
{
    return __builtin_ctzll(bits);
}

/* The `wanted` (at most 16) largest of the ring's scores, the largest first, ties to the lower
 * slot. Returns how many there are; a score of -inf does not count. */
static inline int echo_nearest(const float *restrict scores, int wanted, int *restrict slots)
{
    float best[16], kept[16];
    float least;
    int near[ECHO_RING + 1];
    int count = 0, candidates = 0;
    /* The largest of every sixteenth score: the `wanted`-th of these is a bound for the result. */
    for (int lane = 0; lane < 16; lane++)
        best[lane] = scores[lane];
    for (int u = 16; u < ECHO_RING; u += 16)
        for (int lane = 0; lane < 16; lane++)
            best[lane] = scores[u + lane] > best[lane] ? scores[u + lane] : best[lane];
    for (int lane = 1; lane < 16; lane++) {
        float value = best[lane];
        int i = lane;
        for (; i > 0 && best[i - 1] < value; i--)
            best[i] = best[i - 1];
        best[i] = value;
    }
    least = best[wanted - 1];
    for (int u = 0; u < ECHO_RING; u++) {
        near[candidates] = u;
        candidates += scores[u] >= least;
    }
    for (int c = 0; c < candidates; c++) {
        float score = scores[near[c]];
        int i;
        if (score == -INFINITY || (count == wanted && !(score > kept[wanted - 1])))
            continue;
        i = count < wanted ? count++ : wanted - 1;
        for (; i > 0 && kept[i - 1] < score; i--) {
            kept[i] = kept[i - 1];
            slots[i] = slots[i - 1];
        }
        kept[i] = score;
        slots[i] = near[c];
    }
    return count;
}

#endif
