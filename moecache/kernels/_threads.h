/* Threads that share one job at a time: they sleep while there is none, and take its work in small
 * items. A thread that loses its processor in the middle of an item delays the whole job, on a busy
 * machine by milliseconds: then the thread that calls works alone for a while. */
#ifndef MOECACHE_THREADS_H
#define MOECACHE_THREADS_H

#include "_jobs.h"
#include "_levels.h"

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define MC_MAX_THREADS 256
/* The time that a thread looks at a counter before it sleeps, and how often it looks at the clock meanwhile:
 * longer than what a token computes alone between two products. */
#define MC_AWAKE_NS 20000
#define MC_LOOKS 16
/* Weights that are worth a second thread: one that is awake, and one that has to be woken. Less takes as long
 * as telling it. */
static int64_t mc_shared_bytes = 256 * 1024, mc_waking_bytes = 2 * 1024 * 1024;

/* A worker that is waited for longer, and longer than for two items, has lost its processor. */
#define MC_LATE_NS 300000
/* The time that the calling thread then works alone; it doubles each time, up to the second number. */
#define MC_ALONE_NS 20000000
#define MC_MOST_ALONE_NS 320000000

/* For tests: 0 and 0 have threads share whatever there is. */
static inline void mc_share_from(int64_t shared_bytes, int64_t waking_bytes)
{
    mc_shared_bytes = shared_bytes;
    mc_waking_bytes = waking_bytes;
}

static struct {
    pthread_mutex_t turn; /* held by the thread whose job it is */
    pthread_mutex_t lock; /* guards all below but `next` */
    pthread_cond_t wake, left;
    int num_workers; /* threads that were started */
    int num_awake;   /* of them, those that look or work */
    int num_wanted;  /* workers that may still join the job */
    int num_joined;  /* workers that are at it */
    uint64_t number; /* of the job */
    mc_work work;
    void *job;
    int64_t num_items;
    int64_t next; /* item to be taken */
    /* For the thread that has the turn: it works alone until then, and for `alone_ns` the next time. */
    int64_t alone_until_ns, alone_ns;
} mc_pool = {
    .turn = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .left = PTHREAD_COND_INITIALIZER,
};

static inline void mc_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t mc_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* Whether the workers that the caller waited for had lost their processors: the caller did `own_items`
 * in `own_ns`, and a worker's last item takes as long as one of those. */
static int mc_is_late(int64_t waited_ns, int64_t own_ns, int64_t own_items)
{
    return own_items > 0 && waited_ns > MC_LATE_NS && waited_ns > 2 * (own_ns / own_items);
}

/* Remember whether workers had processors. */
static void mc_note_wait(int64_t now_ns, int is_late)
{
    if (!is_late) {
        mc_pool.alone_ns -= mc_pool.alone_ns / 16;
        return;
    }
    mc_pool.alone_ns *= 2;
    if (mc_pool.alone_ns < MC_ALONE_NS)
        mc_pool.alone_ns = MC_ALONE_NS;
    if (mc_pool.alone_ns > MC_MOST_ALONE_NS)
        mc_pool.alone_ns = MC_MOST_ALONE_NS;
    mc_pool.alone_until_ns = now_ns + mc_pool.alone_ns;
}

/* Returns how many items were done here. */
static int64_t mc_take_items(mc_work work, void *job, int64_t num_items)
{
    int64_t item, done = 0;
    for (; (item = __atomic_fetch_add(&mc_pool.next, 1, __ATOMIC_RELAXED)) < num_items; done++)
        work(job, item);
    if (mc_after_items)
        mc_after_items();
    return done;
}

static void *mc_worker(void *unused)
{
    uint64_t seen = 0;
    (void)unused;
    mc_own_floats(); /* a thread begins with those of the one that started it */
    for (;;) {
        for (int64_t until_ns = mc_now_ns() + MC_AWAKE_NS; mc_now_ns() < until_ns;)
            for (int i = 0; i < MC_LOOKS; i++) {
                if (__atomic_load_n(&mc_pool.number, __ATOMIC_ACQUIRE) != seen) {
                    until_ns = 0;
                    break;
                }
                mc_relax();
            }
        pthread_mutex_lock(&mc_pool.lock);
        __atomic_sub_fetch(&mc_pool.num_awake, 1, __ATOMIC_RELAXED);
        while (mc_pool.number == seen)
            pthread_cond_wait(&mc_pool.wake, &mc_pool.lock);
        __atomic_add_fetch(&mc_pool.num_awake, 1, __ATOMIC_RELAXED);
        seen = mc_pool.number;
        if (mc_pool.num_wanted > 0) {
            mc_work work = mc_pool.work;
            void *job = mc_pool.job;
            int64_t num_items = mc_pool.num_items;
            mc_pool.num_wanted--;
            mc_pool.num_joined++;
            pthread_mutex_unlock(&mc_pool.lock);
            mc_take_items(work, job, num_items);
            pthread_mutex_lock(&mc_pool.lock);
            if (__atomic_sub_fetch(&mc_pool.num_joined, 1, __ATOMIC_RELEASE) == 0)
                pthread_cond_signal(&mc_pool.left);
        }
        pthread_mutex_unlock(&mc_pool.lock);
    }
    return NULL;
}

