/* Compute forms: made from a file's order, and expanded to rows of numbers; included once for each
 * level. */

typedef uint8_t LEVEL(v16) __attribute__((vector_size(16)));
typedef uint16_t LEVEL(v8) __attribute__((vector_size(16)));
typedef uint32_t LEVEL(v4) __attribute__((vector_size(16)));
typedef uint64_t LEVEL(v2) __attribute__((vector_size(16)));
#define v16 LEVEL(v16)
#define v8 LEVEL(v8)
#define v4 LEVEL(v4)
#define v2 LEVEL(v2)
typedef uint16_t LEVEL(vw) __attribute__((vector_size(LANES * 4)));
typedef uint64_t LEVEL(vl) __attribute__((vector_size(LANES * 4)));
#define vw LEVEL(vw)
#define vl LEVEL(vl)
#define SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)

/* The same shuffle in each 16 bytes of two vectors; `step` numbers take 16 bytes. */
#if LANES == 16
#define BY_LANES(a, b, ORDER, step) \
    __builtin_shufflevector(a, b, ORDER(0), ORDER(step), ORDER(2 * step), ORDER(3 * step))
#elif LANES == 8
#define BY_LANES(a, b, ORDER, step) __builtin_shufflevector(a, b, ORDER(0), ORDER(step))
#else
#define BY_LANES(a, b, ORDER, step) __builtin_shufflevector(a, b, ORDER(0))
#endif

/* Words of 4 rows to words of 4 columns, and back; of each 16 bytes. */
INLINE void LEVEL(transpose)(vu *words)
{
#define LOW(i) i, i + LANES, i + 1, i + 1 + LANES
#define HIGH(i) i + 2, i + 2 + LANES, i + 3, i + 3 + LANES
    vu two[4];
    for (int i = 0; i < 2; i++) {
        two[i] = BY_LANES(words[i], words[i + 2], LOW, 4);
        two[2 + i] = BY_LANES(words[i], words[i + 2], HIGH, 4);
    }
    for (int i = 0; i < 2; i++) {
        words[2 * i] = BY_LANES(two[2 * i], two[2 * i + 1], LOW, 4);
        words[2 * i + 1] = BY_LANES(two[2 * i], two[2 * i + 1], HIGH, 4);
    }
#undef LOW
#undef HIGH
}

INLINE v16 LEVEL(load16)(const uint8_t *at)
{
    v16 bytes;
    memcpy(&bytes, at, 16);
    return bytes;
}

/* 16 bytes of every fourth of LANES rows, one row's after another's: a transposition of 4 such vectors gives words of
 * LANES rows. */
INLINE vb LEVEL(fourths)(const uint8_t *const *rows, int64_t at)
{
#if LANES == 4
    return (vb)LEVEL(load16)(rows[0] + at);
#elif LANES == 8
    return JOIN(LEVEL(load16)(rows[0] + at), LEVEL(load16)(rows[4] + at));
#else
    return JOIN(LEVEL(load16)(rows[0] + at), LEVEL(load16)(rows[4] + at),
                LEVEL(load16)(rows[8] + at), LEVEL(load16)(rows[12] + at));
#endif
}

/* Codes of 8 bits: pairs of columns of each 4 rows are put side by side. */
INLINE void LEVEL(form_bytes)(const uint8_t *const *blocks, uint32_t flip, uint8_t *out)
{
#define EVENS(i) i, i + 2, i + 4, i + 6, i + 1, i + 3, i + 5, i + 7
    for (int r = 0; r < MC_TILE; r += LANES)
        for (int half = 0; half < 2; half++) {
            vu words[4];
            for (int i = 0; i < 4; i++)
                words[i] = (vu)LEVEL(fourths)(blocks + r + i, 16 * half);
            LEVEL(transpose)(words);
            for (int i = 0; i < 4; i++) {
                vw pairs = (vw)(words[i] ^ flip);
                pairs = BY_LANES(pairs, pairs, EVENS, 8);
                memcpy(out + (4 * half + i) * 64 + r * 4, &pairs, sizeof pairs);
            }
        }
#undef EVENS
}

