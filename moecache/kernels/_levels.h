/* The processor's level: a table of tiles for each, chosen once. */
#ifndef MOECACHE_LEVELS_H
#define MOECACHE_LEVELS_H

#include "_matrix.h"
#include "_threads.h"

/* Whether the processor has AMX, and this process may not use it. */
static int mc_tiles_are_refused;

/* How many bytes ahead of those that are multiplied weights are asked for: once from memory, then from the second
 * cache; by one input, and by several. Processors foresee neither the next group of rows nor codes whose bits lie
 * apart. See `mc_use_level`. */
static struct {
    int64_t near, far;
} mc_ahead[2] = {{4096, 4096}, {4096, 4096}};
#define MC_FETCH(at, num)                                                                            \
    (__builtin_prefetch((at) + mc_ahead[(num) > 1].far, 0, 2),                                       \
     __builtin_prefetch((at) + mc_ahead[(num) > 1].near))

#define MC_IS_WHOLE 0
/* "generic" is plain C, for what every processor of an architecture has: it defines what is equal. */
#define LEVEL(name) mc_generic_##name
#define LANES 4
#define TOKENS 2
#define PLANES_MANY 2
#define PLANES_FEWER 1
#include "_level.h"
#include "_quantize.h"
#include "_attention.h"
#include "_delta.h"
#include "_scan.h"
#define PAGE(name) LEVEL(page_##name)
#define PAIRS 0
#define VECTORS 2
#include "_pages.h"
#include "_values.h"
#include "_codes.h"
#include "_forms.h"
#include "_planes.h"
static const mc_level mc_generic = LEVEL_OF("generic");
#include "_level_end.h"

/* Functions between BEGIN and END are compiled for processors that have these instructions. */
#ifdef __clang__
#define MC_PRAGMA(text) _Pragma(#text)
#define BEGIN(features) \
    MC_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END MC_PRAGMA(clang attribute pop)
#else
#define MC_PRAGMA(text) _Pragma(#text)
#define BEGIN(features) MC_PRAGMA(GCC push_options) MC_PRAGMA(GCC target(features))
#define END MC_PRAGMA(GCC pop_options)
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define MC_X86 1

BEGIN("avx2,fma,f16c")
#define LEVEL(name) mc_avx2_##name
#define LANES 8
#define TOKENS 2
#define PLANES_MANY 4
#define PLANES_FEWER 1
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
#define DOT_AVX2
#include "_level.h"
#include "_quantize.h"
#include "_attention.h"
#include "_delta.h"
#include "_scan.h"
#define PAGE(name) LEVEL(page_##name)
#define PAIRS 0
#define VECTORS 2
#include "_pages.h"
#include "_values.h"
#include "_codes.h"
#include "_forms.h"
#include "_planes.h"
#undef DOT_AVX2
#undef MC_IS_WHOLE
#define MC_IS_WHOLE 1
static const mc_level mc_avx2 = LEVEL_OF("avx2");
#undef MC_IS_WHOLE
#define MC_IS_WHOLE 0
#include "_level_end.h"
END

/* AVX2 with integer products of its own width: the level before, but for its tiles of integers. */
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define MC_AVXVNNI 1
BEGIN("avx2,fma,f16c,avxvnni")
#define LEVEL(name) mc_avxvnni_##name
#define LANES 8
#define PLANES_MANY 3
#define PLANES_FEWER 1
#define FMA(a, b, c) (vf) _mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c))
#define F16C(raw) (vf) _mm256_cvtph_ps((__m128i)(raw))
#define WIDEN(raw) (vu) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(raw)))
#define LENGTHEN(raw) (vu) _mm256_cvtepu16_epi32((__m128i)(raw))
#define PICK(table, at) (vf) _mm256_permutevar8x32_ps((__m256)(table), (__m256i)(at))
#define LOOK_UP(table, at) (vu) _mm256_shuffle_epi8((__m256i)(table), (__m256i)(at))
#define DOT_VNNI(sum, w, x) \
    (vi) _mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(w), (__m256i)(x))
#include "_vectors.h"
#include "_quantize.h"
#include "_values.h"
#include "_planes.h"
#undef DOT_VNNI
static const mc_tile mc_avxvnni_tiles[MC_NUM_CODES][MC_FLAGS] = MC_PLANES;
#include "_level_end.h"
END
#endif

BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#define LEVEL(name) mc_avx512_##name
#define LANES 16
#define TOKENS 4
#define PLANES_MANY 6
#define PLANES_FEWER 2
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
#include "_level.h"
#include "_quantize.h"
#include "_attention.h"
#include "_delta.h"
#include "_scan.h"
#define PAGE(name) LEVEL(page_##name)
#define PAIRS 0
#define VECTORS 4
#include "_pages.h"
#include "_values.h"
#include "_codes.h"
#include "_forms.h"
#include "_planes.h"
#undef DOT_VNNI
static const mc_level mc_avx512 = LEVEL_OF("avx512");
END

/* Products of tiles. */
#if defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include <sys/syscall.h>
#include <unistd.h>
#define MC_AMX 1
BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#include "_amx_tiles.h"
#include "_amx.h"
END

/* Whether the processor has tiles and products of bytes and bf16, and Linux lets this process use them: it saves
 * 8 KiB more of a thread then, and wants to be asked (ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA). */
