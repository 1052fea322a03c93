/* io_uring by raw system calls: a ring of reads that the kernel is to do, and one of those it has
 * done. Linux; elsewhere functions return ENOSYS. Nothing here takes a lock or needs the GIL.
 * Functions return 0 or an errno if not said otherwise. */
#ifndef MOECACHE_READER_RING_H
#define MOECACHE_READER_RING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/io_uring.h>
#include <sys/syscall.h>
/* Headers older than the kernel lack these; the numbers are ABI. */
#ifndef SYS_io_uring_setup
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#endif
#endif

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

static inline void mc_ring_close(mc_ring *ring)
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

static inline int mc_ring_open(mc_ring *ring, unsigned num_entries)
{
#ifdef __linux__
    struct io_uring_params params;
    size_t submit_bytes, done_bytes;
    void *found;
    memset(ring, 0, sizeof *ring);
    memset(&params, 0, sizeof params);
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
static inline unsigned mc_ring_waiting(const mc_ring *ring)
{
    return *ring->submit_tail - __atomic_load_n(ring->submit_head, __ATOMIC_ACQUIRE);
}

static inline int mc_ring_is_full(const mc_ring *ring)
{
    return mc_ring_waiting(ring) >= ring->num_entries;
}

/* Call under the owner's lock, and not when full. `elsewhere`: a thread of the kernel copies
 * bytes that are in the page cache, not the caller. */
static inline void mc_ring_push(
    mc_ring *ring, int descriptor, const struct iovec *parts, int num_parts, uint64_t offset,
    void *piece, int elsewhere)
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
static inline void mc_ring_push_nothing(mc_ring *ring)
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
static inline int mc_ring_enter(mc_ring *ring, int wait, int64_t timeout_ns)
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

static inline int mc_ring_has_done(const mc_ring *ring)
{
    return *ring->done_head != __atomic_load_n(ring->done_tail, __ATOMIC_ACQUIRE);
}

static inline int mc_ring_pop(mc_ring *ring, void **piece, int64_t *result);

/* Whether the kernel takes entries too: a filter may allow the set-up alone. */
static inline int mc_ring_try(mc_ring *ring)
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
static inline int mc_ring_pop(mc_ring *ring, void **piece, int64_t *result)
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

#endif