/* The words of rows of 32 codes of 4 bits, 8 columns each: even columns, then odd ones. */
INLINE vu LEVEL(words)(vb bytes, int order)
{
    if (order == MC_HALVES_FP4) /* one zero */
        bytes ^= ((vb)((bytes & 15) == 8) & 8) | ((vb)((bytes & 0xf0) == 0x80) & 0x80);
    if (order == MC_NIBBLES) {
        /* Two even columns' codes, or odd ones', in the low byte of each 16 bits. */
        vw even = (vw)(bytes & 15), odd = (vw)bytes >> 4 & 0x0f0f;
#define SIDES_OF(i) \
    i, i + 2, i + 4 * LANES, i + 2 + 4 * LANES, i + 4, i + 6, i + 4 + 4 * LANES, i + 6 + 4 * LANES
#define TWICE(i) SIDES_OF(i), SIDES_OF(i + 8)
        return (vu)BY_LANES((vb)(even | even >> 4), (vb)(odd | odd >> 4), TWICE, 16);
#undef TWICE
#undef SIDES_OF
    }
    /* Bytes of columns 0, 4, 1, 5 and 2, 6, 3, 7 of each 8, for the low and the high nibbles. */
#define FIRST(i) i, i + 4, i + 1, i + 5, i + 8, i + 12, i + 9, i + 13
#define TWICE(i) FIRST(i), FIRST(i)
    vb one = BY_LANES(bytes, bytes, TWICE, 16);
#undef TWICE
#define TWICE(i) FIRST(i + 2), FIRST(i + 2)
    vb two = BY_LANES(bytes, bytes, TWICE, 16);
#undef TWICE
#undef FIRST
    vb low = (one & 15) | (vb)((vw)(two & 15) << 4);
    vb high = ((vb)((vw)one >> 4) & 15) | (two & 0xf0);
    /* The first 8 bytes of one, the last 8 of the other. */
#define ENDS(i) i, i + 1 + LANES / 2
    return (vu)BY_LANES((vl)low, (vl)high, ENDS, 2);
#undef ENDS
}

/* Codes of 4 bits in the order of MC_HALVES: words of the same 8 columns of LANES rows are put side by side. */
INLINE void LEVEL(form_halves)(const vb *fourths, uint8_t *out)
{
    vu words[4];
    for (int i = 0; i < 4; i++)
        words[i] = LEVEL(words)(fourths[i], MC_HALVES);
    LEVEL(transpose)(words);
    for (int i = 0; i < 4; i++)
        memcpy(out + i * 64, &words[i], sizeof words[i]);
}

INLINE void LEVEL(form_nibbles)(const uint8_t *const *blocks, int order, uint8_t *out)
{
    for (int r = 0; r < MC_TILE; r += LANES) {
        vu words[4];
        for (int i = 0; i < 4; i++)
            words[i] = LEVEL(words)(LEVEL(fourths)(blocks + r + i, 0), order);
        LEVEL(transpose)(words);
        for (int i = 0; i < 4; i++)
            memcpy(out + i * 64 + r * 4, &words[i], sizeof words[i]);
    }
}

/* The bits of codes of 5 or 6 bits above the fourth, given as codes of 4 bits. */
INLINE void LEVEL(form_above)(const vb *fourths, int bits, uint8_t *out)
{
    vu words[4];
    for (int i = 0; i < 4; i++)
        words[i] = LEVEL(words)(fourths[i], MC_HALVES);
    LEVEL(transpose)(words);
    /* The bits of each byte's two nibbles, side by side. */
    for (int i = 0; i < 4; i++)
        words[i] = bits == 5 ? (words[i] | words[i] >> 3) & 0x03030303
                             : (words[i] | words[i] >> 2) & 0x0f0f0f0f;
    vu one = words[0] | words[1] << (bits == 5 ? 2 : 4);
    vu two = words[2] | words[3] << (bits == 5 ? 2 : 4);
    if (bits == 5)
        one |= two << 4;
    else
        memcpy(out + 64, &two, sizeof two);
    memcpy(out, &one, sizeof one);
}

/* Sets bits if one of 16 scales is above `largest` in size, as infinities and NaN are. Sizes compare as
 * their bits do, so a negative difference has the highest bit. */
INLINE v4 LEVEL(too_large)(const uint8_t *scales, int scale, uint32_t largest)
{
    v4 found = {0};
    if (mc_has_factor(scale)) {
        v16 some;
        memcpy(&some, scales, 16);
        return (v4)(((uint8_t)largest - (some & 0x7f)) & 0x80);
    }
    if (scale == MC_F32) {
        for (int i = 0; i < MC_TILE; i += 4) {
            v4 some;
            memcpy(&some, scales + i * 4, 16);
            found |= (largest - (some & 0x7fffffff)) & 0x80000000;
        }
    } else {
        for (int i = 0; i < MC_TILE; i += 8) {
            v8 some;
            memcpy(&some, scales + i * 2, 16);
            found |= (v4)(((uint16_t)largest - (some & 0x7fff)) & 0x8000);
        }
    }
    return found;
}

