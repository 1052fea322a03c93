"""PythonPolicy: an eviction policy written in Python, driven like the compiled ones."""

cimport cython
from libc.stdint cimport int32_t

import numpy as np

from moecache.policies._ids cimport id_at
from moecache.policies._policy cimport RESIDENT, Policy, settle


@cython.final
cdef class PythonPolicy(Policy):
    """Wrap an object that decides which key is evicted. Each call takes the GIL.

    The object has `access(key)` for a hit, `insert(key)` for a key that was
    admitted, `remove(key)` for one that left, and `victim(held) -> key`, where
    `key in held` says that the key must stay: a step uses it, or it is pinned. It may
    have `begin_step(layer, ids)` (ids: int32 [rows, top_k], -1 for no expert),
    `begin_sequence()`, and `prefers(candidate, resident) -> bool`: whether a key that is
    read ahead is worth the slot of another. Without it what is read ahead takes free slots
    alone, unless it is more likely than not (`ExpertCache.claim`). After an error that it
    raises it is not asked again: `error` keeps it, and the lowest key that may leave is the
    victim.

    Parameters
    ----------
    capacity : int
        Most keys in the cache, at least 1.
    num_keys : int
        Keys are in [0, num_keys): layer * num_experts + expert, or the expert alone if
        each layer has a policy of its own.
    script : object

    Raises
    ------
    ValueError
        If the capacity is below 1.
    TypeError
        If the object lacks a method.
    """

    def __cinit__(self, int capacity, *, int num_keys, script):
        self.hold_at_most(capacity)
        for name in ("access", "insert", "remove", "victim"):
            if not callable(getattr(script, name, None)):
                raise TypeError(
                    f"a policy needs access(key), insert(key), remove(key) and victim(held); "
                    f"{type(script).__name__} has no {name}"
                )
        self.script = script
        self.on_step = getattr(script, "begin_step", None)
        self.on_sequence = getattr(script, "begin_sequence", None)
        self.on_prefers = getattr(script, "prefers", None)
        self.held = Held(self)

    @staticmethod
    def reraise(policies) -> None:
        """Raise what a policy raised, if one did."""
        for policy in policies:
            error = (<PythonPolicy>policy).error
            if error is not None:
                (<PythonPolicy>policy).error = None
                raise error

    cdef void fail(self, object error):
        # The first error counts: later ones are its consequences.
        if self.error is None:
            self.error = error

    cdef void begin_step(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* sequences,
    ) noexcept nogil:
        cdef Py_ssize_t i
        cdef int32_t[::1] view
        with gil:
            if self.on_step is None or self.error is not None:
                return
            try:
                flat = np.empty(rows * k, np.int32)
                view = flat
                for i in range(rows * k):
                    view[i] = <int32_t>id_at(ids, wide, i)
                self.on_step(layer, flat.reshape(rows, k))
            except BaseException as error:
                self.fail(error)

    cdef void access(self, int key) noexcept nogil:
        with gil:
            if self.error is None:
                try:
                    self.script.access(key)
                except BaseException as error:
                    self.fail(error)

    cdef void insert(self, int key, bint accessed) noexcept nogil:
        settle(self, key, RESIDENT)
        with gil:
            if self.error is None:
                try:
                    self.script.insert(key)
                except BaseException as error:
                    self.fail(error)

    cdef void remove(self, int key) noexcept nogil:
        self.forget(key)
        with gil:
            if self.error is None:
                try:
                    self.script.remove(key)
                except BaseException as error:
                    self.fail(error)

    cdef int victim(self) noexcept nogil:
        cdef int key = -1
        cdef Py_ssize_t chosen
        with gil:
            if self.error is None:
                try:
                    answer = self.script.victim(self.held)
                    chosen = answer
                    if not 0 <= chosen < self.num_keys or not self.nodes[chosen].segment:
                        raise ValueError(
                            f"{type(self.script).__name__}.victim returned {answer}, "
                            "which is not in the cache"
                        )
                    if self.nodes[chosen].blocked:
                        raise ValueError(
                            f"{type(self.script).__name__}.victim returned {answer}, which the "
                            "step at hand uses; ask `key in held`"
                        )
                    return <int>chosen
                except BaseException as error:
                    self.fail(error)
        # The cache or the replay raises the error later; until then some key must be evicted.
        for key in range(self.num_keys):
            if self.nodes[key].segment and not self.nodes[key].blocked:
                return key
        return -1

    cdef bint prefers(self, int candidate, int resident) noexcept nogil:
        with gil:
            if self.on_prefers is not None and self.error is None:
                try:
                    return bool(self.on_prefers(candidate, resident))
                except BaseException as error:
                    self.fail(error)
        return False

    cdef void begin_sequence(self) noexcept nogil:
        with gil:
            if self.on_sequence is not None and self.error is None:
                try:
                    self.on_sequence()
                except BaseException as error:
                    self.fail(error)


@cython.final
cdef class Held:
    """The keys that must stay."""

    def __cinit__(self, Policy policy not None):
        self.policy = policy

    def __contains__(self, Py_ssize_t key) -> bool:
        self.policy.checked(key)
        return self.policy.nodes[key].blocked != 0
