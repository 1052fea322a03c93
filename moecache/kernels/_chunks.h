/* Inputs of an expert or a product, some at a time: as a level's tiles take them, or packed. */
#ifndef MOECACHE_CHUNKS_H
#define MOECACHE_CHUNKS_H

#include "_levels.h"

/* Inputs that a tile is given at once: their results fit on the stack, and a tile takes six of them at a time
 * where it takes most. */
#define MC_CHUNK 66
/* From how many inputs on they are packed. */
#define MC_MANY 8

/* A chunk after the other, and what multiplies it with rows. */
typedef struct {
    const uint8_t *const *inputs;
    int64_t num, left, most; /* of this chunk; from it on; of any chunk */
    mc_tile tile;
    const mc_many *many;
    uint8_t *room; /* of inputs that are packed, or NULL */
} mc_chunks;

/* Without memory for a room, tiles multiply all. */
static mc_chunks mc_chunks_of(
    const mc_level *level, int type, const mc_matrix *matrix, const uint8_t *const *inputs,
    int64_t num)
{
    mc_chunks chunks = {
        inputs, 0, num, MC_CHUNK, mc_tile_of(level, type, matrix), level->many[type], NULL};
    if (chunks.many && num >= MC_MANY) {
        int64_t bytes = chunks.many->bytes(matrix, num < MC_MANY_CHUNK ? num : MC_MANY_CHUNK);
        chunks.room = bytes ? aligned_alloc(64, (size_t)bytes) : NULL;
        chunks.most = chunks.room ? MC_MANY_CHUNK : MC_CHUNK;
    }
    return chunks;
}

/* Goes on to the next inputs; returns how many, 0 behind the last one. */
static int64_t mc_next_chunk(mc_chunks *chunks, const mc_matrix *matrix)
{
    chunks->inputs += chunks->num;
    chunks->left -= chunks->num;
    chunks->num = chunks->left < chunks->most ? chunks->left : chunks->most;
    if (chunks->room && chunks->num >= MC_MANY) {
        chunks->many->pack(matrix, chunks->inputs, chunks->num, chunks->room);
    } else if (chunks->room) {
        free(chunks->room);
        chunks->room = NULL;
    }
    return chunks->num;
}

/* The products of rows [row, row + 16) with a chunk's inputs, as a tile gives them. */
static inline void mc_multiply(
    const mc_chunks *chunks, const mc_matrix *matrix, int64_t row, float *out)
{
    if (chunks->room)
        chunks->many->multiply(matrix, row, chunks->num, chunks->room, out);
    else
        chunks->tile(matrix, row, chunks->inputs, chunks->num, out);
}

#endif
