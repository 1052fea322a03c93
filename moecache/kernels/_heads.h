/* Heads of attention as the kernels take them: to positions, to those of a page, over a state. */
#ifndef MOECACHE_HEADS_H
#define MOECACHE_HEADS_H

#include <stdint.h>

/* A head's state of linear attention, before some rows and behind them, and the rows: [width, value_width] by the delta
 * rule, [value_width, width] by a scan. */
typedef struct {
    const float *state;
    float *next; /* or the same */
    int64_t width, value_width, num;
    const float *queries, *keys, *values;
    int64_t key_step, value_step; /* numbers from a row to the next */
    const float *decays, *shares; /* [num]: what multiplies the state; how far it goes to a value */
    /* If each number of a key decays by its own: `decays` are [num, width], keys times theirs these, both as far apart
     * as keys are. */
    const float *faded;
    float *out;
} mc_delta;

/* Keys and values of a head. A key may lie in two parts; a query is then as long as both, one behind the
 * other. */
typedef struct {
    const uint8_t *keys, *values, *more;     /* of position 0 */
    int64_t key_step, value_step, more_step; /* bytes from a position to the next */
    int64_t width, value_width, more_width;  /* numbers of a key, of a value, of a key's second part */
    int type; /* MC_F32 or MC_BF16 */
    float scale; /* of the products */
} mc_attention;

/* A query that sees positions [first, last), one at least, where its mean of values goes, and its sink, or
 * -INFINITY. */
typedef struct {
    const float *query;
    float *out, sink;
    int64_t first, last;
} mc_query;

/* Queries of a page and the keys and values of all positions up to its end. A query sees the positions that
 * its row of `mask` says, a byte each, or without a mask those up to its own: the last query is of the last
 * position. Steps are in bytes: from a position to the next, from a head to the next. */
#define MC_MOST_WIDTH 256
typedef struct {
    const uint8_t *queries, *keys, *values, *mask; /* or NULL */
    uint8_t *out; /* [num_queries, num_heads, value_width] */
    int64_t query_step, query_head_step, key_step, key_head_step, value_step, value_head_step;
    int64_t mask_step, out_step;
    int64_t num_queries, num_keys, num_heads, num_kv_heads, width, value_width;
    int type; /* MC_X_F32 or MC_X_BF16 */
    float scale;
} mc_page;

#endif
