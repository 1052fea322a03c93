/* Products of bf16, that a processor with AVX-512 may have or not: the level before, but for its tiles of bf16 and
 * FP8, and the attention of a page. */
#include "_levels.h"

#ifdef MC_X86
#include "_avx512_vectors.h"

BEGIN(AVX512 ",avx512bf16,avx512vbmi")
#define VECTORS 4
#include "_vectors.h"
#include "_values.h"
#include "_fp8.h"
#include "_avx512.h"
#define PAGE(name) mc_avx512_page_dp_##name
#define PAIRS 1
#include "_pages.h"

void mc_avx512_bf16_set(mc_level *level)
{
    mc_fill_tables();
    level->name = "avx512";
    level->tiles[MC_X_BF16][MC_BF16] = mc_tile_bf16_dp;
    level->tiles[MC_X_BF16][MC_E4M3] = mc_tile_e4m3_dp;
    level->attend_page[MC_X_BF16] = mc_avx512_page_dp_attend;
}
END
#endif
