"""Steps, and the waves they are handed out in."""

import functools
import weakref
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from moecache.cache._cache import ExpertCache
from moecache.interrupts import uninterrupted
from moecache.loading._guard import Guard
from moecache.loading._loader import SlotLoader
from moecache.loading._step import Step

# Ids that are looked at one by one: faster than to sort them.
_FEW = 64
# Ids from which on it is worth it to look for narrow ones.
_MANY = 512
# Questions after which finished reads are looked for.
_LOOK_AFTER = 100


class Wave:
    """The part of a step that can be computed now: its slots are leased and filled.

    Valid until the next wave is asked for. Iterating yields (slot, pairs) for
    each expert. A pair is an index into the step's flattened ids: pair p is
    choice p % top_k of token p // top_k.

    Attributes
    ----------
    slots : ndarray of int32, shape [n]
        The slots of the wave's experts.
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
    """Slots that hold all experts of a step until it is closed, or dropped. A context manager.

    Attributes
    ----------
    slots : ndarray of int32, of the ids' shape
        Slot of each id; -1 for a dropped one.
    """

    def __init__(self, loader: SlotLoader, step: Step, guard: Guard) -> None:
        # Read-only: these very slots are released.
        step.slots.flags.writeable = False
        self.slots = step.slots.reshape(step.ids.shape)
        self._loader = loader
        self._guard = guard

    def close(self) -> None:
        """End the lease; a second call does nothing."""
        self._guard.close()
        self._loader.give_back()

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


# Called with a step's layer, ids and sequences when its experts are acquired, and before it waits
# for them.
Observe = Callable[[int, np.ndarray, npt.ArrayLike | None], object]


def lease(
    loader: SlotLoader,
    cache: ExpertCache,
    layer: int,
    ids: np.ndarray,
    *,
    observe: Observe | None = None,
    ignore_out_of_range: bool = False,
    sequences: npt.ArrayLike | None = None,
) -> Lease:
    """Return a lease on all experts of a step, once every one is there."""
    step = Step(
        layer,
        ids,
        cache.num_experts,
        ignore_out_of_range=ignore_out_of_range,
        sequences=sequences,
    )
    guard = loader.guard(step)
    try:
        loader.acquire(step)
        if observe is not None:
            observe(layer, ids, sequences)
        while step.loads:
            loader.arrivals(step)
        loader.pool.before_compute(step.slots)
        return Lease(loader, step, guard)
    except BaseException:
        guard.close()
        loader.give_back()
        raise


def waves(
    loader: SlotLoader,
    cache: ExpertCache,
    layer: int,
    ids: np.ndarray,
    *,
    observe: Observe | None = None,
    bulk: bool | None = None,
    ignore_out_of_range: bool = False,
    sequences: npt.ArrayLike | None = None,
) -> Generator[Wave, None, None]:
    """Yield the waves of a step: resident experts first, then the others as they arrive.

    A bulk step, by default one of many tokens, admits no more experts to the cache than
    its layer's fair share, or, of several sequences, what the policy finds worth it; the
    others pass through staging slots, as does what finds no slot to claim.
    """
    top_k = ids.shape[-1] if ids.ndim else 1
    one_token = ids.size == top_k
    if bulk is None:
        bulk = not one_token
    share = cache.fair_share(layer) if bulk else cache.num_experts
    step = Step(
        layer,
        ids,
        cache.num_experts,
        share=share,
        ignore_out_of_range=ignore_out_of_range,
        sequences=sequences,
    )
    guard = loader.guard(step)
    try:
        loader.acquire(step)
        if observe is not None:
            observe(layer, ids, sequences)
        if step.loads or step.bypassed:
            yield from _Parts(loader, step, top_k).waves()
        elif ids.size:
            loader.pool.before_compute(step.slots)
            yield _whole_step(ids, step.slots, top_k, one_token=one_token)
    finally:
        guard.close()
        loader.give_back()


def compute_token(
    loader: SlotLoader,
    cache: ExpertCache,
    layer: int,
    ids: np.ndarray,
    compute: Callable[[np.ndarray, list[int]], object],
    *,
    observe: Observe | None = None,
    sequences: npt.ArrayLike | None = None,
) -> None:
    """Have a token's experts computed: those that are resident, then each as it arrives.

    What `waves` does for one token, with fewer objects. Leases end with the step.

    Parameters
    ----------
    loader, cache, layer
    ids : ndarray of int32 or int64, shape [1, top_k]
    compute : callable (slots, places)
        Called with the slot of each id, int32 [top_k], and a list of the places whose experts are
        to be computed, in each call others.
    observe : callable, optional
    sequences : array of int, shape [1], optional
        Which sequence the token is of, where there are several.
    """
    step = Step(layer, ids, cache.num_experts, share=cache.num_experts, sequences=sequences)
    guard = loader.guard(step)
    try:
        loader.acquire(step)
        if observe is not None:
            observe(layer, ids, sequences)
        if not loader.compute_token(step, compute):
            _compute_waves(loader, step, compute)
    finally:
        guard.close()
        loader.give_back()


def _compute_waves(
    loader: SlotLoader,
    step: Step,
    compute: Callable[[np.ndarray, list[int]], object],
) -> None:
    """Compute a token's experts that come twice, have no slot, or go through staging slots."""
    slots = np.full(step.ids.size, -1, np.int32)
    if step.loads or step.bypassed:
        waves = _Parts(loader, step, step.ids.size).waves()
    else:
        waves = iter([_whole_step(step.ids, step.slots, step.ids.size, one_token=True)])
    for wave in waves:
        for slot, pairs in wave:
            slots[pairs] = slot
            # One by one where a token has an expert twice: a row's bits do not depend on others.
            for pair in pairs.tolist():
                compute(slots, [pair])


