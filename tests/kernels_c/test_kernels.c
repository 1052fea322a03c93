/* The kernels without Python: each form of integers on every level of this processor, against the
 * definition; forms made from files' orders, expansion, activations, floats, threads, experts.
 *
 * Prints a line with a checksum for each. The lines depend on neither the processor nor the level, so a
 * cross-compiled program has to print the same ones (`make arm`). Given a level's name, it fails if the
 * processor does not have that level. */
#include <stdlib.h>

/* Whether there is no memory for packed inputs. */
static int is_out_of_memory;

static void *sometimes(size_t alignment, size_t size)
{
    return is_out_of_memory ? NULL : aligned_alloc(alignment, size);
}
#define aligned_alloc sometimes

#include "checks.h"
#include "definition.h"
#include "random_forms.h"
#include "threads.h"

static uint8_t file_bytes[MOST_BYTES];

/* The integers of a block in the order of its columns, see `mc_planes`. */
static void integers_of(const mc_planes *block, int is_whole, int is_permuted, int *integers)
{
    static const int planes[2][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {0, 4, 1, 5, 2, 6, 3, 7}};
    static const int fours[4] = {0, 2, 1, 3};
    for (int i = 0; i < MC_BLOCK; i++) {
        int place = is_whole ? i / 4 * 4 + fours[i % 4] : i;
        int column = i / 8 * 8 + planes[is_permuted][place % 8];
        integers[column] = is_whole ? block->whole[i] : 128 * block->high[i] + block->low[i];
    }
}

/* Whether a level makes of an input what the first level makes of it. */
static int have_equal_integers(
    const mc_matrix *m, const mc_level *level, const uint8_t *some, const uint8_t *first)
{
    int is_permuted = mc_code_bits(m->codes) < 8, integers[2][MC_BLOCK];
    for (int64_t k = 0; k < mc_input_columns(m); k += MC_BLOCK) {
        const mc_planes *one = (const mc_planes *)some + k / MC_BLOCK;
        const mc_planes *other = (const mc_planes *)first + k / MC_BLOCK;
        integers_of(one, level->is_whole, is_permuted, integers[0]);
        integers_of(other, 0, is_permuted, integers[1]);
        if (memcmp(one, other, offsetof(mc_planes, high))
            || memcmp(integers[0], integers[1], sizeof integers[0]))
            return 0;
    }
    return 1;
}

/* Products of random inputs with a random form: all levels, alone and together, against the definition. */
static void test_products(const mc_matrix *m)
{
    static float rows[NUM_INPUTS][MOST_COLUMNS];
    static float right[NUM_INPUTS][MOST_ROWS];
    static _Alignas(64) uint8_t planes[MC_MAX_LEVELS][NUM_INPUTS][MOST_COLUMNS * 4];
    int64_t bytes = mc_input_row_bytes(MC_X_PLANES, mc_input_columns(m));
    memset(rows, 0, sizeof rows);
    memset(planes, 0xee, sizeof planes);
    fill_form(m, form);
    for (int i = 0; i < NUM_INPUTS; i++) {
        fill_input(rows[i], m->columns, i % 8);
        for (int64_t r = 0; r < m->rows; r++)
            right[i][r] = product_of(m, r, rows[i]);
        add_floats(right[i], m->rows);
    }
    for (int l = 0; l < num_levels; l++) {
        const uint8_t *inputs[NUM_INPUTS];
        mc_tile tile = mc_tile_of(levels[l], MC_X_PLANES, m);
        check(mc_input_type(levels[l], MC_X_F32, m) == MC_X_PLANES
                  && mc_input_type(levels[l], MC_X_BF16, m) == MC_X_PLANES,
              levels[l], "inputs that are no integers");
        for (int i = 0; i < NUM_INPUTS; i++) {
            uint16_t half[MOST_COLUMNS];
            mc_from_f32(rows[i], m->columns, MC_X_BF16, (uint8_t *)half);
            mc_convert(levels[l], i % 2 ? (uint8_t *)half : (uint8_t *)rows[i],
                       i % 2 ? MC_X_BF16 : MC_X_F32, MC_X_PLANES, m, planes[l][i]);
            inputs[i] = planes[l][i];
            check(have_equal_integers(m, levels[l], planes[l][i], planes[0][i]), levels[l],
                  "other integers");
            if (!l)
                add_bytes(planes[0][i], bytes);
        }
        for (int64_t row = 0; row < m->rows; row += MC_TILE) {
            int64_t num = m->rows - row < MC_TILE ? m->rows - row : MC_TILE;
            for (int count = 1; count <= NUM_INPUTS; count += count < 8 ? 1 : 5) {
                float out[NUM_INPUTS * MC_TILE];
                tile(m, row, inputs, count, out);
                for (int i = 0; i < count; i++)
                    check(are_equal(out + i * MC_TILE, right[i] + row, num), levels[l],
                          "not the products as defined");
            }
        }
        /* In a room, and without memory for one. */
        for (is_out_of_memory = 0; is_out_of_memory < 2 && levels[l]->many[MC_X_PLANES]; is_out_of_memory++) {
            static float out[NUM_INPUTS][MOST_ROWS];
            mc_product product = {.level = levels[l], .matrix = *m, .inputs = inputs,
                                  .out = {(uint8_t *)out, sizeof out[0], MC_X_F32},
                                  .input_type = MC_X_PLANES, .num_inputs = NUM_INPUTS};
            mc_products(&product, 1);
            for (int i = 0; i < NUM_INPUTS; i++)
                check(are_equal(out[i], right[i], m->rows), levels[l], "not the products as defined");
        }
        is_out_of_memory = 0;
    }
}

