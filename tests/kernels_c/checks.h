/* What tests say and sum up. */
#ifndef CHECKS_H
#define CHECKS_H

#include <stdio.h>
#include <stdlib.h>

#include "_products.h"

static const mc_level *levels[MC_MAX_LEVELS];
static int num_levels;
static uint64_t sum = 0xcbf29ce484222325u;
static char what[64]; /* is tested */

static void check(int is_right, const mc_level *level, const char *problem)
{
    if (is_right)
        return;
    fprintf(stderr, "%s, level %s: %s\n", what, level->name, problem);
    exit(1);
}

/* FNV-1a. */
static void add_bytes(const void *bytes, int64_t num)
{
    for (int64_t i = 0; i < num; i++)
        sum = (sum ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3u;
}

/* Every NaN counts as the same: processors make them with other signs. */
static uint32_t bits_of(float value) { return value != value ? 0x7fc00000 : mc_float_to_bits(value); }

static void add_floats(const float *values, int64_t num)
{
    for (int64_t i = 0; i < num; i++) {
        uint32_t bits = bits_of(values[i]);
        add_bytes(&bits, 4);
    }
}

static int are_equal(const float *a, const float *b, int64_t num)
{
    for (int64_t i = 0; i < num; i++)
        if (bits_of(a[i]) != bits_of(b[i]))
            return 0;
    return 1;
}

static void print_sum(void)
{
    printf("%-32s %016llx\n", what, (unsigned long long)sum);
    sum = 0xcbf29ce484222325u;
}

#endif