class _Parts:
    """A step with misses, cut into waves."""

    def __init__(self, loader: SlotLoader, step: Step, top_k: int) -> None:
        self._loader = loader
        self._step = step
        self._top_k = top_k
        self._order, starts = _group(step.ids.reshape(-1))
        self._starts = starts.tolist()
        # If every pair is a group of its own, groups are pairs.
        first = self._order[starts[:-1]] if len(self._order) >= len(starts) else self._order
        self._experts = step.ids.reshape(-1)[first].tolist()
        self._group_of = {expert: group for group, expert in enumerate(self._experts)}
        self._slots = step.slots[first]  # slot of each group
        step.leased = self._leased = set(step.slots[step.slots >= 0].tolist())

    def waves(self) -> Iterator[Wave]:
        step = self._step
        coming = {load.expert for load in step.loads}
        if step.bypassed:
            self._loader.stage(step)
        slots = self._slots.tolist()
        ready = [
            group
            for group, (expert, slot) in enumerate(zip(self._experts, slots, strict=True))
            if slot >= 0 and expert not in coming
        ]
        if ready:
            slots = (wave := self._wave(ready)).slots
            yield wave
            self._release(slots)
        while step.loads or step.bypassed:
            while step.bypassed and not self._loader.stage(step) and not step.loads:
                self._loader.wait_for_staging(step.layer)
            done = self._loader.arrivals(step)
            groups = [self._group_of[load.expert] for load in done]
            self._slots[groups] = [load.slot for load in done]
            slots = (wave := self._wave(groups)).slots
            yield wave
            self._release(slots)

    def _wave(self, groups: list[int]) -> Wave:
        wave = _wave_of(self._order, self._starts, groups, self._slots, self._top_k)
        self._loader.pool.before_compute(wave.slots)
        return wave

    def _release(self, slots: np.ndarray) -> None:
        # A wave is over: its slots may be evicted, or staged over, from here on.
        step = self._step
        staged = step.staged.intersection(slots.tolist()) if step.staged else ()
        leased = slots
        if staged:
            leased = np.array([slot for slot in slots.tolist() if slot not in staged], np.int32)
        with uninterrupted():
            self._leased.difference_update(leased.tolist())
            step.staged.difference_update(staged)
            self._loader.release(leased, staged)


def _whole_step(ids: np.ndarray, slots: np.ndarray, top_k: int, *, one_token: bool) -> Wave:
    # A router's choices for one token are distinct: every pair is a group,
    # nothing to sort. Repeated ones must be computed together, as they are
    # when they come as misses: a product of two rows may round differently.
    if one_token and len(set(slots.tolist())) == top_k and slots.min() >= 0:
        pairs, offsets = _counted(top_k)
        return Wave(slots, pairs, offsets, top_k)
    order, starts = _group(ids.reshape(-1))
    found = slots[order[starts[:-1]]]
    # Ids that were dropped have no slot.
    return _wave_of(order, starts.tolist(), np.flatnonzero(found >= 0).tolist(), found, top_k)


def _wave_of(
    order: np.ndarray, starts: list[int], groups: list[int], slots: np.ndarray, top_k: int
) -> Wave:
    """Return the wave of some groups; `slots` has the slot of every group of the step."""
    if len(order) == len(starts) - 1:  # every pair is a group
        return Wave(slots[groups], order[groups], _counted(len(groups))[1], top_k)
    parts = [order[starts[group] : starts[group + 1]] for group in groups]
    offsets = np.zeros(len(groups) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    pairs = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return Wave(slots[groups], pairs, offsets, top_k)


def _group(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs in the order of their experts, and where each expert's begin, and the end."""
    if ids.size <= _FEW and len(set(ids.tolist())) == ids.size:
        return _counted(ids.size)  # one token's, usually: any order will do
    # Stable: the pairs of an expert stay in the order of the tokens.
    keys = ids
    if ids.size > _MANY:
        # NumPy sorts numbers of 16 bits by their digits, five times as fast.
        narrow = ids.astype(np.int16)
        keys = narrow if (narrow == ids).all() else ids
    order = np.argsort(keys, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return order, np.concatenate(([0] if ids.size else [], starts, [ids.size])).astype(np.int64)


@functools.lru_cache(maxsize=2 * _FEW)
def _counted(num: int) -> tuple[np.ndarray, np.ndarray]:
    pairs, offsets = np.arange(num), np.arange(num + 1)
    # Shared by all waves of that size.
    pairs.flags.writeable = offsets.flags.writeable = False
    return pairs, offsets


def reading(loader: SlotLoader) -> Callable[[], bool]:
    """Return what tells whether experts are on their way into slots; it keeps no loader."""
    reference = weakref.ref(loader)
    num_asked = 0

    def is_reading() -> bool:
        nonlocal num_asked
        loader = reference()
        if loader is None or not loader.num_in_flight:
            num_asked = 0
            return False
        num_asked += 1
        # The step that asked for them may have gone, and left them to be taken in.
        if num_asked % _LOOK_AFTER == 0:
            loader.look()
        return True

    return is_reading
