/* The operating system's means for many reads at once: io_uring by raw system calls, direct
 * descriptors, aligned memory. Linux; elsewhere missing functions return ENOSYS. Nothing here
 * takes a lock or needs the GIL. Functions return 0 or an errno if not said otherwise. */
#ifndef MOECACHE_READER_H
#define MOECACHE_READER_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
/* Headers older than the kernel lack these; the numbers are ABI. */
#ifndef SYS_io_uring_setup
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#endif
#endif

#ifndef O_DIRECT
#define O_DIRECT 0
#endif

enum { MC_HUGE = 2 * 1024 * 1024 };

/* ------------------------------------------------------------------ faults, for tests
 * Debug and sanitizer builds let a test alter the result of every read, below everything
 * else: the nth results from now on are short, negative, zero or too long. */
#ifdef MOECACHE_FAULTS
enum { MC_SHORT = 1, MC_ERROR = 2, MC_ZERO = 3, MC_LONG = 4 };
static struct { int kind, error; int64_t skip, times; int refuse_ring; } mc_faults;

static int64_t mc_faulty(int64_t result, size_t asked)
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
#define MC_RING_REFUSED() mc_faults.refuse_ring
#else
#define mc_faulty(result, asked) (result)
#define MC_RING_REFUSED() 0
#endif

static void mc_inject(int kind, int error, int64_t skip, int64_t times, int refuse_ring)
{
#ifdef MOECACHE_FAULTS
    mc_faults.times = 0;
    mc_faults.kind = kind, mc_faults.error = error;
    mc_faults.skip = skip, mc_faults.refuse_ring = refuse_ring;
    __atomic_store_n(&mc_faults.times, times, __ATOMIC_SEQ_CST);
#else
    (void)kind, (void)error, (void)skip, (void)times, (void)refuse_ring;
#endif
}

static int mc_has_faults(void)
{
#ifdef MOECACHE_FAULTS
    return 1;
#else
    return 0;
#endif
}

/* ------------------------------------------------------------------ time and memory */
static int64_t mc_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Memory for direct reads, in huge pages where the system has them: pinning 4 KiB pages one
 * by one was measured to cost a direct read two thirds of its speed. NULL if there is none. */
static char *mc_map_buffers(size_t nbytes)
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

static void mc_unmap_buffers(char *buffers, size_t nbytes)
{
    size_t whole = (nbytes + 2 * (size_t)MC_HUGE - 1) / MC_HUGE * MC_HUGE - MC_HUGE;
    if (buffers != NULL)
        munmap(buffers, whole);
}

/* ------------------------------------------------------------------ descriptors */

/* A second descriptor of an open file that reads around the page cache, or -errno. It is
 * the same file, even if it was renamed. */
static int mc_open_direct(int descriptor)
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
static size_t mc_direct_alignment(int descriptor)
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

static int64_t mc_preadv(int descriptor, const struct iovec *parts, int num_parts,
                         uint64_t offset, size_t asked)
{
    ssize_t count = preadv(descriptor, parts, num_parts, (off_t)offset);
    (void)asked;
    return mc_faulty(count >= 0 ? (int64_t)count : -(int64_t)errno, asked);
}

/* The same for what is in the page cache; -EAGAIN for the rest. */
static int64_t mc_preadv_cached(int descriptor, const struct iovec *parts, int num_parts,
                                uint64_t offset, size_t asked)
{
#ifdef RWF_NOWAIT
    ssize_t count = preadv2(descriptor, parts, num_parts, (off_t)offset, RWF_NOWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EOPNOTSUPP || errno == ENOSYS))
        return -EAGAIN;
    return mc_faulty(count >= 0 ? (int64_t)count : -(int64_t)errno, asked);
#else
    (void)descriptor, (void)parts, (void)num_parts, (void)offset, (void)asked;
    return -EAGAIN;
#endif
}

/* ------------------------------------------------------------------ io_uring */
typedef struct {
    int descriptor; /* -1: closed */
    int has_timeout;
    unsigned num_entries;
    unsigned *submit_head, *submit_tail, submit_mask, *submit_array;
    unsigned *done_head, *done_tail, done_mask;
    void *entries, *done; /* struct io_uring_sqe, struct io_uring_cqe */
    void *ring;
    size_t ring_bytes, entries_bytes;
} mc_ring;

