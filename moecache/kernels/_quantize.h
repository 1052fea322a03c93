/* Inputs as integers: included once for each level whose products of integers have a form of their own. */

/* A row as blocks of integers, see `mc_planes`. */
static void LEVEL(quantize)(
    const uint8_t *from, int type, int64_t columns, int codes, uint8_t *to)
{
    enum { PARTS = MC_BLOCK / LANES };
    int64_t bytes = mc_input_bytes(type);
    int is_permuted = mc_code_bits(codes) < 8;
    for (int64_t k = 0; k < columns; k += MC_BLOCK, to += sizeof(mc_planes)) {
        mc_planes block = {0};
        vf values[PARTS];
        vi most = {0};
        for (int i = 0; i < PARTS; i++) {
            values[i] = LEVEL(load)(
                from + (k + i * LANES) * bytes, type == MC_X_BF16 ? MC_BF16 : MC_F32);
            /* Sizes are in the order of their bits, NaN and infinities the largest. */
            vi size = (vi)values[i] & 0x7fffffff, larger = size > most;
            most = (larger & size) | (~larger & most);
        }
        uint32_t bits = 0;
        for (int i = 0; i < LANES; i++)
            bits = (uint32_t)most[i] > bits ? (uint32_t)most[i] : bits;
        float max = mc_bits_to_float(bits);
        if (bits >= 0x7f800000) {
            block.scale = mc_bits_to_float(0x7fc00000);
        } else if (max >= 0x1p-109f) {
#ifdef DOT_AVX2
            typedef int16_t shorts8 __attribute__((vector_size(16)));
#else
            typedef int8_t bytes_of_lanes __attribute__((vector_size(LANES)));
            typedef int8_t bytes16 __attribute__((vector_size(16)));
#endif
            int32_t whole[MC_BLOCK];
            float turns = 16256 / max;
            block.scale = max / 16256 * mc_unit(codes);
            for (int i = 0; i < PARTS; i++) {
                /* To the nearest integer, ties to even, by the sum with 1.5 * 2^23. */
                vf nearest = (values[i] * turns + 12582912.0f) - 12582912.0f;
                vi part = __builtin_convertvector(nearest, vi);
                memcpy(whole + i * LANES, &part, sizeof part);
#ifndef DOT_AVX2
                vi high = (part + 64) >> 7;
                bytes_of_lanes above = __builtin_convertvector(high, bytes_of_lanes);
                bytes_of_lanes below = __builtin_convertvector(part - (high << 7), bytes_of_lanes);
                memcpy(block.high + i * LANES, &above, sizeof above);
                memcpy(block.low + i * LANES, &below, sizeof below);
#endif
            }
            for (int i = 0; i < MC_BLOCK; i++)
                block.sums[i / 16] += whole[i];
#ifdef DOT_AVX2
            for (int i = 0; i < MC_BLOCK; i += 8) {
                /* Columns 0, 4, 1, 5 are a row's first four bytes, or 0 to 3. */
                shorts8 some;
                for (int j = 0; j < 8; j++)
                    some[j] = (int16_t)whole[i + j];
                some = is_permuted ? __builtin_shufflevector(some, some, 0, 1, 4, 5, 2, 3, 6, 7)
                                   : __builtin_shufflevector(some, some, 0, 2, 1, 3, 4, 6, 5, 7);
                memcpy(block.whole + i, &some, sizeof some);
            }
#else
            for (int i = 0; i < MC_BLOCK && is_permuted; i += 16)
                for (int plane = 0; plane < 2; plane++) {
                    bytes16 some;
                    memcpy(&some, (plane ? block.low : block.high) + i, 16);
                    some = __builtin_shufflevector(
                        some, some, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
                    memcpy((plane ? block.low : block.high) + i, &some, 16);
                }
#endif
            block.sums[2] = block.sums[0] + block.sums[1];
        }
        for (int i = 0; i < 3; i++)
            block.totals[i] = (float)block.sums[i] * block.scale;
        memcpy(to, &block, sizeof block);
    }
}
