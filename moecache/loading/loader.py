"""SlotLoader: slots claimed in the cache, and loads that fill them; load.py has their states."""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from queue import Empty, SimpleQueue

import numpy as np

from moecache.cache._cache import ExpertCache
from moecache.errors import CapacityError, MoeCacheError, StoreError
from moecache.interrupts import uninterrupted
from moecache.loading._guard import Guard
from moecache.loading.counts import LoadCounts
from moecache.loading.engine import Engine
from moecache.loading.filler import Filler
from moecache.loading.load import Cause, Load, LoadState, ReadCancelledError, interrupted, named
from moecache.loading.staging import StagingSlots
from moecache.loading.step import Step
from moecache.slots import HostSlots, SlotPool
from moecache.stores.base import ExpertStore

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0


class SlotLoader:
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

    _closed = True  # until everything is there

    def __init__(
        self,
        store: ExpertStore,
        pool: SlotPool,
        cache: ExpertCache,
        engine: Engine,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._store = store
        self.pool = pool
        self._cache = cache
        self.engine = engine
        self.clock = clock
        self._lock = threading.Lock()
        self._loads: dict[int, Load] = {}  # by slot, in the order in which they were claimed
        self._num_queued = 0
        self._num_reading = 0  # with buffers, and not ahead of a step
        self._over: SimpleQueue[Step] = SimpleQueue()  # steps that are over, to be given back
        self._staging = StagingSlots(range(cache.capacity, pool.num_slots))
        self._to_announce = False
        self._process = os.getpid()
        # Steps that wait until no unwanted load holds a slot: weakly, as an interrupt may come.
        self._making_room: weakref.WeakSet[Step] = weakref.WeakSet()
        self.counts = LoadCounts(clock)
        self.num_staging = self._staging.num_slots
        self.prefetch_done: Callable[[Load], object] = lambda _: None
        # Slots that the engine itself brings into compute form, as far as it can.
        self._filled = pool if isinstance(pool, HostSlots) and engine.fills else None
        self._filler: Filler | None = None
        self._closed = False

    @property
    def num_in_flight(self) -> int:
        """Experts that are being read, or wait for it."""
        return len(self._loads)

    def guard(self, step: Step) -> Guard:
        """Return what gives back all that a step holds, when it is closed or dropped.

        Follow `close` by `give_back`; without it, the next call of the loader's does that.
        """
        return Guard(self._over, step)

    def acquire(self, step: Step) -> None:
        """Lease what is there and start to load the rest; see `ExpertCache.acquire`.

        Sets `step.slots`, `step.loads` (experts on their way, each to be put into
        `step.arrived` when it is there) and `step.bypassed`.

        Raises
        ------
        CapacityError
            If the slots that leases and pins leave are too few. Nothing is held.
        """
        self.look()
        with contextlib.suppress(CapacityError):
            self._acquire(step)
            return
        # Loads that no step waits for may hold slots which the step would have had without
        # them, or did a moment ago.
        self._making_room.add(step)
        try:
            self._wait_for_unwanted()
            self._acquire(step)
        finally:
            self._making_room.discard(step)

    def prefetch(
        self, layer: int, expert: int, *, cause: Cause = Cause.PREFETCH, likely: bool = False
    ) -> bool:
        """Read an expert that no step asked for, behind everything that a step waits for.

        With a reader, this returns as soon as the reader has the expert's runs; a later call of
        `look` or `wait` takes in what was read. Without one, the calling thread reads.

        Returns
        -------
        bool
            False if the expert is there or on its way, there is no slot for it (a warm start takes
            none from another; `likely`: see `ExpertCache.claim`), or the runtime is closed.
        """
        with uninterrupted():
            with self._lock:
                if self._closed or self._making_room:
                    return False
                self._drain()
                ahead = cause is Cause.PREFETCH
                slot = self._cache.claim(layer, expert, evict=ahead, foreseen=ahead, likely=likely)
                if slot < 0:
                    return False
                load = Load(layer, expert, slot, cause)
                load.state = LoadState.READING
                self._loads[slot] = load
                if ahead:
                    self.counts.begin_prefetch(self._store.layout.expert_bytes(layer))
            self._submit([load], deferred=True)
            # Joined, or of no use any more, before the engine had it.
            if load.urgent:
                self.engine.hasten(load)
            elif load.is_cancelled:
                self.engine.cancel(load)
        self.look()
        return True

    def count_resident_steps(self, num: int = 1) -> None:
        """Count steps that found everything there, and leased nothing."""
        with self._lock:
            self._check_open()
            self.counts.num_steps += num
            self.counts.num_resident_steps += num

    def stage(self, step: Step) -> bool:
        """Start to load bypassed experts into free staging slots; return whether any was free."""
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

    def wait_for_staging(self, layer: int) -> None:
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

    def start_filler(self) -> None:
        """Have a thread take in what has arrived; callers that wait take part."""
        self._filler = Filler(self._fill)

    def look(self) -> None:
        """Take in what has arrived, without waiting, unless a thread does that."""
        if self._filler is not None and self._filler.is_alive:
            return
        if self._loads and os.getpid() == self._process and self.engine.poll():
            self._take_in()

    def wait(self, arrived: "SimpleQueue[Load]") -> Load:
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

    def release(self, leased: Collection[int], staged: Collection[int] = ()) -> None:
        """Give slots back, once computations that use them are issued."""
        if os.getpid() != self._process:
            return
        with uninterrupted():
            with self._lock:
                self._release(leased, staged)
            self._after_lock()

    def give_back(self) -> None:
        """Take back what steps that are over hold, now or as soon as the lock is free.

        Never waits for the lock: an iterator of waves may be closed by the
        garbage collector, in the middle of a section that holds it.
        """
        if os.getpid() == self._process:
            with uninterrupted():
                self._after_lock()

    def close(self) -> None:
        """Stop reading; a second call does nothing.

        Steps that wait for loads get an error. Returns after at most two seconds,
        even if a read hangs.
        """
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
            logger.warning("loader.stuck reads=%d do not return", num_stuck)

    def __del__(self) -> None:
        """End the threads of a runtime that was dropped without `close`."""
        if not self._closed and os.getpid() == self._process:
            self.engine.close(0.5)
            if self._filler is not None:
                self._filler.close(0)

    # From a step to its loads.

    def _acquire(self, step: Step) -> None:
        with uninterrupted():
            cancelled = False
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
                self.look()

    def _load_misses(self, step: Step, misses: list[int]) -> None:
        flat, slots = step.ids.reshape(-1), step.slots
        for position in misses:
            if position < 0:
                expert, slot = int(flat[~position]), int(slots[~position])
                load = self._loads.get(slot)
                if load is None:
                    raise MoeCacheError(
                        f"expert {expert} of layer {step.layer} was claimed in the cache "
                        "from outside the runtime; publish or abandon it first"
                    )
                self._hasten(load)
            elif slots[position] < 0:
                step.bypassed.append(int(flat[position]))
                continue
            else:
                load = Load(step.layer, int(flat[position]), int(slots[position]), step.cause)
                self._enqueue(load)
            load.waiting.append(step.arrived)
            step.loads.add(load)

    def _undo(self, step: Step, misses: list[int]) -> None:
        """Make a step hold nothing, as before it was acquired."""
        for load in self._loads.values():
            if step.arrived in load.waiting:
                load.waiting.remove(step.arrived)
        for position in misses:
            slot = int(step.slots[position]) if position >= 0 else -1
            if slot < 0:
                continue
            if self._loads.pop(slot, None) is not None:
                self._num_queued -= 1
                self.counts.end_urgent(read=False)
            self._cache.abandon(slot)
        self._cache.release(step.slots)
        step.slots.fill(-1)
        step.loads.clear()
        step.bypassed.clear()

    def _enqueue(self, load: Load) -> None:
        self._loads[load.slot] = load
        self._num_queued += 1
        self.counts.begin_urgent()

    def _hasten(self, load: Load) -> None:
        if not load.urgent:
            load.urgent = True
            self.counts.begin_urgent()
            self.engine.hasten(load)

    # From the queue to the engine, without the lock.

    def _issue(self) -> None:
        """Give the engine what is queued, as much as there are buffers for."""
        most = self.pool.max_buffers
        while self._num_queued:
            with self._lock:
                room = None if most is None else max(0, most - self._num_reading)
                queued = (one for one in self._loads.values() if one.state is LoadState.QUEUED)
                batch = list(islice(queued, room))
                for load in batch:
                    load.state = LoadState.READING
                self._num_queued -= len(batch)
                self._num_reading += len(batch)
            if not batch:
                return
            self._submit(batch)

    def _submit(self, batch: Sequence[Load], *, deferred: bool = False) -> None:
        started = self.clock()
        left = list(batch)  # the engine empties it once it has them
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

    # From the engine to the steps that wait, without the lock.

    def _fill(self) -> bool:
        """Wait for a moment, and take in what has arrived; False if nothing is on its way."""
        seen = self.engine.epoch
        self._take_in()
        if self._closed or not self._loads or os.getpid() != self._process:
            return False
        self.engine.wait(seen)
        return True

    def _take_in(self) -> None:
        """Bring in every load that was read, and give the engine what waits for buffers."""
        with uninterrupted():
            while self._take_one():
                pass
            if self._num_queued:
                self._issue()

    def _take_one(self) -> bool:
        done: list[tuple[Load, Exception | None]] = []
        try:
            self.engine.take(done)
        finally:
            for load, error in done:
                if self._is_done(load):
                    self._bring_in(load, error)
        return bool(done)

    def _is_done(self, load: Load) -> bool:
        """Note that a load is done; False if `close` did not wait for it."""
        with self._lock:
            before, load.state = load.state, LoadState.DONE
        return before is not LoadState.DONE

    def _bring_in(self, load: Load, error: Exception | None) -> None:
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
        except Exception as caught:  # noqa: BLE001 - a waiting step raises it
            uploaded = named(caught, load, self._store).with_traceback(None)
        finally:
            self._conclude(load, uploaded)

    def _conclude(self, load: Load, error: Exception | None) -> None:
        """Publish a load whose slot is filled, or give the slot back; tell the steps that wait."""
        if error is not None:
            self.pool.reclaim(load.slot)
        load.parts, load.fills = {}, ()
        with self._lock:
            ahead = load.cause.is_ahead
            self._num_reading -= not ahead
            failed_before = isinstance(error, StoreError) and not load.waiting
            if error is not None and self._closed and not failed_before:
                error = ReadCancelledError("the runtime was closed")
            elif load.waiting and (isinstance(error, ReadCancelledError) or (ahead and error)):
                # A step that joined it shall not fail for another expert.
                self.counts.end_prefetch(load, self._store.layout.expert_bytes(load.layer))
                load.cause = Cause.DEMAND if ahead else load.cause
                load.state, load.error = LoadState.QUEUED, None
                self._num_queued += 1
            if load.state is LoadState.DONE:
                load.error = error
                self._retire(load)
        self._after_lock()
        if load.state is LoadState.DONE:
            if error is not None and not (load.waiting or load.is_cancelled):
                self.counts.log_failure(load)
            for arrived in load.waiting:
                arrived.put(load)
            if ahead:
                self.prefetch_done(load)
        # Another thread may wait in the engine for this very load.
        self.engine.announce()

    # Under the lock.

    def _retire(self, load: Load) -> None:
        """Take a load that is over from the table, and publish its slot or give it back."""
        del self._loads[load.slot]
        filled = load.error is None
        self.counts.done(load, self._store.layout.expert_bytes(load.layer))
        if load.urgent:
            self.counts.end_urgent(read=filled)
        self.counts.end_prefetch(load, self._store.layout.expert_bytes(load.layer))
        if not load.staged:
            (self._cache.publish if filled else self._cache.abandon)(load.slot)
        elif not load.waiting:
            self._to_announce |= self._staging.give_back(load.slot)

    def _cancel_prefetches(self, layer: int | None) -> bool:
        """Take back what is read ahead for a layer that came without it; `None`: for any layer."""
        loads = [one for one in self._loads.values() if one.is_unwanted]
        unwanted = [load for load in loads if layer in (None, load.layer)]
        for load in unwanted:
            load.error = ReadCancelledError("the layer came without it")
            self.engine.cancel(load)
        return bool(unwanted)

    def _release(self, leased: np.ndarray | Collection[int], staged: Collection[int]) -> None:
        if len(leased):
            slots = leased if isinstance(leased, np.ndarray) else np.array([*leased], np.int32)
            # In one order: the last end of a lease on a slot is the one that counts.
            self.pool.release_after_compute(slots)
            self._cache.release(slots)
        if staged:
            self.pool.release_after_compute(np.array([*staged], np.int32))
            for slot in staged:
                self._to_announce |= self._staging.give_back(slot)

    def _drain(self) -> None:
        while True:
            try:
                step = self._over.get_nowait()
            except Empty:
                return
            for load in step.loads:
                self._leave(load, step.arrived)
            self._release(step.leased, step.staged)

    def _leave(self, load: Load, arrived: "SimpleQueue[Load]") -> None:
        """Let a step wait for a load no longer."""
        if self._loads.get(load.slot) is not load:  # it was over before
            if load.staged:
                self._to_announce |= self._staging.give_back(load.slot)
            return
        load.waiting.remove(arrived)
        if load.waiting:
            return
        if load.staged:
            self._staging.orphan(load.slot)
        if load.state is LoadState.QUEUED:
            self._num_queued -= 1
            load.state, load.error = LoadState.DONE, ReadCancelledError("no step waits for it")
            self._retire(load)
        elif not load.cause.is_ahead:
            # A read that has begun goes on, and its expert ends up in the cache.
            self.engine.cancel(load)

    # After every section that held the lock.

    def _after_lock(self) -> None:
        """Take back what was left meanwhile by threads that found the lock taken."""
        while not self._over.empty() and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()
        if self._to_announce:
            self._to_announce = False
            self.engine.announce()

    def _wait_for_unwanted(self) -> None:
        """Wait for every load that no step waits for; take back what can be."""
        with uninterrupted(), self._lock:
            self._cancel_prefetches(None)
            unwanted = [load for load in self._loads.values() if not load.waiting]
            for load in unwanted:
                self._hasten(load)
        while True:
            seen = self.engine.epoch
            self._take_in()
            if self._closed or not any(self._loads.get(one.slot) is one for one in unwanted):
                return
            self.engine.wait(seen)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise MoeCacheError("this runtime is the parent process's; open one in the child")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise MoeCacheError("the runtime is closed")
