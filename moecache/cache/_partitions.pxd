"""Declarations of what is beside this file."""

cimport cython
from libc.stdint cimport uint64_t

from moecache.policies._policy cimport Policy


@cython.final
cdef class Partitions:
    cdef list each       # one Policy, or one per layer
    cdef bint is_global  # one
    cdef int num_experts
    cdef int* num_lost   # [len(each)] slots without an expert that are not free
    cdef str name
    cdef uint64_t generation

    # Of policies written in Python.
    cdef bint is_scripted
    cdef object turn
    cdef uint64_t thread  # the one whose turn it is, or 0

    cdef int take_policies(self) except -1
    cdef int take_turn(self) except -1
    cdef void end_turn(self) noexcept
    cdef int raise_error(self) except -1
    cdef void heed_reset(self, uint64_t generation) noexcept


# Inline functions rather than methods: every step calls these.
cdef inline int enter(Partitions partitions) except -1:
    # A policy in Python may let another thread run, which would find half a change.
    if partitions.is_scripted:
        partitions.take_turn()
    return 0


cdef inline void leave(Partitions partitions) noexcept:
    if partitions.is_scripted:
        partitions.end_turn()


cdef inline int heed_script(Partitions partitions) except -1:
    # The error of a policy in Python ends the next step, and every one after it.
    if partitions.is_scripted:
        partitions.raise_error()
    return 0


cdef inline int partition_of(Partitions partitions, int layer) noexcept nogil:
    return 0 if partitions.is_global else layer


cdef inline Policy policy_of(Partitions partitions, int layer):
    return <Policy>partitions.each[partition_of(partitions, layer)]


cdef inline int local_key(Partitions partitions, int key) noexcept nogil:
    # With one policy per layer, a key is the expert's number in its layer.
    return key if partitions.is_global else key % partitions.num_experts


cdef inline int room_left(Partitions partitions, Policy policy, int partition) noexcept nogil:
    return policy.capacity - policy.size - partitions.num_lost[partition]