static void mc_ring_close(mc_ring *ring)
{
    if (ring->descriptor < 0)
        return;
    if (ring->entries != NULL)
        munmap(ring->entries, ring->entries_bytes);
    if (ring->ring != NULL)
        munmap(ring->ring, ring->ring_bytes);
    close(ring->descriptor);
    ring->descriptor = -1;
}

static int mc_ring_open(mc_ring *ring, unsigned num_entries)
{
#ifdef __linux__
    struct io_uring_params params;
    size_t submit_bytes, done_bytes;
    void *found;
    memset(ring, 0, sizeof *ring);
    memset(&params, 0, sizeof params);
    ring->descriptor = -1;
    if (MC_RING_REFUSED())
        return MC_RING_REFUSED();
    ring->descriptor = (int)syscall(SYS_io_uring_setup, num_entries, &params);
    if (ring->descriptor < 0)
        return errno;
    /* One mapping for both rings: Linux 5.4. Reads by IORING_OP_READV: 5.1. */
    if (!(params.features & IORING_FEAT_SINGLE_MMAP) ||
        !(params.features & IORING_FEAT_NODROP) ||
        !(params.features & IORING_FEAT_SUBMIT_STABLE)) {
        mc_ring_close(ring);
        return ENOSYS;
    }
    submit_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    done_bytes = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    ring->ring_bytes = submit_bytes > done_bytes ? submit_bytes : done_bytes;
    ring->entries_bytes = params.sq_entries * sizeof(struct io_uring_sqe);
    found = mmap(NULL, ring->ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                 ring->descriptor, IORING_OFF_SQ_RING);
    ring->ring = found == MAP_FAILED ? NULL : found;
    found = mmap(NULL, ring->entries_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                 ring->descriptor, IORING_OFF_SQES);
    ring->entries = found == MAP_FAILED ? NULL : found;
    if (ring->ring == NULL || ring->entries == NULL) {
        mc_ring_close(ring);
        return ENOMEM;
    }
#ifdef IORING_ENTER_EXT_ARG
    ring->has_timeout = (params.features & IORING_FEAT_EXT_ARG) != 0;
#endif
    ring->num_entries = params.sq_entries;
    ring->submit_head = (unsigned *)((char *)ring->ring + params.sq_off.head);
    ring->submit_tail = (unsigned *)((char *)ring->ring + params.sq_off.tail);
    ring->submit_mask = *(unsigned *)((char *)ring->ring + params.sq_off.ring_mask);
    ring->submit_array = (unsigned *)((char *)ring->ring + params.sq_off.array);
    ring->done_head = (unsigned *)((char *)ring->ring + params.cq_off.head);
    ring->done_tail = (unsigned *)((char *)ring->ring + params.cq_off.tail);
    ring->done_mask = *(unsigned *)((char *)ring->ring + params.cq_off.ring_mask);
    ring->done = (char *)ring->ring + params.cq_off.cqes;
    return 0;
#else
    (void)num_entries;
    memset(ring, 0, sizeof *ring);
    ring->descriptor = -1;
    return ENOSYS;
#endif
}

/* Entries pushed that the kernel has not taken yet. */
static unsigned mc_ring_waiting(const mc_ring *ring)
{
    return *ring->submit_tail - __atomic_load_n(ring->submit_head, __ATOMIC_ACQUIRE);
}

static int mc_ring_is_full(const mc_ring *ring)
{
    return mc_ring_waiting(ring) >= ring->num_entries;
}

/* Call under the owner's lock, and not when full. `elsewhere`: a thread of the kernel copies
 * bytes that are in the page cache, not the caller. */
