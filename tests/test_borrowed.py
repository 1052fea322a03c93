"""Borrowed: slots in the memory of a KV cache, until that needs it."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moecache
from moecache.errors import CapacityError, ConfigError, MoeCacheError
from moecache.layout import ExpertLayout, Role
from moecache.runtime import borrowed as module
from moecache.runtime import plan as planning
from moecache.runtime.borrowed import Borrowed
from moecache.runtime.runtime import ExpertRuntime
from moecache.slots import HostSlots
from tests.helpers.runtimes import drain, expected, make_runtime

CAPACITY, MOST = 16, 6
ALL = np.arange(8)


class Memory:
    """What is free, as tests say."""

    free = 1 << 40

    def __call__(self) -> int:
        """Return it."""
        return self.free


@pytest.fixture(name="memory")
def _memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(module, "free_host_bytes", memory)
    monkeypatch.setattr(module, "_SURPLUS_BYTES", 0)
    return memory


@pytest.fixture(name="runtime")
def _runtime() -> Iterator[ExpertRuntime]:
    """Return a runtime that has filled all of its slots."""
    with make_runtime(CAPACITY) as runtime:
        runtime.borrowed = Borrowed(runtime.cache, runtime.pool, MOST, 0)
        for layer in range(2):
            drain(runtime, layer, ALL)
            for expert in range(8):
                drain(runtime, layer, np.array([expert]))
        assert runtime.cache.num_free == 0
        yield runtime


def slot_bytes(runtime: ExpertRuntime) -> int:
    """Return the bytes of a slot."""
    return runtime.pool.nbytes // runtime.pool.num_slots


@pytest.mark.parametrize(
    ("free", "spare", "wanted", "given"),
    [
        (10.0, 0, 10, 0),
        (10.0, 0, 10.5, 1),
        (10.0, 1, 10, 1),
        (0.0, 0, 2.5, 3),
        (0.0, 0, MOST, MOST),
        (0.0, 5, 99, MOST),
    ],
)
def test_as_many_slots_are_given_back_as_memory_lacks(
    runtime: ExpertRuntime, memory: Memory, free: float, spare: int, wanted: float, given: int
) -> None:
    """Whole slots, the last ones, never more than were borrowed; steps go on with the others."""
    unit = slot_bytes(runtime)
    runtime.borrowed = Borrowed(runtime.cache, runtime.pool, MOST, spare * unit)
    memory.free = int(free * unit)
    runtime.borrowed.make_room(int(wanted * unit))
    assert runtime.cache.num_withheld == given
    assert runtime.borrowed.nbytes == (MOST - given) * unit
    assert runtime.stats().capacity == CAPACITY - given
    assert runtime.cache.slot_table.max() < CAPACITY - given
    for layer in (0, 1, 2, 0):
        assert drain(runtime, layer, ALL) == expected(layer, ALL)
        assert drain(runtime, layer, ALL[:2]) == expected(layer, ALL[:2])
    runtime.cache.check()


def test_slots_are_used_again_once_memory_is_free(runtime: ExpertRuntime, memory: Memory) -> None:
    """As many as fit, and not for a little more than nothing."""
    unit = slot_bytes(runtime)
    memory.free = 0
    runtime.borrowed.make_room(4 * unit)
    assert runtime.cache.num_withheld == 4
    memory.free = 3 * unit // 2
    runtime.borrowed.make_room(unit)
    assert runtime.cache.num_withheld == 4
    memory.free = 5 * unit // 2
    runtime.borrowed.make_room(unit)
    assert runtime.cache.num_withheld == 3
    memory.free = 99 * unit
    runtime.borrowed.make_room(unit)
    assert runtime.cache.num_withheld == 0
    drain(runtime, 2, ALL)
    runtime.cache.check()


def test_slots_that_were_never_filled_count_as_taken(memory: Memory) -> None:
    """The system calls their memory free: a KV cache may not have it, too."""
    # Of a huge page each, so that none is written with its neighbour.
    layout = ExpertLayout(8, 1, [[Role("up", (2**21,), np.dtype(np.uint8))]] * 3)
    cache, pool = moecache.ExpertCache(3, 8, CAPACITY), HostSlots(layout, CAPACITY)
    borrowed = Borrowed(cache, pool, MOST, 0)
    memory.free = pool.nbytes + 2**21
    borrowed.make_room(2**21)
    assert cache.num_withheld == 0
    borrowed.make_room(2**22)
    assert cache.num_withheld == 1
    # Written, though the cache knows of nothing: backed ahead.
    pool.slab("up")[:8] = 1
    memory.free -= 8 * 2**21
    borrowed.make_room(2**22)
    assert cache.num_withheld == 1


def test_memory_of_slots_goes_and_comes_back_as_zeros() -> None:
    """Whole pages of the slots that are named, and nothing of their neighbours'."""
    layout = ExpertLayout(8, 1, [[Role("up", (2**17,), np.dtype(np.uint8))]])
    with HostSlots(layout, 5) as pool:
        assert pool.count_backed(range(5)) == 0
        pool.slab("up")[:] = 7
        assert pool.count_backed(range(5)) == 5
        pool.discard([1, 3])
        assert pool.count_backed([1]) == pool.count_backed([3]) == 0
        assert pool.slab("up")[[0, 2, 4]].min() == 7
        assert pool.slab("up")[[1, 3]].max() == 0
    with pytest.raises(MoeCacheError, match="closed"):
        pool.discard([1])