/* 16 rows' scales of a group of columns; those beyond the matrix are zero. Returns their end. */
INLINE uint8_t *LEVEL(form_scales)(
    const mc_file *file, const uint8_t *const *rows, int64_t num_rows, int64_t group, uint8_t *out,
    v4 *wrong)
{
    int64_t bytes = mc_scale_bytes(file->scale);
    int64_t at = group * file->scale_step, num = group < file->num_scales ? num_rows : 0;
    if (num < MC_TILE)
        memset(out, 0, (size_t)(MC_TILE * bytes));
    if (file->scale == MC_E8M0) {
        for (int64_t r = 0; r < num; r++) {
            /* 2^(b - 127) in bf16; the least is denormal, and 255 is no number. */
            uint8_t b = rows[r][at];
            uint16_t power = (uint16_t)(b << 7);
            if (__builtin_expect((uint8_t)(b + 1) < 2, 0))
                power = b ? 0x7fc0 : 0x40;
            memcpy(out + 2 * r, &power, 2);
        }
    } else if (bytes == 1) {
        for (int64_t r = 0; r < num; r++)
            out[r] = rows[r][at];
    } else if (bytes == 4) {
        for (int64_t r = 0; r < num; r++)
            memcpy(out + 4 * r, rows[r] + at, 4);
    } else {
        for (int64_t r = 0; r < num; r++)
            memcpy(out + 2 * r, rows[r] + at, 2);
    }
    *wrong |= LEVEL(too_large)(out, file->scale, file->largest);
    return out + MC_TILE * bytes;
}

INLINE uint8_t *LEVEL(form_of)(
    const mc_file *file, int64_t row, uint8_t *out, int *wrong, int order)
{
    v4 too_large = {0};
    int is_bytes = order <= MC_OFFSET_BYTES;
    int64_t num_rows = file->rows - row < MC_TILE ? file->rows - row : MC_TILE, step = 0;
    const uint8_t *rows[MC_TILE], *scales[MC_TILE];
    for (int64_t r = 0; r < num_rows; r++) {
        rows[r] = file->codes + (row + r) * file->row_bytes;
        scales[r] = file->scales + (row + r) / file->scale_rows * file->scale_row_bytes;
    }
    if (mc_has_factor(file->scale)) {
        memset(out, 0, (size_t)mc_factor_bytes(file->scale));
        memcpy(out, file->factor, 4);
        /* The factor may make scales infinite: the format's own check finds that. */
        uint32_t exponent = mc_float_to_bits(mc_factor(out)) >> 23 & 0xff;
        *wrong |= exponent < 16 || exponent > 240;
        out += mc_factor_bytes(file->scale);
    }
    const uint8_t *next = rows[0] + MC_TILE * file->row_bytes;
    for (int64_t k = 0, group = 0; k < file->columns; k += MC_BLOCK, step += file->block_bytes) {
        uint8_t copies[MC_TILE][MC_BLOCK];
        const uint8_t *blocks[MC_TILE];
        for (; group * file->group < k + MC_BLOCK && group * file->group >= k; group++)
            out = LEVEL(form_scales)(file, scales, num_rows, group, out, &too_large);
        /* Prefetch the next 16 rows in memory order: the processor does not foresee 16 places at once. */
        for (int64_t line = 0; line < MC_TILE * file->block_bytes; line += 64)
            __builtin_prefetch(next + line, 0, 2);
        next += MC_TILE * file->block_bytes;
        if (num_rows == MC_TILE && k + MC_BLOCK <= file->columns) {
            for (int r = 0; r < MC_TILE; r++)
                blocks[r] = rows[r] + step;
        } else {
            int64_t left = file->columns - k < MC_BLOCK ? file->columns - k : MC_BLOCK;
            memset(copies, file->zero, sizeof copies);
            for (int r = 0; r < MC_TILE; r++) {
                blocks[r] = copies[r];
                if (r < num_rows)
                    memcpy(copies[r], rows[r] + step, (size_t)(is_bytes ? left : (left + 1) / 2));
            }
        }
        if (is_bytes)
            LEVEL(form_bytes)(blocks, order == MC_OFFSET_BYTES ? 0x80808080 : 0, out);
        else
            LEVEL(form_nibbles)(blocks, order, out);
        out += MC_TILE * (is_bytes ? MC_BLOCK : MC_BLOCK / 2);
    }
    for (int i = 0; i < 4; i++)
        *wrong |= too_large[i] != 0;
    return out;
}

