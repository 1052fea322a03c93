/* A layer of linear attention between its products: a convolution over the last rows, then the gated delta
 * rule; Yang et al., Gated Delta Networks, 2024.
 *
 * A row's bits depend on it and on the rows of its sequence before it, however they were cut into calls. */
#ifndef MOECACHE_LINEAR_H
#define MOECACHE_LINEAR_H

#include "_steps.h"

/* Most rows of a convolution, and numbers of a head; rows that go through a head together. */
enum { MC_MOST_KERNEL = 8, MC_MOST_HEAD = 256, MC_ROWS_TOGETHER = 16 };

/* Rows of a sequence, and what those before them have left: the last ones, which a convolution sees, in the type
 * MC_F32 or MC_BF16, and the heads' states. The next ones may be written over these. Behind the first `num_saved`
 * rows, if it is not 0, both are saved as well. */
typedef struct {
    int64_t first, num, num_saved;
    const uint8_t *seen;
    uint8_t *next_seen;
    int64_t row_step, channel_step; /* of these: bytes */
    int seen_type;
    uint8_t *saved_seen;
    const float *states; /* [num_heads, width, value_width] */
    float *next_states, *saved_states;
} mc_stretch;

typedef struct {
    const mc_level *level;
    int64_t num_keys, num_heads; /* heads of queries and keys, and of values */
    int64_t width, value_width;
    int is_tiled; /* whether a key's heads of values are `num_keys` apart, and not neighbours */
    int64_t kernel;
    const float *conv;          /* [kernel, channels]: channels of queries, keys and values */
    const float *rates, *steps; /* [num_heads]: a state decays by exp(rate * softplus(x + step)) */
    const uint8_t *norm;        /* of a head's result */
    int norm_type;
    float epsilon;
    const mc_stretch *stretches;
    float *mixed;                  /* [rows, channels] */
    const float *decays, *shares;  /* [rows, num_heads]: before they are made parts of 1 */
    const float *gates;            /* [rows, num_heads, value_width] */
    float *out;                    /* the same */
} mc_linear;

/* Where some channels of a convolution's rows are read from. */
typedef struct {
    int64_t channel, num;
    float seen[MC_MOST_KERNEL - 1][MC_MOST_HEAD]; /* the last is the row before the first */
} mc_channels;

static inline int64_t mc_num_channels(const mc_linear *l)
{
    return 2 * l->num_keys * l->width + l->num_heads * l->value_width;
}

static inline void mc_see(const mc_linear *l, const mc_stretch *s, int64_t channel, int64_t num, mc_channels *c)
{
    c->channel = channel;
    c->num = num;
    for (int64_t t = 0; t < l->kernel - 1; t++) {
        const uint8_t *from = s->seen + t * s->row_step + channel * s->channel_step;
        for (int64_t i = 0; i < num; i++) {
            uint16_t half;
            if (s->seen_type == MC_F32)
                memcpy(&c->seen[t][i], from + i * s->channel_step, 4);
            else {
                memcpy(&half, from + i * s->channel_step, 2);
                c->seen[t][i] = mc_bf16_to_float(half);
            }
        }
    }
}

/* Rounds channels of a stretch's rows to the type in which the next call will see them. */
static inline void mc_round_rows(const mc_linear *l, const mc_stretch *s, int64_t channel, int64_t num)
{
    for (int64_t t = 0; s->seen_type == MC_BF16 && t < s->num; t++) {
        float *row = l->mixed + (s->first + t) * mc_num_channels(l) + channel;
        for (int64_t i = 0; i < num; i++)
            row[i] = mc_bf16_to_float(mc_float_to_bf16(row[i]));
    }
}

/* Row `t` of a stretch; negative ones are those before it. */
static inline const float *mc_seen_row(const mc_linear *l, const mc_stretch *s, const mc_channels *c, int64_t t)
{
    if (t < 0)
        return c->seen[l->kernel - 1 + t];
    return l->mixed + (s->first + t) * mc_num_channels(l) + c->channel;
}

/* Keeps what the rows behind the first `num` will see. */
static inline void mc_leave(const mc_linear *l, const mc_stretch *s, const mc_channels *c, int64_t num, uint8_t *seen)
{
    for (int64_t t = 0; t < l->kernel - 1; t++) {
        const float *row = mc_seen_row(l, s, c, num - (l->kernel - 1) + t);
        uint8_t *to = seen + t * s->row_step + c->channel * s->channel_step;
        for (int64_t i = 0; i < c->num; i++)
            mc_store(row + i, 1, s->seen_type, to + i * s->channel_step);
    }
}

static inline void mc_leave_all(const mc_linear *l, const mc_stretch *s, const mc_channels *c)
{
    if (s->num_saved)
        mc_leave(l, s, c, s->num_saved, s->saved_seen);
    mc_leave(l, s, c, s->num, s->next_seen);
}

