/* The values of codes and of scales: included once for each level. */

/* FP8 whose lowest bit is bit `at` of a lane: sign, then 7 bits, which become those from the 26th on. */
INLINE vf LEVEL(fp8_number)(vu lanes, int at)
{
    return (vf)((vi)(lanes << (24 - at)) >> 4 & (int32_t)0x87f00000) * LEVEL(all)(0x1p120f);
}

/* All 7 bits set are no number. */
INLINE vf LEVEL(fp8)(vu lanes, int at)
{
    vi is_nan = (vi)(lanes >> at & 0x7f) == 0x7f;
    return (vf)((vi)LEVEL(fp8_number)(lanes, at) | is_nan);
}

/* LANES codes as numbers, each from bit `at` of 32 on; the caller has put codes of 5 and 6 bits together.
 * All are exact: exponents of few bits become those of fp32 by a product with a power of two, denormals
 * included. */
INLINE vf LEVEL(value)(vu lanes, int at, int codes)
{
    if (codes == MC_I8)
        return __builtin_convertvector((vi)(lanes << (24 - at)) >> 24, vf);
#ifdef PICK
    if (mc_table(codes) || (LANES == 16 && mc_code_bits(codes) == 4)) {
        /* 8 lanes look up 3 bits: the fourth is FP4's sign, or selects a half of the table. */
        float table[16];
        for (int i = 0; i < 16; i++)
            table[i] = mc_table(codes) ? (float)mc_table(codes)[i] * mc_unit(codes)
                                       : (float)(i - mc_bias(codes));
        if (codes == MC_E2M1)
            table[8] = -0.0f;
        vf low, high;
        memcpy(&low, table, sizeof low);
        vf picked = PICK(low, lanes >> at);
        if (LANES == 16)
            return picked;
        if (codes == MC_E2M1)
            return (vf)((vu)picked | (lanes >> at & 8) << 28);
        memcpy(&high, table + 8, sizeof high);
        vi is_high = (vi)(lanes << (28 - at)) >> 31;
        return (vf)((is_high & (vi)PICK(high, lanes >> at)) | (~is_high & (vi)picked));
    }
#endif
    if (mc_table(codes) && codes != MC_E2M1) {
        vi values;
        for (int i = 0; i < LANES; i++)
            values[i] = mc_table(codes)[lanes[i] >> at & 15];
        return __builtin_convertvector(values, vf) * mc_unit(codes);
    }
    if (codes == MC_E2M1) {
        vf size = (vf)((lanes >> at & 7) << 22) * LEVEL(all)(0x1p126f);
        return (vf)((vu)size | (lanes >> at & 8) << 28);
    }
    if (codes != MC_E4M3) {
        uint32_t mask = (1u << mc_code_bits(codes)) - 1;
        return __builtin_convertvector((vi)(lanes >> at & mask) - mc_bias(codes), vf);
    }
    return LEVEL(fp8)(lanes, at);
}

/* Scales, zero points or offsets of 16 rows, or LANES of them, without the factor of them all. */
INLINE vf LEVEL(scales)(const uint8_t *at, int scale)
{
    if (scale == MC_IN_STEPS)
        return __builtin_convertvector((vi)(LEVEL(widen)(at) << 24) >> 24, vf);
    if (mc_has_factor(scale))
        return LEVEL(value)(LEVEL(widen)(at), 0, MC_E4M3);
    return LEVEL(load)(at, scale);
}

INLINE vf LEVEL(scaled)(vf values, const uint8_t *tile, int scale)
{
    if (!mc_has_factor(scale))
        return values;
    vf factor = LEVEL(all)(mc_factor(tile));
    return scale == MC_DIVIDED ? values / factor : values * factor;
}
