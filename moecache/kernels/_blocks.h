/* Compute forms of ggml's blocks that have more than a scale and codes of 4 or 8 bits: q4_1, q5_0, q5_1,
 * q2_k to q6_k, iq4_xs; included by `_forms.h` for each level.
 *
 * 32 columns of a row first take the order of q4_0: low nibbles hold the lowest four bits of the first 16,
 * high nibbles those of the others. The bits above the fourth take the same order. */

typedef struct {
    int codes;      /* as in the form */
    int columns;    /* of a block */
    int numbers_at; /* a float16 of scales, and one of offsets behind it, if any */
    int has_offsets;
    int group;
} LEVEL(blocks);

/* An order without a row here has no columns, and no kernel is made of it. */
static const LEVEL(blocks) LEVEL(all_blocks)[MC_NUM_ORDERS] = {
    [MC_Q4_1] = {MC_U4, 32, 0, 1, 32},
    [MC_Q5_0] = {MC_I5, 32, 0, 0, 32},
    [MC_Q5_1] = {MC_U5, 32, 0, 1, 32},
    [MC_Q2_K] = {MC_U4, 256, 80, 1, 16},
    [MC_Q3_K] = {MC_I4, 256, 108, 0, 16},
    [MC_Q4_K] = {MC_U4, 256, 0, 1, 32},
    [MC_Q5_K] = {MC_U5, 256, 0, 1, 32},
    [MC_Q6_K] = {MC_I6, 256, 208, 0, 16},
    [MC_IQ4_XS] = {MC_IQ4, 256, 0, 0, 32},
    [MC_SUPER32] = {MC_IQ4, 256, 0, 0, 32},
    [MC_SUPER16] = {MC_IQ4, 256, 0, 0, 16},
};

/* Some bits of 32 bytes, from bit `shift` on, as nibbles: the first 16 bytes give the low ones. */
INLINE vb LEVEL(halves_of)(const uint8_t *const *rows, int64_t at, int shift, int mask)
{
    vb first = (vb)((vw)LEVEL(fourths)(rows, at) >> (uint16_t)shift);
    vb second = (vb)((vw)LEVEL(fourths)(rows, at + 16) >> (uint16_t)shift);
    return (first & (uint8_t)mask) | (vb)((vw)(second & (uint8_t)mask) << 4);
}

/* 32 bits of a row, one for each column, as nibbles. */
INLINE vb LEVEL(fifths)(const uint8_t *const *rows, int64_t at)
{
    vl every = (vl){0} + 0x8040201008040201;
    vb each = (vb)every;
    vu words = {0};
    for (int i = 0; i < LANES; i += 4) {
        uint32_t word;
        memcpy(&word, rows[i] + at, 4);
        words[i] = word;
    }
#define FIRST(i) i, i, i, i, i, i, i, i
#define TWO(i) FIRST(i), FIRST(i + 1)
    vb first = BY_LANES((vb)words, (vb)words, TWO, 16);
#undef TWO
#define TWO(i) FIRST(i + 2), FIRST(i + 3)
    vb second = BY_LANES((vb)words, (vb)words, TWO, 16);
#undef TWO
#undef FIRST
    return ((vb)((first & each) == each) & 1) | ((vb)((second & each) == each) & 16);
}

/* The `s`th 32 columns of blocks, of every fourth row: the lowest four bits, and those above. */
INLINE vb LEVEL(lowest)(const uint8_t *const *rows, int s, int order)
{
    switch (order) {
    case MC_Q4_1: return LEVEL(fourths)(rows, 4);
    case MC_Q5_0: return LEVEL(fourths)(rows, 6);
    case MC_Q5_1: return LEVEL(fourths)(rows, 8);
    case MC_Q2_K: return LEVEL(halves_of)(rows, 16 + s / 4 * 32, s % 4 * 2, 3);
    case MC_Q3_K: /* q - 4 if the third bit is not set; 8 more in the form */
        return LEVEL(halves_of)(rows, 32 + s / 4 * 32, s % 4 * 2, 3)
            + (LEVEL(halves_of)(rows, 0, s, 1) << 2) + 0x44;
    case MC_Q4_K: return LEVEL(halves_of)(rows, 16 + s / 2 * 32, s % 2 * 4, 15);
    case MC_Q5_K: return LEVEL(halves_of)(rows, 48 + s / 2 * 32, s % 2 * 4, 15);
    case MC_Q6_K: return LEVEL(halves_of)(rows, s / 4 * 64 + s % 2 * 32, s % 4 / 2 * 4, 15);
    case MC_SUPER32: return LEVEL(fourths)(rows, 10 + 16 * s);
    case MC_SUPER16: return LEVEL(fourths)(rows, 18 + 16 * s);
    case MC_IQ4_XS: return LEVEL(fourths)(rows, 8 + 16 * s);
    default: __builtin_trap(); /* never taken for another */
    }
}