/* Values of a form as rows of fp32 and bf16. */
static void test_expansion(const mc_matrix *m)
{
    for (int type = MC_X_F32; type <= MC_X_BF16; type++) {
        static uint8_t first[MOST_ROWS * MOST_COLUMNS * 4], other[sizeof first];
        mc_expansion expansion = {.matrix = *m, .out = {first, m->columns * mc_input_bytes(type), type}};
        int64_t bytes = m->rows * expansion.out.row_bytes;
        for (int l = 0; l < num_levels; l++) {
            expansion.level = levels[l];
            expansion.out.data = l ? other : first;
            mc_expand(&expansion, 2);
            check(!l || !memcmp(first, other, (size_t)bytes), levels[l], "other values");
        }
        add_bytes(first, bytes);
    }
}

static void test_form(const char *name, int codes, int flags)
{
    static const int64_t sizes[][3] = {{16, 32, 32}, {37, 104, 64}, {16, 256, 128}, {33, 544, 544}};
    int num_scales = flags & MC_SUPERS ? 1 : flags & (MC_ZEROS | MC_OFFSETS) ? 3 : 5;
    for (int i = 0; i < num_scales; i++)
        for (int s = 0; s < 4; s++) {
            int scale = i < 3 ? MC_F32 + i : MC_TIMES + i - 3;
            mc_matrix m = matrix_of(codes, flags & MC_SUPERS ? MC_IN_STEPS : scale, flags, sizes[s][0],
                                    sizes[s][1], sizes[s][2]);
            snprintf(what, sizeof what, "form %s, %lld columns", name, (long long)m.columns);
            if (codes != MC_E4M3)
                test_products(&m);
            else
                fill_form(&m, form);
            test_expansion(&m);
        }
    snprintf(what, sizeof what, "form %s", name);
    print_sum();
}

