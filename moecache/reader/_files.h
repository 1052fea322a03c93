/* Reads of a file: around its page cache, through it, and of no more than is in it. */
#ifndef MOECACHE_READER_FILES_H
#define MOECACHE_READER_FILES_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/vfs.h>
#endif

#ifndef O_DIRECT
#define O_DIRECT 0
#endif

/* A second descriptor of an open file that reads around the page cache, or -errno. It is
 * the same file, even if it was renamed. */
static inline int mc_open_direct(int descriptor)
{
#ifdef __linux__
    char path[40] = "/proc/self/fd/";
    char digits[16];
    int at = 0, to = 14, found, number = descriptor;
    do
        digits[at++] = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    while (at > 0)
        path[to++] = digits[--at];
    found = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    return found >= 0 ? found : -errno;
#else
    (void)descriptor;
    return -ENOSYS;
#endif
}

/* The alignment that direct reads need of offsets, lengths and addresses; 0 if the file
 * system would only pretend (tmpfs) or cannot read directly. */
static inline size_t mc_direct_alignment(int descriptor)
{
#ifdef __linux__
    struct statfs system;
    size_t alignment = 512, page = (size_t)sysconf(_SC_PAGESIZE);
    void *buffer = NULL;
    if (fstatfs(descriptor, &system) == 0 &&
        (system.f_type == 0x01021994 /* tmpfs */ || system.f_type == 0x858458f6 /* ramfs */))
        return 0;
#ifdef STATX_DIOALIGN
    {
        struct statx found;
        if (statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 &&
            (found.stx_mask & STATX_DIOALIGN)) {
            alignment = found.stx_dio_offset_align > found.stx_dio_mem_align
                            ? found.stx_dio_offset_align : found.stx_dio_mem_align;
            if (alignment == 0)
                return 0;
            alignment = alignment < 512 ? 512 : alignment;
        }
    }
#endif
    /* Ask the file itself: not every file system tells, and not all that tell are right. */
    if (posix_memalign(&buffer, page > 65536 ? page : 65536, 65536) != 0)
        return 0;
    for (; alignment <= 65536; alignment *= 2) {
        char *target = (char *)buffer + (alignment < 65536 ? alignment : 0);
        ssize_t count = pread(descriptor, target, alignment, 0);
        if (count >= 0 || errno != EINVAL)
            break;
    }
    free(buffer);
    return alignment <= 65536 ? alignment : 0;
#else
    (void)descriptor;
    return 0;
#endif
}

/* The bytes that were read, or -errno. */
static inline int64_t mc_preadv(
    int descriptor, const struct iovec *parts, int num_parts, uint64_t offset)
{
    ssize_t count = preadv(descriptor, parts, num_parts, (off_t)offset);
    return count >= 0 ? (int64_t)count : -(int64_t)errno;
}

/* The same for what is in the page cache; -EAGAIN for the rest. */
static inline int64_t mc_preadv_cached(
    int descriptor, const struct iovec *parts, int num_parts, uint64_t offset)
{
#ifdef RWF_NOWAIT
    ssize_t count = preadv2(descriptor, parts, num_parts, (off_t)offset, RWF_NOWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EOPNOTSUPP || errno == ENOSYS))
        return -EAGAIN;
    return count >= 0 ? (int64_t)count : -(int64_t)errno;
#else
    (void)descriptor, (void)parts, (void)num_parts, (void)offset;
    return -EAGAIN;
#endif
}

#endif
