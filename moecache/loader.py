"""SlotLoader: slots claimed in the cache, and the loads that fill them."""

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from queue import Empty, SimpleQueue

import numpy as np

from moecache._cache import ExpertCache
from moecache._reader import Reader
from moecache.errors import CapacityError, ConfigError, MoeCacheError
from moecache.fetch import Cause, Fetch, Load, StoreFetch
from moecache.interrupts import deferred
from moecache.load_counts import LoadCounts
from moecache.reader_fetch import ReaderFetch
from moecache.slots.base import SlotPool, UploadCounts
from moecache.staging import StagingSlots
from moecache.stores.base import ExpertStore, FileStore

logger = logging.getLogger(__name__)

MakeFetch = Callable[[threading.Lock, Callable[[Load], bool]], Fetch]

CLOSE_TIMEOUT_S = 2.0
MAX_LOGGED_CAUSES = 100


class Discard:
    """What a step that is over gives back: loads it waits for no more, and slots."""

    __slots__ = ("arrived", "leased", "loads", "staged")

    def __init__(
        self,
        loads: Iterable[Load],
        arrived: "SimpleQueue[Load]",
        leased: np.ndarray,
        staged: Collection[int] = (),
    ) -> None:
        self.loads = loads
        self.arrived = arrived
        self.leased = leased
        self.staged = staged


