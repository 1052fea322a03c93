/* Codes of integers as bytes that are multiplied: included once for each level that multiplies integers.
 * With DOT_VNNI, bytes of weights are unsigned. */

#ifdef DOT_VNNI
/* Weights are unsigned: the number that is added to those that have signs, a power of two. */
#define FLIP 0x80808080
#define UNSIGNED 128
#else
#define FLIP 0
#define UNSIGNED 0
#endif

/* Whether integers have signs where they are multiplied. */
INLINE int LEVEL(has_sign)(int codes)
{
    return codes == MC_I8 || codes == MC_IQ4 || codes == MC_IQ2 || codes == MC_IQ3X;
}

/* Added to each integer of a code in what `unpack` returns: a power of two, if anything. */
INLINE int LEVEL(bias)(int codes)
{
    if (LEVEL(has_sign)(codes))
        return UNSIGNED;
    return mc_table(codes) ? 16 : mc_bias(codes);
}

/* Integers of codes of 4 bits that a table has, with the bias. */
INLINE vu LEVEL(look_up)(vu nibbles, int codes)
{
    uint8_t table[16];
    for (int i = 0; i < 16; i++)
        table[i] = (uint8_t)(mc_table(codes)[i] + LEVEL(bias)(codes));
#ifdef LOOK_UP
    vu all;
    for (int i = 0; i < LANES; i++) {
        uint32_t four;
        memcpy(&four, table + i % 4 * 4, 4);
        all[i] = four;
    }
    return LOOK_UP(all, nibbles);
#else
    uint8_t bytes[LANES * 4];
    memcpy(bytes, &nibbles, sizeof bytes);
    for (int i = 0; i < LANES * 4; i++)
        bytes[i] = table[bytes[i]];
    memcpy(&nibbles, bytes, sizeof bytes);
    return nibbles;
#endif
}

/* The integers of 16 columns, four columns of a row in each lane, from the codes of 32 at `at`. */
INLINE void LEVEL(unpack)(const uint8_t *at, int half, int codes, vu *words)
{
    int bits = mc_code_bits(codes);
    vu above = {0};
    if (bits == 5 || bits == 6)
        memcpy(&above, at + 256 + (bits - 5) * half * 64, sizeof above);
    if (bits == 5)
        above >>= 4 * half;
UNROLL(4)
    for (int j = 0; j < 4; j++) {
        vu lanes;
        memcpy(&lanes, at + (bits == 8 ? 4 * half + j : 2 * half + j / 2) * 64, sizeof lanes);
        if (bits == 8) {
            words[j] = LEVEL(by_rows)(lanes) ^ FLIP;
            continue;
        }
        words[j] = (j % 2 ? lanes >> 4 : lanes) & 0x0f0f0f0f;
        if (bits > 4)
            words[j] |= (above >> (bits - 4) * j & (bits == 5 ? 0x01010101 : 0x03030303)) << 4;
        if (mc_table(codes))
            words[j] = LEVEL(look_up)(words[j], codes);
    }
}

#undef FLIP
#undef UNSIGNED
