"""Declarations of the header beside this file."""

from libc.stdint cimport int64_t


cdef extern from "_locks.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)
    int pthread_cond_destroy(pthread_cond_t *condition)
    int pthread_cond_signal(pthread_cond_t *condition)
    int pthread_cond_broadcast(pthread_cond_t *condition)
    int mc_condition_init(pthread_cond_t *condition)
    void mc_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t timeout_ns)
    int64_t mc_clock_ns()
