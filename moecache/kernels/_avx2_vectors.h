/* What AVX2 does with vectors: before `_vectors.h`. */

#include <immintrin.h>

#define LANES 8
#define FMA(a, b, c) (vf) _mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c))
#define F16C(raw) (vf) _mm256_cvtph_ps((__m128i)(raw))
#define JOIN(a, b) \
    (vb) _mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)(a)), (__m128i)(b), 1)
#define WIDEN(raw) (vu) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(raw)))
#define LENGTHEN(raw) (vu) _mm256_cvtepu16_epi32((__m128i)(raw))
#define NARROW(words) \
    (vh) _mm_packus_epi32(_mm256_castsi256_si128((__m256i)(words)), \
                          _mm256_extracti128_si256((__m256i)(words), 1))
#define PICK(table, at) (vf) _mm256_permutevar8x32_ps((__m256)(table), (__m256i)(at))
#define LOOK_UP(table, at) (vu) _mm256_shuffle_epi8((__m256i)(table), (__m256i)(at))
#define ANY(lanes) !_mm256_testz_si256((__m256i)(lanes), (__m256i)(lanes))