static int mc_has_tiles(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d >> 22 & 1 || ~d >> 24 & 1 || ~d >> 25 & 1)
        return 0;
    mc_tiles_are_refused = !!syscall(SYS_arch_prctl, 0x1023, 18);
    return !mc_tiles_are_refused;
}
#endif

/* Products of bf16, that a processor with AVX-512 may have or not. */
BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx512vbmi")
#include "_avx512.h"
#ifdef MC_AMX
#include "_amx_floats.h"
#include "_amx_rows.h"
#endif
#define PAGE(name) mc_avx512_page_dp_##name
#define PAIRS 1
#define VECTORS 4
#include "_pages.h"
#include "_level_end.h"
END
#endif

#if defined(__aarch64__) && defined(__GNUC__) && defined(__BYTE_ORDER__) \
    && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#define MC_ARM 1

BEGIN("arch=armv8.2-a+dotprod")
static inline uint32x4_t mc_four_bytes(const uint8_t *raw)
{
    uint32_t four;
    memcpy(&four, raw, 4);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}

#define LEVEL(name) mc_neon_##name
#define LANES 4
#define TOKENS 4
#define PLANES_MANY 4
#define PLANES_FEWER 1
#define FMA(a, b, c) (vf) vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b))
#define F16C(raw) (vf) vcvt_f32_f16((float16x4_t)(raw))
#define WIDEN(raw) (vu) mc_four_bytes(raw)
#define LOOK_UP(table, at) (vu) vqtbl1q_u8((uint8x16_t)(table), (uint8x16_t)(at))
#define DOT_NEON
#include "_level.h"
#include "_quantize.h"
#include "_attention.h"
#include "_delta.h"
#include "_scan.h"
#define PAGE(name) LEVEL(page_##name)
#define PAIRS 0
#define VECTORS 4
#include "_pages.h"
#include "_values.h"
#include "_codes.h"
#include "_forms.h"
#include "_planes.h"
#undef DOT_NEON
static const mc_level mc_neon = LEVEL_OF("neon");
#include "_level_end.h"
END

/* Whether the processor has the products of four bytes (dotprod): all of Apple's do. */
static int mc_has_dots(void)
{
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & 1 << 20) != 0; /* HWCAP_ASIMDDP, which older headers lack */
#elif defined(__APPLE__) || defined(__ARM_FEATURE_DOTPROD)
    return 1;
#else
    return 0;
#endif
}
#endif

/* The most levels that a processor has. */
#define MC_MAX_LEVELS 6

/* The levels that this processor has, the best one last; returns how many. */
static int mc_levels(const mc_level **levels)
{
    int num = 0;
    levels[num++] = &mc_generic;
#ifdef MC_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")
        || !__builtin_cpu_supports("f16c"))
        return num;
    levels[num++] = &mc_avx2;
#ifdef MC_AVXVNNI
    if (__builtin_cpu_supports("avxvnni")) {
        static mc_level with_vnni;
        with_vnni = mc_avx2;
        with_vnni.name = "avxvnni";
        memcpy(with_vnni.planes, mc_avxvnni_tiles, sizeof mc_avxvnni_tiles);
        with_vnni.quantize = mc_avxvnni_quantize;
        with_vnni.is_whole = 0;
        levels[num++] = &with_vnni;
    }
#endif
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512vnni")) {
        static mc_level without, best;
        without = best = mc_avx512;
        without.name = "avx512vnni";
        levels[num++] = &without;
        if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) {
            mc_fill_tables();
            best.name = "avx512";
            best.tiles[MC_X_BF16][MC_BF16] = mc_tile_bf16_dp;
            best.tiles[MC_X_BF16][MC_E4M3] = mc_tile_e4m3_dp;
            best.attend_page[MC_X_BF16] = mc_avx512_page_dp_attend;
            levels[num++] = &best;
#ifdef MC_AMX
            if (mc_has_tiles()) {
                static mc_level with_tiles;
                mc_fill_shapes();
                mc_after_items = mc_release_tiles;
                with_tiles = best;
                with_tiles.name = "amx";
                with_tiles.many[MC_X_PLANES] = &mc_many_planes;
                with_tiles.many[MC_X_BF16] = &mc_many_floats;
                with_tiles.tiles[MC_X_BF16][MC_BF16] = mc_tile_bf16_amx;
                with_tiles.tiles[MC_X_BF16][MC_E4M3] = mc_tile_e4m3_amx;
                levels[num++] = &with_tiles;
            }
#endif
        }
    }
#endif
#ifdef MC_ARM
    if (mc_has_dots())
        levels[num++] = &mc_neon;
#endif
    return num;
}

/* Ask for weights as far ahead as a level's loops read fastest, as measured; elsewhere 4096 bytes are near and far.
 * Sapphire Rapids reads by a tenth faster with two distances. So does Zen 4 with two short ones where one input takes
 * its wide registers no time, as what comes too early is gone again; its loops for AVX2 wait for arithmetic. */
static void mc_use_level(const mc_level *level)
{
    int64_t near = 4096, one_near = 4096, one_far = 4096;
#ifdef MC_X86
    if (__builtin_cpu_is("intel")) {
        near = one_near = 1024;
    } else if (__builtin_cpu_is("amd") && !strncmp(level->name, "avx512", 6)) {
        one_near = 256;
        one_far = 512;
    }
#else
    (void)level;
#endif
    mc_ahead[0].near = one_near;
    mc_ahead[0].far = one_far;
    mc_ahead[1].near = near;
}

#endif
