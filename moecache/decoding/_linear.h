/* A layer whose heads have states instead of keys and values: a convolution over the last rows, then the gated delta
 * rule (Yang et al., Gated Delta Networks, 2024), with a decay for each number of a key (Kimi Team, Kimi Linear, 2025),
 * or Mamba 2's scan (Dao and Gu, Transformers are SSMs, 2024).
 *
 * A row's bits depend on it and on the rows of its sequence before it, however they were cut into calls. */
#ifndef MOECACHE_LINEAR_H
#define MOECACHE_LINEAR_H

#include "_steps.h"

/* Most rows of a convolution, and numbers of a head; channels, and rows, that go together. */
enum { MC_MOST_KERNEL = 8, MC_MOST_HEAD = 256, MC_CHANNELS = 128, MC_ROWS_TOGETHER = 16 };

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
    const float *states; /* [num_heads, width, value_width], or of a scan [num_heads, value_width, width] */
    float *next_states, *saved_states;
} mc_stretch;

typedef struct {
    const mc_level *level;
    int64_t num_keys, num_heads; /* heads of queries and keys, and of values */
    int64_t width, value_width;
    int is_tiled; /* whether a key's heads of values are `num_keys` apart, and not neighbours */
    int is_scan;
    /* Whether each number of a key decays by its own: `decays` and `steps` are as wide as keys, gates sigmoids. */
    int by_channel;
    float bound; /* of the logarithm of such a decay, if it is not 0 */
    int64_t kernel, channels;
    const float *conv, *conv_bias;           /* [kernel, channels], and [channels] or NULL */
    int has_activation;                      /* whether the convolution's silu goes on */
    int64_t queries_at, keys_at, values_at;  /* their first channels */
    /* [num_heads], steps by channel [num_heads, width]: a state decays by exp(rate * softplus(x + step)). */
    const float *rates, *steps;
    const float *skips;                      /* of a scan [num_heads]: how much of a value is added to the result */
    const uint8_t *norm;                     /* of a head's result, by the delta rule */
    int norm_type;
    float epsilon;
    const mc_stretch *stretches;
    float *mixed;                            /* [rows, channels] */
    /* [rows, num_heads], decays by channel [rows, num_heads, width]: before they are made parts of 1; a scan's are
     * one. */
    const float *decays, *shares;
    const float *gates;                      /* [rows, num_heads, value_width] */
    int64_t mixed_step, share_step, gate_step; /* numbers from a row of these to the next */
    float *out;                              /* [rows, num_heads, value_width] */
} mc_linear;

/* Some channels' rows before the first; the last is the row before it. */
typedef float mc_seen[MC_MOST_KERNEL - 1][MC_CHANNELS];

static inline void mc_see(const mc_linear *l, const mc_stretch *s, int64_t channel, int64_t num, mc_seen seen)
{
    for (int64_t t = 0; t < l->kernel - 1; t++) {
        const uint8_t *from = s->seen + t * s->row_step + channel * s->channel_step;
        for (int64_t i = 0; i < num; i++) {
            uint16_t half;
            if (s->seen_type == MC_F32)
                memcpy(&seen[t][i], from + i * s->channel_step, 4);
            else {
                memcpy(&half, from + i * s->channel_step, 2);
                seen[t][i] = mc_bf16_to_float(half);
            }
        }
    }
}

/* Rounds channels of a stretch's rows to the type in which the next call will see them. */
static inline void mc_round_rows(const mc_linear *l, const mc_stretch *s, int64_t channel, int64_t num)
{
    for (int64_t t = 0; s->seen_type == MC_BF16 && t < s->num; t++) {
        float *row = l->mixed + (s->first + t) * l->mixed_step + channel;
        for (int64_t i = 0; i < num; i++)
            row[i] = mc_bf16_to_float(mc_float_to_bf16(row[i]));
    }
}

/* Row `t` of a stretch, from a channel on; negative ones are those before it. */
static inline const float *mc_seen_row(
    const mc_linear *l, const mc_stretch *s, mc_seen seen, int64_t channel, int64_t t)
{
    if (t < 0)
        return seen[l->kernel - 1 + t];
    return l->mixed + (s->first + t) * l->mixed_step + channel;
}

/* Keeps what the rows behind the first `num` will see. */
static inline void mc_leave(
    const mc_linear *l, const mc_stretch *s, mc_seen seen, int64_t channel, int64_t channels, int64_t num,
    uint8_t *next)
{
    for (int64_t t = 0; t < l->kernel - 1; t++) {
        const float *row = mc_seen_row(l, s, seen, channel, num - (l->kernel - 1) + t);
        uint8_t *to = next + t * s->row_step + channel * s->channel_step;
        for (int64_t i = 0; i < channels; i++)
            mc_store(row + i, 1, s->seen_type, to + i * s->channel_step);
    }
}

