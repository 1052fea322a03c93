/* The table of a level's functions, and which of them multiplies what. */
#ifndef MOECACHE_FUNCTIONS_H
#define MOECACHE_FUNCTIONS_H

#include "_heads.h"
#include "_matrix.h"

/* Writes the products of rows [row, row + 16) with `num` inputs: out[i * 16 + r], fp32.
 * Rows beyond the matrix have any value. An input is `columns` numbers, padded with zeros to a whole
 * block if weights are codes, or the same columns as `mc_planes`. */
typedef void (*mc_tile)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out);

/* Products with many inputs, up to MC_MANY_CHUNK, which are packed once for all rows. */
#define MC_MANY_CHUNK 64
typedef struct {
    /* Bytes of a room for inputs of a matrix, and for what is made of its rows: a multiple of 64, or 0 if
     * tiles multiply this matrix. */
    int64_t (*bytes)(const mc_matrix *matrix, int64_t num);
    void (*pack)(
        const mc_matrix *matrix, const uint8_t *const *inputs, int64_t num, uint8_t *room);
    /* As a tile, with packed inputs. */
    void (*multiply)(
        const mc_matrix *matrix, int64_t row, int64_t num, uint8_t *room, float *out);
} mc_many;

/* Defines a tile that multiplies weights of one kind with `many` inputs at a time, then with `fewer`,
 * then with one: as many as registers hold. */
#define MC_TILE_BY(name, few, many, fewer, codes)                                             \
    static void name(                                                                         \
        const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num,      \
        float *out)                                                                           \
    {                                                                                         \
        int64_t t = 0;                                                                        \
        for (; t + (many) <= num; t += (many))                                                \
            few(matrix, row, inputs + t, many, out + t * MC_TILE, codes);                     \
        for (; t + (fewer) <= num; t += (fewer))                                              \
            few(matrix, row, inputs + t, fewer, out + t * MC_TILE, codes);                    \
        if ((fewer) > 1 && t < num)                                                           \
            few(matrix, row, inputs + t, 1, out + t * MC_TILE, codes);                        \
    }

typedef struct {
    const char *name;
    int is_whole; /* whether integers of inputs are whole in `mc_planes` */
    /* By type of inputs and codes: numbers and FP8. NULL: inputs are converted to fp32 first. */
    mc_tile tiles[2][MC_NUM_CODES];
    /* By codes and flags: integers. NULL: there is no such form. */
    mc_tile planes[MC_NUM_CODES][MC_FLAGS];
    /* What multiplies many inputs of a type, with the bits of a tile; NULL: tiles do. */
    const mc_many *many[3];
    void (*activate)(float *gate, const float *up, int64_t num, const mc_activation *how);
    void (*quantize)(const uint8_t *from, int type, int64_t columns, int codes, uint8_t *to);
    uint8_t *(*form)(const mc_file *file, int64_t row, uint8_t *out, int *wrong);
    void (*expand)(
        const mc_matrix *matrix, int64_t row, int type, uint8_t *out, int64_t out_row_bytes);
    uint32_t (*read)(const uint8_t *at, int64_t num);
    /* `scores` has room for `num` times `step` numbers, and `step` are at least as many as the positions
     * that a query sees. Neighbours that see much the same take the shortest time. */
    void (*attend)(
        const mc_attention *a, const mc_query *queries, int64_t num, float *scores, int64_t step);
    /* Some queries' products with the first `num` keys, and sums of as many values that have these shares. */
    void (*score)(
        const mc_attention *a, const float *const *queries, int64_t num_queries, int64_t num,
        float *const *scores);
    void (*mix)(
        const mc_attention *a, const float *const *shares, int64_t num_queries, int64_t num,
        float *const *out);
    void (*delta)(const mc_delta *d);
    void (*softplus)(float *x, int64_t num);
    void (*fade)(float *x, int64_t num, float rate, float bound);
    void (*scan)(const mc_delta *d);
    void (*gate)(float *x, const float *gate, int64_t num);
    /* Of queries [first, first + num) of the heads that share the keys of `head`, by the type of keys and
     * values; false if there is no memory. */
    int (*attend_page[2])(const mc_page *p, int64_t head, int64_t first, int64_t num);
} mc_level;

/* What multiplies a matrix with inputs of a type; NULL: nothing does. */
static inline mc_tile mc_tile_of(const mc_level *level, int type, const mc_matrix *matrix)
{
    if (mc_is_integer(matrix->codes) == 2 && !mc_table(matrix->codes))
        return NULL;
    if (type == MC_X_PLANES)
        return level->planes[matrix->codes][mc_flags(matrix) >> 8];
    return level->tiles[type][matrix->codes];
}

/* As what inputs are multiplied that are given in a type of numbers. */
static inline int mc_input_type(const mc_level *level, int given, const mc_matrix *matrix)
{
    if (mc_is_integer(matrix->codes))
        return MC_X_PLANES;
    return level->tiles[given][matrix->codes] ? given : MC_X_F32;
}

#endif
