"""Steps, and the waves they are handed out in."""

import functools
from collections.abc import Generator, Iterator, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

import numpy as np

from moecache._cache import ExpertCache
from moecache.fetch import Cause, Load
from moecache.interrupts import deferred
from moecache.loader import Discard, SlotLoader
from moecache.prefetch import Prefetcher


class Wave:
    """The part of a step that can be computed now: its slots are leased and filled.

    Valid until the next wave is asked for. Iterating yields (slot, pairs) for
    each expert. A pair is an index into the step's flattened ids: pair p is
    choice p % top_k of token p // top_k.

    Attributes
    ----------
    slots : ndarray of int32, shape [n]
        Where the wave's experts are.
    pairs : ndarray of int64, shape [m]
        Pairs that the wave covers, grouped by expert.
    offsets : ndarray of int64, shape [n + 1]
        The pairs of slots[i] are pairs[offsets[i]:offsets[i + 1]].
    top_k : int
        Choices per token.
    """

    __slots__ = ("offsets", "pairs", "slots", "top_k")

    def __init__(
        self, slots: np.ndarray, pairs: np.ndarray, offsets: np.ndarray, top_k: int
    ) -> None:
        # Read-only: these very slots are released when the wave is over.
        slots.flags.writeable = False
        self.slots = slots
        self.pairs = pairs
        self.offsets = offsets
        self.top_k = top_k

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (slot, pairs) for each expert."""
        bounds = self.offsets.tolist()
        for slot, start, stop in zip(self.slots.tolist(), bounds, bounds[1:], strict=False):
            yield slot, self.pairs[start:stop]

    def __len__(self) -> int:
        """Return the number of experts."""
        return len(self.slots)


class Lease:
    """Slots that hold all experts of a step until it is closed. A context manager.

    Attributes
    ----------
    slots : ndarray of int32, of the ids' shape
        Slot of each id; -1 for a dropped one.
    """

    def __init__(self, loader: SlotLoader, slots: np.ndarray) -> None:
        # Read-only: these very slots are released.
        slots.flags.writeable = False
        self.slots = slots
        self._loader: SlotLoader | None = loader

    def close(self) -> None:
        """End the lease; a second call does nothing."""
        with deferred():
            loader, self._loader = self._loader, None
            if loader is not None:
                loader.release(self.slots)

    def __del__(self) -> None:
        """End a lease that was dropped."""
        if self._loader is None:
            return
        with deferred():
            loader, self._loader = self._loader, None
            loader.discard(Discard((), SimpleQueue(), self.slots))

    def __enter__(self) -> Self:
        """Return the lease."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the lease."""
        self.close()


def lease(
    loader: SlotLoader,
    cache: ExpertCache,
    layer: int,
    ids: np.ndarray,
    *,
    prefetcher: Prefetcher | None = None,
    ignore_out_of_range: bool = False,
) -> Lease:
    """Return a lease on all experts of a step, once every one is there."""
    # Before the slots are acquired: what is given back is known at any interrupt.
    slots = np.full(ids.shape, -1, np.int32)
    misses = np.empty(min(ids.size, cache.num_experts), np.int32)
    arrived: SimpleQueue[Load] = SimpleQueue()
    outstanding: set[Load] = set()
    made: Lease | None = None
    try:
        with deferred():
            loads, _ = loader.acquire(
                layer,
                ids,
                slots.reshape(-1),
                misses,
                arrived,
                cause=_cause(ids),
                share=-1,
                ignore_out_of_range=ignore_out_of_range,
            )
            outstanding.update(loads)
            if prefetcher is not None:
                prefetcher.step(layer, ids)
        while outstanding:
            for load in _wait(loader, cache, arrived):
                outstanding.discard(load)
                if load.error is not None:
                    raise load.error
        loader.before_compute(slots)
        with deferred():
            made = Lease(loader, slots)
    except BaseException:
        with deferred():
            if made is None:
                loader.discard(Discard(outstanding, arrived, slots))
            else:
                made.close()
        raise
    return made


def waves(
    loader: SlotLoader,
    cache: ExpertCache,
    layer: int,
    ids: np.ndarray,
    *,
    prefetcher: Prefetcher | None = None,
    ignore_out_of_range: bool = False,
) -> Generator[Wave, None, None]:
    """Yield the waves of a step: what is there first, then what arrives.

    A step of many tokens admits no more experts to the cache than its layer's
    fair share; the others pass through staging slots, as does what finds no
    slot to claim.
    """
    top_k = ids.shape[-1] if ids.ndim else 1
    # Before the slots are acquired: what is given back is known at any interrupt.
    slots = np.full(ids.size, -1, np.int32)
    misses = np.empty(min(ids.size, cache.num_experts), np.int32)
    arrived: SimpleQueue[Load] = SimpleQueue()
    one_token = ids.size == top_k
    loads: list[Load] = []
    step: _Step | None = None
    over = False

    def give_back() -> None:
        nonlocal over
        with deferred():
            if over:
                return
            over = True
            if step is None:
                loader.discard(Discard(loads, arrived, slots))
            else:
                step.close()

    try:
        try:
            with deferred():
                loads, bypassed = loader.acquire(
                    layer,
                    ids,
                    slots,
                    misses,
                    arrived,
                    cause=_cause(ids),
                    share=cache.num_experts if one_token else cache.fair_share(layer),
                    ignore_out_of_range=ignore_out_of_range,
                )
                if prefetcher is not None:
                    prefetcher.step(layer, ids)
                if loads or bypassed:
                    step = _Step(loader, cache, layer, ids, slots, top_k, arrived, loads)
            if step is not None:
                yield from step.waves(bypassed)
            elif ids.size:
                loader.before_compute(slots)
                yield _whole_step(ids, slots, top_k, one_token=one_token)
        finally:
            give_back()
    except BaseException:
        # An interrupt may have come before that began.
        give_back()
        raise