static inline int64_t mc_convolve_items(const mc_linear *l)
{
    return (l->channels + MC_CHANNELS - 1) / MC_CHANNELS;
}

/* The convolution of some of a sequence's channels, in place: the last row first, as no other sees it. */
static inline void mc_convolve_item(void *job, int64_t item)
{
    const mc_linear *l = job;
    const mc_activation silu = {.kind = MC_SILU};
    int64_t parts = mc_convolve_items(l);
    const mc_stretch *s = &l->stretches[item / parts];
    int64_t channel = item % parts * MC_CHANNELS;
    int64_t num = l->channels - channel < MC_CHANNELS ? l->channels - channel : MC_CHANNELS;
    mc_seen seen;
    mc_round_rows(l, s, channel, num);
    mc_see(l, s, channel, num, seen);
    if (s->num_saved)
        mc_leave(l, s, seen, channel, num, s->num_saved, s->saved_seen);
    mc_leave(l, s, seen, channel, num, s->num, s->next_seen);
    for (int64_t t = s->num - 1; t >= 0; t--) {
        float sums[MC_CHANNELS] = {0};
        for (int64_t j = 0; j < l->kernel; j++) {
            const float *row = mc_seen_row(l, s, seen, channel, t - (l->kernel - 1) + j);
            const float *weight = l->conv + j * l->channels + channel;
            for (int64_t i = 0; i < num; i++)
                sums[i] += row[i] * weight[i];
        }
        for (int64_t i = 0; l->conv_bias && i < num; i++)
            sums[i] += l->conv_bias[channel + i];
        if (l->has_activation)
            l->level->activate(sums, NULL, (num + 15) & ~15, &silu);
        memcpy(l->mixed + (s->first + t) * l->mixed_step + channel, sums, (size_t)num * sizeof *sums);
    }
}

/* to = x / sqrt(sum(x^2) + 1e-6) * scale */
static inline void mc_normalize(const float *x, int64_t num, float scale, float *to)
{
    float turns = scale / sqrtf(mc_squares(x, num) + 1e-6f);
    for (int64_t i = 0; i < num; i++)
        to[i] = x[i] * turns;
}

static inline float mc_softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

/* Gates what a head gives. The delta rule norms a head before its gate; a scan norms groups of heads afterwards. */
static inline void mc_gate_head(const mc_linear *l, int64_t row, int64_t head, float *given)
{
    const mc_activation silu = {.kind = MC_SILU};
    float gate[MC_MOST_HEAD] = {0};
    int64_t width = l->value_width;
    if (!l->is_scan)
        mc_norm(given, l->norm, l->norm_type, width, l->epsilon, given);
    memcpy(gate, l->gates + row * l->gate_step + head * width, (size_t)width * sizeof *gate);
    if (l->by_channel)
        l->level->gate(given, gate, (width + 15) & ~15);
    else
        l->level->activate(gate, given, (width + 15) & ~15, &silu);
    memcpy(l->out + (row * l->num_heads + head) * width, l->by_channel ? given : gate, (size_t)width * sizeof *gate);
}

typedef float mc_head_numbers[MC_ROWS_TOGETHER][MC_MOST_HEAD];

/* Writes the decays of each row's key, [begin, end) of a stretch, and the key times its decays. */
static inline void mc_fade_rows(
    const mc_linear *l, const mc_stretch *s, int64_t head, int64_t begin, int64_t end, const float *keys,
    mc_head_numbers decays, mc_head_numbers faded)
{
    int64_t width = l->width, at = head * width;
    for (int64_t t = begin; t < end; t++) {
        const float *given = l->decays + (s->first + t) * l->num_heads * width + at;
        const float *key = keys + (t - begin) * MC_MOST_HEAD;
        float *own = decays[t - begin];
        for (int64_t i = 0; i < width; i++)
            own[i] = given[i] + l->steps[at + i];
        memset(own + width, 0, (size_t)(-width & 15) * sizeof *own);
        l->level->fade(own, (width + 15) & ~15, l->rates[head], l->bound);
        for (int64_t i = 0; i < width; i++)
            faded[t - begin][i] = key[i] * own[i];
    }
}

