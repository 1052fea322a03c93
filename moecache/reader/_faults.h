/* Faults, for tests. Debug and sanitizer builds let a test alter the result of every read, below
 * everything else: the nth results from now on are short, negative, zero or too long. A file that
 * includes this has faults of its own: `_reads.pyx`, which reads, is the only one. */
#ifndef MOECACHE_READER_FAULTS_H
#define MOECACHE_READER_FAULTS_H

#include <stddef.h>
#include <stdint.h>

#ifdef MOECACHE_FAULTS
enum { MC_HAS_FAULTS = 1 };
enum { MC_SHORT = 1, MC_ERROR = 2, MC_ZERO = 3, MC_LONG = 4 };
static struct { int kind, error; int64_t skip, times; int refuse_ring; } mc_faults;

static inline int64_t mc_faulty(int64_t result, size_t asked)
{
    if (__atomic_load_n(&mc_faults.times, __ATOMIC_RELAXED) <= 0)
        return result;
    if (__atomic_fetch_sub(&mc_faults.skip, 1, __ATOMIC_RELAXED) > 0)
        return result;
    if (__atomic_fetch_sub(&mc_faults.times, 1, __ATOMIC_RELAXED) <= 0)
        return result;
    switch (mc_faults.kind) {
    case MC_SHORT:
        return result > 1 ? result / 3 + 1 : result;
    case MC_ERROR:
        return -mc_faults.error;
    case MC_ZERO:
        return 0;
    default:
        return (int64_t)asked + 4096;
    }
}

/* The errno with which io_uring is to be refused, or 0. */
static inline int mc_refused_ring(void)
{
    return mc_faults.refuse_ring;
}

static inline void mc_inject(int kind, int error, int64_t skip, int64_t times, int refuse_ring)
{
    mc_faults.times = 0;
    mc_faults.kind = kind, mc_faults.error = error;
    mc_faults.skip = skip, mc_faults.refuse_ring = refuse_ring;
    __atomic_store_n(&mc_faults.times, times, __ATOMIC_SEQ_CST);
}
#else
enum { MC_HAS_FAULTS = 0 };

static inline int64_t mc_faulty(int64_t result, size_t asked)
{
    (void)asked;
    return result;
}

static inline int mc_refused_ring(void)
{
    return 0;
}

static inline void mc_inject(int kind, int error, int64_t skip, int64_t times, int refuse_ring)
{
    (void)kind, (void)error, (void)skip, (void)times, (void)refuse_ring;
}
#endif

#endif
