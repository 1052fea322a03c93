"""The whole way from a miss to a product on a GPU, as chance has it: hypothesis looks for a hole.

Experts hold nothing but their key. Steps, leases, reads ahead and their ends come in any order,
any read and any call of the device may fail, and streams go on when they like. Shown impossible:
a product that sees another expert than its own (used after it was evicted, overwritten before it
was used, read before it was copied), an expert uploaded that is there already, a slot that stays
claimed, memory that stays taken.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import moecache
from moecache.errors import CapacityError, StoreError
from moecache.slots import CudaSlots
from moecache.stores.base import Parts
from tests.helpers.examples import num_examples
from tests.helpers.fake_device import FakeDevice
from tests.helpers.stores import numbered_store

LAYERS, EXPERTS = 2, 6
layers = st.integers(0, LAYERS - 1)
experts = st.integers(0, EXPERTS - 1)
# Which call of the device fails, from the next one on; mostly none.
faults = st.just(-1) | st.just(-1) | st.integers(0, 9)


class FaultyStore:
    """Experts that hold their key; a read fails when it is told to, and is noted."""

    def __init__(self) -> None:
        self._store = numbered_store(LAYERS, EXPERTS)
        self.layout = self._store.layout
        self.fails = False
        self.strict = True
        self.cache: moecache.ExpertCache | None = None
        self.read_twice: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read_into(self, layer: int, expert: int, out: Parts | np.ndarray) -> None:
        """Read an expert, unless this is to fail."""
        # A step under way may stage an expert that a later one was given a slot for.
        if self.strict and self.cache is not None and self.cache.slot_table[layer, expert] >= 0:
            self.read_twice.append((layer, expert))
        if self.fails:
            self.fails = False
            raise StoreError("the test says so")
        self._store.read_into(layer, expert, out)


class RuntimeMachine(RuleBasedStateMachine):
    """One host loop, one step at a time, beside leases and reads ahead."""

    @initialize(
        seed=st.integers(0, 2**16),
        capacity=st.integers(1, 5),
        staging=st.integers(1, 2),
        buffers=st.sampled_from([0, 2**20]),
        policy=st.sampled_from(["lru", "lfu", "slru", "echo"]),
    )
    def begin(self, seed: int, capacity: int, staging: int, buffers: int, policy: str) -> None:
        """Open a runtime on a device of some temper."""
        self.device = FakeDevice(eager=False, seed=seed)
        self.store = FaultyStore()
        self.cache = moecache.ExpertCache(LAYERS, EXPERTS, capacity, policy=policy)
        self.store.cache = self.cache
        pool = CudaSlots(
            self.store.layout, capacity, staging, self.device, max_pinned_bytes=buffers
        )
        self.runtime = moecache.ExpertRuntime(
            self.store,
            pool,
            self.cache,
            loader_threads=0,
        )
        self.other = self.device.create_stream()
        self.step: Generator[Any, None, None] | None = None
        self.ids = np.empty((0, 0), np.int64)
        self.layer = 0
        self.leases: list[tuple[Any, int, np.ndarray]] = []
        self.wrong: list[str] = []

    @rule(layer=layers, rows=st.lists(st.lists(experts, min_size=1, max_size=3), max_size=4))
    def begin_step(self, layer: int, rows: list[list[int]]) -> None:
        """Ask for a step's waves; the one before is given up."""
        self.give_up()
        width = min(map(len, rows), default=1)
        self.layer = layer
        self.ids = np.array([row[:width] for row in rows], np.int64).reshape(len(rows), width)
        self.step = self.runtime.waves(layer, self.ids)

    @rule(fault=faults, read_fails=st.booleans(), more=st.booleans())
    def next_wave(self, fault: int, read_fails: bool, more: bool) -> None:
        """Issue the products of the next wave."""
        if self.step is None:
            return
        self.device.fail_at, self.store.fails = fault, read_fails and more
        self.store.strict = False
        try:
            wave = next(self.step, None)
            self.device.fail_at = -1
            if wave is None:
                self.step = None
                return
            for slot, pairs in wave:
                for pair in pairs.tolist():
                    self.product(self.layer, int(self.ids.reshape(-1)[pair]), slot)
        except (MemoryError, StoreError, CapacityError):
            self.step = None
        finally:
            self.device.fail_at, self.store.fails = -1, False
            self.store.strict = True

    @rule()
    def give_up(self) -> None:
        """Leave a step in the middle."""
        if self.step is not None:
            self.step.close()
            self.step = None

    @rule(
        layer=layers,
        chosen=st.lists(experts, min_size=1, max_size=3, unique=True),
        fault=faults,
        read_fails=st.booleans(),
        elsewhere=st.booleans(),
    )
    def lease(
        self, layer: int, chosen: list[int], fault: int, read_fails: bool, elsewhere: bool
    ) -> None:
        """Have a step's experts all at once, in this stream or in another."""
        ids = np.array(chosen)
        stream = self.other if elsewhere else self.device.current_stream()
        self.device.fail_at, self.store.fails = fault, read_fails
        try:
            with self.device.using(stream):
                lease = self.runtime.lease(layer, ids)
                self.device.fail_at = -1
                for slot, expert in zip(lease.slots.tolist(), chosen, strict=True):
                    self.product(layer, expert, slot)
            self.leases.append((lease, layer, ids))
        except (MemoryError, StoreError, CapacityError):
            pass
        finally:
            self.device.fail_at, self.store.fails = -1, False

    @rule()
    def end_leases(self) -> None:
        """End all of them."""
        while self.leases:
            self.leases.pop()[0].close()

    @rule(layer=layers, expert=experts, fault=faults, read_fails=st.booleans())
    def read_ahead(self, layer: int, expert: int, fault: int, read_fails: bool) -> None:
        """Fetch an expert that no step asked for."""
        self.device.fail_at, self.store.fails = fault, read_fails
        with contextlib.suppress(MemoryError):
            self.runtime._loader.prefetch(layer, expert)
        self.device.fail_at, self.store.fails = -1, False

    @rule(moves=st.integers(1, 8))
    def go_on(self, moves: int) -> None:
        """Let the device make some moves."""
        self.device.run(moves)

    @invariant()
    def all_is_well(self) -> None:
        """No product met another expert, none was read that was there, and the tables agree."""
        if hasattr(self, "wrong"):
            assert not self.wrong
            assert not self.store.read_twice
            self.cache.check()

    def product(self, layer: int, expert: int, slot: int) -> None:
        """Issue something that reads all of a slot when the device comes to it."""
        wanted = layer * EXPERTS + expert
        arrays = self.runtime.expert(slot, layer)

        def work() -> None:
            for array in arrays.values():
                if not np.all(array == wanted):
                    self.wrong.append(f"expert {wanted} in slot {slot} is {array.flat[0]}")

        self.device.work(work)

    def teardown(self) -> None:
        """End everything: no slot is claimed, nothing is taken any more."""
        if not hasattr(self, "device"):
            return
        self.give_up()
        self.end_leases()
        self.device.run()
        self.all_is_well()
        assert self.runtime.stats().num_in_flight == 0
        with self.runtime.lease(0, np.arange(1)):  # every slot can be used again
            pass
        for layer in range(LAYERS):
            for wave in self.runtime.waves(layer, np.arange(EXPERTS).reshape(EXPERTS, 1)):
                for slot, pairs in wave:
                    self.product(layer, int(pairs[0]), slot)
        self.device.run()
        assert not self.wrong
        self.runtime.close()
        self.device.destroy_stream(self.other)
        assert self.device.num_events == self.device.num_streams == 0
        assert self.device.used_bytes == self.device.pinned_bytes == 0


TestRuntime = RuntimeMachine.TestCase
TestRuntime.settings = settings(max_examples=num_examples(100))