/* In the child of a fork there are no workers, whatever they were doing, and none that was late. */
static void mc_after_fork(void)
{
    pthread_mutex_init(&mc_pool.turn, NULL);
    pthread_mutex_init(&mc_pool.lock, NULL);
    pthread_cond_init(&mc_pool.wake, NULL);
    pthread_cond_init(&mc_pool.left, NULL);
    mc_pool.num_workers = mc_pool.num_awake = mc_pool.num_wanted = mc_pool.num_joined = 0;
    mc_pool.alone_until_ns = mc_pool.alone_ns = 0;
}

static void mc_start_workers(int num)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    if (mc_pool.num_workers >= num || pthread_attr_init(&attributes))
        return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* Signals are for threads that can handle them. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (mc_pool.num_workers < num) {
        pthread_t thread;
        /* With fewer threads it takes longer, that is all. */
        if (pthread_create(&thread, &attributes, mc_worker, NULL))
            break;
        mc_pool.num_workers++;
        __atomic_add_fetch(&mc_pool.num_awake, 1, __ATOMIC_RELAXED);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static void mc_share_as_set(int num_threads, mc_work work, void *job, int64_t num_items, int64_t bytes);

/* Do `work` for every item below `num_items`, with at most `num_threads` threads, this one
 * included; returns when all is done. Alone if another thread's job is under way, or if it takes no
 * longer than `bytes` of weights, read once, that are too few. */
static void mc_share(int num_threads, mc_work work, void *job, int64_t num_items, int64_t bytes)
{
    uint64_t floats = mc_own_floats();
    mc_share_as_set(num_threads, work, job, num_items, bytes);
    mc_restore_floats(floats);
}

static void mc_share_as_set(int num_threads, mc_work work, void *job, int64_t num_items, int64_t bytes)
{
    int is_awake = __atomic_load_n(&mc_pool.num_awake, __ATOMIC_RELAXED) > 0;
    if (num_items < num_threads)
        num_threads = (int)num_items;
    if (bytes < (is_awake ? mc_shared_bytes : mc_waking_bytes))
        num_threads = 1;
    int has_turn = num_threads > 1 && !pthread_mutex_trylock(&mc_pool.turn);
    if (!has_turn || mc_now_ns() < mc_pool.alone_until_ns) {
        for (int64_t item = 0; item < num_items; item++)
            work(job, item);
        if (mc_after_items)
            mc_after_items();
        if (has_turn)
            pthread_mutex_unlock(&mc_pool.turn);
        return;
    }
    pthread_mutex_lock(&mc_pool.lock);
    mc_start_workers(num_threads - 1);
    mc_pool.work = work;
    mc_pool.job = job;
    mc_pool.num_items = num_items;
    mc_pool.num_wanted = num_threads - 1;
    __atomic_store_n(&mc_pool.next, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&mc_pool.number, mc_pool.number + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&mc_pool.wake);
    pthread_mutex_unlock(&mc_pool.lock);
    int64_t began_ns = mc_now_ns(), own_items = mc_take_items(work, job, num_items);
    pthread_mutex_lock(&mc_pool.lock);
    /* Nobody joins any more; those who did are at their last items, and mostly done before a thread would
     * have fallen asleep and been woken. */
    mc_pool.num_wanted = 0;
    if (mc_pool.num_joined) {
        int64_t since_ns = mc_now_ns(), now_ns;
        pthread_mutex_unlock(&mc_pool.lock);
        while (__atomic_load_n(&mc_pool.num_joined, __ATOMIC_ACQUIRE)
               && mc_now_ns() < since_ns + MC_AWAKE_NS)
            mc_relax();
        pthread_mutex_lock(&mc_pool.lock);
        while (mc_pool.num_joined)
            pthread_cond_wait(&mc_pool.left, &mc_pool.lock);
        now_ns = mc_now_ns();
        mc_note_wait(now_ns, mc_is_late(now_ns - since_ns, since_ns - began_ns, own_items));
    }
    pthread_mutex_unlock(&mc_pool.lock);
    pthread_mutex_unlock(&mc_pool.turn);
}

#endif
