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

/* sum(x^2) */
static inline float mc_squares(const float *x, int64_t num)
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
    return sides[0] + rest;
}

/* out = x / sqrt(mean(x^2) + eps) * weight, whose type is MC_F32 or MC_BF16; `out` may be `x`. */
static inline void mc_norm(
    const float *x, const uint8_t *weight, int type, int64_t num, float eps, float *out)
{
    float turns = 1.0f / sqrtf(mc_squares(x, num) / (float)num + eps);
    int64_t i;
    if (type == MC_F32)
        for (i = 0; i < num; i++)
            out[i] = x[i] * turns * ((const float *)weight)[i];
    else
        for (i = 0; i < num; i++)
            out[i] = x[i] * turns * mc_bf16_to_float(((const uint16_t *)weight)[i]);
}

/* (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias; float32 or bfloat16 both; `out` may be `x`. */
static inline void mc_layer_norm(
    const float *x, const uint8_t *weight, const uint8_t *bias, int type, int64_t num, float eps,
    float *out)
{
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < num; i++)
        sum += x[i];
    double mean = sum / (double)num;
    for (int64_t i = 0; i < num; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    float turns = 1.0f / sqrtf((float)(squares / (double)num) + eps);
    for (int64_t i = 0; i < num; i++) {
        float some = (float)(x[i] - mean) * turns;
        if (type == MC_F32)
            out[i] = some * ((const float *)weight)[i] + ((const float *)bias)[i];
        else
            out[i] = some * mc_bf16_to_float(((const uint16_t *)weight)[i])
                     + mc_bf16_to_float(((const uint16_t *)bias)[i]);
    }
}

/* Which numbers of a head are a pair: i and i + width / 2; or neighbours, which are written where they
 * were, or as halves. */
enum { MC_PAIRED_HALVES, MC_PAIRED_NEIGHBOURS, MC_PAIRED_NEIGHBOURS_TO_HALVES };

/* Turns the first `width` numbers of a head by a position's angles, [width / 2], at most 512. */
static inline void mc_turn(float *head, const float *cos, const float *sin, int64_t width, int pairs)
{
    int64_t half = width / 2;
    float second[256];
    for (int64_t i = 0; i < half; i++) {
        int64_t a = pairs == MC_PAIRED_HALVES ? i : 2 * i, b = pairs == MC_PAIRED_HALVES ? i + half : 2 * i + 1;
        float x = head[a], y = head[b];
        float low = x * cos[i] - y * sin[i], high = y * cos[i] + x * sin[i];
        head[pairs == MC_PAIRED_NEIGHBOURS_TO_HALVES ? i : a] = low;
        if (pairs == MC_PAIRED_NEIGHBOURS_TO_HALVES)
            second[i] = high;
        else
            head[b] = high;
    }
    if (pairs == MC_PAIRED_NEIGHBOURS_TO_HALVES)
        memcpy(head + half, second, (size_t)half * sizeof *second);
}

/* Rounds to the type of a cache. */
static inline void mc_store(const float *from, int64_t num, int type, uint8_t *to)
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
static inline void mc_add(float *to, const float *from, int64_t num, float scale)
{
    for (int64_t i = 0; i < num; i++)
        to[i] += from[i] * scale;
}

static inline void mc_scale(float *values, int64_t num, float factor)
{
    for (int64_t i = 0; i < num; i++)
        values[i] *= factor;
}

/* NaN stays. */
static inline void mc_clip(float *values, int64_t num, float bound)
{
    for (int64_t i = 0; i < num; i++)
        if (values[i] > bound)
            values[i] = bound;
        else if (values[i] < -bound)
            values[i] = -bound;
}

/* Multiplies each `each` of `num` numbers by a gate of theirs. */
static inline void mc_scale_parts(float *x, const float *gates, int64_t num, int64_t each)
{
    for (int64_t i = 0; i < num; i += each)
        mc_scale(x + i, each, gates[i / each]);
}

/* What a row sees of its sequence, [kv_heads, positions, width]. */
typedef struct {
    uint8_t *keys, *values; /* of its first head */
    int64_t key_head, value_head; /* bytes from a head to the next */
    int64_t position; /* the row's own, behind those that were there */
    int64_t begin;    /* the first position that is seen */
    int64_t dropped;  /* positions that are no longer there, the first ones */
} mc_held;

