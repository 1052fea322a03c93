"""Partitions: a cache's policies, one for all layers or one for each."""

cimport cython
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

import threading

from moecache.policies._policy cimport Policy
from moecache.policies._python_policy cimport PythonPolicy

from moecache.errors import ConfigError
from moecache.policies.making import make_policies, policy_name


@cython.final
cdef class Partitions:
    """The policies of a cache, which no other cache may have from then on.

    While policies are written in Python, calls of the cache come one after another, and not from
    the policy: each begins with `enter` and ends with `leave`. The parameters are those of
    `make_policies`.
    """

    def __cinit__(self, policy, str scope, int num_layers, int num_experts, int capacity, counts):
        self.name = policy_name(policy)
        self.is_global = scope == "global"
        self.num_experts = num_experts
        self.each = make_policies(policy, scope, num_layers, num_experts, capacity, counts)
        self.take_policies()
        self.is_scripted = isinstance(self.each[0], PythonPolicy)
        self.turn = threading.Lock() if self.is_scripted else None
        self.num_lost = <int*>calloc(len(self.each), sizeof(int))
        if self.num_lost == NULL:
            raise MemoryError(f"no memory for the policies of {capacity} slots")

    def __dealloc__(self):
        free(self.num_lost)

    cdef int take_policies(self) except -1:
        # The cache's tables begin empty, so a policy must.
        for part in self.each:
            if (<Policy>part).is_taken or (<Policy>part).size:
                raise ConfigError(
                    f"this {type(part).__name__} has keys, or is in another cache; give a new one, "
                    "or a class or function that makes it"
                )
        for part in self.each:
            (<Policy>part).is_taken = True
        return 0

    cdef int take_turn(self) except -1:
        if self.thread == threading.get_ident():
            raise RuntimeError(f"{self.name} may not call the cache that asks it")
        self.turn.acquire()
        self.thread = threading.get_ident()
        return 0

    cdef void end_turn(self) noexcept:
        self.thread = 0
        self.turn.release()

    cdef int raise_error(self) except -1:
        """Raise what a policy in Python has raised, if any."""
        for part in self.each:
            error = (<PythonPolicy>part).error
            if error is None:
                continue
            if not isinstance(error, Exception):
                raise error
            raise ConfigError(
                f"policy {self.name} raised {type(error).__name__}: {error}"
            ) from error
        return 0

    cdef void heed_reset(self, uint64_t generation) noexcept:
        """Have policies that keep keys in the order of their counts read these anew."""
        if generation != self.generation:
            self.generation = generation
            for part in self.each:
                (<Policy>part).recount()
