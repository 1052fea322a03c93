/* Work that threads share: products and experts, the same on every level and with any threads. */
#ifndef THREADS_H
#define THREADS_H

#include "checks.h"
#include "random_forms.h"

/* A product that threads share, with a bias. */
static void test_threads(void)
{
    static float first[1000], found[1000], bias[1000];
    static uint8_t planes[MOST_COLUMNS * 4];
    const uint8_t *inputs[1] = {planes};
    mc_matrix m = matrix_of(MC_I8, MC_F16, 0, 1000, 544, 32);
    float input[544];
    snprintf(what, sizeof what, "threads");
    fill_form(&m, form);
    fill_input(input, 544, 0);
    fill_input(bias, 1000, 0);
    for (int l = 0; l < num_levels; l++)
        for (int threads = 1; threads < 4; threads++) {
            int is_first = !l && threads == 1;
            mc_product product = {
                .level = levels[l], .matrix = m, .bias = {(uint8_t *)bias, 4000, MC_X_F32},
                .out = {(uint8_t *)(is_first ? first : found), 4000, MC_X_F32}, .inputs = inputs,
                .input_type = MC_X_PLANES, .num_inputs = 1};
            mc_convert(levels[l], (uint8_t *)input, MC_X_F32, MC_X_PLANES, &m, planes);
            mc_products(&product, threads);
            check(is_first || are_equal(first, found, 1000), levels[l], "other products by threads");
        }
    add_floats(first, 1000);
    print_sum();
}

/* Three tokens with two experts each of three slots: gate and up of U4, down of I5. */
static void test_experts(void)
{
    enum { HIDDEN = 96, WIDTH = 64, TOKENS = 3, TOP_K = 2, PAIRS = TOKENS * TOP_K };
    static const int32_t slots[] = {2, 0, 1};
    static const int64_t offsets[] = {0, 1, 4, 6}, pairs[PAIRS] = {3, 0, 2, 5, 1, 4};
    static float first[TOKENS * HIDDEN], found[TOKENS * HIDDEN];
    mc_matrix both = matrix_of(MC_U4, MC_F16, MC_OFFSETS, 2 * WIDTH, HIDDEN, 32);
    mc_matrix down = matrix_of(MC_I5, MC_F16, 0, HIDDEN, WIDTH, 32);
    int64_t up_bytes = both.row_bytes * 2 * WIDTH / MC_TILE;
    int64_t slot_bytes = up_bytes + down.row_bytes * HIDDEN / MC_TILE;
    float input[TOKENS][HIDDEN], weights[PAIRS];
    snprintf(what, sizeof what, "experts");
    for (int i = 0; i < 3; i++) {
        fill_form(&both, form + i * slot_bytes);
        fill_form(&down, form + i * slot_bytes + up_bytes);
        fill_input(input[i], HIDDEN, i);
    }
    mc_matrix gate = both, up = both;
    gate.rows = up.rows = WIDTH;
    up.data = gate.data + up_bytes / 2;
    down.data = form + up_bytes;
    fill_input(weights, PAIRS, 0);
    for (int l = 0; l < num_levels; l++)
        for (int threads = 1; threads < 3; threads++) {
            static float hidden[PAIRS][WIDTH], rows[PAIRS][HIDDEN];
            static uint8_t planes[TOKENS][HIDDEN * 4];
            const uint8_t *inputs[PAIRS], *hidden_inputs[PAIRS];
            float *out = l || threads > 1 ? found : first;
            for (int i = 0; i < TOKENS; i++)
                mc_convert(levels[l], (uint8_t *)input[i], MC_X_F32, MC_X_PLANES, &up, planes[i]);
            for (int i = 0; i < PAIRS; i++) {
                inputs[i] = planes[pairs[i] / TOP_K];
                hidden_inputs[i] = (uint8_t *)hidden[i];
            }
            mc_experts experts = {
                .level = levels[l], .up = {{gate, slot_bytes, {0}}, {up, slot_bytes, {0}}},
                .down = {down, slot_bytes, {0}}, .activation = {MC_SILU, 0, 0}, .num_ups = 2,
                .width = WIDTH,
                .slots = slots, .offsets = offsets, .pairs = pairs, .num_experts = 3,
                .inputs = {inputs, inputs}, .input_types = {MC_X_PLANES, MC_X_PLANES},
                .hidden = {(uint8_t *)hidden, sizeof hidden[0], MC_X_F32},
                .hidden_type = MC_X_PLANES, .hidden_inputs = hidden_inputs,
                .out = {(uint8_t *)rows, sizeof rows[0], MC_X_F32}};
            mc_sum combined = {rows[0], {(uint8_t *)weights, 4 * TOP_K, MC_X_F32},
                               {(uint8_t *)out, 4 * HIDDEN, MC_X_F32}, TOKENS, TOP_K, HIDDEN};
            mc_compute_experts(&experts, threads);
            mc_combine(&combined, threads);
            check(are_equal(out, first, TOKENS * HIDDEN), levels[l], "other experts");
        }
    add_floats(first, TOKENS * HIDDEN);
    print_sum();
}

#endif