#include "_words.h"
#include "_blocks.h"

/* The compute form of rows [row, row + 16), from the file's order; returns its end. `wrong` becomes 1
 * if a scale is infinite, no number, or too large for its codes. */
static uint8_t *LEVEL(form)(const mc_file *file, int64_t row, uint8_t *out, int *wrong)
{
#define FORM(name, text, how) \
    case MC_##name: return LEVEL(how)(file, row, out, wrong, MC_##name);
    switch (file->order) {
        MC_ORDERS(FORM)
    case MC_NUM_ORDERS: break;
    }
#undef FORM
    __builtin_unreachable(); /* `Tiler` takes no other */
}

/* Adds the bits of codes of 5 or 6 bits above the fourth. */
INLINE void LEVEL(codes_above)(const uint8_t *at, uint8_t (*rows)[MC_BLOCK], int bits)
{
    /* The bit of each of 16 columns in its byte; with 5 bits, the next 16 columns have those above. */
    v16 first = {1, 1, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 4, 4, 8, 8};
    if (bits == 6)
        first = (v16){1, 1, 4, 4, 1, 1, 4, 4, 16, 16, 64, 64, 16, 16, 64, 64};
    for (int r = 0; r < MC_TILE; r++)
        for (int half = 0; half < 2; half++) {
            uint32_t word;
            memcpy(&word, at + (bits - 5) * half * 64 + r * 4, 4);
            v4 word_alone = {word};
            v16 bytes = SHUFFLE((v16)word_alone, 0, 2, 0, 2, 1, 3, 1, 3, 0, 2, 0, 2, 1, 3, 1, 3), codes;
            v16 mask = bits == 5 && half ? first << 4 : first;
            memcpy(&codes, rows[r] + 16 * half, 16);
            codes |= (v16)((bytes & mask) == mask) & 16;
            if (bits == 6)
                codes |= (v16)((bytes & (first + first)) == first + first) & 32;
            memcpy(rows[r] + 16 * half, &codes, 16);
        }
}

/* The codes of 16 rows and 32 columns of a form, a byte each. */
SHARED void LEVEL(codes)(const uint8_t *at, uint8_t (*rows)[MC_BLOCK], int bits)
{
    int is_half = bits < 8;
#define BACK(i) i, i + 4, i + 1, i + 5, i + 2, i + 6, i + 3, i + 7
#define NEXT(i) i, i + 2, i + 4 * LANES, i + 2 + 4 * LANES, i + 1, i + 3, i + 1 + 4 * LANES, i + 3 + 4 * LANES
#define FIRST(i) NEXT(i), NEXT(i + 4)
#define LAST(i) NEXT(i + 8), NEXT(i + 12)
    for (int r = 0; r < MC_TILE; r += LANES)
        for (int half = 0; half < (is_half ? 1 : 2); half++) {
            vu words[4];
            for (int i = 0; i < 4; i++) {
                memcpy(&words[i], at + (4 * half + i) * 64 + r * 4, sizeof words[i]);
                if (!is_half)
                    words[i] = (vu)BY_LANES((vw)words[i], (vw)words[i], BACK, 8);
            }
            LEVEL(transpose)(words);
            for (int i = 0; i < 4; i++) {
                vb low = (vb)words[i] & 15, high = (vb)(words[i] >> 4) & 15;
                vb first = is_half ? BY_LANES(low, high, FIRST, 16) : (vb)words[i];
                vb last = BY_LANES(low, high, LAST, 16);
                for (int j = 0; j < LANES / 4; j++) {
                    memcpy(rows[r + i + 4 * j] + 16 * half, (uint8_t *)&first + 16 * j, 16);
                    if (is_half)
                        memcpy(rows[r + i + 4 * j] + 16, (uint8_t *)&last + 16 * j, 16);
                }
            }
        }
#undef BACK
#undef NEXT
#undef FIRST
#undef LAST
    if (bits == 5 || bits == 6)
        LEVEL(codes_above)(at + 256, rows, bits);
}

