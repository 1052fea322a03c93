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

INLINE v16 LEVEL(load16)(const uint8_t *at)
{
    v16 bytes;
    memcpy(&bytes, at, 16);
    return bytes;
}

/* Some bits of 32 bytes, from bit `shift` on, as nibbles: the first 16 bytes give the low ones. */
INLINE v16 LEVEL(halves_of)(const uint8_t *at, int shift, int mask)
{
    v16 first = (v16)((v8)LEVEL(load16)(at) >> (uint16_t)shift);
    v16 second = (v16)((v8)LEVEL(load16)(at + 16) >> (uint16_t)shift);
    return (first & (uint8_t)mask) | (v16)((v8)(second & (uint8_t)mask) << 4);
}

/* 32 bits, one for each column, as nibbles. */
INLINE v16 LEVEL(fifths)(const uint8_t *at)
{
    v16 each = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint32_t word;
    memcpy(&word, at, 4);
    v4 alone = {word};
    v16 first = SHUFFLE((v16)alone, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    v16 second = SHUFFLE((v16)alone, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    return ((v16)((first & each) == each) & 1) | ((v16)((second & each) == each) & 16);
}

/* The `s`th 32 columns of a block: the lowest four bits, and those above. */
INLINE v16 LEVEL(lowest)(const uint8_t *block, int s, int order)
{
    switch (order) {
    case MC_Q4_1: return LEVEL(load16)(block + 4);
    case MC_Q5_0: return LEVEL(load16)(block + 6);
    case MC_Q5_1: return LEVEL(load16)(block + 8);
    case MC_Q2_K: return LEVEL(halves_of)(block + 16 + s / 4 * 32, s % 4 * 2, 3);
    case MC_Q3_K: /* q - 4 if the third bit is not set; 8 more in the form */
        return LEVEL(halves_of)(block + 32 + s / 4 * 32, s % 4 * 2, 3)
            + (LEVEL(halves_of)(block, s, 1) << 2) + 0x44;
    case MC_Q4_K: return LEVEL(halves_of)(block + 16 + s / 2 * 32, s % 2 * 4, 15);
    case MC_Q5_K: return LEVEL(halves_of)(block + 48 + s / 2 * 32, s % 2 * 4, 15);
    case MC_Q6_K: return LEVEL(halves_of)(block + s / 4 * 64 + s % 2 * 32, s % 4 / 2 * 4, 15);
    case MC_SUPER32: return LEVEL(load16)(block + 10 + 16 * s);
    case MC_SUPER16: return LEVEL(load16)(block + 18 + 16 * s);
    case MC_IQ4_XS: return LEVEL(load16)(block + 8 + 16 * s);
    default: __builtin_trap(); /* never taken for another */
    }
}

INLINE v16 LEVEL(above)(const uint8_t *block, int s, int order)
{
    switch (order) {
    case MC_Q5_0: return LEVEL(fifths)(block + 2);
    case MC_Q5_1: return LEVEL(fifths)(block + 4);
    case MC_Q5_K: return LEVEL(halves_of)(block + 16, s, 1);
    case MC_Q6_K: return LEVEL(halves_of)(block + 128 + s / 4 * 32, s % 4 * 2, 3);
    default: __builtin_trap();
    }
}

/* The integers of a block's scales, then from 16 on of its offsets. */
INLINE void LEVEL(integers)(const uint8_t *block, int order, uint8_t *to)
{
    if (order == MC_Q6_K) {
        memcpy(to, block + 192, 16);
    } else if (order == MC_SUPER32 || order == MC_SUPER16) {
        memcpy(to, block + 2, order == MC_SUPER32 ? 8 : 16);
    } else if (order == MC_Q2_K) {
        v16 both = LEVEL(load16)(block), scales = both & 15, offsets = both >> 4;
        memcpy(to, &scales, 16);
        memcpy(to + 16, &offsets, 16);
    } else if (order == MC_IQ4_XS) {
        for (int i = 0; i < 8; i++)
            to[i] = (uint8_t)(((block[4 + i / 2] >> i % 2 * 4 & 15)
                               | (block[2 + i / 4] >> i % 4 * 2 & 3) << 4) - 32);
    } else if (order == MC_Q3_K || order == MC_Q4_K || order == MC_Q5_K) {
        uint32_t one, two, both, parts[4];
        const uint8_t *at = block + (order == MC_Q3_K ? 96 : 4);
        memcpy(&one, at, 4);
        memcpy(&two, at + 4, 4);
        memcpy(&both, at + 8, 4);
        if (order == MC_Q3_K) {
            parts[0] = (one & 0x0f0f0f0f) | (both & 0x03030303) << 4;
            parts[1] = (two & 0x0f0f0f0f) | (both & 0x0c0c0c0c) << 2;
            parts[2] = (one >> 4 & 0x0f0f0f0f) | (both & 0x30303030);
            parts[3] = (two >> 4 & 0x0f0f0f0f) | (both >> 2 & 0x30303030);
            for (int i = 0; i < 4; i++) /* subtract 32 from each byte: smaller ones get the sign */
                parts[i] = (parts[i] ^ 0x20202020) | (~parts[i] & 0x20202020) * 6;
            memcpy(to, parts, 16);
            return;
        }
        parts[0] = one & 0x3f3f3f3f;
        parts[1] = (both & 0x0f0f0f0f) | (one >> 2 & 0x30303030);
        parts[2] = two & 0x3f3f3f3f;
        parts[3] = (both >> 4 & 0x0f0f0f0f) | (two >> 2 & 0x30303030);
        memcpy(to, parts, 8);
        memcpy(to + 16, parts + 2, 8);
    } else {
        __builtin_trap();
    }
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
    v16 low[MC_SUPER / MC_BLOCK][MC_TILE], high[MC_SUPER / MC_BLOCK][MC_TILE];
    const uint8_t *first = file->codes + row * file->row_bytes;
    const uint8_t *next = first + MC_TILE * file->row_bytes;
    for (int64_t k = 0; k < file->columns; k += kind.columns, first += file->block_bytes) {
        const uint8_t *blocks[MC_TILE];
        uint8_t integers[MC_TILE][32];
        for (int r = 0; r < MC_TILE; r++)
            blocks[r] = r < num_rows ? first + r * file->row_bytes : nothing;
        for (int64_t line = 0; line < MC_TILE * file->block_bytes; line += 64)
            __builtin_prefetch(next + line);
        next += MC_TILE * file->block_bytes;
        out = LEVEL(form_numbers)(blocks, kind.numbers_at, 0, file->largest, out, &too_large);
        if (kind.has_offsets)
            out = LEVEL(form_numbers)(
                blocks, kind.numbers_at + 2, is_super ? 0x8000 : 0, file->largest, out, &too_large);
        for (int r = 0; r < MC_TILE; r++) {
            if (is_super)
                LEVEL(integers)(blocks[r], order, integers[r]);
#pragma GCC unroll 8
            for (int s = 0; s < kind.columns / MC_BLOCK; s++) {
                low[s][r] = LEVEL(lowest)(blocks[r], s, order);
                if (bits > 4)
                    high[s][r] = LEVEL(above)(blocks[r], s, order);
            }
        }
        for (int s = 0; s < kind.columns / MC_BLOCK; s++) {
            for (int i = 0; i < pair * (1 + kind.has_offsets) && is_super; i++, out += MC_TILE)
                for (int r = 0; r < MC_TILE; r++)
                    out[r] = integers[r][i / pair * 16 + s * pair + i % pair];
            LEVEL(form_halves)(low[s], out);
            out += 16 * MC_TILE;
            if (bits > 4)
                LEVEL(form_above)(high[s], bits, out);
            out += (bits - 4) * 4 * MC_TILE;
        }
    }
    for (int i = 0; i < 4; i++)
        *wrong |= too_large[i] != 0;
    return out;
}