INLINE vb LEVEL(above)(const uint8_t *const *rows, int s, int order)
{
    switch (order) {
    case MC_Q5_0: return LEVEL(fifths)(rows, 2);
    case MC_Q5_1: return LEVEL(fifths)(rows, 4);
    case MC_Q5_K: return LEVEL(halves_of)(rows, 16, s, 1);
    case MC_Q6_K: return LEVEL(halves_of)(rows, 128 + s / 4 * 32, s % 4 * 2, 3);
    default: __builtin_trap();
    }
}

/* The integers of blocks' scales, 4 of each of LANES rows in a vector, then from the fifth vector on of their
 * offsets. */
INLINE void LEVEL(integers)(const uint8_t *const *rows, int order, vu *to)
{
    int from = order == MC_Q6_K ? 192 : order == MC_Q3_K ? 92
        : order == MC_SUPER32 || order == MC_SUPER16 ? 2 : 0;
    vu words[4];
    for (int i = 0; i < 4; i++)
        words[i] = (vu)LEVEL(fourths)(rows + i, from);
    LEVEL(transpose)(words);
    if (order == MC_Q6_K || order == MC_SUPER32 || order == MC_SUPER16) {
        for (int i = 0; i < 4; i++)
            to[i] = words[i];
    } else if (order == MC_Q2_K) {
        for (int i = 0; i < 4; i++) {
            to[i] = words[i] & 0x0f0f0f0f;
            to[4 + i] = words[i] >> 4 & 0x0f0f0f0f;
        }
    } else if (order == MC_IQ4_XS) {
        vu above = words[0] >> 16;
        to[0] = to[1] = (vu){0};
        for (int i = 0; i < 8; i++) {
            vu one = (words[1] >> 4 * i & 15) | (above >> 2 * i & 3) << 4;
            to[i / 4] |= ((one - 32) & 0xff) << i % 4 * 8;
        }
    } else if (order == MC_Q3_K) {
        vu one = words[1], two = words[2], both = words[3];
        to[0] = (one & 0x0f0f0f0f) | (both & 0x03030303) << 4;
        to[1] = (two & 0x0f0f0f0f) | (both & 0x0c0c0c0c) << 2;
        to[2] = (one >> 4 & 0x0f0f0f0f) | (both & 0x30303030);
        to[3] = (two >> 4 & 0x0f0f0f0f) | (both >> 2 & 0x30303030);
        for (int i = 0; i < 4; i++) /* subtract 32 from each byte: smaller ones get the sign */
            to[i] = (to[i] ^ 0x20202020) | (~to[i] & 0x20202020) * 6;
    } else if (order == MC_Q4_K || order == MC_Q5_K) {
        vu one = words[1], two = words[2], both = words[3];
        to[0] = one & 0x3f3f3f3f;
        to[1] = (both & 0x0f0f0f0f) | (one >> 2 & 0x30303030);
        to[4] = two & 0x3f3f3f3f;
        to[5] = (both >> 4 & 0x0f0f0f0f) | (two >> 2 & 0x30303030);
    } else {
        __builtin_trap();
    }
}

