/* Products of tiles: the level before, but for many inputs, and inputs of bf16. */
#include "_levels.h"

#ifdef MC_AMX
#include "_avx512_vectors.h"

BEGIN(AVX512)
#include "_vectors.h"
#include "_values.h"
#include "_integers.h"
#include "_amx_tiles.h"
#include "_amx.h"
END

BEGIN(AVX512 ",avx512bf16,avx512vbmi")
#include "_fp8.h"
#include "_amx_floats.h"
#include "_amx_rows.h"

void mc_amx_set(mc_level *level)
{
    mc_fill_shapes();
    mc_after_items = mc_release_tiles;
    level->name = "amx";
    level->many[MC_X_PLANES] = &mc_many_planes;
    level->many[MC_X_BF16] = &mc_many_floats;
    level->tiles[MC_X_BF16][MC_BF16] = mc_tile_bf16_amx;
    level->tiles[MC_X_BF16][MC_E4M3] = mc_tile_e4m3_amx;
}
END
#endif