class _Step:
    """A step with misses: what of it is leased, staged and on its way."""

    def __init__(
        self,
        loader: SlotLoader,
        cache: ExpertCache,
        layer: int,
        ids: np.ndarray,
        slots: np.ndarray,
        top_k: int,
        arrived: "SimpleQueue[Load]",
        loads: Sequence[Load],
    ) -> None:
        self._loader = loader
        self._cache = cache
        self._layer = layer
        self._top_k = top_k
        self._arrived = arrived
        self._cause = _cause(ids)
        self._order, starts = _group(ids.reshape(-1))
        self._starts = starts.tolist()
        first = self._order[starts[:-1]]
        self._experts = ids.reshape(-1)[first]
        self._group_of = {expert: group for group, expert in enumerate(self._experts.tolist())}
        self._slots = slots[first]  # slot of each group
        self._leased = set(slots[slots >= 0].tolist())
        self._staged: set[int] = set()  # slots that hold an expert of ours
        self._outstanding = set(loads)

    def waves(self, bypassed: list[int]) -> Iterator[Wave]:
        coming = {load.expert for load in self._outstanding}
        bypassed = self._stage(bypassed, wait=False)
        ready = [
            group
            for group, (expert, slot) in enumerate(
                zip(self._experts.tolist(), self._slots.tolist(), strict=True)
            )
            if slot >= 0 and expert not in coming
        ]
        if ready:
            yield self._wave(ready)
            self._finish(self._slots[ready].tolist())
        while self._outstanding or bypassed:
            bypassed = self._stage(bypassed, wait=not self._outstanding)
            done = _wait(self._loader, self._cache, self._arrived)
            # All of them are accounted for before one is raised.
            with deferred():
                self._outstanding.difference_update(done)
                self._staged.update(load.slot for load in done if load.staged)
            for load in done:
                if load.error is not None:
                    raise load.error
            groups = [self._group_of[load.expert] for load in done]
            self._slots[groups] = [load.slot for load in done]
            yield self._wave(groups)
            self._finish(self._slots[groups].tolist())

    def _wave(self, groups: list[int]) -> Wave:
        wave = _wave_of(self._order, self._starts, groups, self._slots, self._top_k)
        self._loader.before_compute(wave.slots)
        return wave

    def close(self) -> None:
        leased = np.array(list(self._leased), np.int32)
        self._loader.discard(Discard(self._outstanding, self._arrived, leased, self._staged))

    def _stage(self, experts: list[int], *, wait: bool) -> list[int]:
        while experts:
            with deferred():
                loads = self._loader.stage(self._layer, experts, self._arrived, cause=self._cause)
                self._outstanding.update(loads)
            if loads or not wait:
                return experts[len(loads) :]
            self._loader.wait_for_staging(self._layer)
        return experts

    def _finish(self, slots: list[int]) -> None:
        # A wave is over: what it used may be evicted, or staged over, from here on.
        with deferred():
            leased = [slot for slot in slots if slot in self._leased]
            staged = [slot for slot in slots if slot in self._staged]
            self._leased.difference_update(leased)
            self._staged.difference_update(staged)
            if leased:
                self._loader.release(np.array(leased, np.int32))
            if staged:
                self._loader.unstage(staged)


def _cause(ids: np.ndarray) -> Cause:
    return Cause.DEMAND if ids.ndim == 0 or ids.size == ids.shape[-1] else Cause.BULK


def _wait(loader: SlotLoader, cache: ExpertCache, arrived: "SimpleQueue[Load]") -> list[Load]:
    """Return at least one load that is done, and every other that is done by then."""
    loader.look()
    done: list[Load] = []
    if arrived.empty():
        started = loader.clock()
        done.append(loader.wait(arrived))
        cache.profiler.record_miss_stall(loader.clock() - started)
    try:
        while True:
            done.append(arrived.get_nowait())
    except Empty:
        return done


def _whole_step(ids: np.ndarray, slots: np.ndarray, top_k: int, *, one_token: bool) -> Wave:
    # A router's choices for one token are distinct: every pair is a group,
    # nothing to sort. Repeated ones must be computed together, as they are
    # when they come as misses: a product of two rows may round differently.
    if one_token and len(set(slots.tolist())) == top_k and slots.min() >= 0:
        pairs, offsets = _one_token(top_k)
        return Wave(slots, pairs, offsets, top_k)
    order, starts = _group(ids.reshape(-1))
    found = slots[order[starts[:-1]]]
    # Ids that were dropped have no slot.
    return _wave_of(order, starts.tolist(), np.flatnonzero(found >= 0).tolist(), found, top_k)


def _wave_of(
    order: np.ndarray, starts: list[int], groups: list[int], slots: np.ndarray, top_k: int
) -> Wave:
    """Return the wave of some groups; `slots` has the slot of every group of the step."""
    parts = [order[starts[group] : starts[group + 1]] for group in groups]
    offsets = np.zeros(len(groups) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    pairs = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return Wave(slots[groups], pairs, offsets, top_k)


def _group(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # Stable: the pairs of an expert stay in the order of the tokens.
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    return order, np.append(starts, ids.size)


@functools.lru_cache(maxsize=64)
def _one_token(top_k: int) -> tuple[np.ndarray, np.ndarray]:
    pairs, offsets = np.arange(top_k), np.arange(top_k + 1)
    # Shared by every wave of that size.
    pairs.flags.writeable = offsets.flags.writeable = False
    return pairs, offsets
