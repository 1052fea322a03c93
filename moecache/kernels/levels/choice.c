/* Which levels this processor has, and how far ahead they read. */
#include "_levels.h"

#ifdef MC_X86
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

int mc_tiles_are_refused;
void (*mc_after_items)(void);
struct mc_distances mc_ahead[2] = {{4096, 4096}, {4096, 4096}};

#ifdef MC_AMX
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

#ifdef MC_ARM
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

/* The last level with what another one changes, behind it; returns how many there are then. */
static int mc_add(mc_level *all, int num, void (*set)(mc_level *level))
{
    if (num)
        all[num] = all[num - 1];
    set(&all[num]);
    return num + 1;
}

int mc_levels(const mc_level **levels)
{
    static mc_level all[MC_MAX_LEVELS];
    int num = mc_add(all, 0, mc_generic_set);
#ifdef MC_X86
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
        && __builtin_cpu_supports("f16c");
    int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f")
        && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    int has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16")
        && __builtin_cpu_supports("avx512vbmi");
    if (has_avx2)
        num = mc_add(all, num, mc_avx2_set);
#ifdef MC_AVXVNNI
    if (has_avx2 && __builtin_cpu_supports("avxvnni"))
        num = mc_add(all, num, mc_avxvnni_set);
#endif
    if (has_avx512)
        num = mc_add(all, num, mc_avx512_set);
    if (has_bf16)
        num = mc_add(all, num, mc_avx512_bf16_set);
#ifdef MC_AMX
    if (has_bf16 && mc_has_tiles())
        num = mc_add(all, num, mc_amx_set);
#endif
#endif
#ifdef MC_ARM
    if (mc_has_dots())
        num = mc_add(all, num, mc_neon_set);
#endif
    for (int i = 0; i < num; i++)
        levels[i] = &all[i];
    return num;
}

void mc_use_level(const mc_level *level)
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
