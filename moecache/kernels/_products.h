/* Products and gated experts: what is to be done, cut into items for threads. */
#ifndef MOECACHE_PRODUCTS_H
#define MOECACHE_PRODUCTS_H

#include "_chunks.h"
#include "_jobs.h"
#include "_levels.h"
#include "_threads.h"

/* Weights of an item: a thread takes the next one every few microseconds. */
#define MC_ITEM_BYTES (128 * 1024)

static void mc_add_bias(float *values, const mc_rows *bias, int64_t index, int64_t row, int64_t num)
{
    float terms[MC_TILE];
    if (!bias->data)
        return;
    mc_to_f32(bias->data + index * bias->row_bytes + row * mc_input_bytes(bias->type), bias->type,
              num, terms);
    for (int64_t i = 0; i < num; i++)
        values[i] += terms[i];
}

/* Converts an input of this matrix to another type, or copies it with zeros behind it. To bf16 it is fp32's. */
static void mc_convert(const mc_level *level, const uint8_t *from, int given, int wanted,
                       const mc_matrix *matrix, uint8_t *to)
{
    int64_t columns = matrix->columns, rest = mc_input_columns(matrix) - columns;
    int64_t bytes = mc_input_bytes(given);
    if (wanted == MC_X_PLANES) {
        uint8_t last[MC_BLOCK * 4] = {0};
        int64_t whole = columns / MC_BLOCK * MC_BLOCK;
        level->quantize(from, given, whole, matrix->codes, to);
        memcpy(last, from + whole * bytes, (size_t)((columns - whole) * bytes));
        if (rest)
            level->quantize(last, given, MC_BLOCK, matrix->codes,
                            to + mc_input_row_bytes(MC_X_PLANES, whole));
        return;
    }
    if (given == wanted)
        memcpy(to, from, (size_t)(columns * bytes));
    else if (wanted == MC_X_F32)
        mc_to_f32(from, given, columns, (float *)to);
    else
        mc_from_f32((const float *)from, columns, wanted, to);
    memset(to + mc_input_row_bytes(wanted, columns), 0, (size_t)mc_input_row_bytes(wanted, rest));
}

/* Inputs of an item. */
#define MC_CONVERTED 8

static void mc_convert_item(void *job, int64_t item)
{
    const mc_conversion *c = job;
    for (int64_t i = item * MC_CONVERTED; i < c->num && i < (item + 1) * MC_CONVERTED; i++)
        mc_convert(c->level, c->inputs + i * c->row_bytes, c->given, c->wanted, c->matrix,
                   c->out + i * c->out_bytes);
}

static void mc_convert_all(mc_conversion *conversion, int num_threads)
{
    /* An input takes some four times as long as weights of its size. */
    mc_share(num_threads, mc_convert_item, conversion,
             (conversion->num + MC_CONVERTED - 1) / MC_CONVERTED,
             4 * conversion->num * conversion->row_bytes);
}

/* Bytes of 16 rows. */
static int64_t mc_tile_bytes(const mc_matrix *matrix)
{
    return matrix->row_bytes * (mc_is_coded(matrix) ? 1 : MC_TILE);
}

/* Bytes of a matrix that one input reads in as long as `num` inputs take. */
static int64_t mc_read_bytes(const mc_matrix *matrix, int64_t num)
{
    return matrix->rows / MC_TILE * mc_tile_bytes(matrix) * num;
}

/* Tiles of 16 rows that are one item. */
static int64_t mc_tiles_per_item(const mc_matrix *matrix)
{
    int64_t bytes = mc_tile_bytes(matrix);
    int64_t tiles = bytes < MC_ITEM_BYTES ? MC_ITEM_BYTES / (bytes + 1) : 1;
    return tiles < 1 ? 1 : tiles;
}

static inline int64_t mc_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Tiles of an item that packs its inputs: as many as make that cheap. */
#define MC_MANY_TILES 32

/* Makes items larger that pack their inputs, as long as there are enough for all threads. */
static int64_t mc_many_tiles(
    const mc_level *level, int type, int64_t tiles, int64_t all, int64_t num, int num_threads)
{
    int64_t most = all / (2 * num_threads);
    if (!level->many[type] || num < MC_MANY)
        return tiles;
    most = most < MC_MANY_TILES ? most : MC_MANY_TILES;
    return tiles > most ? tiles : most;
}

