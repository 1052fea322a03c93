/* AVX2, FMA and conversions of fp16: x86-64-v3. */
#include "_levels.h"

#ifdef MC_X86
#include "_avx2_vectors.h"

BEGIN("avx2,fma,f16c")
#define LEVEL(name) mc_avx2_##name
#define NAME "avx2"
#define TOKENS 2
#define PLANES_MANY 4
#define PLANES_FEWER 1
#define VECTORS 2
#define DOT_AVX2
#include "_level.h"
END
#endif
