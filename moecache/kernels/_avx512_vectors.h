/* What AVX-512 does with vectors: before `_vectors.h`. */

#include <immintrin.h>

#define AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#define LEVEL(name) mc_avx512_##name
#define LANES 16
#define FMA(a, b, c) (vf) _mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c))
#define F16C(raw) (vf) _mm512_cvtph_ps((__m256i)(raw))
#define JOIN_TWO(a, b) \
    _mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)(a)), (__m128i)(b), 1)
#define JOIN(a, b, c, d) \
    (vb) _mm512_inserti64x4(_mm512_castsi256_si512(JOIN_TWO(a, b)), JOIN_TWO(c, d), 1)
#define WIDEN(raw) (vu) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(raw)))
#define LENGTHEN(raw) (vu) _mm512_cvtepu16_epi32((__m256i)(raw))
#define NARROW(words) (vh) _mm512_cvtepi32_epi16((__m512i)(words))
#define PICK(table, at) (vf) _mm512_permutexvar_ps((__m512i)(at), (__m512)(table))
#define LOOK_UP(table, at) (vu) _mm512_shuffle_epi8((__m512i)(table), (__m512i)(at))
#define DOT_VNNI(sum, w, x) \
    (vi) _mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(w), (__m512i)(x))
