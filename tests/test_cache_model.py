"""ExpertCache does what its plain-Python oracle does, under every policy and both scopes."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from moecache.cache._cache import ExpertCache
from moecache.errors import CapacityError
from moecache.study._arguments import POLICIES
from tests.helpers.examples import num_examples
from tests.helpers.oracles import OracleCache, OracleSlot

FORMS = ("int32", "int64", "list", "strided", "2-D", "fortran")
PICK = st.integers(0, 1000)
# Few experts, so that they meet again; with 300 also those around a mask's word boundaries.
WIDE = (0, 1, 63, 64, 127, 128, 255, 256, 298, 299)
PLACES = st.tuples(st.integers(0, 2), st.integers(0, 9))


def as_form(ids: list[int], form: str) -> npt.ArrayLike:
    """Return the ids in one of the forms callers have them in."""
    if form == "list":
        return ids
    array = np.array(ids, np.int32 if form in ("int32", "fortran") else np.int64)
    if form == "strided":
        return np.repeat(array, 3)[::3]
    if form in ("2-D", "fortran") and len(ids) % 2 == 0:
        return np.array(array.reshape(2, -1), order="F" if form == "fortran" else "C")
    return array


class CacheMachine(RuleBasedStateMachine):
    """The compiled cache and its oracle side by side."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        num_layers=st.integers(1, 3),
        num_experts=st.sampled_from([1, 4, 6, 10, 300]),
        capacity=st.sampled_from([1, 2, 3, 4, 5, 6, 8, 10, 14]),
        scope=st.sampled_from(["global", "layer"]),
    )
    def create(
        self, policy: str, num_layers: int, num_experts: int, capacity: int, scope: str
    ) -> None:
        """Start empty."""
        if scope == "layer":
            capacity = max(capacity, num_layers)
        self.layers = num_layers
        self.experts = WIDE if num_experts == 300 else tuple(range(num_experts))
        self.cache = ExpertCache(num_layers, num_experts, capacity, policy=policy, scope=scope)
        self.oracle = OracleCache(num_layers, num_experts, capacity, policy=policy, scope=scope)
        self.numbers: dict[OracleSlot, int] = {}
        self.filling: list[OracleSlot] = []
        self.withheld: list[int] = []
        self.steps: list[tuple[npt.NDArray[np.int32], list[OracleSlot | None]]] = []

    def place(self, layer: int, index: int) -> tuple[int, int]:
        """Return a layer and an expert of this model."""
        return layer % self.layers, self.experts[index % len(self.experts)]

    def bind(self, slot: OracleSlot | None, number: int) -> None:
        """Require that a stay keeps one slot, and that no two stays share one."""
        if slot is None:
            assert number == -1
            return
        assert 0 <= number < self.cache.capacity
        if slot not in self.numbers:
            in_use = {*self.oracle.slots.values(), *self.oracle.abandoned}
            assert number not in {n for s, n in self.numbers.items() if s in in_use}
            self.numbers[slot] = number
        assert self.numbers[slot] == number

    def visible(self) -> tuple[Any, ...]:
        """Return what a failed call must leave alone."""
        masks = [self.cache.resident_mask(layer).tolist() for layer in range(self.layers)]
        counts = self.cache.profiler.counts.tolist()
        numbers = self.cache.num_resident, self.cache.num_free, self.cache.num_evictions
        return self.cache.slot_table.tolist(), masks, counts, numbers, self.foreseen()

    def foreseen(self) -> tuple[int, int, int]:
        """Return what became of experts that were claimed as foreseen."""
        cache = self.cache
        return cache.num_foreseen_hits, cache.num_foreseen_late, cache.num_foreseen_unused

    @rule(
        layer=st.integers(0, 2),
        indices=st.lists(st.integers(0, 9), max_size=8),
        form=st.sampled_from(FORMS),
        share=st.sampled_from([-1, -1, -1, 0, 1, 2, 5]),
        foreign=st.booleans(),
        names=st.sampled_from([None, [0, 0], [0, 1], [1, 2]]),
    )
    def acquire(
        self,
        layer: int,
        indices: list[int],
        form: str,
        share: int,
        foreign: bool,
        names: list[int] | None,
    ) -> None:
        """Lease a step, or fail alike and change nothing."""
        layer %= self.layers
        ids = [self.experts[i % len(self.experts)] for i in indices]
        if foreign:
            ids.insert(len(ids) // 2, self.cache.num_experts)
        slots = np.full(len(ids) + 1, -7, np.int32)
        misses = np.full(len(ids) + 1, -7, np.int32)
        rows = 2 if np.ndim(as_form(ids, form)) == 2 else 1
        sequences = None if rows == 1 else names
        before = self.visible()
        try:
            expected, first = self.oracle.acquire(
                layer, ids, rows=rows, share=share, drop=foreign, sequences=sequences
            )
        except CapacityError:
            with pytest.raises(CapacityError):
                self.cache.acquire(
                    layer, as_form(ids, form), slots, misses, ignore_out_of_range=foreign
                )
            assert self.visible() == before
            assert (slots == -7).all()
            assert (misses == -7).all()
            return
        num_misses = self.cache.acquire(
            layer,
            as_form(ids, form),
            slots,
            misses,
            share=share,
            ignore_out_of_range=foreign,
            sequences=sequences,
        )
        assert num_misses == len(first)
        assert misses[:num_misses].tolist() == first
        assert slots[-1] == -7
        for slot, number in zip(expected, slots.tolist(), strict=False):
            self.bind(slot, number)
        for slot in dict.fromkeys(expected):
            if slot is not None and slot.state == "filling" and slot not in self.filling:
                self.filling.append(slot)
        self.steps.append((slots[: len(ids)].copy(), expected))

    @rule(layer=st.integers(0, 2), indices=st.lists(st.integers(0, 9), max_size=4))
    def serve(self, layer: int, indices: list[int]) -> None:
        """Do a whole step at once, so that not everything is leased."""
        steps = len(self.steps)
        self.acquire(layer, indices, "int32", 4, foreign=False, names=None)
        while self.filling:
            self.publish(0)
        if len(self.steps) > steps:
            self.release(len(self.steps) - 1)

    @rule(layer=st.integers(0, 2), indices=st.lists(st.integers(0, 9), max_size=5), bad=PICK)
    def acquire_bad_id(self, layer: int, indices: list[int], bad: int) -> None:
        """Change nothing when there is a bad id anywhere."""
        ids = [self.experts[i % len(self.experts)] for i in indices]
        wrong = [-1, self.cache.num_experts, -(2**31), 2**31 - 1][bad % 4]
        ids.insert(bad % (len(ids) + 1), wrong)
        out = np.full(len(ids), -7, np.int32)
        before = self.visible()
        with pytest.raises(ValueError, match=f"expert {wrong} is not in"):
            self.cache.acquire(layer % self.layers, np.array(ids), out, out.copy())
        assert self.visible() == before
        assert (out == -7).all()

    @precondition(lambda self: self.filling)
    @rule(pick=PICK)
    def publish(self, pick: int) -> None:
        """Fill a claimed slot; a second time is an error."""
        slot = self.filling.pop(pick % len(self.filling))
        self.cache.publish(self.numbers[slot])
        self.oracle.publish(slot)
        with pytest.raises(ValueError, match="not claimed"):
            self.cache.publish(self.numbers[slot])

    @precondition(lambda self: self.filling)
    @rule(pick=PICK)
    def abandon(self, pick: int) -> None:
        """Give a claimed slot back; a second time is an error."""
        slot = self.filling.pop(pick % len(self.filling))
        self.cache.abandon(self.numbers[slot])
        self.oracle.abandon(slot)
        with pytest.raises(ValueError, match="not claimed"):
            self.cache.abandon(self.numbers[slot])

    @precondition(lambda self: self.steps)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        """End a step, before or after its slots were filled."""
        numbers, slots = self.steps.pop(pick % len(self.steps))
        self.cache.release(numbers)
        self.oracle.release(slots)

    @rule(
        place=PLACES,
        evict=st.sampled_from([True, True, False]),
        foreseen=st.booleans(),
        likely=st.booleans(),
    )
    def claim(self, place: tuple[int, int], evict: bool, foreseen: bool, likely: bool) -> None:
        """Start a prefetch, or not."""
        layer, expert = self.place(*place)
        how = {"evict": evict, "foreseen": foreseen, "likely": likely}
        slot = self.oracle.claim(layer, expert, **how)
        self.bind(slot, self.cache.claim(layer, expert, **how))
        if slot is not None:
            self.filling.append(slot)

    @precondition(lambda self: self.oracle.is_global)
    @rule(num=st.integers(0, 6))
    def withhold(self, num: int) -> None:
        """Take the last slots out of use that nothing holds."""
        cache, oracle = self.cache, self.oracle
        places = {self.numbers[slot]: place for place, slot in oracle.slots.items()}
        taken = {self.numbers[slot] for slot in oracle.abandoned} | set(self.withheld)
        takes = []
        for number in reversed(range(cache.capacity)):
            if number in taken or len(takes) == num:
                continue
            if len(self.withheld) + len(takes) + 1 == cache.capacity:
                break
            if number not in places or oracle.can_give(oracle.slots[places[number]]):
                takes.append(number)
        gone = [places[number] for number in takes if number in places]
        assert cache.withhold(num) == takes
        oracle.withhold(gone, len(takes))
        self.withheld += takes

    @precondition(lambda self: self.oracle.is_global and self.withheld)
    @rule(num=st.integers(1, 6))
    def restore(self, num: int) -> None:
        """Take some into use again; what is no withheld slot changes nothing."""
        given = self.withheld[:num]
        in_use = [number for number in range(self.cache.capacity) if number not in self.withheld]
        for wrong in ([*given, given[0]], [*given, in_use[0]], [*given, self.cache.capacity]):
            before = self.visible()
            with pytest.raises(ValueError, match=r"withheld|twice"):
                self.cache.restore(wrong)
            assert self.visible() == before
        self.cache.restore(given)
        del self.withheld[:num]
        self.oracle.num_withheld -= len(given)

    @rule(place=PLACES)
    def pin(self, place: tuple[int, int]) -> None:
        """Pin an expert that is resident."""
        layer, expert = self.place(*place)
        assert self.cache.pin(layer, expert) == self.oracle.pin(layer, expert)

    @rule(dice=st.integers(0, 4))
    def pin_all(self, dice: int) -> None:
        """Pin everything that can be pinned, but seldom."""
        for layer, expert in sorted(self.oracle.resident()) if dice == 0 else []:
            assert self.cache.pin(layer, expert) == self.oracle.pin(layer, expert)

    @rule(place=PLACES)
    def unpin(self, place: tuple[int, int]) -> None:
        """Unpin an expert."""
        layer, expert = self.place(*place)
        self.cache.unpin(layer, expert)
        self.oracle.unpin(layer, expert)

    @rule(dice=st.integers(0, 9))
    def reset_profiler(self, dice: int) -> None:
        """Begin a sequence; set the counts to zero, but seldom."""
        self.cache.begin_sequence()
        self.oracle.begin_sequence()
        if dice == 0:
            self.cache.profiler.reset()
            self.oracle.reset_counts()

    @invariant()
    def agree(self) -> None:
        """Everything a caller can see is what the oracle says."""
        if not hasattr(self, "cache"):
            return
        cache, oracle = self.cache, self.oracle
        cache.check()
        table = cache.slot_table
        resident = {(int(layer), int(expert)) for layer, expert in np.argwhere(table >= 0)}
        assert resident == oracle.resident()
        for place in resident:
            assert table[place] == self.numbers[oracle.slots[place]]
        assert cache.num_resident == len(resident) <= cache.capacity
        assert cache.num_free == oracle.num_free == len(cache.free_slots_now())
        assert cache.num_withheld == len(self.withheld)
        assert cache.num_evictions == oracle.num_evictions
        assert self.foreseen() == (
            oracle.num_foreseen_hits,
            oracle.num_foreseen_late,
            oracle.num_foreseen_unused,
        )
        assert cache.num_pinned == sum(len(part.pinned) for part in oracle.parts)
        assert cache.profiler.counts.tolist() == oracle.counts
        assert cache.profiler.num_hits == oracle.num_hits
        assert cache.profiler.num_misses == oracle.num_misses
        for layer in range(self.layers):
            bits = np.unpackbits(cache.resident_mask(layer).view(np.uint8), bitorder="little")
            assert np.array_equal(bits[: cache.num_experts] > 0, table[layer] >= 0)
            assert not bits[cache.num_experts :].any()
            assert cache.fair_share(layer) == oracle.fair_share(layer)
            there = [expert for of, expert in sorted(resident) if of == layer]
            assert cache.all_resident(layer, np.array(there, np.int32))
            for expert in self.experts:
                local = layer * cache.num_experts + expert if oracle.is_global else expert
                part = oracle.parts[0 if oracle.is_global else layer]
                assert cache.is_pinned(layer, expert) == (local in part.pinned)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=num_examples(150))
