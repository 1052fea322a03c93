/* All functions of a level: included once in its object. Before: LEVEL(name), NAME, LANES, TOKENS (inputs of a
 * block), PLANES_MANY, PLANES_FEWER, VECTORS, and, where the level has them, FMA, F16C and the others that
 * `_vectors.h` and those below ask for; or ROLLED. */

#include "_vectors.h"
#include "_floats.h"
#include "_quantize.h"
#include "_attention.h"
#include "_delta.h"
#include "_scan.h"
#define PAGE(name) LEVEL(page_##name)
#define PAIRS 0
#include "_pages.h"
#include "_values.h"
#include "_codes.h"
#ifndef ROLLED
#include "_many_floats.h"
#endif
#include "_forms.h"
#include "_integers.h"
#include "_planes.h"

void LEVEL(set)(mc_level *level)
{
    *level = (mc_level){
        .name = NAME,
        .tiles[MC_X_F32] = {[MC_F32] = LEVEL(tile_f32), [MC_F16] = LEVEL(tile_f16),
                            [MC_BF16] = LEVEL(tile_bf16), [MC_E4M3] = LEVEL(tile_e4m3)},
        .activate = LEVEL(activate), .quantize = LEVEL(quantize),
        .form = LEVEL(form), .expand = LEVEL(expand), .read = LEVEL(read),
        .attend = LEVEL(attend), .score = LEVEL(score), .mix = LEVEL(mix),
        .delta = LEVEL(delta), .softplus = LEVEL(softplus),
        .fade = LEVEL(fade), .scan = LEVEL(scan), .gate = LEVEL(gate),
        .attend_page = {LEVEL(page_attend), LEVEL(page_attend)},
    };
    memcpy(level->planes, LEVEL(all_planes), sizeof level->planes);
#ifndef ROLLED
    level->many[MC_X_F32] = &LEVEL(many_floats);
#endif
#ifdef DOT_AVX2
    level->is_whole = 1;
#endif
}
