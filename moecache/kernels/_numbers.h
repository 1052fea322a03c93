/* Numbers of 16 and 32 bits, one at a time, and how a thread computes with them. */
#ifndef MOECACHE_NUMBERS_H
#define MOECACHE_NUMBERS_H

#include <stdint.h>
#include <string.h>

static inline float mc_bits_to_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t mc_float_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float mc_bf16_to_float(uint16_t bits) { return mc_bits_to_float((uint32_t)bits << 16); }

/* To the nearest, ties to even; a NaN stays one. */
static inline uint16_t mc_float_to_bf16(float value)
{
    uint32_t bits = mc_float_to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Exact, as every fp16 is an fp32; denormals by a product with 2^112. */
static inline float mc_f16_to_float(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7fff) << 13;
    float value = mc_bits_to_float(rest) * 0x1p112f;
    if (rest >= 0x0f800000) /* infinities and NaN */
        value = mc_bits_to_float(rest + 0x70000000);
    return mc_bits_to_float(mc_float_to_bits(value) | sign);
}

/* How a thread rounds and whether it takes denormals as zeros: torch's `set_flush_denormal` sets it for one
 * thread. Results shall not depend on which thread computes them: all do it as IEEE 754 says. */
static inline uint64_t mc_own_floats(void)
{
    uint64_t before = 0;
#if defined(__x86_64__)
    before = __builtin_ia32_stmxcsr();
    if (before & 0xe040) /* flush to zero, a rounding, denormals are zeros */
        __builtin_ia32_ldmxcsr((unsigned)before & ~0xe040u);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    if (before)
        __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
#endif
    return before;
}

static inline void mc_restore_floats(uint64_t before)
{
#if defined(__x86_64__)
    if (before & 0xe040)
        __builtin_ia32_ldmxcsr((unsigned)before);
#elif defined(__aarch64__)
    if (before)
        __asm__ volatile("msr fpcr, %0" : : "r"(before));
#endif
    (void)before;
}

#endif
