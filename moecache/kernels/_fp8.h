/* FP8 as pairs of bf16, for what multiplies those: included once in each object that does. */

#pragma GCC visibility push(hidden)
/* The sizes of FP8 in bf16, as low bytes and high bytes; filled once. */
extern struct mc_fp8_sizes {
    uint8_t low[128], high[128];
} mc_sizes;

/* By vectors: what tiles of AMX leave to them, too. */
void mc_tile_e4m3_dp(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int64_t num, float *out);
#pragma GCC visibility pop

/* The sizes' low bytes, by halves, and high bytes. */
#define MC_SIZES                                                                           \
    {                                                                                      \
        _mm512_loadu_si512(mc_sizes.low), _mm512_loadu_si512(mc_sizes.low + 64),           \
        _mm512_loadu_si512(mc_sizes.high), _mm512_loadu_si512(mc_sizes.high + 64),         \
    }

/* FP8 of four columns as bf16: the first two of each row, and the other two. */
INLINE void mc_fp8_pairs(const uint8_t *at, const __m512i *sizes, __m512i *first, __m512i *second)
{
    __m512i values = _mm512_loadu_si512(at);
    __m512i below = _mm512_permutex2var_epi8(sizes[0], values, sizes[1]);
    __m512i above = _mm512_permutex2var_epi8(sizes[2], values, sizes[3]);
    above = _mm512_ternarylogic_epi64(above, values, _mm512_set1_epi8(-128), 0xf8);
    *first = _mm512_unpacklo_epi8(below, above);
    *second = _mm512_unpackhi_epi8(below, above);
}
