/* AVX2 with integer products of its own width: the level before, but for its tiles of integers. */
#include "_levels.h"

#ifdef MC_AVXVNNI
#include "_avx2_vectors.h"

BEGIN("avx2,fma,f16c,avxvnni")
#define LEVEL(name) mc_avxvnni_##name
#define PLANES_MANY 3
#define PLANES_FEWER 1
#define DOT_VNNI(sum, w, x) \
    (vi) _mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(w), (__m256i)(x))
#include "_vectors.h"
#include "_quantize.h"
#include "_values.h"
#include "_integers.h"
#include "_planes.h"

void mc_avxvnni_set(mc_level *level)
{
    level->name = "avxvnni";
    level->is_whole = 0;
    level->quantize = mc_avxvnni_quantize;
    memcpy(level->planes, mc_avxvnni_all_planes, sizeof level->planes);
}
END
#endif
