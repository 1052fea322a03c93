"""Transfers: loads on their way from the table to the engine, and back to the steps that wait.

Never under the table's lock, which it takes itself.
"""

cimport cython

from queue import Empty

from moecache.interrupts import uninterrupted
from moecache.loading._load cimport DONE, Load, State
from moecache.loading._table cimport LoadTable
from moecache.loading.load import (
    ReadCancelledError, interrupted, log_failure, log_stuck, named,
)
from moecache.slots import HostSlots


@cython.final
cdef class Transfers:
    """Gives an engine what is queued, and brings what was read into its slots.

    Any thread may call; one that waits takes part in the reading, also for others.

    Parameters
    ----------
    table : LoadTable
    store : ExpertStore
        Named in errors.
    clock : callable () -> int
        Nanoseconds.
    """

    def __cinit__(self, LoadTable table not None, store, clock):
        self.table = table
        self.engine = table.engine
        self.clock = clock
        self.store = store
        self.filled = (
            table.pool if isinstance(table.pool, HostSlots) and table.engine.fills else None
        )
        self.filler = None
        self.prefetch_done = _ignore
        self._logged = set()

    # To the engine.

    cdef int issue(self) except -1:
        """Give the engine what is queued, as much as there are buffers for."""
        cdef LoadTable table = self.table
        cdef list batch
        most = table.pool.max_buffers
        while table.num_queued:
            with table.lock:
                batch = table.next_batch(most)
            if not batch:
                break
            self.submit(batch, False)
        return 0

    cdef int submit(self, list batch, bint deferred) except -1:
        """Give the engine loads; those that it does not take are over."""
        cdef Load load
        cdef list left = list(batch)  # the engine empties it once it has them
        started = self.clock()
        try:
            filled = self.filled
            for load in batch:
                load.parts = self.table.pool.buffers(load.slot, load.layer)
                if filled is not None:
                    load.fills = filled.fills(load.slot, load.layer)
                    load.is_wrong = False
            self.engine.submit(left, deferred=deferred)
            if self.filler is not None:
                self.filler.wake()
        except BaseException as error:
            for load in left:
                failure = error if isinstance(error, Exception) else interrupted(load)
                if self._is_done(load):
                    self._conclude(load, failure.with_traceback(None))
            if not isinstance(error, Exception):
                raise
        if self.engine.reads_in_submit and not deferred:
            self.table.cache.profiler.record_miss_stall(self.clock() - started)
        return 0

    # From the engine to the steps that wait.

    cdef int look(self) except -1:
        """Take in what has arrived, without waiting, unless a thread does that."""
        if self.filler is not None and self.filler.is_alive:
            return 0
        if self.table.by_slot and not self.table.is_inherited() and self.engine.poll():
            self.take_in()
        return 0

    cdef int take_in(self) except -1:
        """Bring in every load that was read, and give the engine what waits for buffers."""
        with uninterrupted():
            while self._take_one():
                pass
            if self.table.num_queued:
                self.issue()
        return 0

    cdef bint fill(self) except -1:
        """Wait for a moment, and take in what has arrived; False if nothing is on its way."""
        seen = self.engine.epoch
        self.take_in()
        if self.table.closed or not self.table.by_slot or self.table.is_inherited():
            return False
        self.engine.wait(seen)
        return True

    cdef Load wait(self, arrived):
        """Return the next load of a step's queue."""
        self.table.check_process()
        while True:
            seen = self.engine.epoch
            self.take_in()
            try:
                # There is nothing to wait for in a closed engine: `close` tells every step.
                return arrived.get(block=self.table.closed, timeout=0.05)
            except Empty:
                if not self.table.closed:
                    self.engine.wait(seen)

    cdef int wait_for(self, list loads) except -1:
        """Wait until loads are over, or this is closed."""
        cdef Load load
        cdef bint waiting
        while True:
            seen = self.engine.epoch
            self.take_in()
            waiting = False
            for load in loads:
                waiting |= self.table.by_slot.get(load.slot) is load
            if self.table.closed or not waiting:
                return 0
            self.engine.wait(seen)

    cdef int close(self, double timeout_s) except -1:
        """End every load of a table that was just closed; waits for the engine so long."""
        cdef Load load
        num_stuck = self.engine.close(timeout_s)
        if self.filler is not None:
            self.filler.close(timeout_s)
        self.take_in()
        with self.table.lock:
            left = list(self.table.by_slot.values())
        for load in left:
            if self._is_done(load):
                self._conclude(load, ReadCancelledError("the runtime was closed"))
        self.engine.announce()
        if num_stuck:
            log_stuck(num_stuck)
        return 0

    cdef int drop(self) except -1:
        """End the threads of a runtime that was dropped without `close`."""
        self.engine.close(0.5)
        if self.filler is not None:
            self.filler.close(0)
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
        with self.table.lock:
            before, load.state = load.state, DONE
        return before != DONE

    cdef int _bring_in(self, Load load, error) except -1:
        """Fill the slot of a load that was read."""
        uploaded = error
        try:
            if error is None:
                uploaded = interrupted(load)
                if load.fills and self.filled is not None:
                    self.filled.finish(load.slot, load.layer, load.parts, is_wrong=load.is_wrong)
                else:
                    self.table.pool.upload(
                        load.slot, load.layer, load.parts, behind=not load.urgent
                    )
                uploaded = None
        except Exception as caught:  # a waiting step raises it
            uploaded = named(caught, load, self.store).with_traceback(None)
        finally:
            self._conclude(load, uploaded)
        return 0

    cdef int _conclude(self, Load load, error) except -1:
        """Publish a load whose slot is filled, or give the slot back; tell the steps that wait."""
        cdef bint is_over = False
        if error is not None:
            self.table.pool.reclaim(load.slot)
        load.parts, load.fills = {}, ()
        with self.table.lock:
            is_over = self.table.end(load, error)
        self.table.catch_up()
        if is_over:
            if load.error is not None and not (load.waiting or load.was_taken_back()):
                log_failure(load, self._logged)
            for arrived in load.waiting:
                arrived.put(load)
            if load.began_ahead():
                self.prefetch_done(load)
        # Another thread may wait in the engine for this very load.
        self.engine.announce()
        return 0


def _ignore(load):
    """Take no note of a read ahead that is over: no prefetcher wants to know."""