def test_slots_in_use_and_pinned_experts_stay(runtime: ExpertRuntime, memory: Memory) -> None:
    """A lease is never taken away; what is pinned is kept."""
    memory.free = 0
    last = int(runtime.cache.slot_table.argmax())
    assert runtime.cache.pin(*divmod(last, 8))
    held = [int(layer_expert) for layer_expert in np.argsort(runtime.cache.slot_table[1])[-2:]]
    with runtime.lease(1, np.array(held)) as lease:
        kept = {CAPACITY - 1, *lease.slots.tolist()}
        runtime.borrowed.make_room(1 << 30)
        assert runtime.cache.num_withheld == MOST
        assert kept <= set(runtime.cache.slot_table[runtime.cache.slot_table >= 0].tolist())
        runtime.cache.check()


def test_a_cache_with_slots_by_layer_withholds_none() -> None:
    """Its layers have their own."""
    cache = moecache.ExpertCache(2, 4, 6, scope="layer")
    with pytest.raises(ConfigError, match="scope"):
        cache.withhold(1)


def test_an_interrupt_loses_no_slot(
    runtime: ExpertRuntime, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after slots were taken, and right after they were given back."""

    class Interrupting:
        """The cache, in whose calls Ctrl-C comes."""

        def __getattr__(self, name: str) -> Any:
            found = getattr(runtime.cache, name)
            if name not in {"withhold", "restore"}:
                return found

            def call(given: Any) -> Any:
                out = found(given)
                os.kill(os.getpid(), signal.SIGINT)
                return out

            return call

    monkeypatch.setattr(runtime.borrowed, "_cache", Interrupting())
    for free, withheld in ((0, 4), (1 << 40, 0)):
        memory.free = free
        with pytest.raises(KeyboardInterrupt):
            runtime.borrowed.make_room(4 * slot_bytes(runtime))
        assert runtime.cache.num_withheld == withheld
        assert runtime.borrowed.nbytes == (MOST - withheld) * slot_bytes(runtime)
    assert drain(runtime, 1, ALL) == expected(1, ALL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_takes_nothing(runtime: ExpertRuntime, memory: Memory) -> None:
    """The lock and the slots are the parent's."""
    memory.free = 0
    with runtime.borrowed._lock:
        child = os.fork()
        if child == 0:
            runtime.borrowed.make_room(1 << 30)
            os._exit(runtime.cache.num_withheld)
        assert os.waitpid(child, 0)[1] == 0


def test_threads_that_step_beside_it_get_their_experts(
    runtime: ExpertRuntime, memory: Memory
) -> None:
    """Slots come and go while four threads compute."""
    problems: list[str] = []
    ends = threading.Event()

    def step(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not ends.is_set():
            layer, ids = int(rng.integers(3)), rng.choice(8, 2, replace=False)
            if drain(runtime, layer, ids) != expected(layer, ids):
                problems.append(f"layer {layer}, {ids}")

    threads = [threading.Thread(target=step, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    rng = np.random.default_rng(9)
    for _ in range(200):
        memory.free = int(rng.integers(8)) * slot_bytes(runtime)
        runtime.borrowed.make_room(4 * slot_bytes(runtime))
    ends.set()
    for thread in threads:
        thread.join()
    assert not problems
    assert runtime.cache.num_evictions > 0
    runtime.cache.check()


@pytest.fixture(name="planned")
def _planned(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., moecache.Plan]:
    """Return what plans for the project's model with memory for a sixth of its experts, or so."""
    free = 2**20

    def plan(**options: object) -> moecache.Plan:
        return moecache.plan(tiny_moe, host_bytes=0, **options)

    monkeypatch.setattr(planning, "free_host_bytes", lambda: free)
    while True:
        with contextlib.suppress(CapacityError):
            if plan(context_tokens=2048).capacity > 40:
                return plan
        free += 2**20


def test_a_plan_counts_the_kv_caches_memory_as_slots(
    planned: Callable[..., moecache.Plan], tiny_moe: Path
) -> None:
    """All but that of the first 512 tokens, only if the host makes room, and only without sizes."""
    before, after = planned(context_tokens=2048), planned(context_tokens=2048, makes_room=True)
    later = before.headroom.kv_cache_bytes * 3 // 4
    assert 0 < before.capacity < after.num_experts - later // after.slot_bytes
    assert before.borrowed_slots == 0 < after.borrowed_slots == later // after.slot_bytes
    assert after.capacity == before.capacity + after.borrowed_slots
    assert f"{after.borrowed_slots} of them until the KV cache" in after.reasons["capacity"]
    assert (after.read, after.staging_slots) == (before.read, before.staging_slots)
    for options in (
        {"memory": "1MiB"},
        {"slots": 40},
        {"reserve": "1MiB"},
        {"scope": "layer"},
        {"context_tokens": 300},
    ):
        assert (
            planned(**{"context_tokens": 2048, "makes_room": True, **options}).borrowed_slots == 0
        )


def test_a_runtime_that_borrowed_gives_back(
    planned: Callable[..., moecache.Plan], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As planned, and a slot less than all experts at most."""
    with planned(context_tokens=2048, makes_room=True, prefault="off").open() as runtime:
        memory.free = 0
        capacity, borrowed = runtime.cache.capacity, runtime.borrowed.nbytes
        runtime.borrowed.make_room(1 << 40)
        assert runtime.cache.num_withheld * slot_bytes(runtime) == borrowed > 0
        assert runtime.stats().capacity == capacity - runtime.cache.num_withheld
    # Some slots go into the spare sixteenth.
    unit = planned(context_tokens=2048).slot_bytes
    free = planning.free_host_bytes() + 190 * unit
    monkeypatch.setattr(planning, "free_host_bytes", lambda: free)
    most = planned(context_tokens=2048, makes_room=True)
    assert most.capacity == most.num_experts - 1
    assert 0 < most.borrowed_slots < borrowed // unit
    assert most.staging_slots > 0