static void mc_product_item(void *job, int64_t item)
{
    const mc_product *p = job;
    int64_t first = item * p->tiles_per_item * MC_TILE;
    int64_t last = first + p->tiles_per_item * MC_TILE;
    if (last > p->matrix.rows)
        last = p->matrix.rows;
    mc_chunks chunks =
        mc_chunks_of(p->level, p->input_type, &p->matrix, p->inputs, p->num_inputs);
    for (int64_t t = 0, count; (count = mc_next_chunk(&chunks, &p->matrix)); t += count)
        for (int64_t row = first; row < last; row += MC_TILE) {
            int64_t num = last - row < MC_TILE ? last - row : MC_TILE;
            float results[MC_CHUNK * MC_TILE];
            mc_multiply(&chunks, &p->matrix, row, results);
            for (int64_t i = 0; i < count; i++) {
                mc_add_bias(results + i * MC_TILE, &p->bias, 0, row, num);
                mc_from_f32(results + i * MC_TILE, num, p->out.type,
                            p->out.data + (t + i) * p->out.row_bytes
                                + row * mc_input_bytes(p->out.type));
            }
        }
}

static void mc_products(mc_product *product, int num_threads)
{
    product->tiles_per_item = mc_many_tiles(
        product->level, product->input_type, mc_tiles_per_item(&product->matrix),
        mc_ceil(product->matrix.rows, MC_TILE), product->num_inputs, num_threads);
    mc_share(num_threads, mc_product_item, product,
             mc_ceil(product->matrix.rows, product->tiles_per_item * MC_TILE),
             mc_read_bytes(&product->matrix, product->num_inputs));
}

static void mc_expand_item(void *job, int64_t item)
{
    const mc_expansion *e = job;
    int64_t row = item * e->tiles_per_item * MC_TILE, end = row + e->tiles_per_item * MC_TILE;
    for (; row < end && row < e->matrix.rows; row += MC_TILE)
        e->level->expand(&e->matrix, row, e->out.type, e->out.data + row * e->out.row_bytes,
                         e->out.row_bytes);
}

static void mc_expand(mc_expansion *expansion, int num_threads)
{
    expansion->tiles_per_item = mc_tiles_per_item(&expansion->matrix);
    mc_share(num_threads, mc_expand_item, expansion,
             mc_ceil(expansion->matrix.rows, expansion->tiles_per_item * MC_TILE),
             4 * mc_read_bytes(&expansion->matrix, 1));
}

static inline mc_matrix mc_in_slot(const mc_slots *slots, int64_t slot)
{
    mc_matrix matrix = slots->first;
    matrix.data += slot * slots->slot_bytes;
    return matrix;
}

/* Chunks of the same inputs for each of an expert's first matrices, which may be one. */
typedef struct {
    mc_matrix matrices[2];
    mc_chunks chunks[2];
    int num, num_kinds; /* 1: both multiply what was packed once */
} mc_both;

static mc_both mc_both_of(const mc_experts *e, int64_t slot, int64_t begin, int64_t num)
{
    mc_both both = {.num = e->num_ups, .num_kinds = 1};
    for (int i = 0; i < both.num; i++)
        both.matrices[i] = mc_in_slot(&e->up[i], slot);
    if (both.num == 2 && !mc_are_alike(&both.matrices[0], &both.matrices[1]))
        both.num_kinds = 2;
    for (int i = 0; i < both.num_kinds; i++)
        both.chunks[i] = mc_chunks_of(
            e->level, e->input_types[i], &both.matrices[i], e->inputs[i] + begin, num);
    if (both.num_kinds == 2) /* Both go on by the same number of inputs. */
        for (int i = 0; i < 2; i++)
            if (both.chunks[i].most > both.chunks[!i].most)
                both.chunks[i].most = both.chunks[!i].most;
    return both;
}

static int64_t mc_next_of_both(mc_both *both)
{
    int64_t count = 0;
    for (int i = 0; i < both->num_kinds; i++)
        count = mc_next_chunk(&both->chunks[i], &both->matrices[i]);
    return count;
}

/* Rows [row, row + num) of gate and of up, for a chunk of inputs, to fp32. */
static void mc_gate_and_up(
    const mc_experts *e, const mc_both *both, int64_t slot, int64_t row, int64_t num, float *gate,
    float *up)
{
    int64_t count = both->chunks[0].num;
    if (!e->is_interleaved) {
        for (int part = 0; part < both->num; part++) {
            float *to = part ? up : gate;
            mc_multiply(&both->chunks[both->num_kinds == 2 && part], &both->matrices[part], row, to);
            for (int64_t i = 0; i < count; i++)
                mc_add_bias(to + i * MC_TILE, &e->up[part].bias, slot, row, num);
        }
        return;
    }
    /* Gate has the even rows, up the odd ones. */
    float results[MC_CHUNK * MC_TILE];
    for (int half = 0; half < 2; half++) {
        int64_t at = 2 * row + half * MC_TILE, left = both->matrices[0].rows - at;
        if (left <= 0)
            break;
        mc_multiply(&both->chunks[0], &both->matrices[0], at, results);
        for (int64_t i = 0; i < count; i++) {
            mc_add_bias(
                results + i * MC_TILE, &e->up[0].bias, slot, at, left < MC_TILE ? left : MC_TILE);
            for (int j = 0; j < MC_TILE / 2; j++) {
                gate[i * MC_TILE + half * 8 + j] = results[i * MC_TILE + 2 * j];
                up[i * MC_TILE + half * 8 + j] = results[i * MC_TILE + 2 * j + 1];
            }
        }
    }
}