/* To the nearest, ties to even; a NaN stays one. */
INLINE vh LEVEL(to_bf16)(vf values)
{
    vu bits = (vu)values, nearest = bits + 0x7fff + (bits >> 16 & 1);
    vu is_nan = (vu)((vi)(bits & 0x7fffffff) > 0x7f800000);
    return LEVEL(narrow)(((is_nan & (bits | 0x400000)) | (~is_nan & nearest)) >> 16);
}

INLINE void LEVEL(expand_of)(
    const mc_matrix *matrix, int64_t row, int type, uint8_t *out, int64_t out_row_bytes, int codes)
{
    const uint8_t *tile = matrix->data + row / MC_TILE * matrix->row_bytes;
    const uint8_t *at = tile + mc_factor_bytes(matrix->scale), *by = at;
    int64_t num_rows = matrix->rows - row < MC_TILE ? matrix->rows - row : MC_TILE;
    int64_t bytes = mc_input_bytes(type), scale_bytes = mc_scale_bytes(matrix->scale);
    int pair = mc_block_groups(matrix), is_super = matrix->scale == MC_IN_STEPS;
    float scales[4][MC_TILE]; /* and as many zero points or offsets */
    for (int64_t k = 0, group = 0; k < matrix->columns; k += MC_BLOCK) {
        uint8_t rows[MC_TILE][MC_BLOCK];
        if (is_super && k % MC_SUPER == 0) {
            by = at;
            at += mc_super_bytes(matrix);
        }
        if (k == group) {
            for (int half = 0; half < pair * (1 + mc_has_terms(matrix)); half++)
                for (int i = 0; i < MC_TILE; i += LANES) {
                    vf some = LEVEL(scales)(at + (half * MC_TILE + i) * scale_bytes, matrix->scale);
                    if (is_super)
                        some *= LEVEL(load)(by + (half / pair * MC_TILE + i) * 2, MC_F16);
                    some = LEVEL(scaled)(some, tile, matrix->scale);
                    memcpy(&scales[half][i], &some, sizeof some);
                }
            at += mc_head_bytes(matrix) * (1 + mc_has_terms(matrix));
            group += pair * matrix->group;
        }
        LEVEL(codes)(at, rows, mc_code_bits(codes));
        at += mc_code_bytes(codes, MC_BLOCK * MC_TILE);
        int64_t left = matrix->columns - k < MC_BLOCK ? matrix->columns - k : MC_BLOCK;
        for (int64_t r = 0; r < num_rows; r++) {
            uint8_t last[MC_BLOCK * 4], *place = out + r * out_row_bytes + k * bytes;
            uint8_t *to = left < MC_BLOCK ? last : place;
            for (int i = 0; i < MC_BLOCK; i += LANES) {
                vf value = LEVEL(value)(LEVEL(widen)(rows[r] + i), 0, codes);
                int half = pair == 2 && i >= 16;
                if (matrix->has_zeros)
                    value += LEVEL(all)(scales[1][r]);
                value *= LEVEL(all)(scales[half][r]);
                if (matrix->has_offsets)
                    value += LEVEL(all)(scales[pair + half][r]);
                if (type == MC_X_F32) {
                    memcpy(to + i * 4, &value, sizeof value);
                } else {
                    vh rounded = LEVEL(to_bf16)(value);
                    memcpy(to + i * 2, &rounded, sizeof rounded);
                }
            }
            if (left < MC_BLOCK)
                memcpy(place, last, (size_t)(left * bytes));
        }
    }
}

/* The values of rows [row, row + 16) in fp32: (code + zero point, if any) * scale + offset, if any. Values
 * in bf16 are rounded once more. */
static void LEVEL(expand)(
    const mc_matrix *matrix, int64_t row, int type, uint8_t *out, int64_t out_row_bytes)
{
#define EXPAND(name, ...)                                                                \
    case MC_##name:                                                                      \
        if (type == MC_X_F32)                                                            \
            LEVEL(expand_of)(matrix, row, MC_X_F32, out, out_row_bytes, MC_##name);      \
        else                                                                             \
            LEVEL(expand_of)(matrix, row, MC_X_BF16, out, out_row_bytes, MC_##name);     \
        break;
    switch (matrix->codes) { MC_CODES(EXPAND) }
#undef EXPAND
}

#undef SHUFFLE
#undef BY_LANES
#undef vw
#undef vl
#undef v16
#undef v8
#undef v4
#undef v2