static void mc_ring_push(mc_ring *ring, int descriptor, const struct iovec *parts,
                         int num_parts, uint64_t offset, void *piece, int elsewhere)
{
#ifdef __linux__
    unsigned tail = *ring->submit_tail, index = tail & ring->submit_mask;
    struct io_uring_sqe *entry = (struct io_uring_sqe *)ring->entries + index;
    memset(entry, 0, sizeof *entry);
    entry->opcode = IORING_OP_READV;
    entry->flags = elsewhere ? IOSQE_ASYNC : 0;
    entry->fd = descriptor;
    entry->addr = (uint64_t)(uintptr_t)parts;
    entry->len = (unsigned)num_parts;
    entry->off = offset;
    entry->user_data = (uint64_t)(uintptr_t)piece;
    ring->submit_array[index] = index;
    __atomic_store_n(ring->submit_tail, tail + 1, __ATOMIC_RELEASE);
#else
    (void)ring, (void)descriptor, (void)parts, (void)num_parts, (void)offset, (void)piece;
    (void)elsewhere;
#endif
}

/* A completion of nothing, which wakes the thread that waits in mc_ring_enter. */
static void mc_ring_push_nothing(mc_ring *ring)
{
#ifdef __linux__
    mc_ring_push(ring, -1, NULL, 0, 0, NULL, 0);
    ((struct io_uring_sqe *)ring->entries)[(*ring->submit_tail - 1) & ring->submit_mask].opcode =
        IORING_OP_NOP;
#else
    (void)ring;
#endif
}

/* Hand pushed entries to the kernel. With `wait`, wait for a completion up to `timeout_ns`
 * (before Linux 5.11: as long as it takes, or until a signal). */
static int mc_ring_enter(mc_ring *ring, int wait, int64_t timeout_ns)
{
#ifdef __linux__
    unsigned flags = wait ? IORING_ENTER_GETEVENTS : 0;
    void *argument = NULL;
    size_t argument_bytes = 0;
    long found;
#ifdef IORING_ENTER_EXT_ARG
    struct __kernel_timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    struct io_uring_getevents_arg extended;
    memset(&extended, 0, sizeof extended);
    extended.ts = (uint64_t)(uintptr_t)&timeout;
    if (wait && ring->has_timeout) {
        flags |= IORING_ENTER_EXT_ARG;
        argument = &extended;
        argument_bytes = sizeof extended;
    }
#endif
    (void)timeout_ns;
    found = syscall(SYS_io_uring_enter, ring->descriptor, mc_ring_waiting(ring), wait ? 1 : 0,
                    flags, argument, argument_bytes);
    return found >= 0 ? 0 : errno;
#else
    (void)ring, (void)wait, (void)timeout_ns;
    return ENOSYS;
#endif
}

static int mc_ring_has_done(const mc_ring *ring)
{
    return *ring->done_head != __atomic_load_n(ring->done_tail, __ATOMIC_ACQUIRE);
}

static int mc_ring_pop(mc_ring *ring, void **piece, int64_t *result);

/* Whether the kernel takes entries too: a filter may allow the set-up alone. */
static int mc_ring_try(mc_ring *ring)
{
    void *piece;
    int64_t result;
    int error;
    mc_ring_push_nothing(ring);
    error = mc_ring_enter(ring, 1, 1000000000);
    if (error == 0 && !mc_ring_pop(ring, &piece, &result))
        error = ETIME;
    if (error)
        mc_ring_close(ring);
    return error;
}

/* Call under the owner's lock. Whether there was a completion; `piece` is NULL for one of nothing. */
static int mc_ring_pop(mc_ring *ring, void **piece, int64_t *result)
{
#ifdef __linux__
    unsigned head = *ring->done_head;
    struct io_uring_cqe *entry;
    if (head == __atomic_load_n(ring->done_tail, __ATOMIC_ACQUIRE))
        return 0;
    entry = (struct io_uring_cqe *)ring->done + (head & ring->done_mask);
    *piece = (void *)(uintptr_t)entry->user_data;
    *result = entry->res;
    __atomic_store_n(ring->done_head, head + 1, __ATOMIC_RELEASE);
    return 1;
#else
    (void)ring, (void)piece, (void)result;
    return 0;
#endif
}

/* Wait on a condition for at most `timeout_ns`. */
static void mc_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t timeout_ns)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(timeout_ns / 1000000000);
    until.tv_nsec += (long)(timeout_ns % 1000000000);
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_cond_timedwait(condition, mutex, &until);
}

static int mc_condition_init(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    int error = pthread_condattr_init(&attributes);
    if (error)
        return error;
#ifdef __linux__
    error = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    if (error == 0)
        error = pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
    return error;
}

#endif