/* silu of the convolution's row; `out` has room for a multiple of 16. */
static inline void mc_convolve(
    const mc_linear *l, const mc_stretch *s, const mc_channels *c, int64_t t, float *out)
{
    const mc_activation silu = {.kind = MC_SILU};
    memset(out, 0, (size_t)((c->num + 15) & ~15) * sizeof *out);
    for (int64_t j = 0; j < l->kernel; j++) {
        const float *row = mc_seen_row(l, s, c, t - (l->kernel - 1) + j);
        const float *weight = l->conv + j * mc_num_channels(l) + c->channel;
        for (int64_t i = 0; i < c->num; i++)
            out[i] += row[i] * weight[i];
    }
    l->level->activate(out, NULL, (c->num + 15) & ~15, &silu);
}

/* x = x / sqrt(sum(x^2) + 1e-6) * scale */
static inline void mc_normalize(float *x, int64_t num, float scale)
{
    float turns = scale / sqrtf(mc_squares(x, num) + 1e-6f);
    for (int64_t i = 0; i < num; i++)
        x[i] *= turns;
}

static inline float mc_softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

/* Rows [begin, end) of a stretch go through a head; `channels` are those of its values. */
static inline void mc_delta_rows(
    const mc_linear *l, const mc_stretch *s, const mc_channels *channels, int64_t head, int64_t begin,
    int64_t end, const float *queries, const float *keys)
{
    const mc_activation silu = {.kind = MC_SILU};
    float values[MC_ROWS_TOGETHER][MC_MOST_HEAD], gate[MC_MOST_HEAD];
    float decays[MC_ROWS_TOGETHER], shares[MC_ROWS_TOGETHER];
    int64_t state = head * l->width * l->value_width;
    for (int64_t t = begin; t < end; t++) {
        int64_t at = (s->first + t) * l->num_heads + head;
        mc_convolve(l, s, channels, t, values[t - begin]);
        decays[t - begin] = expf(l->rates[head] * mc_softplus(l->decays[at] + l->steps[head]));
        shares[t - begin] = 1.0f / (1.0f + expf(-l->shares[at]));
    }
    mc_delta d = {
        .state = (begin ? s->next_states : s->states) + state,
        .next = s->next_states + state,
        .width = l->width,
        .value_width = l->value_width,
        .num = end - begin,
        .queries = queries,
        .keys = keys,
        .values = values[0],
        .key_step = MC_MOST_HEAD,
        .value_step = MC_MOST_HEAD,
        .decays = decays,
        .shares = shares,
        .out = values[0],
    };
    l->level->delta(&d);
    if (end == s->num_saved)
        memcpy(s->saved_states + state, d.next, (size_t)(l->width * l->value_width) * sizeof *d.next);
    for (int64_t t = begin; t < end; t++) {
        int64_t at = ((s->first + t) * l->num_heads + head) * l->value_width;
        float *row = values[t - begin];
        mc_norm(row, l->norm, l->norm_type, l->value_width, l->epsilon, row);
        memset(gate, 0, sizeof gate);
        memcpy(gate, l->gates + at, (size_t)l->value_width * sizeof *gate);
        l->level->activate(gate, row, (l->value_width + 15) & ~15, &silu);
        memcpy(l->out + at, gate, (size_t)l->value_width * sizeof *gate);
    }
}

/* A sequence's heads of values that share a query and a key. */
static inline void mc_linear_item(void *job, int64_t item)
{
    const mc_linear *l = job;
    const mc_stretch *s = &l->stretches[item / l->num_keys];
    int64_t key = item % l->num_keys, each = l->num_heads / l->num_keys, end;
    float queries[MC_ROWS_TOGETHER][MC_MOST_HEAD], keys[MC_ROWS_TOGETHER][MC_MOST_HEAD];
    int64_t values = 2 * l->num_keys * l->width;
    mc_channels of_query, of_key, of_value;
    mc_round_rows(l, s, key * l->width, l->width);
    mc_round_rows(l, s, (l->num_keys + key) * l->width, l->width);
    mc_see(l, s, key * l->width, l->width, &of_query);
    mc_see(l, s, (l->num_keys + key) * l->width, l->width, &of_key);
    for (int64_t begin = 0; begin < s->num; begin = end) {
        end = begin + MC_ROWS_TOGETHER < s->num ? begin + MC_ROWS_TOGETHER : s->num;
        if (begin < s->num_saved && s->num_saved < end)
            end = s->num_saved;
        for (int64_t t = begin; t < end; t++) {
            mc_convolve(l, s, &of_query, t, queries[t - begin]);
            mc_convolve(l, s, &of_key, t, keys[t - begin]);
            mc_normalize(queries[t - begin], l->width, 1.0f / sqrtf((float)l->width));
            mc_normalize(keys[t - begin], l->width, 1.0f);
        }
        for (int64_t i = 0; i < each; i++) {
            int64_t head = l->is_tiled ? i * l->num_keys + key : key * each + i;
            if (begin == 0)
                mc_round_rows(l, s, values + head * l->value_width, l->value_width);
            mc_see(l, s, values + head * l->value_width, l->value_width, &of_value);
            mc_delta_rows(l, s, &of_value, head, begin, end, queries[0], keys[0]);
            if (end == s->num)
                mc_leave_all(l, s, &of_value);
        }
    }
    mc_leave_all(l, s, &of_query);
    mc_leave_all(l, s, &of_key);
}

#endif
