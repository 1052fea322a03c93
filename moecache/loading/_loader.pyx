"""SlotLoader: slots claimed in the cache, and loads that fill them; _load.pyx has their states."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

import time
import weakref

from moecache.errors import CapacityError
from moecache.interrupts import uninterrupted
from moecache.loading._counts cimport LoadCounts
from moecache.loading._guard import Guard
from moecache.loading._load cimport Load
from moecache.loading._step cimport Step
from moecache.loading._table cimport LoadTable
from moecache.loading._transfers cimport Transfers
from moecache.loading.filler import Filler
from moecache.loading.load import Cause

cnp.import_array()

CLOSE_TIMEOUT_S = 2.0

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

    cdef readonly LoadCounts counts
    cdef readonly LoadTable _table
    cdef Transfers _transfers
    cdef readonly object engine, clock, _making_room
    cdef readonly Py_ssize_t num_staging
    cdef object __weakref__

    def __cinit__(self, store, pool, cache, engine, *, clock=time.perf_counter_ns):
        self.engine = engine
        self.clock = clock
        self.counts = LoadCounts(clock)
        # Steps that wait until no unwanted load holds a slot: weakly, as an interrupt may come.
        self._making_room = weakref.WeakSet()
        self._table = LoadTable(store, pool, cache, engine, self.counts)
        self.num_staging = self._table.staging.num_slots
        self._transfers = Transfers(self._table, store, clock)

    @property
    def pool(self):
        """As given."""
        return self._table.pool

    @pool.setter
    def pool(self, pool):
        self._table.pool = pool

    @property
    def prefetch_done(self):
        """Called with every read ahead that ended."""
        return self._transfers.prefetch_done

    @prefetch_done.setter
    def prefetch_done(self, tell):
        self._transfers.prefetch_done = tell

    @property
    def num_in_flight(self):
        """Experts that are being read, or wait for it."""
        return len(self._table.by_slot)

    def guard(self, Step step not None):
        """Return what gives back all that a step holds, when it is closed or dropped.

        Follow `close` by `give_back`; without it, the next call of the loader's does that.
        """
        return Guard(self._table.over, step)

    def acquire(self, Step step not None):
        """Lease what is there and start to load the rest; see `ExpertCache.acquire`.

        Sets `step.slots`, `step.loads` (experts on their way, each to be put into
        `step.arrived` when it is there) and `step.bypassed`.

        Raises
        ------
        CapacityError
            If the slots that leases and pins leave are too few. Nothing is held.
        """
        self._transfers.look()
        try:
            self._acquire(step)
            return
        except CapacityError:
            pass
        # Loads that no step waits for may hold slots which the step would have had without
        # them, or did a moment ago.
        self._making_room.add(step)
        try:
            with uninterrupted(), self._table.lock:
                unwanted = self._table.take_back()
            self._transfers.wait_for(unwanted)
            self._acquire(step)
        finally:
            self._making_room.discard(step)

    cdef int _acquire(self, Step step) except -1:
        cdef bint cancelled = False
        with uninterrupted():
            try:
                with self._table.lock:
                    cancelled = self._table.acquire(step)
            finally:
                self._table.catch_up()
            if self._table.num_queued:
                self._transfers.issue()
            if cancelled:
                self._transfers.look()
        return 0

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
        with uninterrupted():
            with self._table.lock:
                if self._table.closed or self._making_room:
                    return False
                load = self._table.read_ahead(layer, expert, cause, likely)
            if load is None:
                return False
            self._transfers.submit([load], True)
            # Joined, or of no use any more, before the engine had it.
            if load.urgent:
                self.engine.hasten(load)
            elif load.was_taken_back():
                self.engine.cancel(load)
        self._transfers.look()
        return True

    def count_resident_steps(self, int64_t num=1):
        """Count steps that found everything there, and leased nothing."""
        with self._table.lock:
            self._table.check_open()
            self.counts.num_steps += num
            self.counts.num_resident_steps += num

    def stage(self, Step step not None):
        """Start to load bypassed experts into free staging slots; return whether any was free."""
        cdef bint staged = False
        with uninterrupted():
            try:
                with self._table.lock:
                    staged = self._table.stage(step)
            finally:
                self._table.catch_up()
            self._transfers.issue()
        return staged

    def wait_for_staging(self, Py_ssize_t layer):
        """Wait for a moment at least, until a staging slot may be free.

        Raises
        ------
        CapacityError
            If waiting could last for ever: an unfinished step of this thread holds some.
        """
        seen = self.engine.epoch
        with uninterrupted(), self._table.lock:
            if self._table.can_stage(layer):
                return
        self.engine.wait(seen)
        self._transfers.take_in()

    def start_filler(self):
        """Have a thread take in what has arrived; callers that wait take part."""
        self._transfers.filler = Filler(self)

    def fill(self):
        """Wait for a moment, and take in what has arrived; False if nothing is on its way."""
        return self._transfers.fill()

    def look(self):
        """Take in what has arrived, without waiting, unless a thread does that."""
        self._transfers.look()

    def wait(self, arrived):
        """Return the next load that is over, taking part in the reading meanwhile."""
        return self._transfers.wait(arrived)

    def arrivals(self, Step step not None):
        """Return at least one load of a step that is over, and every other that is by then.

        Raises
        ------
        StoreError
            If one could not be read; all of them are accounted for before.
        """
        cdef Load load
        cdef list done = []
        self._transfers.look()
        if step.arrived.empty():
            started = self.clock()
            done.append(self._transfers.wait(step.arrived))
            self._table.cache.profiler.record_miss_stall(self.clock() - started)
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
        if self._table.is_inherited():
            return
        with uninterrupted():
            with self._table.lock:
                self._table.release(leased, staged)
            self._table.catch_up()

    def give_back(self):
        """Take back what steps that are over hold, now or as soon as the lock is free.

        Never waits for the lock: an iterator of waves may be closed by the
        garbage collector, in the middle of a section that holds it.
        """
        if not self._table.is_inherited():
            with uninterrupted():
                self._table.catch_up()

    def close(self):
        """Stop reading; a second call does nothing.

        Steps that wait for loads get an error. Returns after at most two seconds,
        even if a read hangs.
        """
        with self._table.lock:
            if self._table.closed:
                return
            self._table.closed = True
        self._transfers.close(CLOSE_TIMEOUT_S)

    def __del__(self):
        """End the threads of a runtime that was dropped without `close`."""
        # Nothing was begun if making it has failed.
        if self._transfers is not None and not self._table.closed:
            if not self._table.is_inherited():
                self._transfers.drop()