/* Compute forms from random bytes in the order of a file. */
static void test_order(mc_order order, const char *name)
{
    /* Bytes of a block and its columns, or bits of a word's codes. */
    static const int16_t of_order[MC_NUM_ORDERS][2] = {
        [MC_BYTES] = {34, 32}, [MC_OFFSET_BYTES] = {34, 32}, [MC_NIBBLES] = {18, 32},
        [MC_HALVES] = {18, 32}, [MC_HALVES_FP4] = {18, 32}, [MC_GPTQ2] = {2}, [MC_GPTQ4] = {4},
        [MC_GPTQ8] = {8}, [MC_AWQ] = {4}, [MC_Q4_1] = {20, 32}, [MC_Q5_0] = {22, 32},
        [MC_Q5_1] = {24, 32}, [MC_Q2_K] = {84, 256}, [MC_Q3_K] = {110, 256}, [MC_Q4_K] = {144, 256},
        [MC_Q5_K] = {176, 256}, [MC_Q6_K] = {210, 256}, [MC_IQ4_XS] = {136, 256},
        [MC_SUPER32] = {138, 256}, [MC_SUPER16] = {146, 256}};
    static const int scales[] = {MC_F32, MC_F16, MC_BF16, MC_E8M0, MC_TIMES, MC_DIVIDED};
    static const uint32_t largest[] = {0x7effffff, 0x7bff, 0x7eff, 0x7eff, 0x7e, 0x7e};
    uint32_t points[256];
    float factor = 1.5f;
    snprintf(what, sizeof what, "order %s", name);
    check(of_order[order][0] > 0, levels[0], "no sizes are given for it here");
    fill_random((uint8_t *)points, sizeof points);
    fill_random(file_bytes, sizeof file_bytes);
    for (int s = 0; s < 6; s++) {
        int is_words = order >= MC_GPTQ2 && order <= MC_AWQ, bits = of_order[order][0];
        int64_t columns = is_words || of_order[order][1] > 32 ? 512 : order >= MC_Q4_1 ? 96 : 104;
        int64_t rows = is_words ? 40 : 37, blocks = (columns + 31) / 32;
        mc_file file = {
            .codes = file_bytes + 2, .scales = file_bytes, .rows = rows, .columns = columns,
            .group = s % 2 && !is_words ? 16 : 32, .block_bytes = bits, .scale_rows = 1 + s / 4,
            .scale_step = bits, .num_scales = blocks, .order = order, .scale = scales[s],
            .largest = largest[s], .factor = (const uint8_t *)&factor,
            .zero = order == MC_OFFSET_BYTES ? 0x80 : 0, .zeros = file_bytes + (1 << 19),
            .zero_row_bytes = rows * bits / 8, .zero_points = points};
        file.row_bytes = file.scale_row_bytes =
            (is_words ? 0 : (columns + of_order[order][1] - 1) / of_order[order][1] * bits);
        if (is_words) {
            if (s > 2)
                break;
            file.row_bytes = order == MC_AWQ ? rows / 2 : rows * 4;
            file.scales = file_bytes + (1 << 18);
            file.scale_row_bytes = rows * mc_scale_bytes(file.scale);
        } else if (order >= MC_Q4_1) {
            file.codes = file_bytes;
        }
        for (int64_t row = 0; row < rows; row += MC_TILE) {
            static uint8_t first[1 << 17], other[sizeof first];
            int64_t num = 0;
            int was_wrong = 0;
            for (int l = 0; l < num_levels; l++) {
                int wrong = 0;
                uint8_t *to = l ? other : first;
                int64_t size = levels[l]->form(&file, row, to, &wrong) - to;
                check(!l || (size == num && wrong == was_wrong && !memcmp(first, other, (size_t)num)),
                      levels[l], "another form");
                num = size;
                was_wrong = wrong;
            }
            add_bytes(first, num);
            add_bytes(&was_wrong, 4);
        }
    }
    print_sum();
}

/* All but the exact GELU, which has the C library's erf. */
static void test_activations(void)
{
    for (int kind = 0; kind < MC_NUM_ACTIVATIONS; kind++) {
        mc_activation how = {kind, 1.702f, 7.0f};
        float gate[256], up[256], first[256] = {0}, found[256];
        for (int i = 0; i < 256 && kind != MC_GELU; i++) {
            gate[i] = random_float() * (i % 2 ? 100.0f : 3.0f);
            up[i] = random_float() * 10;
        }
        gate[7] = INFINITY, gate[9] = -INFINITY, gate[11] = NAN;
        for (int l = 0; l < num_levels && kind != MC_GELU; l++) {
            memcpy(found, gate, sizeof gate);
            levels[l]->activate(found, up, 256, &how);
            if (!l)
                memcpy(first, found, sizeof first);
            check(are_equal(first, found, 256), levels[l], "another activation");
        }
        add_floats(first, 256);
    }
    snprintf(what, sizeof what, "activations");
    print_sum();
}