/* Heads of some rows' queries, each over what is held of its sequence. */
typedef struct {
    const mc_level *level;
    mc_attention first; /* steps, widths, type and scale of all rows */
    int64_t num_heads, num_kv_heads;
    int64_t parts; /* of the heads that share keys, each computed by itself */
    int64_t window;        /* positions that a row sees, its own among them; 0: all */
    int64_t num_rows, tile; /* most rows of an item; those of one sequence share a read of its keys */
    const mc_held *held;   /* [num_rows] */
    float *queries;        /* [num_rows, num_heads, width and more_width] */
    const float *sinks;    /* [num_heads], or NULL */
    float *scores;         /* [whole tiles of rows, num_kv_heads, parts, 4, most] */
    int64_t most;
    float *out; /* [num_rows, num_heads, value_width] */
    /* Of latent attention: a matrix [num_heads, content + out_width, width], whose first rows of a
     * head make a query of its content, and whose others make of the sum of latents what it gives. */
    const uint8_t *expand;
    int expand_type;
    int64_t content, out_width;
    const float *given; /* [num_rows, num_heads, content and more_width] */
} mc_heads;

/* The keys and values of a row's sequence. */
static inline mc_attention mc_held_of(const mc_heads *h, int64_t row, int64_t shared)
{
    const mc_held *held = &h->held[row];
    mc_attention a = h->first;
    a.keys = a.more = held->keys + shared * held->key_head;
    a.values = held->values + shared * held->value_head;
    return a;
}

/* A row's query, and what it sees. */
static inline mc_query mc_query_of(const mc_heads *h, int64_t row, int64_t head, float *out)
{
    const mc_held *held = &h->held[row];
    int64_t first = held->begin, last = held->position + 1;
    if (h->window && last - h->window > first)
        first = last - h->window;
    return (mc_query){
        .query = h->queries + (row * h->num_heads + head) * (h->first.width + h->first.more_width),
        .out = out,
        .sink = h->sinks ? h->sinks[head] : -INFINITY,
        .first = first - held->dropped,
        .last = last - held->dropped,
    };
}

/* Some rows' heads that share keys and values, or four of them. */
enum { MC_MOST_TILE = 4 };
static inline void mc_attend_item(void *job, int64_t item)
{
    const mc_heads *h = job;
    int64_t each = h->num_heads / h->num_kv_heads, some = item % h->parts * 4, next;
    int64_t shared = item / h->parts % h->num_kv_heads;
    int64_t row = item / h->parts / h->num_kv_heads * h->tile, end = row + h->tile;
    if (end > h->num_rows)
        end = h->num_rows;
    for (; row < end; row = next) {
        mc_attention a = mc_held_of(h, row, shared);
        for (next = row + 1; next < end && h->held[next].keys == h->held[row].keys;)
            next++;
        mc_query queries[4 * MC_MOST_TILE];
        int64_t num = 0;
        for (int64_t own = row; own < next; own++)
            for (int64_t i = some; i < each && i < some + 4; i++) {
                int64_t head = shared * each + i;
                queries[num++] = mc_query_of(
                    h, own, head, h->out + (own * h->num_heads + head) * a.value_width);
            }
        h->level->attend(&a, queries, num, h->scores + item * h->tile * 4 * h->most, h->most);
    }
}

/* The same of latents, which are keys and values both: DeepSeek-AI, DeepSeek-V2, 2024. Products with
 * the matrix that would expand them to keys are taken into the query, and those that would expand them
 * to values come after the sum. */
enum { MC_MOST_RANK = 1024 };
static inline void mc_latent_rows(
    const mc_heads *h, int64_t row, int64_t num, int64_t head, int64_t each, float *scores)
{
    int64_t rank = h->first.width, more = h->first.more_width;
    int64_t step = rank * (h->expand_type == MC_F32 ? 4 : 2);
    float mixed[MC_MOST_TILE * 4 * MC_MOST_RANK];
    mc_attention rows = {.key_step = step, .value_step = step, .width = rank,
                         .value_width = rank, .type = h->expand_type, .scale = 1};
    mc_attention a = mc_held_of(h, row, 0);
    mc_query queries[MC_MOST_TILE * 4] = {{0}};
    const float *given[MC_MOST_TILE];
    float *out[MC_MOST_TILE];
    /* What is held as values is the keys' second part. */
    a.more = a.values;
    a.values = a.keys;
    for (int64_t i = 0; i < each; i++) {
        for (int64_t r = 0; r < num; r++) {
            int64_t at = (row + r) * h->num_heads + head + i;
            given[r] = h->given + at * (h->content + more);
            out[r] = h->queries + at * (rank + more);
            memcpy(out[r] + rank, given[r] + h->content, (size_t)more * sizeof **out);
            queries[r * each + i] = mc_query_of(h, row + r, head + i, mixed + (r * each + i) * rank);
        }
        rows.values = h->expand + (head + i) * (h->content + h->out_width) * step;
        h->level->mix(&rows, given, num, h->content, out);
    }
    h->level->attend(&a, queries, num * each, scores, h->most);
    for (int64_t i = 0; i < each; i++) {
        for (int64_t r = 0; r < num; r++) {
            given[r] = mixed + (r * each + i) * rank;
            out[r] = h->out + ((row + r) * h->num_heads + head + i) * h->out_width;
        }
        rows.keys = h->expand + ((head + i) * (h->content + h->out_width) + h->content) * step;
        h->level->score(&rows, given, num, h->out_width, out);
    }
}

