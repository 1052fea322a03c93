/* What is to be done: products, gated experts, weighted sums. */
#ifndef MOECACHE_JOBS_H
#define MOECACHE_JOBS_H

#include "_matrix.h"

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
    mc_slots up, down;
    mc_activation activation;
    int is_gated, is_interleaved;
    int64_t width, up_row; /* rows of gate; the first one of up */
    const int32_t *slots;
    const int64_t *offsets, *pairs;
    int64_t num_experts;
    const uint8_t *const *inputs; /* of each i */
    int input_type;
    mc_rows hidden; /* scratch: activations of each i */
    int hidden_type; /* input type of `down`; MC_X_PLANES is made of fp32, in its place */
    const uint8_t **hidden_inputs;
    mc_rows out;
    int64_t tiles_per_item, items_per_expert;
} mc_experts;

/* out[t] = sum over j of weights[t, j] * rows[t * top_k + j], in the order of j. */
typedef struct {
    const float *rows;
    mc_rows weights, out;
    int64_t num_tokens, top_k, columns;
} mc_sum;

#endif
