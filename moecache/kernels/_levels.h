/* What the processor can do: a table of tiles for each level, chosen once. */
#ifndef MOECACHE_LEVELS_H
#define MOECACHE_LEVELS_H

#include "_matrix.h"

/* "generic" is what every processor of this architecture has: SSE2, NEON. */
#define LEVEL(name) mc_generic_##name
#define LANES 4
#define TOKENS 2
#include "_level.h"
#include "_codes.h"
#include "_forms.h"
#include "_int8.h"
static const mc_level mc_generic = LEVEL_OF("generic", LEVEL, NULL);
#include "_level_end.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define MC_X86 1

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define LEVEL(name) mc_avx2_##name
#define LANES 8
#define TOKENS 2
#define FMA(a, b, c) (vf) _mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c))
#define F16C(raw) (vf) _mm256_cvtph_ps((__m128i)(raw))
#define WIDEN(raw) (vu) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(raw)))
#define NARROW(words) \
    (vh) _mm_packus_epi32(_mm256_castsi256_si128((__m256i)(words)), \
                          _mm256_extracti128_si256((__m256i)(words), 1))
#define PICK(table, at) (vf) _mm256_permutevar8x32_ps((__m256)(table), (__m256i)(at))
#define DOT_AVX2
#include "_level.h"
#include "_codes.h"
#include "_forms.h"
#include "_int8.h"
static const mc_level mc_avx2 = LEVEL_OF("avx2", LEVEL, NULL);
#undef DOT_AVX2
#include "_level_end.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")
#endif
#define LEVEL(name) mc_avx512_##name
#define LANES 16
#define TOKENS 4
#define FMA(a, b, c) (vf) _mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c))
#define F16C(raw) (vf) _mm512_cvtph_ps((__m256i)(raw))
#define WIDEN(raw) (vu) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(raw)))
#define NARROW(words) (vh) _mm512_cvtepi32_epi16((__m512i)(words))
#define PICK(table, at) (vf) _mm512_permutexvar_ps((__m512i)(at), (__m512)(table))
#include "_level.h"
#include "_codes.h"
#include "_forms.h"
#include "_avx512.h"
#define AVX2(name) mc_avx2_##name
static const mc_level mc_avx512 =
    LEVEL_OF("avx512", AVX2, NULL, NULL, mc_tile_bf16_dp, mc_tile_i8_dp, mc_tile_4_dp,
             mc_tile_e4m3_dp, mc_tile_4_dp, mc_tile_4_dp, mc_tile_4_dp, mc_tile_5_dp, mc_tile_5_dp,
             mc_tile_6_dp);
#undef AVX2
#include "_level_end.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

/* Integer products that a level may have or not. */
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
#define LEVEL(name) mc_vnni_##name
#define LANES 16
#define F16C(raw) (vf) _mm512_cvtph_ps((__m256i)(raw))
#define DOT_VNNI
#include "_vectors.h"
#include "_int8.h"
#undef DOT_VNNI
#include "_level_end.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

/* The levels that this processor has, the best one last; returns how many. */
static int mc_levels(const mc_level **levels)
{
    int num = 0;
    levels[num++] = &mc_generic;
#ifdef MC_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
        levels[num++] = &mc_avx2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) {
            mc_fill_tables();
            levels[num++] = &mc_avx512;
        }
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512vnni")) {
            /* The best level has them; the others keep their own, with the same bits. */
            static mc_level best;
            best = *levels[num - 1];
            best.tiles[MC_X_INT8][MC_I8] = mc_vnni_tile_i8_int8;
            best.tiles[MC_X_INT8][MC_I4] = mc_vnni_tile_i4_int8;
            levels[num - 1] = &best;
        }
    }
#endif
    return num;
}

#endif
