"""SlotLoader: slots claimed in the cache, and loads that fill them; _load.pyx has their states."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from posix.unistd cimport getpid

import threading
import time
import weakref
from queue import Empty, SimpleQueue

import numpy as np

from moecache.errors import CapacityError, MoeCacheError, StoreError
from moecache.interrupts import uninterrupted
from moecache.loading._counts cimport LoadCounts
from moecache.loading._guard import Guard
from moecache.loading._load cimport DONE, QUEUED, READING, Load, State
from moecache.loading._step cimport Step
from moecache.loading.filler import Filler
from moecache.loading.load import (
    Cause, ReadCancelledError, interrupted, log_failure, log_stuck, named,
)
from moecache.loading.staging import StagingSlots
from moecache.slots import HostSlots

cnp.import_array()

CLOSE_TIMEOUT_S = 2.0

cdef object DEMAND = Cause.DEMAND
cdef object BULK = Cause.BULK
cdef object PREFETCH = Cause.PREFETCH


@cython.final
cdef class SlotLoader:
    """Fill slots from a store.

    Ties cache, pool and engine together: a claim in the cache and the load that
    fills it are made under one lock, so that a step which joins a claim always
    finds its load. No byte moves under the lock.

    Parameters
    ----------
    store : ExpertStore
    pool : SlotPool
        Its slots from `cache.capacity` on are for staging.
    cache : ExpertCache
    engine : Engine
        Reads the store; closed with this.
    clock : callable () -> int, optional
        Returns nanoseconds; stalls are measured with it.

    Attributes
    ----------
    pool, engine
        As given.
    counts : LoadCounts
    num_staging : int
        Slots beside the cache's.
    prefetch_done : callable (load)
        Called with every read ahead that ended, well or not; never under the lock.
    """

    cdef object _store
    cdef readonly object engine, clock
    cdef public object pool, _cache, prefetch_done
    cdef readonly object _lock, _making_room
    cdef readonly dict _loads
    cdef readonly Py_ssize_t _num_queued, _num_reading, num_staging
    cdef readonly LoadCounts counts
    cdef object _over, _staging, _filled, _filler
    cdef set _logged
    cdef bint _to_announce, _closed
    cdef int _process
    cdef object __weakref__

    def __cinit__(self, store, pool, cache, engine, *, clock=time.perf_counter_ns):
        self._closed = True  # until everything is there
        self._store = store
        self.pool = pool
        self._cache = cache
        self.engine = engine
        self.clock = clock
        self._lock = threading.Lock()
        self._loads = {}  # by slot, in the order in which they were claimed
        self._num_queued = 0
        self._num_reading = 0  # with buffers, and not ahead of a step
        self._over = SimpleQueue()  # steps that are over, to be given back
        self._staging = StagingSlots(range(cache.capacity, pool.num_slots))
        self._to_announce = False
        self._process = getpid()
        self._logged = set()
        # Steps that wait until no unwanted load holds a slot: weakly, as an interrupt may come.
        self._making_room = weakref.WeakSet()
        self.counts = LoadCounts(clock)
        self.num_staging = self._staging.num_slots
        self.prefetch_done = _ignore
        # Slots that the engine itself brings into compute form, as far as it can.
        self._filled = pool if isinstance(pool, HostSlots) and engine.fills else None
        self._filler = None
        self._closed = False

    @property
    def num_in_flight(self):
        """Experts that are being read, or wait for it."""
        return len(self._loads)

    def guard(self, Step step not None):
        """Return what gives back all that a step holds, when it is closed or dropped.

        Follow `close` by `give_back`; without it, the next call of the loader's does that.
        """
        return Guard(self._over, step)

    def acquire(self, Step step not None):
        """Lease what is there and start to load the rest; see `ExpertCache.acquire`.

        Sets `step.slots`, `step.loads` (experts on their way, each to be put into
        `step.arrived` when it is there) and `step.bypassed`.

        Raises
        ------
        CapacityError
            If the slots that leases and pins leave are too few. Nothing is held.
        """
        self._look()
        try:
            self._acquire(step)
            return
        except CapacityError:
            pass
        # Loads that no step waits for may hold slots which the step would have had without
        # them, or did a moment ago.
        self._making_room.add(step)
        try:
            self._wait_for_unwanted()
            self._acquire(step)
        finally:
            self._making_room.discard(step)

    def prefetch(
        self, Py_ssize_t layer, Py_ssize_t expert, *, cause=PREFETCH, bint likely=False
    ):
        """Read an expert that no step asked for, behind everything that a step waits for.

        With a reader, this returns as soon as the reader has the expert's runs; a later call of
        `look` or `wait` takes in what was read. Without one, the calling thread reads.

        Returns
        -------
        bool
            False if the expert is there or on its way, there is no slot for it (a warm start takes
            none from another; `likely`: see `ExpertCache.claim`), or the runtime is closed.
        """
        cdef Load load
        cdef bint ahead = cause is PREFETCH
        cdef Py_ssize_t slot
        with uninterrupted():
            with self._lock:
                if self._closed or self._making_room:
                    return False
                self._drain()
                slot = self._cache.claim(layer, expert, evict=ahead, foreseen=ahead, likely=likely)
                if slot < 0:
                    return False
                load = Load(layer, expert, slot, cause)
                load.state = READING
                self._loads[slot] = load
                if ahead:
                    self.counts.begin_prefetch(self._bytes_of(load))
            self._submit([load], True)
            # Joined, or of no use any more, before the engine had it.
            if load.urgent:
                self.engine.hasten(load)
            elif load.was_taken_back():
                self.engine.cancel(load)
        self._look()
        return True

    def count_resident_steps(self, int64_t num=1):
        """Count steps that found everything there, and leased nothing."""
        with self._lock:
            self._check_open()
            self.counts.num_steps += num
            self.counts.num_resident_steps += num

    def stage(self, Step step not None):
        """Start to load bypassed experts into free staging slots; return whether any was free."""
        cdef Load load
        with uninterrupted():
            try:
                with self._lock:
                    self._check_open()
                    # Slots that were given back while the lock was taken.
                    self._drain()
                    chosen = step.bypassed[: self._staging.num_free]
                    for expert in chosen:
                        slot = self._staging.take()
                        step.staged.add(slot)  # given back with the step, should anything fail
                        load = Load(step.layer, expert, slot, step.cause, staged=True)
                        load.waiting.append(step.arrived)
                        step.loads.add(load)
                        self._enqueue(load)
                        step.staged.discard(slot)
                    del step.bypassed[: len(chosen)]
            finally:
                self._after_lock()
            self._issue()
        return bool(chosen)

    def wait_for_staging(self, Py_ssize_t layer):
        """Wait for a moment at least, until a staging slot may be free.

        Raises
        ------
        CapacityError
            If waiting could last for ever: an unfinished step of this thread holds some.
        """
        seen = self.engine.epoch
        with uninterrupted(), self._lock:
            self._check_open()
            self._drain()
            if self._staging.num_free:
                return
            self._staging.check_wait(layer)
        self.engine.wait(seen)
        self._take_in()

    def start_filler(self):
        """Have a thread take in what has arrived; callers that wait take part."""
        self._filler = Filler(self)

    def look(self):
        """Take in what has arrived, without waiting, unless a thread does that."""
        self._look()

    cdef int _look(self) except -1:
        if self._filler is not None and self._filler.is_alive:
            return 0
        if self._loads and getpid() == self._process and self.engine.poll():
            self._take_in()
        return 0

    def wait(self, arrived):
        """Return the next load that is over, taking part in the reading meanwhile."""
        self._check_process()
        while True:
            seen = self.engine.epoch
            self._take_in()
            try:
                # There is nothing to wait for in a closed engine: `close` tells every step.
                return arrived.get(block=self._closed, timeout=0.05)
            except Empty:
                if not self._closed:
                    self.engine.wait(seen)

    def arrivals(self, Step step not None):
        """Return at least one load of a step that is over, and every other that is by then.

        Raises
        ------
        StoreError
            If one could not be read; all of them are accounted for before.
        """
        cdef Load load
        cdef list done = []
        self._look()
        if step.arrived.empty():
            started = self.clock()
            done.append(self.wait(step.arrived))
            self._cache.profiler.record_miss_stall(self.clock() - started)
        while not step.arrived.empty():  # nobody else takes from it
            done.append(step.arrived.get_nowait())
        for load in done:
            if load.staged:
                step.staged.add(load.slot)
            step.loads.discard(load)
        for load in done:
            if load.error is not None:
                raise load.error
        return done

    def compute_token(self, Step step not None, compute):
        """Have the experts of a token's step computed: those that are there, then the others.

        Parameters
        ----------
        step : Step
            Acquired, of one token.
        compute : callable (slots, places)
            Called with the step's slots, and a list of the places whose experts are to be
            computed, in each call others.

        Returns
        -------
        bool
            False, and nothing was computed, if an expert comes twice or has no slot.
        """
        cdef Load load
        cdef Py_ssize_t place, size = cnp.PyArray_SIZE(step.slots)
        cdef const int32_t *slots = <const int32_t *>cnp.PyArray_DATA(step.slots)
        cdef dict places = {}
        cdef list ready = []
        cdef set coming
        if step.bypassed:
            return False
        for place in range(size):
            if slots[place] < 0 or slots[place] in places:
                return False
            places[slots[place]] = place
        coming = {load.slot for load in step.loads}
        for place in range(size):
            if slots[place] not in coming:
                ready.append(place)
        if ready:
            compute(step.slots, ready)
        while step.loads:
            compute(step.slots, [places[load.slot] for load in self.arrivals(step)])
        return True

    def release(self, leased, staged=()):
        """Give slots back, once computations that use them are issued."""
        if getpid() != self._process:
            return
        with uninterrupted():
            with self._lock:
                self._release(leased, staged)
            self._after_lock()

    def give_back(self):
        """Take back what steps that are over hold, now or as soon as the lock is free.

        Never waits for the lock: an iterator of waves may be closed by the
        garbage collector, in the middle of a section that holds it.
        """
        if getpid() == self._process:
            with uninterrupted():
                self._after_lock()

    def close(self):
        """Stop reading; a second call does nothing.

        Steps that wait for loads get an error. Returns after at most two seconds,
        even if a read hangs.
        """
        cdef Load load
        with self._lock:
            if self._closed:
                return
            self._closed = True
        num_stuck = self.engine.close(CLOSE_TIMEOUT_S)
        if self._filler is not None:
            self._filler.close(CLOSE_TIMEOUT_S)
        self._take_in()
        with self._lock:
            left = list(self._loads.values())
        for load in left:
            if self._is_done(load):
                self._conclude(load, ReadCancelledError("the runtime was closed"))
        self.engine.announce()
        if num_stuck:
            log_stuck(num_stuck)

    def __del__(self):
        """End the threads of a runtime that was dropped without `close`."""
        if not self._closed and getpid() == self._process:
            self.engine.close(0.5)
            if self._filler is not None:
                self._filler.close(0)

    # From a step to its loads.

    cdef int _acquire(self, Step step) except -1:
        cdef bint cancelled = False
        cdef list misses
        with uninterrupted():
            try:
                with self._lock:
                    self._check_open()
                    if not self._over.empty():
                        self._drain()
                    count = self._cache.acquire(
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
                    if self._loads:
                        cancelled = self._cancel_prefetches(step.layer)
            finally:
                self._after_lock()
            if self._num_queued:
                self._issue()
            if cancelled:
                self._look()

    cdef int _load_misses(self, Step step, list misses) except -1:
        cdef Load load
        cdef Py_ssize_t position, expert
        cdef const int32_t *slots = <const int32_t *>cnp.PyArray_DATA(step.slots)
        flat = step.ids.reshape(-1)
        for position in misses:
            expert = flat[position if position >= 0 else ~position]
            if position < 0:
                load = self._loads.get(slots[~position])
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

    cdef int _undo(self, Step step, list misses) except -1:
        """Make a step hold nothing, as before it was acquired."""
        cdef Load load
        cdef Py_ssize_t position, slot
        for load in self._loads.values():
            if step.arrived in load.waiting:
                load.waiting.remove(step.arrived)
        for position in misses:
            slot = step.slots[position] if position >= 0 else -1
            if slot < 0:
                continue
            if self._loads.pop(slot, None) is not None:
                self._num_queued -= 1
                self.counts.end_urgent(False)
            self._cache.abandon(slot)
        self._cache.release(step.slots)
        step.slots.fill(-1)
        step.loads.clear()
        step.bypassed.clear()

    cdef int _enqueue(self, Load load) except -1:
        self.counts.begin_urgent()
        try:
            self._loads[load.slot] = load
        except BaseException:
            self.counts.end_urgent(False)
            raise
        self._num_queued += 1
        return 0

    cdef int _hasten(self, Load load) except -1:
        if not load.urgent:
            self.counts.begin_urgent()
            load.urgent = True
            self.engine.hasten(load)
        return 0

    # From the queue to the engine, without the lock.

    cdef int _issue(self) except -1:
        """Give the engine what is queued, as much as there are buffers for."""
        cdef Load load
        cdef list batch
        cdef Py_ssize_t room
        most = self.pool.max_buffers
        while self._num_queued:
            with self._lock:
                room = self._num_queued if most is None else <Py_ssize_t>most - self._num_reading
                batch = []
                for load in self._loads.values():
                    if len(batch) >= room:
                        break
                    if load.state == QUEUED:
                        batch.append(load)
                for load in batch:
                    load.state = READING
                self._num_queued -= len(batch)
                self._num_reading += len(batch)
            if not batch:
                break
            self._submit(batch, False)
        return 0

    cdef int _submit(self, list batch, bint deferred) except -1:
        cdef Load load
        cdef list left = list(batch)  # the engine empties it once it has them
        started = self.clock()
        try:
            filled = self._filled
            for load in batch:
                load.parts = self.pool.buffers(load.slot, load.layer)
                if filled is not None:
                    load.fills = filled.fills(load.slot, load.layer)
                    load.is_wrong = False
            self.engine.submit(left, deferred=deferred)
            if self._filler is not None:
                self._filler.wake()
        except BaseException as error:
            for load in left:
                failure = error if isinstance(error, Exception) else interrupted(load)
                if self._is_done(load):
                    self._conclude(load, failure.with_traceback(None))
            if not isinstance(error, Exception):
                raise
        if self.engine.reads_in_submit and not deferred:
            self._cache.profiler.record_miss_stall(self.clock() - started)
        return 0

    # From the engine to the steps that wait, without the lock.

    def fill(self):
        """Wait for a moment, and take in what has arrived; False if nothing is on its way."""
        seen = self.engine.epoch
        self._take_in()
        if self._closed or not self._loads or getpid() != self._process:
            return False
        self.engine.wait(seen)
        return True

    cdef int _take_in(self) except -1:
        """Bring in every load that was read, and give the engine what waits for buffers."""
        with uninterrupted():
            while self._take_one():
                pass
            if self._num_queued:
                self._issue()
        return 0

    cdef bint _take_one(self) except -1:
        cdef Load load
        cdef list done = []
        try:
            self.engine.take(done)
        finally:
            for load, error in done:
                if self._is_done(load):
                    self._bring_in(load, error)
        return bool(done)

    cdef bint _is_done(self, Load load) except -1:
        """Note that a load is done; False if `close` did not wait for it."""
        cdef State before
        with self._lock:
            before, load.state = load.state, DONE
        return before != DONE

    cdef int _bring_in(self, Load load, error) except -1:
        """Fill the slot of a load that was read."""
        uploaded = error
        try:
            if error is None:
                uploaded = interrupted(load)
                if load.fills and self._filled is not None:
                    self._filled.finish(load.slot, load.layer, load.parts, is_wrong=load.is_wrong)
                else:
                    self.pool.upload(load.slot, load.layer, load.parts, behind=not load.urgent)
                uploaded = None
        except Exception as caught:  # a waiting step raises it
            uploaded = named(caught, load, self._store).with_traceback(None)
        finally:
            self._conclude(load, uploaded)
        return 0

    cdef int _conclude(self, Load load, error) except -1:
        """Publish a load whose slot is filled, or give the slot back; tell the steps that wait."""
        cdef bint ahead, failed_before
        if error is not None:
            self.pool.reclaim(load.slot)
        load.parts, load.fills = {}, ()
        with self._lock:
            ahead = _is_ahead(load)
            self._num_reading -= not ahead
            failed_before = isinstance(error, StoreError) and not load.waiting
            if error is not None and self._closed and not failed_before:
                error = ReadCancelledError("the runtime was closed")
            elif load.waiting and (isinstance(error, ReadCancelledError) or (ahead and error)):
                # A step that joined it shall not fail for another expert.
                self.counts.end_prefetch(load, self._bytes_of(load))
                load.cause = DEMAND if ahead else load.cause
                load.state, load.error = QUEUED, None
                self._num_queued += 1
            if load.state == DONE:
                load.error = error
                self._retire(load)
        self._after_lock()
        if load.state == DONE:
            if error is not None and not (load.waiting or load.was_taken_back()):
                log_failure(load, self._logged)
            for arrived in load.waiting:
                arrived.put(load)
            if ahead:
                self.prefetch_done(load)
        # Another thread may wait in the engine for this very load.
        self.engine.announce()
        return 0

    # Under the lock.

    cdef int _retire(self, Load load) except -1:
        """Take a load that is over from the table, and publish its slot or give it back."""
        cdef bint filled = load.error is None
        cdef int64_t num_bytes = self._bytes_of(load)
        del self._loads[load.slot]
        self.counts.done(load, num_bytes)
        if load.urgent:
            self.counts.end_urgent(filled)
        self.counts.end_prefetch(load, num_bytes)
        if not load.staged:
            if filled:
                self._cache.publish(load.slot)
            else:
                self._cache.abandon(load.slot)
        elif not load.waiting:
            self._announce_later(load.slot)
        return 0

    cdef int _announce_later(self, Py_ssize_t slot) except -1:
        """Make a staging slot free."""
        if self._staging.give_back(slot):
            self._to_announce = True
        return 0

    cdef bint _cancel_prefetches(self, Py_ssize_t layer) except -1:
        """Take back what is read ahead for a layer that came without it; -1: for any layer."""
        cdef Load load
        cdef list unwanted = []
        for load in self._loads.values():
            if load.layer == layer or layer < 0:
                if load.is_useless():
                    unwanted.append(load)
        for load in unwanted:
            load.error = ReadCancelledError("the layer came without it")
            self.engine.cancel(load)
        return len(unwanted) > 0

    cdef int _release(self, leased, staged) except -1:
        if len(leased):
            slots = leased if isinstance(leased, np.ndarray) else np.array([*leased], np.int32)
            # In one order: the last end of a lease on a slot is the one that counts.
            self.pool.release_after_compute(slots)
            self._cache.release(slots)
        if staged:
            self.pool.release_after_compute(np.array([*staged], np.int32))
            for slot in staged:
                self._announce_later(slot)
        return 0

    cdef int _drain(self) except -1:
        cdef Step step
        cdef Load load
        while not self._over.empty():
            try:
                step = self._over.get_nowait()
            except Empty:
                break
            for load in step.loads:
                self._leave(load, step.arrived)
            self._release(step.leased, step.staged)
        return 0

    cdef int _leave(self, Load load, arrived) except -1:
        """Let a step wait for a load no longer."""
        if self._loads.get(load.slot) is not load:  # it was over before
            if load.staged:
                self._announce_later(load.slot)
            return 0
        load.waiting.remove(arrived)
        if load.waiting:
            return 0
        if load.staged:
            self._staging.orphan(load.slot)
        if load.state == QUEUED:
            self._num_queued -= 1
            load.state, load.error = DONE, ReadCancelledError("no step waits for it")
            self._retire(load)
        elif not _is_ahead(load):
            # A read that has begun goes on, and its expert ends up in the cache.
            self.engine.cancel(load)
        return 0

    cdef int64_t _bytes_of(self, Load load) except -1:
        return self._store.layout.expert_bytes(load.layer)

    # After every section that held the lock.

    cdef int _after_lock(self) except -1:
        """Take back what was left meanwhile by threads that found the lock taken."""
        while not self._over.empty() and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()
        if self._to_announce:
            self._to_announce = False
            self.engine.announce()
        return 0

    cdef int _wait_for_unwanted(self) except -1:
        """Wait for every load that no step waits for; take back what can be."""
        cdef Load load
        cdef list unwanted = []
        cdef bint waiting = True
        with uninterrupted(), self._lock:
            self._cancel_prefetches(-1)
            for load in self._loads.values():
                if not load.waiting:
                    unwanted.append(load)
            for load in unwanted:
                self._hasten(load)
        while True:
            seen = self.engine.epoch
            self._take_in()
            waiting = False
            for load in unwanted:
                waiting |= self._loads.get(load.slot) is load
            if self._closed or not waiting:
                return 0
            self.engine.wait(seen)

    cdef int _check_process(self) except -1:
        if getpid() != self._process:
            raise MoeCacheError("this runtime is the parent process's; open one in the child")

    cdef int _check_open(self) except -1:
        self._check_process()
        if self._closed:
            raise MoeCacheError("the runtime is closed")
        return 0


cdef bint _is_ahead(Load load) noexcept:
    """Whether the read began before a step asked for it."""
    return load.cause is not DEMAND and load.cause is not BULK


def _ignore(load):
    """Nobody asks."""
