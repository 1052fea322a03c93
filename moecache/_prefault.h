/* The operating system's calls for the pages of a mapping. Every function returns 0 or an
 * errno, takes no lock of ours and needs no GIL. Linux; elsewhere there are hints and touches
 * alone. */
#ifndef MOECACHE_PREFAULT_H
#define MOECACHE_PREFAULT_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32
#include <windows.h>
#else
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#endif

#ifdef __linux__
#include <sys/syscall.h>
/* Headers older than the kernel lack these; the numbers are ABI. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif
#endif

static size_t mc_page_size(void)
{
#ifdef _WIN32
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
#else
    return (size_t)sysconf(_SC_PAGESIZE);
#endif
}

/* Linux 5.14 and later; EINVAL where the kernel does not know it. For writing, it gives private
 * memory pages of its own, where a read would map the shared page of zeros. Contents stay. */
static int mc_populate(uintptr_t address, size_t nbytes, int for_writing)
{
#ifdef __linux__
    int advice = for_writing ? MADV_POPULATE_WRITE : MADV_POPULATE_READ, tries = 0;
    for (;;) {
        if (madvise((void *)address, nbytes, advice) == 0)
            return 0;
        /* Both are passing conditions; pages that are in memory by now stay there. */
        if ((errno != EAGAIN && errno != EINTR) || ++tries == 10)
            return errno;
    }
#else
    (void)address, (void)nbytes, (void)for_writing;
    return EINVAL;
#endif
}

/* Start reading without waiting, step by step. A hint: the result may be ignored. */
static int mc_willneed(uintptr_t address, size_t nbytes, size_t step)
{
    size_t at = 0;
    int error = 0;
    while (at < nbytes && error == 0) {
        size_t part = nbytes - at < step ? nbytes - at : step;
#if defined(_WIN32)
        WIN32_MEMORY_RANGE_ENTRY range = {(void *)(address + at), part};
        error = PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0) ? 0 : EINVAL;
#else
        error = posix_madvise((void *)(address + at), part, POSIX_MADV_WILLNEED);
#endif
        at += part;
    }
    return error;
}

/* From now on the calling thread's reads are served when the disk has nothing else to do. A hint:
 * bfq and mq-deadline heed it, a disk without a scheduler does not. */
static void mc_read_when_idle(void)
{
#ifdef __linux__
    enum { WHO_PROCESS = 1, CLASS_IDLE = 3, CLASS_SHIFT = 13 };
    (void)syscall(SYS_ioprio_set, WHO_PROCESS, 0, CLASS_IDLE << CLASS_SHIFT);
#endif
}

/* Let the kernel use large folios and page-table entries, where it can. A hint. */
static int mc_huge(uintptr_t address, size_t nbytes)
{
#ifdef MADV_HUGEPAGE
    return madvise((void *)address, nbytes, MADV_HUGEPAGE) == 0 ? 0 : errno;
#else
    (void)address, (void)nbytes;
    return EINVAL;
#endif
}

/* Keep pages in memory until they are unmapped; reads them first. */
static int mc_lock(uintptr_t address, size_t nbytes)
{
#ifdef _WIN32
    return VirtualLock((void *)address, nbytes) ? 0 : ENOMEM;
#else
    return mlock((void *)address, nbytes) == 0 ? 0 : errno;
#endif
}

/* Take pages out of this process: those of a file stay in the page cache, others are gone. */
static int mc_unmap_pages(uintptr_t address, size_t nbytes)
{
#ifdef __linux__
    return madvise((void *)address, nbytes, MADV_DONTNEED) == 0 ? 0 : errno;
#else
    (void)address, (void)nbytes;
    return EINVAL;
#endif
}

/* Read the file's bytes from `offset`, for the page cache: `buffer` is scratch of `room` bytes. */
static int mc_read(int descriptor, uint64_t offset, size_t nbytes, char *buffer, size_t room)
{
#ifdef _WIN32
    (void)descriptor, (void)offset, (void)nbytes, (void)buffer, (void)room;
    return ENOSYS;
#else
    while (nbytes > 0) {
        ssize_t count = pread(descriptor, buffer, nbytes < room ? nbytes : room, (off_t)offset);
        if (count < 0) {
            if (errno == EINTR)
                continue;
            return errno;
        }
        if (count == 0) {
            /* A file ends within its last page; an earlier end is EFAULT, as for a populate. */
            size_t page = mc_page_size();
            return offset % page != 0 && nbytes < page ? 0 : EFAULT;
        }
        offset += (uint64_t)count;
        nbytes -= (size_t)count;
    }
    return 0;
#endif
}

static int64_t mc_now_ns(void)
{
#ifdef _WIN32
    return 0;
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
#endif
}

/* Whether pages of a file that are in memory are slow to read the first time.
 *
 * In a virtual machine they can be: where its host takes back what the guest has
 * freed (free page reporting, balloons), the disk's data arrives in host memory
 * that the guest's processor has no translation for yet, and the first access to
 * each page costs microseconds. Seen: 0.2 to 6.5 s for 4 GiB, all of it in memory.
 * So this reads pages here and there twice, and compares the two times.
 */
static int mc_first_read_is_slow(int descriptor, uint64_t offset, size_t nbytes)
{
    enum { SAMPLES = 64, ENOUGH = 2, SLOW_NS = 500 };
    size_t step = nbytes / SAMPLES, at;
    int slow = 0;
    char byte;
    if (step == 0)
        step = 1;
    for (at = 0; at < nbytes && slow < ENOUGH; at += step) {
        int64_t start = mc_now_ns(), first, second;
        if (mc_read(descriptor, offset + at, 1, &byte, 1) != 0)
            return 0;
        first = mc_now_ns();
        if (mc_read(descriptor, offset + at, 1, &byte, 1) != 0)
            return 0;
        second = mc_now_ns();
        slow += first - start > 2 * (second - first) + SLOW_NS;
    }
    return slow >= ENOUGH;
}

/* Read one byte of every page_size bytes, and the last byte. */
static void mc_touch(const volatile unsigned char *first, size_t nbytes, size_t page_size)
{
    size_t at;
    if (nbytes == 0)
        return;
    for (at = 0; at < nbytes; at += page_size) {
        (void)first[at];
        if (page_size > nbytes - at)
            break; /* at + page_size could overflow */
    }
    (void)first[nbytes - 1];
}

/* A byte per page; its lowest bit is set if the page is in memory. */
static int mc_mincore(uintptr_t address, size_t nbytes, unsigned char *pages)
{
#ifdef __linux__
    return mincore((void *)address, nbytes, pages) == 0 ? 0 : errno;
#else
    (void)address, (void)nbytes, (void)pages;
    return ENOSYS;
#endif
}

/* Pages of the file's bytes in the page cache: Linux 6.5 and later, else ENOSYS. */
static int mc_cachestat(int descriptor, uint64_t offset, uint64_t nbytes, uint64_t *num_pages)
{
#ifdef __linux__
    struct { uint64_t offset, nbytes; } range = {offset, nbytes};
    struct { uint64_t cached, dirty, writeback, evicted, recently_evicted; } counts;
    if (syscall(SYS_cachestat, descriptor, &range, &counts, 0) != 0)
        return errno;
    *num_pages = counts.cached;
    return 0;
#else
    (void)descriptor, (void)offset, (void)nbytes, (void)num_pages;
    return ENOSYS;
#endif
}

#endif