class SlotLoader:
    """Fill slots from a store.

    Ties cache, pool and store together: a claim in the cache and the load that
    fills it are made under one lock, so that a step which joins a claim always
    finds its load. No byte moves under the lock. What claims or gives back
    (`acquire`, `stage`, `release`, `unstage`, `discard`) is called in a
    section of the caller's that defers interrupts.

    Parameters
    ----------
    store : ExpertStore
    pool : SlotPool
        Its slots from `cache.capacity` on are for staging.
    cache : ExpertCache
    num_threads : int
        0: only callers that wait for experts read them.
    reader : Reader, optional
        Reads the store's files, many experts at once; closed with this. Without
        one, `store.read_into` reads one expert at a time in each thread.
    make_fetch : callable (lock, finish) -> Fetch, optional
        Who carries out loads, instead of threads or the reader.
    clock : callable () -> int, optional
        Nanoseconds; what stalls are measured with.

    Raises
    ------
    ConfigError
        If there is a reader, but the store does not say where experts lie.

    Attributes
    ----------
    counts : LoadCounts
    num_staging : int
        Slots beside the cache's.
    prefetch_done : callable (load)
        Told of every prefetch that ended, well or not; never under the lock.
    """

    def __init__(
        self,
        store: ExpertStore,
        pool: SlotPool,
        cache: ExpertCache,
        num_threads: int,
        reader: Reader | None = None,
        *,
        make_fetch: MakeFetch | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._store = store
        self._pool = pool
        self._cache = cache
        self.clock = clock
        self._lock = threading.Lock()
        self._discards: SimpleQueue[Discard] = SimpleQueue()
        self._unstaged = threading.Condition(self._lock)
        self._loads: dict[int, Load] = {}
        self._staging = StagingSlots(range(cache.capacity, pool.num_slots))
        self._to_announce = False
        self._closed = False
        self._process = os.getpid()
        self._logged: set[tuple[type, str]] = set()
        self._prefetches: set[Load] = set()
        self._num_paused = 0  # steps that wait until no prefetch holds a slot
        self.counts = LoadCounts(clock)
        self.num_staging = self._staging.num_slots
        self.prefetch_done: Callable[[Load], object] = _ignore
        self._fetch: Fetch
        if make_fetch is not None:
            self._fetch = make_fetch(self._lock, self._finish)
        elif reader is None:
            self._fetch = StoreFetch(store, pool, self._lock, self._finish, num_threads)
        elif isinstance(store, FileStore):
            self._fetch = ReaderFetch(reader, store, pool, self._lock, self._finish, num_threads)
        else:
            raise ConfigError(f"a {type(store).__name__} has no files that a reader could read")

    @property
    def num_in_flight(self) -> int:
        """Experts that are being read, or wait for it."""
        return len(self._loads)

    def acquire(
        self,
        layer: int,
        ids: np.ndarray,
        slots: np.ndarray,
        misses: np.ndarray,
        arrived: "SimpleQueue[Load]",
        *,
        cause: Cause,
        share: int,
        ignore_out_of_range: bool = False,
    ) -> tuple[list[Load], list[int]]:
        """Lease what is there and start to load the rest; see `ExpertCache.acquire`.

        Returns
        -------
        loads : list of Load
            Experts on their way, each to be put into `arrived` when it is there.
        bypassed : list of int
            Experts that `share` left without a slot: to be staged.
        """
        self.look()
        acquire = functools.partial(
            self._acquire,
            *(layer, ids, slots, misses, arrived, cause),
            share=share,
            ignore_out_of_range=ignore_out_of_range,
        )
        try:
            return acquire()
        except CapacityError:
            # Prefetches may hold slots that the step would have had without them, or did a
            # moment ago.
            with self._lock:
                self._num_paused += 1
        try:
            self._wait_for_prefetches()
            return acquire()
        finally:
            with self._lock:
                self._num_paused -= 1
            self._drain_if_free()

    def _acquire(
        self,
        layer: int,
        ids: np.ndarray,
        slots: np.ndarray,
        misses: np.ndarray,
        arrived: "SimpleQueue[Load]",
        cause: Cause,
        *,
        share: int,
        ignore_out_of_range: bool,
    ) -> tuple[list[Load], list[int]]:
        try:
            with self._lock:
                self._check_open()
                count = self._cache.acquire(
                    layer,
                    ids,
                    slots,
                    misses,
                    share=share,
                    ignore_out_of_range=ignore_out_of_range,
                )
                self.counts.num_steps += 1
                if count == 0:
                    self.counts.num_resident_steps += 1
                    self._cancel_prefetches(layer)
                    return [], []
                claimed: list[Load] = []
                joined: list[Load] = []
                try:
                    bypassed = self._plan(layer, ids, slots, misses[:count], cause, claimed, joined)
                    for load in joined:
                        load.waiting.append(arrived)
                    self._cancel_prefetches(layer)
                    for load in joined:
                        self._hasten(load)
                    for load in claimed:
                        load.waiting.append(arrived)
                        self._submit(load)
                except BaseException:
                    self._roll_back(slots, misses[:count], joined, arrived)
                    raise
        finally:
            self._drain_if_free()
        loads = claimed + joined
        self._begin(loads, arrived)
        return loads, bypassed

    def prefetch(
        self,
        layer: int,
        expert: int,
        *,
        cause: Cause = Cause.PREFETCH,
        evict: bool = True,
    ) -> bool:
        """Read an expert that nobody asked for, behind everything that somebody waits for.

        Where a reader reads, this returns as soon as it has the expert's runs; who looks
        takes in what it has read. Else the calling thread reads.

        Parameters
        ----------
        layer, expert : int
        cause : Cause, default PREFETCH
            What its bytes are counted as.
        evict : bool, default True
            If false, take free slots only.

        Returns
        -------
        bool
            False if the expert is there or on its way, the policy values it less than
            whom it would replace, or the runtime is closed.
        """
        with self._lock:
            if self._closed or self._num_paused:
                return False
            slot = self._cache.claim(layer, expert, evict=evict, foreseen=cause is Cause.PREFETCH)
            if slot < 0:
                return False
            load = Load(layer, expert, slot, cause)
            self._loads[slot] = load
            self._prefetches.add(load)
            if cause is Cause.PREFETCH:
                self.counts.begin_prefetch(self._store.layout.expert_bytes(layer))
        self._fetch.prefetch(load)
        return True

    @property
    def max_buffers_ahead(self) -> int | None:
        """Experts read ahead that may take memory beside their slots at once; None: they do not."""
        return self._pool.max_buffers_ahead

    @property
    def uploads(self) -> UploadCounts:
        """What the slots' device copied."""
        return self._pool.uploads

    def count_resident_step(self) -> None:
        """Count a step that found everything there, and leased nothing."""
        with self._lock:
            self._check_open()
            self.counts.num_steps += 1
            self.counts.num_resident_steps += 1

    def before_compute(self, slots: np.ndarray) -> None:
        """Let what the caller computes from now on wait until these slots are filled."""
        self._pool.before_compute(slots)

    @property
    def quantum_bytes(self) -> int | None:
        """Bytes of a prefetch that a demand may have to wait for; None: all of it."""
        return self._fetch.quantum_bytes

    def release(self, slots: np.ndarray) -> None:
        """End the leases on slots of the cache, once computations that use them are issued."""
        if os.getpid() != self._process:
            return
        with self._lock:
            # In one order: of two ends of leases on a slot the later one counts.
            self._pool.release_after_compute(slots)
            self._cache.release(slots)
        self._drain_if_free()

    def stage(
        self,
        layer: int,
        experts: Sequence[int],
        arrived: "SimpleQueue[Load]",
        *,
        cause: Cause,
    ) -> list[Load]:
        """Start to load the first of `experts` into free staging slots, as many as there are."""
        loads: list[Load] = []
        with self._lock:
            self._check_open()
            # Slots that were given back while the lock was taken.
            self._drain()
            for expert in experts[: self._staging.num_free]:
                load = Load(layer, expert, self._staging.take(), cause, staged=True)
                load.waiting.append(arrived)
                self._submit(load)
                loads.append(load)
        self._begin(loads, arrived)
        return loads

    def wait_for_staging(self, layer: int) -> None:
        """Wait for a moment at least, until a staging slot may be free.

        Raises
        ------
        CapacityError
            If waiting could last for ever: an unfinished step of this thread holds some.
        """
        seen = self._fetch.epoch
        with deferred(), self._lock:
            self._check_open()
            # Waiting gives the lock up without looking at discards.
            self._drain()
            if self._staging.num_free:
                return
            self._staging.check_wait(layer)
            if not self._fetch.needs_callers:
                self._unstaged.wait(0.05)
                return
        self._fetch.help(seen)

    def unstage(self, slots: Sequence[int]) -> None:
        """Give staging slots back, once computations that use them are issued."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._pool.release_after_compute(np.asarray(slots, np.int32))
            for slot in slots:
                self._return_staging(slot)
        self._drain_if_free()

    def look(self) -> None:
        """Take in what has arrived, without waiting."""
        if os.getpid() == self._process:
            self._fetch.look()

    def wait(self, arrived: "SimpleQueue[Load]") -> Load:
        """Return the next load that is done, taking part in the reading meanwhile."""
        if os.getpid() != self._process:
            raise MoeCacheError("this runtime is the parent process's; open one in the child")
        return self._fetch.wait(arrived)

    def discard(self, given_back: Discard) -> None:
        """Take back what a step has no more use for, now or as soon as the lock is free.

        Never waits for the lock: an iterator of waves may be closed by the
        garbage collector, in the middle of a section that holds it.
        """
        if os.getpid() != self._process:
            return
        self._discards.put(given_back)
        self._drain_if_free()

    def close(self) -> None:
        """Stop the threads; a second call does nothing.

        Steps that wait for queued loads get an error. Returns after at most two
        seconds, even if a read hangs.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            dropped = self._fetch.remove_all()
            for load in dropped:
                load.error = MoeCacheError("the runtime was closed")
                self._retire(load, filled=False)
            self._unstaged.notify_all()
        for load in dropped:
            for arrived in load.waiting:
                arrived.put(load)
        num_stuck = self._fetch.close(CLOSE_TIMEOUT_S)
        if num_stuck:
            logger.warning("loader.stuck reads=%d do not return", num_stuck)

    def _plan(
        self,
        layer: int,
        ids: np.ndarray,
        slots: np.ndarray,
        misses: np.ndarray,
        cause: Cause,
        claimed: list[Load],
        joined: list[Load],
    ) -> list[int]:
        flat = ids.reshape(-1)
        bypassed: list[int] = []
        for position in misses.tolist():
            if position < 0:
                load = self._loads.get(int(slots[~position]))
                if load is None:
                    raise MoeCacheError(
                        f"expert {int(flat[~position])} of layer {layer} was claimed in the cache "
                        "from outside the runtime; publish or abandon it first"
                    )
                joined.append(load)
            elif slots[position] < 0:
                bypassed.append(int(flat[position]))
            else:
                claimed.append(Load(layer, int(flat[position]), int(slots[position]), cause))
        return bypassed

    def _roll_back(
        self,
        slots: np.ndarray,
        misses: np.ndarray,
        joined: list[Load],
        arrived: "SimpleQueue[Load]",
    ) -> None:
        for load in joined:
            if arrived in load.waiting:
                load.waiting.remove(arrived)
        for position in misses.tolist():
            if position >= 0 and slots[position] >= 0:
                dropped = self._loads.pop(int(slots[position]), None)
                if dropped is not None:
                    self.counts.end_urgent(read=False)
                    self._fetch.remove(dropped)
                self._cache.abandon(int(slots[position]))
        self._cache.release(slots)
        # The caller gives back what stands there.
        slots[:] = -1

    def _begin(self, loads: list[Load], arrived: "SimpleQueue[Load]") -> None:
        started = self.clock()
        try:
            self._fetch.begin()
        except BaseException:
            # The caller does not know of them.
            self.discard(Discard(loads, arrived, np.empty(0, np.int32)))
            raise
        if self._fetch.begins_by_reading:
            self._cache.profiler.record_miss_stall(self.clock() - started)

    def _wait_for_prefetches(self) -> None:
        """Take back what is read ahead, and wait for what cannot be taken back."""
        over: SimpleQueue[Load] = SimpleQueue()
        with self._lock:
            self._cancel_prefetches(None)
            loads = list(self._prefetches)
            for load in loads:
                load.told.append(over)
                self._hasten(load)
        for _ in loads:
            self.wait(over)

    def _cancel_prefetches(self, layer: int | None) -> None:
        """Take back what is read ahead for a layer that came without it, or for any."""
        if not self._prefetches:
            return
        for load in list(self._prefetches):
            if (
                (layer is None or load.layer == layer)
                and not (load.urgent or load.waiting or load.cancelled)
                and load.cause is Cause.PREFETCH
            ):
                load.cancelled = True
                if self._fetch.cancel(load):
                    load.done = True
                    load.error = MoeCacheError("nobody asked for it")
                    self._retire(load, filled=False)

    def _hasten(self, load: Load) -> None:
        if not load.urgent:
            load.urgent = True
            self.counts.begin_urgent()
            self._fetch.hasten(load)

    def _submit(self, load: Load) -> None:
        self._loads[load.slot] = load
        self.counts.begin_urgent()
        self._fetch.add(load)

    def _retire(self, load: Load, *, filled: bool) -> None:
        del self._loads[load.slot]
        if load.urgent:
            self.counts.end_urgent(read=filled)
        self._end_prefetch(load)
        if load.staged:
            return
        if filled:
            self._cache.publish(load.slot)
        else:
            self._cache.abandon(load.slot)

    def _end_prefetch(self, load: Load) -> None:
        if load in self._prefetches:
            self._prefetches.discard(load)
            if load.cause is Cause.PREFETCH:
                self.counts.end_prefetch(load, self._store.layout.expert_bytes(load.layer))

    def _return_staging(self, slot: int) -> None:
        if self._staging.give_back(slot):
            self._unstaged.notify()
            self._to_announce = True

    def _drain_if_free(self) -> None:
        # Called after every section that held the lock: who finds it taken
        # leaves its discard to the holder. The sections are plain `with` on the
        # lock itself, where an interrupt cannot come between taking and entering.
        while not self._discards.empty() and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()
        if self._to_announce:
            self._to_announce = False
            self._fetch.announce()

    def _drain(self) -> None:
        while True:
            try:
                given_back = self._discards.get_nowait()
            except Empty:
                return
            for load in given_back.loads:
                self._cancel(load, given_back.arrived)
            self._pool.release_after_compute(given_back.leased)
            self._cache.release(given_back.leased)
            if given_back.staged:
                self._pool.release_after_compute(np.array(list(given_back.staged), np.int32))
            for slot in given_back.staged:
                self._return_staging(slot)

    def _cancel(self, load: Load, arrived: "SimpleQueue[Load]") -> None:
        # Those not begun are dropped unless another step waits for them; those
        # under way finish, and end up in the cache.
        if self._loads.get(load.slot) is not load:  # it was done before
            if load.staged:
                self._return_staging(load.slot)
            return
        load.waiting.remove(arrived)
        if not load.waiting and self._fetch.remove(load):
            self._retire(load, filled=False)
            if load.staged:
                self._return_staging(load.slot)
        elif load.staged:
            load.orphaned = True
            self._staging.orphan(load.slot)

    def _finish(self, load: Load) -> bool:
        """Take in a load that is done; False if it is to be carried out once more."""
        with deferred():
            return self._take_in(load)

    def _take_in(self, load: Load) -> bool:
        with self._lock:
            if load.done:
                return True
            ahead = load in self._prefetches
            if ahead and load.error is not None and load.waiting and not self._closed:
                # Who joined it shall not fail for what it did not ask for.
                self._end_prefetch(load)
                load.error, load.cancelled = None, False
                return False
            load.done = True
            if load.error is not None and self._closed:
                load.cancelled = True
            self.counts.done(load, self._store.layout.expert_bytes(load.layer))
            self._retire(load, filled=load.error is None)
            if load.orphaned:
                self._return_staging(load.slot)
        self._drain_if_free()
        if load.error is not None and not (load.waiting or load.cancelled or self._closed):
            self._log_failure(load)
        for arrived in (*load.waiting, *load.told):
            arrived.put(load)
        if ahead:
            self.prefetch_done(load)
        return True

    def _log_failure(self, load: Load) -> None:
        # Nobody waits who could be told. Once per cause: a dead disk fails every read.
        cause = (type(load.error), str(load.error))
        if cause not in self._logged and len(self._logged) < MAX_LOGGED_CAUSES:
            self._logged.add(cause)
            logger.warning(
                "loader.read_failed layer=%d expert=%d error=%s",
                load.layer,
                load.expert,
                load.error,
            )

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise MoeCacheError("this runtime is the parent process's; open one in the child")
        if self._closed:
            raise MoeCacheError("the runtime is closed")


def _ignore(load: Load) -> None:
    """Nobody prefetches."""
