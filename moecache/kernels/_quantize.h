/* Inputs as integers: included once for each level whose products of integers have a form of their own. */

#if LANES == 16
#define EACH(of) of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9), of(10), of(11), of(12), of(13), \
        of(14), of(15)
#elif LANES == 8
#define EACH(of) of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)
#else
#define EACH(of) of(0), of(1), of(2), of(3)
#endif
/* Lanes that are `by` apart, exchanged. */
#define BY_8(i) ((i) ^ 8) % LANES
#define BY_4(i) ((i) ^ 4) % LANES
#define BY_2(i) (i) ^ 2
#define BY_1(i) (i) ^ 1
/* The lower half's lanes of the first, the upper half's of the second; and all others, exchanged. */
#define STAYS(i) ((i) < LANES / 2 ? (i) : (i) + LANES)
#define CROSSES(i) (i) + LANES / 2

/* The largest of a register's lanes. */
INLINE int32_t LEVEL(largest_of)(vi v)
{
#define LARGER(by)                                          \
    {                                                       \
        vi other = __builtin_shufflevector(v, v, EACH(by)); \
        vi is_larger = other > v;                           \
        v = (is_larger & other) | (~is_larger & v);         \
    }
    if (LANES > 8)
        LARGER(BY_8)
    if (LANES > 4)
        LARGER(BY_4)
    LARGER(BY_2)
    LARGER(BY_1)
#undef LARGER
    return v[0];
}

/* The sums of two registers' lanes. */
INLINE void LEVEL(two_sums)(vi first, vi second, int32_t *sums)
{
    vi v = __builtin_shufflevector(first, second, EACH(STAYS))
        + __builtin_shufflevector(first, second, EACH(CROSSES));
    if (LANES > 8)
        v += __builtin_shufflevector(v, v, EACH(BY_4));
    if (LANES > 4)
        v += __builtin_shufflevector(v, v, EACH(BY_2));
    v += __builtin_shufflevector(v, v, EACH(BY_1));
    sums[0] = v[0];
    sums[1] = v[LANES / 2];
}
#undef EACH
#undef BY_8
#undef BY_4
#undef BY_2
#undef BY_1
#undef STAYS
#undef CROSSES

#ifndef DOT_AVX2
/* A block's integers as bytes: as they are, or of each eight the first, the fifth, the second, the sixth and so on. */
INLINE void LEVEL(put)(const vi *parts, int is_permuted, int8_t *to)
{
    typedef int8_t bytes_of_lanes __attribute__((vector_size(LANES)));
    for (int i = 0; i < MC_BLOCK / LANES; i++) {
#if LANES == 4
        if (is_permuted && i % 2 == 0) {
            vh pairs = LEVEL(narrow)(((vu)parts[i] & 255) | ((vu)parts[i + 1] & 255) << 8);
            memcpy(to + i * LANES, &pairs, sizeof pairs);
        }
        if (is_permuted)
            continue;
#endif
        bytes_of_lanes some = __builtin_convertvector(parts[i], bytes_of_lanes);
#if LANES == 8
        if (is_permuted)
            some = __builtin_shufflevector(some, some, 0, 4, 1, 5, 2, 6, 3, 7);
#elif LANES == 16
        if (is_permuted)
            some = __builtin_shufflevector(
                some, some, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
#endif
        memcpy(to + i * LANES, &some, sizeof some);
    }
}
#endif

/* A row as blocks of integers, see `mc_planes`. */
static void LEVEL(quantize)(
    const uint8_t *from, int type, int64_t columns, int codes, uint8_t *to)
{
    enum { PARTS = MC_BLOCK / LANES };
    int64_t bytes = mc_input_bytes(type);
    int is_permuted = mc_code_bits(codes) < 8;
    for (int64_t k = 0; k < columns; k += MC_BLOCK, to += sizeof(mc_planes)) {
        mc_planes *block = (mc_planes *)to;
        vf values[PARTS];
        vi most = {0};
        for (int i = 0; i < PARTS; i++) {
            values[i] = LEVEL(load)(
                from + (k + i * LANES) * bytes, type == MC_X_BF16 ? MC_BF16 : MC_F32);
            /* Sizes are in the order of their bits, NaN and infinities the largest. */
            vi size = (vi)values[i] & 0x7fffffff, larger = size > most;
            most = (larger & size) | (~larger & most);
        }
        int32_t bits = LEVEL(largest_of)(most);
        float max = mc_bits_to_float((uint32_t)bits);
        if (bits >= 0x7f800000 || !(max >= 0x1p-109f)) {
            memset(block, 0, sizeof *block);
            if (bits >= 0x7f800000) {
                block->scale = mc_bits_to_float(0x7fc00000);
                for (int i = 0; i < 3; i++)
                    block->totals[i] = 0.0f * block->scale;
            }
            continue;
        }
        float turns = 16256 / max;
        vi sums[2] = {{0}}, high[PARTS], low[PARTS];
        for (int i = 0; i < PARTS; i++) {
            /* To the nearest integer, ties to even, by the sum with 1.5 * 2^23. */
            vf nearest = (values[i] * turns + 12582912.0f) - 12582912.0f;
            vi part = __builtin_convertvector(nearest, vi);
            sums[i / (PARTS / 2)] += part;
#ifdef DOT_AVX2
            /* Columns 0, 4, 1, 5 are a row's first four bytes, or 0 to 3. */
            vh some = LEVEL(narrow)((vu)part & 0xffff);
            some = is_permuted ? __builtin_shufflevector(some, some, 0, 1, 4, 5, 2, 3, 6, 7)
                               : __builtin_shufflevector(some, some, 0, 2, 1, 3, 4, 6, 5, 7);
            memcpy(block->whole + i * LANES, &some, sizeof some);
#else
            high[i] = (part + 64) >> 7;
            low[i] = part - (high[i] << 7);
#endif
        }
#ifdef DOT_AVX2
        (void)high, (void)low;
#else
        LEVEL(put)(high, is_permuted, block->high);
        LEVEL(put)(low, is_permuted, block->low);
#endif
        LEVEL(two_sums)(sums[0], sums[1], block->sums);
        block->sums[2] = block->sums[0] + block->sums[1];
        block->scale = max / 16256 * mc_unit(codes);
        for (int i = 0; i < 3; i++)
            block->totals[i] = (float)block->sums[i] * block->scale;
    }
}
