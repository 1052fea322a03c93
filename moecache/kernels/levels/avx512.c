/* AVX-512 with products of four bytes. */
#include "_levels.h"

#ifdef MC_X86
#include "_avx512_vectors.h"

BEGIN(AVX512)
#define NAME "avx512vnni"
#define TOKENS 4
#define PLANES_MANY 6
#define PLANES_FEWER 2
#define VECTORS 4
#include "_level.h"
END
#endif
