/* The levels of instructions: each is an object of its own, of a file in `levels/`. */
#ifndef MOECACHE_LEVELS_H
#define MOECACHE_LEVELS_H

#include "_functions.h"

/* What the compiler knows of, and the build does not leave out (see setup.py). */
#if defined(__x86_64__) && defined(__GNUC__)
#define MC_X86 1
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#ifndef MC_WITHOUT_AVXVNNI
#define MC_AVXVNNI 1
#endif
#if defined(__linux__) && !defined(MC_WITHOUT_AMX)
#define MC_AMX 1
#endif
#endif
#endif
#if defined(__aarch64__) && defined(__GNUC__) && defined(__BYTE_ORDER__) \
    && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define MC_ARM 1
#endif

/* Functions between BEGIN and END are compiled for processors that have these instructions. */
#define MC_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define BEGIN(features) \
    MC_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END MC_PRAGMA(clang attribute pop)
#else
#define BEGIN(features) MC_PRAGMA(GCC push_options) MC_PRAGMA(GCC target(features))
#define END MC_PRAGMA(GCC pop_options)
#endif

/* Shared by the objects of one module, and by no other. */
#pragma GCC visibility push(hidden)

/* How many bytes ahead of those that are multiplied weights are asked for: once from memory, then from the second
 * cache; by one input, and by several. Processors foresee neither the next group of rows nor codes whose bits lie
 * apart. See `mc_use_level`. */
extern struct mc_distances {
    int64_t near, far;
} mc_ahead[2];
#define MC_FETCH(at, num)                                                                            \
    (__builtin_prefetch((at) + mc_ahead[(num) > 1].far, 0, 2),                                       \
     __builtin_prefetch((at) + mc_ahead[(num) > 1].near))

/* What a level has, all of it or what it changes of the one before. */
void mc_generic_set(mc_level *level);
void mc_avx2_set(mc_level *level);
void mc_avxvnni_set(mc_level *level);
void mc_avx512_set(mc_level *level);
void mc_avx512_bf16_set(mc_level *level);
void mc_amx_set(mc_level *level);
void mc_neon_set(mc_level *level);

/* What a thread does when there are no more items, or NULL. */
extern void (*mc_after_items)(void);

/* Whether the processor has AMX, and this process may not use it. */
extern int mc_tiles_are_refused;

/* The most levels that a processor has. */
#define MC_MAX_LEVELS 6

/* The levels that this processor has, the best one last; returns how many. */
int mc_levels(const mc_level **levels);

/* Ask for weights as far ahead as a level's loops read fastest, as measured; elsewhere 4096 bytes are near and far.
 * Sapphire Rapids reads by a tenth faster with two distances. So does Zen 4 with two short ones where one input takes
 * its wide registers no time, as what comes too early is gone again; its loops for AVX2 wait for arithmetic. */
void mc_use_level(const mc_level *level);

#pragma GCC visibility pop

#endif