/* Many inputs have the bits of one: in a room, and without memory for one. */
static void test_many(const mc_matrix *m, const mc_level *level, float (*rows)[MOST_COLUMNS])
{
    static float out[NUM_INPUTS][MOST_ROWS];
    const uint8_t *inputs[NUM_INPUTS];
    for (int i = 0; i < NUM_INPUTS; i++)
        inputs[i] = (const uint8_t *)rows[i];
    for (is_out_of_memory = 0; is_out_of_memory < 2; is_out_of_memory++) {
        mc_product product = {.level = level, .matrix = *m, .inputs = inputs, .input_type = MC_X_F32,
                              .out = {(uint8_t *)out, sizeof out[0], MC_X_F32}, .num_inputs = NUM_INPUTS};
        mc_products(&product, 1);
        for (int i = 0; i < NUM_INPUTS; i++)
            for (int64_t row = 0; row < m->rows; row += MC_TILE) {
                float alone[MC_TILE];
                mc_tile_of(level, MC_X_F32, m)(m, row, inputs + i, 1, alone);
                check(are_equal(out[i] + row, alone, m->rows - row < MC_TILE ? m->rows - row : MC_TILE),
                      level, "another product among many");
            }
    }
    is_out_of_memory = 0;
}

/* Floats: bits are the generic level's; the others add in other orders. */
static void test_floats(int codes, const char *name, int flags)
{
    static float values[MOST_ROWS * MOST_COLUMNS], rows[NUM_INPUTS][MOST_COLUMNS];
    const uint8_t *inputs[1] = {(const uint8_t *)rows[0]};
    /* A stretch of sums, and a part of one that is no vector. */
    mc_matrix m = matrix_of(codes, MC_F32, flags, 37, 350, 32);
    snprintf(what, sizeof what, "floats %s", name);
    memset(rows, 0, sizeof rows);
    for (int i = 0; i < NUM_INPUTS; i++)
        fill_input(rows[i], m.columns, 0);
    if (codes == MC_E4M3) {
        mc_expansion expansion = {
            .level = levels[0], .matrix = m, .out = {(uint8_t *)values, m.columns * 4, MC_X_F32}};
        fill_form(&m, form);
        mc_expand(&expansion, 1);
    } else {
        m.row_bytes = m.columns * (codes == MC_F32 ? 4 : 2);
        for (int64_t i = 0; i < m.rows * m.columns; i++) {
            put_scale(form + i * (codes == MC_F32 ? 4 : 2), codes, 0);
            values[i] = number_at(form, codes, (int)i);
        }
    }
    for (int l = 0; l < num_levels; l++) {
        check(mc_input_type(levels[l], MC_X_F32, &m) == MC_X_F32, levels[l], "integer inputs");
        for (int64_t row = 0; row < m.rows; row++) {
            float out[MC_TILE];
            double right = 0, size = 0;
            mc_tile_of(levels[l], MC_X_F32, &m)(&m, row / MC_TILE * MC_TILE, inputs, 1, out);
            for (int64_t k = 0; k < m.columns; k++) {
                right += (double)values[row * m.columns + k] * rows[0][k];
                size += fabs((double)values[row * m.columns + k] * rows[0][k]);
            }
            check(fabs(out[row % MC_TILE] - right) <= 1e-6 * size, levels[l], "another product");
            if (!l)
                add_floats(out + row % MC_TILE, 1);
        }
        test_many(&m, levels[l], rows);
    }
    print_sum();
}

int main(int num_arguments, char **arguments)
{
    mc_share_from(0, 0);
    int has_level = num_arguments < 2;
    num_levels = mc_levels(levels);
    pthread_atfork(NULL, NULL, mc_after_fork);
    for (int l = 0; l < num_levels; l++) {
        fprintf(stderr, "%s%s", l ? ", " : "levels: ", levels[l]->name);
        has_level |= num_arguments > 1 && !strcmp(arguments[1], levels[l]->name);
    }
    fprintf(stderr, "\n");
    if (!has_level) {
        fprintf(stderr, "level %s is not among them\n", arguments[1]);
        return 1;
    }
#define TEST(codes, suffix, flags) test_form(#codes " " #suffix, MC_##codes, flags);
    MC_FORMS(TEST)
    TEST(E4M3, plain, 0)
    TEST(E4M3, pairs, MC_PAIRS)
#define ORDER(name, text, ...) test_order(MC_##name, text);
    MC_ORDERS(ORDER)
    test_activations();
    test_floats(MC_F32, "f32", 0);
    test_floats(MC_F16, "f16", 0);
    test_floats(MC_BF16, "bf16", 0);
    test_floats(MC_E4M3, "e4m3", 0);
    test_floats(MC_E4M3, "e4m3 pairs", MC_PAIRS);
    test_threads();
    test_experts();
    return 0;
}
