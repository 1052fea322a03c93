/* What is to be done: products, gated experts, weighted sums. */
#ifndef MOECACHE_JOBS_H
#define MOECACHE_JOBS_H

#include "_functions.h"

/* Does an item of a job. */
typedef void (*mc_work)(void *job, int64_t item);

/* Rows of fp32 or bf16. */
typedef struct {
    uint8_t *data;
    int64_t row_bytes;
    int type;
} mc_rows;

/* out[i] = matrix @ inputs[i] + bias */
typedef struct {
    const mc_level *level;
    mc_matrix matrix;
    mc_rows bias, out;
    const uint8_t *const *inputs;
    int input_type;
    int64_t num_inputs, tiles_per_item;
} mc_product;

/* Inputs of a product, as a matrix multiplies them. */
typedef struct {
    const mc_level *level;
    const mc_matrix *matrix;
    const uint8_t *inputs;
    int64_t row_bytes, num;
    int given, wanted;
    uint8_t *out;
    int64_t out_bytes;
} mc_conversion;

/* The values of a matrix of codes, as rows of fp32 or bf16. */
typedef struct {
    const mc_level *level;
    mc_matrix matrix;
    mc_rows out;
    int64_t tiles_per_item;
} mc_expansion;

/* Matrices of a role in slots: the same shape, one after the other. */
typedef struct {
    mc_matrix first; /* of slot 0 */
    int64_t slot_bytes;
    mc_rows bias; /* a row for each slot, or none */
} mc_slots;

/* rows[pairs[i]] = down(act(gate(x)) * up(x)) of the expert in slots[e], for
 * i in [offsets[e], offsets[e + 1]). */
typedef struct {
    const mc_level *level;
    mc_slots up[2]; /* gate and up; or one, of up without a gate or of rows of both in turns */
    mc_slots down;
    mc_activation activation;
    int num_ups, is_interleaved;
    int64_t width; /* rows of gate */
    const int32_t *slots;
    const int64_t *offsets, *pairs;
    int64_t num_experts;
    const uint8_t *const *inputs[2]; /* of each i, for each of `up`; the same if `mc_are_alike` */
    int input_types[2];
    mc_rows hidden; /* scratch: activations of each i */
    int hidden_type; /* input type of `down`; MC_X_PLANES is made of fp32, in its place */
    const uint8_t **hidden_inputs;
    mc_rows out;
    int64_t tiles_per_item, items_per_expert;
} mc_experts;

/* Attention of a page; an item is some queries of the heads that share their keys. */
typedef struct {
    const mc_level *level;
    mc_page page;
    int64_t per_item, items_per_head;
    int has_failed; /* for want of memory */
} mc_attending;

static inline void mc_page_item(void *job, int64_t item)
{
    mc_attending *a = job;
    int64_t first = item % a->items_per_head * a->per_item, left = a->page.num_queries - first;
    if (!a->level->attend_page[a->page.type](
            &a->page, item / a->items_per_head, first, left < a->per_item ? left : a->per_item))
        __atomic_store_n(&a->has_failed, 1, __ATOMIC_RELAXED);
}

/* out[t] = sum over j of weights[t, j] * rows[t * top_k + j], in the order of j. */
typedef struct {
    const float *rows;
    mc_rows weights, out;
    int64_t num_tokens, top_k, columns;
} mc_sum;

#endif