/* Rows [begin, end) of a stretch go through a head. */
static inline void mc_head_rows(
    const mc_linear *l, const mc_stretch *s, int64_t head, int64_t begin, int64_t end, const float *queries,
    const float *keys, int64_t key_step)
{
    mc_head_numbers results, own, faded;
    float decays[MC_ROWS_TOGETHER], shares[MC_ROWS_TOGETHER];
    int64_t state = head * l->width * l->value_width, at = l->values_at + head * l->value_width;
    const float *values = l->mixed + (s->first + begin) * l->mixed_step + at;
    for (int64_t t = begin; t < end; t++) {
        int64_t share = (s->first + t) * l->share_step + head;
        float step = 0;
        if (!l->by_channel) {
            step = mc_softplus((l->is_scan ? l->shares : l->decays)[share] + l->steps[head]);
            decays[t - begin] = expf(l->rates[head] * step);
        }
        shares[t - begin] = l->is_scan ? step : 1.0f / (1.0f + expf(-l->shares[share]));
        memcpy(results[t - begin], values + (t - begin) * l->mixed_step, (size_t)l->value_width * sizeof *values);
        /* Activations come in multiples of 16. */
        memset(results[t - begin] + l->value_width, 0, (size_t)(-l->value_width & 15) * sizeof *values);
    }
    if (l->by_channel)
        mc_fade_rows(l, s, head, begin, end, keys, own, faded);
    mc_delta d = {
        .state = (begin ? s->next_states : s->states) + state,
        .next = s->next_states + state,
        .width = l->width,
        .value_width = l->value_width,
        .num = end - begin,
        .queries = queries,
        .keys = keys,
        .values = results[0],
        .key_step = key_step,
        .value_step = MC_MOST_HEAD,
        .decays = l->by_channel ? own[0] : decays,
        .faded = l->by_channel ? faded[0] : NULL,
        .shares = shares,
        .out = results[0],
    };
    if (l->is_scan)
        l->level->scan(&d);
    else
        l->level->delta(&d);
    if (end == s->num_saved)
        memcpy(s->saved_states + state, d.next, (size_t)(l->width * l->value_width) * sizeof *d.next);
    for (int64_t t = begin; t < end; t++) {
        const float *value = values + (t - begin) * l->mixed_step;
        for (int64_t i = 0; l->is_scan && i < l->value_width; i++)
            results[t - begin][i] += l->skips[head] * value[i];
        mc_gate_head(l, s->first + t, head, results[t - begin]);
    }
}

/* The end of the rows that go together from `begin` on. */
static inline int64_t mc_rows_end(const mc_stretch *s, int64_t begin)
{
    int64_t end = begin + MC_ROWS_TOGETHER < s->num ? begin + MC_ROWS_TOGETHER : s->num;
    return begin < s->num_saved && s->num_saved < end ? s->num_saved : end;
}

/* The delta rule of a sequence's heads of values that share a query and a key. */
static inline void mc_delta_item(void *job, int64_t item)
{
    const mc_linear *l = job;
    const mc_stretch *s = &l->stretches[item / l->num_keys];
    int64_t key = item % l->num_keys, each = l->num_heads / l->num_keys, end;
    mc_head_numbers queries, keys;
    for (int64_t begin = 0; begin < s->num; begin = end) {
        end = mc_rows_end(s, begin);
        for (int64_t t = begin; t < end; t++) {
            const float *row = l->mixed + (s->first + t) * l->mixed_step + key * l->width;
            mc_normalize(row + l->queries_at, l->width, 1.0f / sqrtf((float)l->width), queries[t - begin]);
            mc_normalize(row + l->keys_at, l->width, 1.0f, keys[t - begin]);
        }
        for (int64_t i = 0; i < each; i++) {
            int64_t head = l->is_tiled ? i * l->num_keys + key : key * each + i;
            mc_head_rows(l, s, head, begin, end, queries[0], keys[0], MC_MOST_HEAD);
        }
    }
}

/* The scan of one of a sequence's heads. */
static inline void mc_scan_item(void *job, int64_t item)
{
    const mc_linear *l = job;
    const mc_stretch *s = &l->stretches[item / l->num_heads];
    int64_t head = item % l->num_heads, key = head / (l->num_heads / l->num_keys), end;
    for (int64_t begin = 0; begin < s->num; begin = end) {
        const float *row = l->mixed + (s->first + begin) * l->mixed_step + key * l->width;
        end = mc_rows_end(s, begin);
        mc_head_rows(l, s, head, begin, end, row + l->queries_at, row + l->keys_at, l->mixed_step);
    }
}

/* out[row] = x[row] * gate[row], of rows that are steps apart; `out` may be `x`. */
static inline void mc_multiply_rows(
    const float *x, const float *gate, int64_t step, float *out, int64_t out_step, int64_t num, int64_t width)
{
    for (int64_t t = 0; t < num; t++, x += step, gate += step, out += out_step)
        for (int64_t i = 0; i < width; i++)
            out[i] = x[i] * gate[i];
}

#endif
