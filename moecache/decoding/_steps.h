/* What a token's layer computes beside products: norms, rotary positions, attention, the router.
 *
 * All of it is float32, and a row's bits depend on that row alone. */
#ifndef MOECACHE_STEPS_H
#define MOECACHE_STEPS_H

#include "_jobs.h"

#include <stdlib.h>

/* Numbers that are summed side by side, and then by halves: the same order on every processor. */
#define MC_SIDES 16
typedef float mc_sides __attribute__((vector_size(MC_SIDES * 4)));

/* out = x / sqrt(mean(x^2) + eps) * weight, whose type is MC_F32 or MC_BF16; `out` may be `x`. */
static void mc_norm(
    const float *x, const uint8_t *weight, int type, int64_t num, float eps, float *out)
{
    mc_sides sums = {0};
    float sides[MC_SIDES], rest = 0;
    int64_t i = 0;
    for (; i + MC_SIDES <= num; i += MC_SIDES) {
        mc_sides part;
        memcpy(&part, x + i, sizeof part);
        sums += part * part;
    }
    for (; i < num; i++)
        rest += x[i] * x[i];
    memcpy(sides, &sums, sizeof sides);
    for (int half = MC_SIDES / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            sides[j] += sides[j + half];
    float turns = 1.0f / sqrtf((sides[0] + rest) / (float)num + eps);
    if (type == MC_F32)
        for (i = 0; i < num; i++)
            out[i] = x[i] * turns * ((const float *)weight)[i];
    else
        for (i = 0; i < num; i++)
            out[i] = x[i] * turns * mc_bf16_to_float(((const uint16_t *)weight)[i]);
}

/* Turns the first `width` numbers of a head by a position's angles: number i and number i + width / 2
 * are a pair, or, interleaved, numbers 2 i and 2 i + 1. Angles are [width]. */
static void mc_turn(float *head, const float *cos, const float *sin, int64_t width, int is_interleaved)
{
    int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        int64_t a = is_interleaved ? 2 * i : i, b = is_interleaved ? 2 * i + 1 : i + half;
        float x = head[a], y = head[b];
        head[a] = x * cos[a] - y * sin[a];
        head[b] = y * cos[b] + x * sin[b];
    }
}

/* Rounds to the type of a cache. */
static void mc_store(const float *from, int64_t num, int type, uint8_t *to)
{
    if (type == MC_F32) {
        memcpy(to, from, (size_t)num * 4);
        return;
    }
    for (int64_t i = 0; i < num; i++) {
        uint16_t bits = mc_float_to_bf16(from[i]);
        memcpy(to + 2 * i, &bits, 2);
    }
}

/* to += from * scale */
static void mc_add(float *to, const float *from, int64_t num, float scale)
{
    for (int64_t i = 0; i < num; i++)
        to[i] += from[i] * scale;
}

/* Heads of some rows' queries over a cache [batch, kv_heads, capacity, width]. */
typedef struct {
    const mc_level *level;
    mc_attention first; /* that of row 0 and head 0 */
    int64_t num_heads, num_kv_heads, rows_per_sequence;
    int64_t key_head, value_head; /* bytes from a head to the next */
    int64_t length;               /* positions before the first of the new ones */
    const int64_t *begins;        /* of each sequence: the first position that is seen */
    const float *queries;         /* [rows, num_heads, width] */
    const float *sinks;           /* [num_heads], or NULL */
    float *scores;                /* [rows, num_kv_heads, 4, most] */
    int64_t most;
    float *out; /* [rows, num_heads, value_width] */
} mc_heads;

/* The heads of a row that share keys and values. */
static void mc_attend_item(void *job, int64_t item)
{
    const mc_heads *h = job;
    int64_t row = item / h->num_kv_heads, shared = item % h->num_kv_heads;
    int64_t sequence = row / h->rows_per_sequence, each = h->num_heads / h->num_kv_heads;
    int64_t place = sequence * h->num_kv_heads + shared;
    mc_attention a = h->first;
    a.keys += place * h->key_head;
    a.values += place * h->value_head;
    a.first = h->begins[sequence];
    a.last = h->length + row % h->rows_per_sequence + 1;
    int64_t head = shared * each, at = row * h->num_heads + head;
    h->level->attend(
        &a, h->queries + at * a.width, each, h->sinks ? h->sinks + head : NULL,
        h->scores + item * 4 * h->most, h->most, h->out + at * a.value_width);
}

