/* Products of rows of bf16 by tiles of AMX (tdpbf16ps): one input or many, with the same bits.
 *
 * A row is chunks of 32 columns, the last one filled up with zeros, and a sum has one after the other. A tile is a chunk of
 * 16 rows. */

/* 16 times 32 columns: of a row or an input, or of 16 of them. */
typedef uint8_t mc_amx_chunks[MC_GROUP][2 * MC_BLOCK];

INLINE int64_t mc_num_row_chunks(const mc_matrix *matrix)
{
    return (matrix->columns + MC_BLOCK - 1) / MC_BLOCK;
}

/* Chunk k of a row, with zeros behind its last column. */
INLINE __m512i mc_row_chunk(const uint8_t *row, int64_t k, int64_t columns)
{
    int64_t left = columns - k * MC_BLOCK;
    if (left >= MC_BLOCK)
        return _mm512_loadu_si512(row + 2 * MC_BLOCK * k);
    return _mm512_maskz_loadu_epi16(
        (__mmask32)((1u << left) - 1), row + 2 * MC_BLOCK * k);
}

/* Columns become rows, and rows columns: of 16 times 16 words. */
INLINE void mc_transpose(__m512i *rows)
{
    __m512i two[16], four[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        two[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        two[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            four[i + 2 * j] = _mm512_unpacklo_epi64(two[i + j], two[i + j + 2]);
            four[i + 2 * j + 1] = _mm512_unpackhi_epi64(two[i + j], two[i + j + 2]);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(four[i], four[i + 4], 0x88);
        __m512i b = _mm512_shuffle_i32x4(four[i], four[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(four[i + 8], four[i + 12], 0x88);
        __m512i d = _mm512_shuffle_i32x4(four[i + 8], four[i + 12], 0xdd);
        rows[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        rows[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        rows[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

/* As tdpbf16ps wants what it multiplies with a tile: pairs of columns, each 16 times. */
INLINE void mc_store_pairs(__m512i *chunks, mc_amx_chunks *to)
{
    mc_transpose(chunks);
#pragma GCC unroll 16
    for (int i = 0; i < MC_GROUP; i++)
        _mm512_store_si512((*to)[i], chunks[i]);
}

/* By whether inputs are many, and by the number of rows; filled once. */
static mc_tile_shapes mc_row_shapes[2][MC_TILE + 1];

static void mc_fill_shapes(void)
{
    for (int i = 0; i < 2; i++)
        for (int rows = 1; rows <= MC_TILE; rows++) {
            mc_tile_shapes *shapes = &mc_row_shapes[i][rows];
            shapes->palette = 1;
            /* Sums; rows of weights; inputs, a pair of columns in each row: of one or of 16. */
            for (int number = 0; number < 8; number++) {
                shapes->row_bytes[number] = i || number / 2 == 2 ? 64 : 4;
                shapes->rows[number] = number < 6 ? (uint8_t)rows : MC_GROUP;
            }
        }
}

/* Sums of 16 rows: of up to four inputs, or ("many") of as many times 16 that are packed. Rows that are long are foreseen by
 * the processor, each for itself; of others the next ones are asked for. */
INLINE void mc_multiply_chunks(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int num, float *out, int is_many)
{
    enum { LONG = 4096, EACH = sizeof(mc_amx_chunks) };
    int64_t step = matrix->row_bytes, chunks = mc_num_row_chunks(matrix);
    int64_t lines = step < LONG ? MC_TILE * step / 64 / (chunks + !chunks) : 0;
    int rows = matrix->rows - row < MC_TILE ? (int)(matrix->rows - row) : MC_TILE;
    int wide = is_many ? 64 : 4;
    const uint8_t *first = matrix->data + row * step, *next = first + MC_TILE * step;
    _Alignas(64) mc_amx_chunks end;
    _Alignas(64) uint8_t last[4][2 * MC_BLOCK];
#define EACH_SUM(DO) \
    DO(0, 6) if (num > 1) DO(1, 7) if (num > 2) DO(2, 6) if (num > 3) DO(3, 7)
#define ZERO(sum, number) TILE_ZERO(sum);
#define DOT(sum, number)                                                                       \
    {                                                                                          \
        const uint8_t *input = inputs[sum] + k * (is_many ? EACH : 64);                        \
        TILE_LOAD(number, is_end && !is_many ? last[sum] : input, wide);                       \
        if (k % 2)                                                                             \
            TILE_DOT_BF16(sum, 4, number);                                                     \
        else                                                                                   \
            TILE_DOT_BF16(sum, 5, number);                                                     \
    }
#define STORE(sum, number) TILE_STORE(sum, out + sum * (is_many ? MC_GROUP * MC_TILE : MC_TILE), wide);
    mc_begin_tiles(&mc_row_shapes[is_many][rows]);
    EACH_SUM(ZERO)
    for (int64_t k = 0; k < chunks; k++) {
        const uint8_t *at = first + 64 * k;
        int is_end = matrix->columns < (k + 1) * MC_BLOCK;
        for (int64_t line = 0; line < lines; line++, next += 64)
            __builtin_prefetch(next, 0, 2);
        if (is_end) {
            for (int r = 0; r < rows; r++)
                _mm512_store_si512(end[r], mc_row_chunk(first + r * step, k, matrix->columns));
            for (int t = 0; !is_many && t < num; t++)
                _mm512_store_si512(last[t], mc_row_chunk(inputs[t], k, matrix->columns));
        }
        if (k % 2)
            TILE_LOAD(4, is_end ? end[0] : at, is_end ? 64 : step);
        else
            TILE_LOAD(5, is_end ? end[0] : at, is_end ? 64 : step);
        EACH_SUM(DOT)
    }
    EACH_SUM(STORE)
#undef STORE
#undef DOT
#undef ZERO
#undef EACH_SUM
}

MC_TILE_BY(mc_tile_bf16_amx, mc_multiply_chunks, 4, 1, 0)

/* A room has the chunks of 16 inputs after the other. */
static int64_t mc_rows_room_bytes(const mc_matrix *matrix, int64_t num)
{
    return mc_num_row_chunks(matrix) * ((num + MC_GROUP - 1) / MC_GROUP) * (int64_t)sizeof(mc_amx_chunks);
}

static void mc_pack_rows(
    const mc_matrix *matrix, const uint8_t *const *inputs, int64_t num, uint8_t *room)
{
    int64_t chunks = mc_num_row_chunks(matrix);
    mc_amx_chunks *to = (mc_amx_chunks *)room;
    for (int64_t first = 0; first < num; first += MC_GROUP, to += chunks)
        for (int64_t k = 0; k < chunks; k++) {
            __m512i some[MC_GROUP];
#pragma GCC unroll 16
            for (int i = 0; i < MC_GROUP; i++)
                some[i] = first + i < num ? mc_row_chunk(inputs[first + i], k, matrix->columns)
                                          : _mm512_setzero_si512();
            mc_store_pairs(some, &to[k]);
        }
}

/* As a tile does, with inputs from a room. */
static void mc_multiply_rows(
    const mc_matrix *matrix, int64_t row, int64_t num, uint8_t *room, float *out)
{
    int64_t bytes = mc_rows_room_bytes(matrix, MC_GROUP);
    const uint8_t *inputs[] = {room, room + bytes, room + 2 * bytes, room + 3 * bytes};
    _Alignas(64) float sums[MC_MANY_CHUNK][MC_TILE];
    _Static_assert(MC_MANY_CHUNK == 4 * MC_GROUP, "as many as there are registers for");
    mc_multiply_chunks(matrix, row, inputs, (int)((num + MC_GROUP - 1) / MC_GROUP), sums[0], 1);
    /* A row's sums become an input's. */
    for (int64_t t = 0; t < num; t += MC_GROUP) {
        __m512i some[MC_GROUP];
#pragma GCC unroll 16
        for (int i = 0; i < MC_GROUP; i++)
            some[i] = _mm512_load_si512(sums[t + i]);
        mc_transpose(some);
        for (int i = 0; i < MC_GROUP && t + i < num; i++)
            _mm512_storeu_si512(out + (t + i) * MC_TILE, some[i]);
    }
}

/* Many inputs of bf16: with FP8, or with rows. */
static int64_t mc_floats_bytes(const mc_matrix *matrix, int64_t num)
{
    return matrix->codes == MC_BF16 ? mc_rows_room_bytes(matrix, num) : mc_float_room_bytes(matrix, num);
}

static void mc_pack_any(const mc_matrix *matrix, const uint8_t *const *inputs, int64_t num, uint8_t *room)
{
    (matrix->codes == MC_BF16 ? mc_pack_rows : mc_pack_floats)(matrix, inputs, num, room);
}

static void mc_multiply_any(const mc_matrix *matrix, int64_t row, int64_t num, uint8_t *room, float *out)
{
    (matrix->codes == MC_BF16 ? mc_multiply_rows : mc_multiply_floats)(matrix, row, num, room, out);
}

static const mc_many mc_many_floats = {mc_floats_bytes, mc_pack_any, mc_multiply_any};
