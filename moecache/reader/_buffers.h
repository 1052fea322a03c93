/* Memory that direct reads go into at full speed. */
#ifndef MOECACHE_READER_BUFFERS_H
#define MOECACHE_READER_BUFFERS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

enum { MC_HUGE = 2 * 1024 * 1024 };

/* In huge pages where the system has them: pinning 4 KiB pages one by one was measured to cost a
 * direct read two thirds of its speed. NULL if there is none. */
static inline char *mc_map_buffers(size_t nbytes)
{
    size_t whole = (nbytes + 2 * (size_t)MC_HUGE - 1) / MC_HUGE * MC_HUGE;
    uintptr_t raw, start;
    void *found = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED)
        return NULL;
    raw = (uintptr_t)found;
    start = (raw + MC_HUGE - 1) / MC_HUGE * MC_HUGE;
    whole -= MC_HUGE;
    if (start != raw)
        munmap(found, start - raw);
    munmap((char *)start + whole, MC_HUGE - (start - raw));
#ifdef MADV_HUGEPAGE
    (void)madvise((void *)start, whole, MADV_HUGEPAGE);
#endif
#ifdef MADV_DONTFORK
    /* A fork during a read must not make these pages copy-on-write. */
    (void)madvise((void *)start, whole, MADV_DONTFORK);
#endif
    return (char *)start;
}

static inline void mc_unmap_buffers(char *buffers, size_t nbytes)
{
    size_t whole = (nbytes + 2 * (size_t)MC_HUGE - 1) / MC_HUGE * MC_HUGE - MC_HUGE;
    if (buffers != NULL)
        munmap(buffers, whole);
}

#endif