static inline void mc_latent_item(void *job, int64_t item)
{
    const mc_heads *h = job;
    int64_t each = h->num_heads / h->parts, head = item % h->parts * each, next;
    int64_t row = item / h->parts * h->tile, end = row + h->tile;
    if (end > h->num_rows)
        end = h->num_rows;
    for (; row < end; row = next) {
        for (next = row + 1; next < end && h->held[next].keys == h->held[row].keys;)
            next++;
        mc_latent_rows(h, row, next - row, head, each, h->scores + item * h->tile * 4 * h->most);
    }
}

/* How a router chooses: scores of all, then those of the chosen. */
enum {
    MC_SOFTMAX,
    MC_SIGMOID,
    MC_SOFTMAX_OF_CHOSEN,
    MC_SPARSEMIXER,
    MC_SIGMOID_OF_CHOSEN /* of large logits, whose sigmoids are all 1, the largest is chosen */
};
typedef struct {
    int64_t num_experts, top_k, num_groups, num_kept; /* groups that experts may be chosen from */
    int64_t num_best;                                 /* of a group, whose scores are its own */
    int kind, is_normalized;
    float least, floor, scale; /* added to the sum of weights; its least; multiplies the weights */
    float jitter;
    float cap; /* logits are cap * tanh(logits / cap), unless it is 0 */
    const float *expert_scales; /* multiply an expert's weight, or NULL */
    const float *correction; /* added to scores for the choice alone, or NULL */
} mc_router;

/* Writes the `num` largest of some scores, the largest first; of equal ones the first. */
static inline void mc_top(const float *scores, int64_t num_scores, int64_t num, int32_t *out)
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
static inline void mc_softmax(float *values, int64_t num)
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

/* One expert after the other: the largest logit's share among those that are near it, relative to
 * the larger of the two; Liu et al., GRIN, 2024. */
static inline void mc_sparsemixer(const mc_router *r, const float *logits, int32_t *ids, float *weights)
{
    for (int64_t k = 0; k < r->top_k; k++) {
        int64_t best = -1;
        float sum = 0;
#define IS_TAKEN(i) ((k > 0 && ids[0] == (i)) || (k > 1 && ids[1] == (i)))
        for (int64_t i = 0; i < r->num_experts; i++)
            if (!IS_TAKEN(i) && (best < 0 || logits[i] > logits[best]))
                best = i;
        for (int64_t i = 0; i < r->num_experts; i++) {
            float size = fabsf(logits[i]), most = logits[best];
            if (IS_TAKEN(i) || (most - logits[i]) / (size > most ? size : most) > 2 * r->jitter)
                continue;
            sum += expf(logits[i] - most);
        }
#undef IS_TAKEN
        ids[k] = (int32_t)best;
        weights[k] = 1.0f / sum;
    }
}

/* A token's experts and their weights. `logits` [num_experts] and `scratch`, as long, are written to. */
static inline void mc_route(
    const mc_router *r, float *logits, float *scratch, int32_t *ids, float *weights)
{
    float *choice = logits;
    for (int64_t i = 0; r->cap > 0 && i < r->num_experts; i++)
        logits[i] = tanhf(logits[i] / r->cap) * r->cap;
    if (r->kind == MC_SPARSEMIXER) {
        mc_sparsemixer(r, logits, ids, weights);
        return;
    }
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
        /* A group's score is the sum of its largest ones. */
        int64_t size = r->num_experts / r->num_groups;
        if (choice == logits)
            choice = memcpy(scratch, logits, (size_t)r->num_experts * sizeof *scratch);
        float best[64] = {0};
        int32_t kept[64], two[2];
        for (int64_t g = 0; g < r->num_groups; g++) {
            mc_top(choice + g * size, size, r->num_best, two);
            for (int64_t n = 0; n < r->num_best; n++)
                best[g] += choice[g * size + two[n]];
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
    if (sum < r->floor)
        sum = r->floor;
    if (r->kind == MC_SOFTMAX_OF_CHOSEN)
        mc_softmax(weights, r->top_k);
    else if (r->kind == MC_SIGMOID_OF_CHOSEN)
        for (int64_t k = 0; k < r->top_k; k++)
            weights[k] = 1.0f / (1.0f + expf(-weights[k]));
    for (int64_t k = 0; k < r->top_k; k++)
        weights[k] = (r->is_normalized ? weights[k] / sum : weights[k]) * r->scale;
    for (int64_t k = 0; r->expert_scales && k < r->top_k; k++)
        weights[k] *= r->expert_scales[ids[k]];
}

#endif