/* Gate and up of a run of tiles, one after the other: they lie far apart, and a processor foresees only what
 * follows. Zen 4 takes a fifth less time for 24 tiles than for one and one. For few inputs. */
#define MC_RUN 24
#define MC_RUN_INPUTS 2

static void mc_up_run(
    const mc_experts *e, int64_t slot, int64_t first, int64_t last, int64_t begin, int64_t count)
{
    float both[2][MC_RUN * MC_RUN_INPUTS * MC_TILE];
    int64_t size = count * MC_TILE;
    uint8_t *out = e->hidden.data + begin * e->hidden.row_bytes;
    memset(both, 0, sizeof both);
    for (int part = 0; part < e->num_ups; part++) {
        mc_matrix matrix = mc_in_slot(&e->up[part], slot);
        mc_tile tile = mc_tile_of(e->level, e->input_types[part], &matrix);
        for (int64_t row = first, n = 0; row < last; row += MC_TILE, n++) {
            int64_t num = last - row < MC_TILE ? last - row : MC_TILE;
            float *at = both[part] + n * size;
            tile(&matrix, row, e->inputs[part] + begin, count, at);
            for (int64_t i = 0; i < count; i++)
                mc_add_bias(at + i * MC_TILE, &e->up[part].bias, slot, row, num);
        }
    }
    e->level->activate(
        both[0], e->num_ups == 2 ? both[1] : NULL, mc_ceil(last - first, MC_TILE) * size,
        &e->activation);
    for (int64_t row = first, n = 0; row < last; row += MC_TILE, n++)
        for (int64_t i = 0; i < count; i++)
            mc_from_f32(both[0] + n * size + i * MC_TILE, last - row < MC_TILE ? last - row : MC_TILE,
                        e->hidden.type,
                        out + i * e->hidden.row_bytes + row * mc_input_bytes(e->hidden.type));
}

static void mc_up_item(void *job, int64_t item)
{
    const mc_experts *e = job;
    int64_t expert = item / e->items_per_expert, slot = e->slots[expert];
    int64_t first = item % e->items_per_expert * e->tiles_per_item * MC_TILE;
    int64_t last = first + e->tiles_per_item * MC_TILE;
    if (last > e->width)
        last = e->width;
    int64_t begin = e->offsets[expert], all = e->offsets[expert + 1] - begin;
    if (all <= MC_RUN_INPUTS && !e->is_interleaved) {
        for (int64_t row = first; row < last; row += MC_RUN * MC_TILE)
            mc_up_run(e, slot, row, last < row + MC_RUN * MC_TILE ? last : row + MC_RUN * MC_TILE,
                      begin, all);
        return;
    }
    mc_both both = mc_both_of(e, slot, begin, all);
    for (int64_t t = begin, count; (count = mc_next_of_both(&both)); t += count)
        for (int64_t row = first; row < last; row += MC_TILE) {
            int64_t num = last - row < MC_TILE ? last - row : MC_TILE;
            float gate[MC_CHUNK * MC_TILE], up[MC_CHUNK * MC_TILE];
            /* No more than is used: for one input, 8 KiB of zeros cost a third of its products. */
            memset(gate, 0, (size_t)(count * MC_TILE) * sizeof *gate);
            memset(up, 0, (size_t)(count * MC_TILE) * sizeof *up);
            mc_gate_and_up(e, &both, slot, row, num, gate, up);
            e->level->activate(
                gate, e->num_ups == 2 || e->is_interleaved ? up : NULL, count * MC_TILE,
                &e->activation);
            for (int64_t i = 0; i < count; i++)
                mc_from_f32(gate + i * MC_TILE, num, e->hidden.type,
                            e->hidden.data + (t + i) * e->hidden.row_bytes
                                + row * mc_input_bytes(e->hidden.type));
        }
}

static void mc_hidden_item(void *job, int64_t item)
{
    const mc_experts *e = job;
    uint8_t *row = e->hidden.data + item * e->hidden.row_bytes;
    e->level->quantize(
        row, e->hidden.type, mc_input_columns(&e->down.first), e->down.first.codes, row);
}