/* 4 bytes of each of LANES rows to 4 times a byte of each. */
INLINE vb LEVEL(columns)(vu rows)
{
#define EACH(i) i, i + 4, i + 8, i + 12, i + 1, i + 5, i + 9, i + 13, \
        i + 2, i + 6, i + 10, i + 14, i + 3, i + 7, i + 11, i + 15
    vu four = (vu)BY_LANES((vb)rows, (vb)rows, EACH, 16);
#undef EACH
#if LANES == 16
    four = __builtin_shufflevector(four, four, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#elif LANES == 8
    four = __builtin_shufflevector(four, four, 0, 4, 1, 5, 2, 6, 3, 7);
#endif
    return (vb)four;
}

/* Writes a float16 for each of 16 rows and returns the end; `flip` negates numbers that are subtracted. */
INLINE uint8_t *LEVEL(form_numbers)(
    const uint8_t *const *blocks, int at, uint16_t flip, uint32_t largest, uint8_t *out, v4 *wrong)
{
    for (int r = 0; r < MC_TILE; r++) {
        uint16_t bits;
        memcpy(&bits, blocks[r] + at, 2);
        bits ^= flip;
        memcpy(out + 2 * r, &bits, 2);
    }
    *wrong |= LEVEL(too_large)(out, MC_F16, largest);
    return out + 2 * MC_TILE;
}

/* Like `form_of`, for blocks. Rows beyond the matrix are blocks of zero bytes. */
INLINE uint8_t *LEVEL(form_blocks)(
    const mc_file *file, int64_t row, uint8_t *out, int *wrong, int order)
{
    static const uint8_t nothing[256];
    LEVEL(blocks) kind = LEVEL(all_blocks)[order];
    v4 too_large = {0};
    int64_t num_rows = file->rows - row < MC_TILE ? file->rows - row : MC_TILE;
    int is_super = kind.columns == MC_SUPER, pair = MC_BLOCK / kind.group;
    int bits = mc_code_bits(kind.codes);
    const uint8_t *first = file->codes + row * file->row_bytes;
    const uint8_t *next = first + MC_TILE * file->row_bytes;
    for (int64_t k = 0; k < file->columns; k += kind.columns, first += file->block_bytes) {
        const uint8_t *blocks[MC_TILE];
        for (int r = 0; r < MC_TILE; r++)
            blocks[r] = r < num_rows ? first + r * file->row_bytes : nothing;
        for (int64_t line = 0; line < MC_TILE * file->block_bytes; line += 64)
            __builtin_prefetch(next + line, 0, 2);
        next += MC_TILE * file->block_bytes;
        out = LEVEL(form_numbers)(blocks, kind.numbers_at, 0, file->largest, out, &too_large);
        if (kind.has_offsets)
            out = LEVEL(form_numbers)(
                blocks, kind.numbers_at + 2, is_super ? 0x8000 : 0, file->largest, out, &too_large);
        int64_t step = 16 * MC_TILE + (bits - 4) * 4 * MC_TILE
            + is_super * pair * (1 + kind.has_offsets) * MC_TILE;
        for (int r = 0; r < MC_TILE && is_super; r += LANES) {
            vu numbers[8];
            LEVEL(integers)(blocks + r, order, numbers);
UNROLL(8)
            for (int i = 0; i < kind.columns / kind.group; i += 4)
                for (int half = 0; half <= kind.has_offsets; half++) {
                    vb some = LEVEL(columns)(numbers[half * 4 + i / 4]);
UNROLL(4)
                    for (int j = i; j < i + 4; j++)
                        memcpy(out + j / pair * step + (half * pair + j % pair) * MC_TILE + r,
                               (uint8_t *)&some + (j - i) * LANES, LANES);
                }
        }
UNROLL(8)
        for (int s = 0; s < kind.columns / MC_BLOCK; s++, out += step) {
            uint8_t *to = out + is_super * pair * (1 + kind.has_offsets) * MC_TILE;
            for (int r = 0; r < MC_TILE; r += LANES) {
                vb low[4], high[4];
                for (int i = 0; i < 4; i++) {
                    low[i] = LEVEL(lowest)(blocks + r + i, s, order);
                    if (bits > 4)
                        high[i] = LEVEL(above)(blocks + r + i, s, order);
                }
                LEVEL(form_halves)(low, to + r * 4);
                if (bits > 4)
                    LEVEL(form_above)(high, bits, to + 16 * MC_TILE + r * 4);
            }
        }
    }
    for (int i = 0; i < 4; i++)
        *wrong |= too_large[i] != 0;
    return out;
}
