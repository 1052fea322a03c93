"""SlotLoader: the threads that fill slots from the store."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from queue import Empty, SimpleQueue

import numpy as np

from moecache._cache import ExpertCache
from moecache.errors import CapacityError, MoeCacheError
from moecache.slots.base import SlotPool
from moecache.stores.base import ExpertStore

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
MAX_LOGGED_CAUSES = 100


class Load:
    """One expert on its way into one slot."""

    __slots__ = ("error", "expert", "layer", "orphaned", "slot", "staged", "waiting")

    def __init__(self, layer: int, expert: int, slot: int, *, staged: bool = False) -> None:
        self.layer = layer
        self.expert = expert
        self.slot = slot
        self.staged = staged
        self.orphaned = False  # staged, and nobody waits for it any more
        self.waiting: list[SimpleQueue[Load]] = []
        self.error: BaseException | None = None


class Discard:
    """What a step that is over gives back: loads it waits for no more, and slots."""

    __slots__ = ("arrived", "leased", "loads", "staged")

    def __init__(
        self,
        loads: Iterable[Load],
        arrived: "SimpleQueue[Load]",
        leased: np.ndarray,
        staged: Iterable[int] = (),
    ) -> None:
        self.loads = loads
        self.arrived = arrived
        self.leased = leased
        self.staged = staged


class SlotLoader:
    """Fill slots from a store, in threads of its own and in callers that wait.

    Ties cache, pool and store together: a claim in the cache and the load that
    fills it are made under one lock, so that a step which joins a claim always
    finds its load. No byte moves under the lock.

    Parameters
    ----------
    store : ExpertStore
    pool : SlotPool
        Its slots from `cache.capacity` on are for staging.
    cache : ExpertCache
    num_threads : int
        0: only callers that wait for experts read them.
    """

    def __init__(
        self, store: ExpertStore, pool: SlotPool, cache: ExpertCache, num_threads: int
    ) -> None:
        self._store = store
        self._pool = pool
        self._cache = cache
        self._lock = threading.Lock()
        self._discards: SimpleQueue[Discard] = SimpleQueue()
        self._work = threading.Condition(self._lock)
        self._unstaged = threading.Condition(self._lock)
        self._queue: deque[Load] = deque()
        self._loads: dict[int, Load] = {}
        self._staging = list(range(cache.capacity, pool.num_slots))
        self._stagers: dict[int, int] = {}  # staging slot in use -> thread, 0 for an orphan
        self._closed = False
        self._process = os.getpid()
        self._logged: set[tuple[type, str]] = set()
        self.num_staging = len(self._staging)
        self.num_steps = 0
        self.num_reads = 0
        self.num_failed_reads = 0
        self.bytes_read = 0
        self._threads = [
            threading.Thread(target=self._work_loop, name=f"moecache-loader-{index}", daemon=True)
            for index in range(num_threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # the system has no more threads
            self.close()
            raise

    def acquire(
        self,
        layer: int,
        ids: np.ndarray,
        slots: np.ndarray,
        misses: np.ndarray,
        arrived: "SimpleQueue[Load]",
        *,
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
                self.num_steps += 1
                if count == 0:
                    return [], []
                claimed: list[Load] = []
                joined: list[Load] = []
                try:
                    bypassed = self._plan(layer, ids, slots, misses[:count], claimed, joined)
                    for load in joined:
                        load.waiting.append(arrived)
                    for load in claimed:
                        load.waiting.append(arrived)
                        self._submit(load)
                except BaseException:
                    self._roll_back(slots, misses[:count], joined, arrived)
                    raise
                self._work.notify(len(claimed))
                return claimed + joined, bypassed
        finally:
            self._drain_if_free()

    def release(self, slots: np.ndarray) -> None:
        """End the leases on slots of the cache, once computations that use them are issued."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._pool.release_after_compute(slots)
            self._cache.release(slots)
        self._drain_if_free()

    def stage(
        self, layer: int, experts: Sequence[int], arrived: "SimpleQueue[Load]", *, wait: bool
    ) -> list[Load]:
        """Start to load the first of `experts` into free staging slots.

        Parameters
        ----------
        wait : bool
            Wait for at least one slot. Otherwise return an empty list if none is free.

        Raises
        ------
        CapacityError
            If waiting could last for ever: an unfinished step of this thread holds some.
        """
        self._check_open()
        with self._lock:
            while wait and not self._staging:
                if self.num_staging == 0:
                    raise CapacityError(
                        f"layer {layer} finds every slot in use and there are no staging slots; "
                        "try again, or open with more memory"
                    )
                # Whoever holds some and waits for more could wait for another who does.
                mine = list(self._stagers.values()).count(threading.get_ident())
                if mine:
                    raise CapacityError(
                        f"layer {layer} needs a staging slot, but all {self.num_staging} are in "
                        f"use, {mine} of them by an unfinished step of this thread; finish its "
                        "waves first"
                    )
                # Waiting gives the lock up without looking at discards: look again.
                self._unstaged.wait(0.05)
                self._drain()
                self._check_open()
            loads = []
            for expert in experts[: len(self._staging)]:
                slot = self._staging.pop()
                self._stagers[slot] = threading.get_ident()
                load = Load(layer, expert, slot, staged=True)
                load.waiting.append(arrived)
                self._submit(load)
                loads.append(load)
            self._work.notify(len(loads))
        return loads

    def unstage(self, slots: Sequence[int]) -> None:
        """Give staging slots back, once computations that use them are issued."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._pool.release_after_compute(np.asarray(slots, np.int32))
            for slot in slots:
                self._return_staging(slot)
        self._drain_if_free()

    def wait(self, arrived: "SimpleQueue[Load]") -> Load:
        """Return the next load that is done, reading queued ones meanwhile.

        The caller has nothing better to do: reading itself spares it the hop to
        another thread, and needs none if there are none.
        """
        if os.getpid() != self._process:
            raise MoeCacheError("this runtime is the parent process's; open one in the child")
        while True:
            try:
                return arrived.get_nowait()
            except Empty:
                pass
            load = None
            try:
                with self._lock:
                    load = self._queue.popleft() if self._queue else None
                if load is None:
                    return arrived.get()
                self._fill(load)
            except BaseException:
                # An interrupt between taking the load and filling it: others may wait.
                if load is not None and self._loads.get(load.slot) is load:
                    self._interrupted(load)
                    self._finish(load)
                raise

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
            dropped = list(self._queue)
            self._queue.clear()
            for load in dropped:
                load.error = MoeCacheError("the runtime was closed")
                self._retire(load, filled=False)
            self._work.notify_all()
            self._unstaged.notify_all()
        for load in dropped:
            for arrived in load.waiting:
                arrived.put(load)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        started = [thread for thread in self._threads if thread.ident is not None]
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
        num_stuck = sum(thread.is_alive() for thread in started)
        if num_stuck:
            logger.warning("loader.stuck threads=%d reads do not return", num_stuck)

    def _plan(
        self,
        layer: int,
        ids: np.ndarray,
        slots: np.ndarray,
        misses: np.ndarray,
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
                claimed.append(Load(layer, int(flat[position]), int(slots[position])))
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
                if dropped is not None and dropped in self._queue:
                    self._queue.remove(dropped)
                self._cache.abandon(int(slots[position]))
        self._cache.release(slots)
        # The caller gives back what stands there.
        slots[:] = -1

    def _submit(self, load: Load) -> None:
        self._loads[load.slot] = load
        self._queue.append(load)

    def _retire(self, load: Load, *, filled: bool) -> None:
        del self._loads[load.slot]
        if load.staged:
            return
        if filled:
            self._cache.publish(load.slot)
        else:
            self._cache.abandon(load.slot)

    def _return_staging(self, slot: int) -> None:
        if self._stagers.pop(slot, None) is not None:
            self._staging.append(slot)
            self._unstaged.notify()

    def _drain_if_free(self) -> None:
        # Called after every section that held the lock: who finds it taken
        # leaves its discard to the holder. The sections are plain `with` on the
        # lock itself, where an interrupt cannot come between taking and entering.
        while not self._discards.empty() and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

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
        if load in self._queue and not load.waiting:
            self._queue.remove(load)
            self._retire(load, filled=False)
            if load.staged:
                self._return_staging(load.slot)
        elif load.staged:
            load.orphaned = True
            self._stagers[load.slot] = 0

    def _work_loop(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                load = self._queue.popleft()
            try:
                self._fill(load)
            except BaseException:
                logger.exception("loader.interrupted expert=%d layer=%d", load.expert, load.layer)
            # Not kept alive until the next one comes.
            del load

    def _fill(self, load: Load) -> None:
        try:
            parts = self._pool.buffers(load.slot, load.layer)
            self._store.read_into(load.layer, load.expert, parts)
            self._pool.wait(self._pool.upload(load.slot, load.layer, parts))
        except Exception as error:  # noqa: BLE001 - a waiting step raises it
            # Without its frames: they hold this load, a cycle with the slot's arrays in it.
            load.error = error.with_traceback(None)
        except BaseException:
            # Ctrl-C or exit belongs to this thread, and not to steps that wait for the load.
            self._interrupted(load)
            raise
        finally:
            self._finish(load)

    def _interrupted(self, load: Load) -> None:
        load.error = MoeCacheError(
            f"reading expert {load.expert} of layer {load.layer} was interrupted; call again"
        )

    def _finish(self, load: Load) -> None:
        with self._lock:
            if load.error is None:
                self.num_reads += 1
                self.bytes_read += self._store.layout.expert_bytes(load.layer)
            else:
                self.num_failed_reads += 1
            self._retire(load, filled=load.error is None)
            if load.orphaned:
                self._return_staging(load.slot)
        self._drain_if_free()
        if load.error is not None and not load.waiting:
            self._log_failure(load)
        for arrived in load.waiting:
            arrived.put(load)

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
