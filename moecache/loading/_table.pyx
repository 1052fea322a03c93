"""LoadTable: the loads that are not over, by slot, and all that changes with them under a lock.

No byte moves here, and nothing waits.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from posix.unistd cimport getpid

import threading
from queue import Empty, SimpleQueue

import numpy as np

from moecache.errors import MoeCacheError, StoreError
from moecache.loading._counts cimport LoadCounts
from moecache.loading._load cimport DONE, QUEUED, READING, Load
from moecache.loading._step cimport Step
from moecache.loading.load import Cause, ReadCancelledError
from moecache.loading.staging import StagingSlots

cnp.import_array()

cdef object DEMAND = Cause.DEMAND
cdef object PREFETCH = Cause.PREFETCH


@cython.final
cdef class LoadTable:
    """Which expert is on its way into which slot, and for whom.

    A claim in the cache and the load that fills it are made under one lock, so that a step
    which joins a claim always finds its load.

    Parameters
    ----------
    store : ExpertStore
    pool : SlotPool
    cache : ExpertCache
    engine : Engine
        Told of reads that become urgent, or of no use; never asked to begin any.
    counts : LoadCounts

    Attributes
    ----------
    pool, cache, engine
        As given.
    lock : threading.Lock
    by_slot : dict of int to Load
    num_queued, num_reading : int
        Loads without buffers; those with buffers that did not begin ahead of a step.
    """

    def __cinit__(self, store, pool, cache, engine, LoadCounts counts not None):
        self.pool = pool
        self.cache = cache
        self.engine = engine
        self.counts = counts
        self.layout = store.layout
        self.lock = threading.Lock()
        self.by_slot = {}
        self.over = SimpleQueue()
        self.staging = StagingSlots(range(cache.capacity, pool.num_slots))
        self._process = getpid()
        self._to_announce = False

    # With or without the lock.

    cdef bint is_inherited(self) noexcept:
        """Whether this is another process than the one that made it."""
        return getpid() != self._process

    cdef int check_process(self) except -1:
        if self.is_inherited():
            raise MoeCacheError("this runtime is the parent process's; open one in the child")
        return 0

    cdef int check_open(self) except -1:
        self.check_process()
        if self.closed:
            raise MoeCacheError("the runtime is closed")
        return 0

    # After every section that held the lock.

    cdef int catch_up(self) except -1:
        """Take back what was left meanwhile by threads that found the lock taken."""
        while not self.over.empty() and self.lock.acquire(blocking=False):
            try:
                self.drain()
            finally:
                self.lock.release()
        if self._to_announce:
            self._to_announce = False
            self.engine.announce()
        return 0

    # Under the lock.

    cdef bint acquire(self, Step step) except -1:
        """Lease what is there, and queue the rest; return whether reads ahead were taken back."""
        cdef list misses
        self.check_open()
        if not self.over.empty():
            self.drain()
        count = self.cache.acquire(
            step.layer,
            step.ids,
            step.slots,
            step.misses,
            share=step.share,
            ignore_out_of_range=step.ignore_out_of_range,
            sequences=step.sequences,
        )
        self.counts.num_steps += 1
        if count == 0:
            self.counts.num_resident_steps += 1
        else:
            misses = step.misses[:count].tolist()
            try:
                self._load_misses(step, misses)
            except BaseException:
                self._undo(step, misses)
                raise
        return len(self.by_slot) > 0 and self._cancel_ahead(step.layer)

    cdef bint stage(self, Step step) except -1:
        """Queue bypassed experts, into staging slots that are free; return whether any was."""
        cdef Load load
        self.check_open()
        # Slots that were given back while the lock was taken.
        self.drain()
        chosen = step.bypassed[: self.staging.num_free]
        for expert in chosen:
            slot = self.staging.take()
            step.staged.add(slot)  # given back with the step, should anything fail
            load = Load(step.layer, expert, slot, step.cause, staged=True)
            load.waiting.append(step.arrived)
            step.loads.add(load)
            self._enqueue(load)
            step.staged.discard(slot)
        del step.bypassed[: len(chosen)]
        return len(chosen) > 0

    cdef bint can_stage(self, Py_ssize_t layer) except -1:
        """Whether a staging slot is free; CapacityError if it were no use to wait for one."""
        self.check_open()
        self.drain()
        if self.staging.num_free:
            return True
        self.staging.check_wait(layer)
        return False

    cdef Load read_ahead(self, Py_ssize_t layer, Py_ssize_t expert, cause, bint likely):
        """Return a new load that no step asked for, and that the caller submits; None: no slot."""
        cdef Load load
        cdef bint ahead = cause is PREFETCH
        cdef Py_ssize_t slot
        self.drain()
        slot = self.cache.claim(layer, expert, evict=ahead, foreseen=ahead, likely=likely)
        if slot < 0:
            return None
        load = Load(layer, expert, slot, cause)
        load.state = READING
        self.by_slot[slot] = load
        if ahead:
            self.counts.begin_prefetch(self._bytes_of(load))
        return load

    cdef list take_back(self):
        """Take back all reads ahead; return every load that no step waits for, made urgent."""
        cdef Load load
        cdef list unwanted = []
        self._cancel_ahead(-1)
        for load in self.by_slot.values():
            if not load.waiting:
                unwanted.append(load)
        for load in unwanted:
            self._hasten(load)
        return unwanted

    cdef list next_batch(self, most):
        """Return what is queued, and is being read from now on; `most`: with buffers, None: any."""
        cdef Load load
        cdef list batch = []
        cdef Py_ssize_t room = (
            self.num_queued if most is None else <Py_ssize_t>most - self.num_reading
        )
        for load in self.by_slot.values():
            if len(batch) >= room:
                break
            if load.state == QUEUED:
                batch.append(load)
        for load in batch:
            load.state = READING
        self.num_queued -= len(batch)
        self.num_reading += len(batch)
        return batch

    cdef bint end(self, Load load, error) except -1:
        """Publish a load whose slot is filled, or give the slot back.

        Returns False if it is to be read once more.
        """
        cdef bint ahead = load.began_ahead()
        cdef bint failed_before = isinstance(error, StoreError) and not load.waiting
        self.num_reading -= not ahead
        if error is not None and self.closed and not failed_before:
            error = ReadCancelledError("the runtime was closed")
        elif load.waiting and (isinstance(error, ReadCancelledError) or (ahead and error)):
            # A step that joined it shall not fail for another expert.
            self.counts.end_prefetch(load, self._bytes_of(load))
            load.cause = DEMAND if ahead else load.cause
            load.state, load.error = QUEUED, None
            self.num_queued += 1
            return False
        load.error = error
        self._retire(load)
        return True

    cdef int release(self, leased, staged) except -1:
        """Give slots back, of the cache and beside it."""
        if len(leased):
            slots = leased if isinstance(leased, np.ndarray) else np.array([*leased], np.int32)
            # In one order: the last end of a lease on a slot is the one that counts.
            self.pool.release_after_compute(slots)
            self.cache.release(slots)
        if staged:
            self.pool.release_after_compute(np.array([*staged], np.int32))
            for slot in staged:
                self._free_staged(slot)
        return 0

    cdef int drain(self) except -1:
        """Give back what steps that are over hold."""
        cdef Step step
        cdef Load load
        while not self.over.empty():
            try:
                step = self.over.get_nowait()
            except Empty:
                break
            for load in step.loads:
                self._leave(load, step.arrived)
            self.release(step.leased, step.staged)
        return 0

    cdef int _load_misses(self, Step step, list misses) except -1:
        cdef Load load
        cdef Py_ssize_t position, expert
        cdef const int32_t *slots = <const int32_t *>cnp.PyArray_DATA(step.slots)
        flat = step.ids.reshape(-1)
        for position in misses:
            expert = flat[position if position >= 0 else ~position]
            if position < 0:
                load = self.by_slot.get(slots[~position])
                if load is None:
                    raise MoeCacheError(
                        f"expert {expert} of layer {step.layer} was claimed in the cache "
                        "from outside the runtime; publish or abandon it first"
                    )
                self._hasten(load)
            elif slots[position] < 0:
                step.bypassed.append(expert)
                continue
            else:
                load = Load(step.layer, expert, slots[position], step.cause)
                self._enqueue(load)
            load.waiting.append(step.arrived)
            step.loads.add(load)
        return 0

    cdef int _undo(self, Step step, list misses) except -1:
        """Make a step hold nothing, as before it was acquired."""
        cdef Load load
        cdef Py_ssize_t position, slot
        for load in self.by_slot.values():
            if step.arrived in load.waiting:
                load.waiting.remove(step.arrived)
        for position in misses:
            slot = step.slots[position] if position >= 0 else -1
            if slot < 0:
                continue
            if self.by_slot.pop(slot, None) is not None:
                self.num_queued -= 1
                self.counts.end_urgent(False)
            self.cache.abandon(slot)
        self.cache.release(step.slots)
        step.slots.fill(-1)
        step.loads.clear()
        step.bypassed.clear()
        return 0

    cdef int _enqueue(self, Load load) except -1:
        self.counts.begin_urgent()
        try:
            self.by_slot[load.slot] = load
        except BaseException:
            self.counts.end_urgent(False)
            raise
        self.num_queued += 1
        return 0

    cdef int _hasten(self, Load load) except -1:
        if not load.urgent:
            self.counts.begin_urgent()
            load.urgent = True
            self.engine.hasten(load)
        return 0

    cdef bint _cancel_ahead(self, Py_ssize_t layer) except -1:
        """Take back what is read ahead for a layer that came without it; -1: for any layer."""
        cdef Load load
        cdef list unwanted = []
        for load in self.by_slot.values():
            if load.layer == layer or layer < 0:
                if load.is_useless():
                    unwanted.append(load)
        for load in unwanted:
            load.error = ReadCancelledError("the layer came without it")
            self.engine.cancel(load)
        return len(unwanted) > 0

    cdef int _leave(self, Load load, arrived) except -1:
        """Let a step wait for a load no longer."""
        if self.by_slot.get(load.slot) is not load:  # it was over before
            if load.staged:
                self._free_staged(load.slot)
            return 0
        load.waiting.remove(arrived)
        if load.waiting:
            return 0
        if load.staged:
            self.staging.orphan(load.slot)
        if load.state == QUEUED:
            self.num_queued -= 1
            load.state, load.error = DONE, ReadCancelledError("no step waits for it")
            self._retire(load)
        elif not load.began_ahead():
            # A read that has begun goes on, and its expert ends up in the cache.
            self.engine.cancel(load)
        return 0

    cdef int _retire(self, Load load) except -1:
        """Take a load that is over from the table, and publish its slot or give it back."""
        cdef bint filled = load.error is None
        cdef int64_t num_bytes = self._bytes_of(load)
        del self.by_slot[load.slot]
        self.counts.done(load, num_bytes)
        if load.urgent:
            self.counts.end_urgent(filled)
        self.counts.end_prefetch(load, num_bytes)
        if not load.staged:
            if filled:
                self.cache.publish(load.slot)
            else:
                self.cache.abandon(load.slot)
        elif not load.waiting:
            self._free_staged(load.slot)
        return 0

    cdef int _free_staged(self, Py_ssize_t slot) except -1:
        """Make a staging slot free."""
        if self.staging.give_back(slot):
            self._to_announce = True
        return 0

    cdef int64_t _bytes_of(self, Load load) except -1:
        return self.layout.expert_bytes(load.layer)