/* How a router chooses: scores of all, then those of the chosen. */
enum { MC_SOFTMAX, MC_SIGMOID, MC_SOFTMAX_OF_CHOSEN };
typedef struct {
    int64_t num_experts, top_k, num_groups, num_kept; /* groups that experts may be chosen from */
    int kind, is_normalized;
    float least, scale; /* added to the sum of weights; multiplies the weights */
    const float *correction; /* added to scores for the choice alone, or NULL */
} mc_router;

/* Writes the `num` largest of some scores, the largest first; of equal ones the first. */
static void mc_top(const float *scores, int64_t num_scores, int64_t num, int32_t *out)
{
    for (int64_t n = 0; n < num; n++)
        out[n] = -1;
    for (int64_t i = 0; i < num_scores; i++) {
        int64_t place = num;
        /* A NaN is never chosen before a number, but there are always `num`. */
        while (place > 0
               && (out[place - 1] < 0 || scores[i] > scores[out[place - 1]]
                   || (scores[out[place - 1]] != scores[out[place - 1]] && scores[i] == scores[i])))
            place--;
        if (place == num)
            continue;
        memmove(out + place + 1, out + place, (size_t)(num - 1 - place) * sizeof *out);
        out[place] = (int32_t)i;
    }
}

/* In place. */
static void mc_softmax(float *values, int64_t num)
{
    float most = values[0], sum = 0;
    for (int64_t i = 1; i < num; i++)
        most = values[i] > most ? values[i] : most;
    for (int64_t i = 0; i < num; i++) {
        values[i] = expf(values[i] - most);
        sum += values[i];
    }
    for (int64_t i = 0; i < num; i++)
        values[i] /= sum;
}

/* A token's experts and their weights. `logits` [num_experts] and `scratch`, as long, are written to. */
static void mc_route(
    const mc_router *r, float *logits, float *scratch, int32_t *ids, float *weights)
{
    float *choice = logits;
    if (r->kind == MC_SOFTMAX)
        mc_softmax(logits, r->num_experts);
    else if (r->kind == MC_SIGMOID)
        for (int64_t i = 0; i < r->num_experts; i++)
            logits[i] = 1.0f / (1.0f + expf(-logits[i]));
    if (r->correction) {
        for (int64_t i = 0; i < r->num_experts; i++)
            scratch[i] = logits[i] + r->correction[i];
        choice = scratch;
    }
    if (r->num_kept < r->num_groups) {
        /* A group's score is the sum of its two largest. */
        int64_t size = r->num_experts / r->num_groups;
        if (choice == logits)
            choice = memcpy(scratch, logits, (size_t)r->num_experts * sizeof *scratch);
        float best[64] = {0};
        int32_t kept[64], two[2];
        for (int64_t g = 0; g < r->num_groups; g++) {
            mc_top(choice + g * size, size, 2, two);
            best[g] = choice[g * size + two[0]] + choice[g * size + two[1]];
        }
        mc_top(best, r->num_groups, r->num_kept, kept);
        for (int64_t g = 0; g < r->num_groups; g++) {
            int is_kept = 0;
            for (int64_t k = 0; k < r->num_kept; k++)
                is_kept |= kept[k] == g;
            for (int64_t i = 0; !is_kept && i < size; i++)
                choice[g * size + i] = -INFINITY;
        }
    }
    mc_top(choice, r->num_experts, r->top_k, ids);
    float sum = r->least;
    for (int64_t k = 0; k < r->top_k; k++)
        sum += weights[k] = logits[ids[k]];
    if (r->kind == MC_SOFTMAX_OF_CHOSEN)
        mc_softmax(weights, r->top_k);
    for (int64_t k = 0; k < r->top_k; k++)
        weights[k] = (r->is_normalized ? weights[k] / sum : weights[k]) * r->scale;
}

#endif