static void mc_down_item(void *job, int64_t item)
{
    const mc_experts *e = job;
    int64_t expert = item / e->items_per_expert, slot = e->slots[expert];
    mc_matrix matrix = mc_in_slot(&e->down, slot);
    int64_t first = item % e->items_per_expert * e->tiles_per_item * MC_TILE;
    int64_t last = first + e->tiles_per_item * MC_TILE;
    if (last > matrix.rows)
        last = matrix.rows;
    int64_t begin = e->offsets[expert];
    mc_chunks chunks = mc_chunks_of(e->level, e->hidden_type, &matrix, e->hidden_inputs + begin,
                                    e->offsets[expert + 1] - begin);
    for (int64_t t = begin, count; (count = mc_next_chunk(&chunks, &matrix)); t += count)
        for (int64_t row = first; row < last; row += MC_TILE) {
            int64_t num = last - row < MC_TILE ? last - row : MC_TILE;
            float results[MC_CHUNK * MC_TILE];
            mc_multiply(&chunks, &matrix, row, results);
            for (int64_t i = 0; i < count; i++) {
                mc_add_bias(results + i * MC_TILE, &e->down.bias, slot, row, num);
                mc_from_f32(results + i * MC_TILE, num, e->out.type,
                            e->out.data + e->pairs[t + i] * e->out.row_bytes
                                + row * mc_input_bytes(e->out.type));
            }
        }
}

#define MC_SUM_COLUMNS 1024

static void mc_sum_item(void *job, int64_t item)
{
    const mc_sum *s = job;
    float sums[MC_SUM_COLUMNS];
    for (int64_t first = 0; first < s->columns; first += MC_SUM_COLUMNS) {
        int64_t num = s->columns - first < MC_SUM_COLUMNS ? s->columns - first : MC_SUM_COLUMNS;
        for (int64_t j = 0; j < s->top_k; j++) {
            const float *row = s->rows + (item * s->top_k + j) * s->columns + first;
            float weight;
            mc_to_f32(s->weights.data + item * s->weights.row_bytes
                          + j * mc_input_bytes(s->weights.type),
                      s->weights.type, 1, &weight);
            if (j == 0)
                for (int64_t i = 0; i < num; i++)
                    sums[i] = row[i] * weight;
            else
                for (int64_t i = 0; i < num; i++)
                    sums[i] += row[i] * weight;
        }
        if (s->top_k == 0)
            memset(sums, 0, sizeof sums);
        mc_from_f32(sums, num, s->out.type,
                    s->out.data + item * s->out.row_bytes + first * mc_input_bytes(s->out.type));
    }
}

static void mc_combine(mc_sum *sum, int num_threads)
{
    mc_share(num_threads, mc_sum_item, sum, sum->num_tokens,
             sum->num_tokens * sum->top_k * sum->columns * 4);
}

static void mc_compute_experts(mc_experts *e, int num_threads)
{
    int64_t num = e->offsets[e->num_experts], num_tiles = e->num_experts * mc_ceil(e->width, MC_TILE);
    int64_t each = e->num_experts ? num / e->num_experts : 0, nbytes = 0, fewest = 0, tiles;
    for (int i = 0; i < e->num_ups; i++) {
        nbytes += mc_read_bytes(&e->up[i].first, num);
        tiles = mc_tiles_per_item(&e->up[i].first);
        fewest = !i || tiles < fewest ? tiles : fewest;
    }
    /* Gate and up: an item has tiles of both. */
    e->tiles_per_item = mc_ceil(fewest, 1 + (e->num_ups == 2 || e->is_interleaved));
    /* Runs are worth larger items, as long as there are enough of them for all threads. */
    if (num <= MC_RUN_INPUTS * e->num_experts) {
        int64_t run = num_tiles / (16 * num_threads);
        run = run < MC_RUN ? run : MC_RUN;
        e->tiles_per_item = run > e->tiles_per_item ? run : e->tiles_per_item;
    }
    for (int i = 0; i < e->num_ups; i++)
        e->tiles_per_item = mc_many_tiles(
            e->level, e->input_types[i], e->tiles_per_item, num_tiles, each, num_threads);
    e->items_per_expert = mc_ceil(e->width, e->tiles_per_item * MC_TILE);
    mc_share(num_threads, mc_up_item, e, e->num_experts * e->items_per_expert, nbytes);
    if (e->hidden_type == MC_X_PLANES) {
        mc_share(num_threads, mc_hidden_item, e, num, 4 * num * e->hidden.row_bytes);
    }
    e->tiles_per_item = mc_many_tiles(
        e->level, e->hidden_type, mc_tiles_per_item(&e->down.first),
        e->num_experts * mc_ceil(e->down.first.rows, MC_TILE),
        each, num_threads);
    e->items_per_expert = mc_ceil(e->down.first.rows, e->tiles_per_item * MC_TILE);
    mc_share(num_threads, mc_down_item, e, e->num_experts * e->items_per_expert,
             mc_read_bytes(&e->down.first, num));
}

#endif
