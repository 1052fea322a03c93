/* Waiting on a condition by a clock that nobody sets. Linux's condition variables know it. */
#ifndef MOECACHE_READER_LOCKS_H
#define MOECACHE_READER_LOCKS_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

static inline int64_t mc_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Wait on a condition for at most `timeout_ns`. */
static inline void mc_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t timeout_ns)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)(timeout_ns / 1000000000);
    until.tv_nsec += (long)(timeout_ns % 1000000000);
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_cond_timedwait(condition, mutex, &until);
}

static inline int mc_condition_init(pthread_cond_t *condition)
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
