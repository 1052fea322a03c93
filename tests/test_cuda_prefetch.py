"""Reading ahead into slots on a GPU: behind demands, within bounds, by what copies really take."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import moecache
from moecache.compute import on_device
from moecache.compute._residency import residency_of
from moecache.loading.load import Cause
from moecache.prefetch.break_even import BreakEven
from moecache.slots import CudaSlots, UploadCounts
from moecache.stores.memory import MemoryStore
from tests.helpers.fake_device import FakeDevice
from tests.helpers.stores import numbered_store
from tests.test_cuda_experts import FP32, LAYERS, make_runtime, make_step, on


def drain(runtime: moecache.ExpertRuntime, layer: int, ids: np.ndarray) -> list[int]:
    """Run a step of the host on an eager device; return what was found for each pair."""
    found = np.full(ids.size, -1)
    for wave in runtime.waves(layer, ids):
        for slot, pairs in wave:
            found[pairs] = runtime.expert(slot, layer)["down"].flat[0]
    return found.tolist()


@pytest.mark.parametrize("prefetch", ["hints", "echo", "last", "auto"])
def test_a_storm_of_hints_stays_within_its_buffers(prefetch: str) -> None:
    """Pinned memory has a bound, demands are right, and none of them is left out."""
    store, device = numbered_store(), FakeDevice()
    pool = CudaSlots(store.layout, 6, 2, device, max_pinned_bytes=0)
    cache = moecache.ExpertCache(3, 8, 6, policy="lru")
    rng = np.random.default_rng(0)
    with moecache.ExpertRuntime(store, pool, cache, prefetch=prefetch) as runtime:
        for _ in range(60):
            for layer in range(3):
                runtime.hint((layer + 1) % 3, rng.permutation(8))
                ids = rng.permutation(8)[:2].reshape(1, 2)
                assert drain(runtime, layer, ids) == [layer * 8 + expert for expert in ids[0]]
                uploads = runtime.stats().uploads
                assert uploads is not None
                assert uploads.pinned_bytes <= 4 * pool.slot_stride
        runtime.cache.check()
    assert device.pinned_bytes == device.used_bytes == 0


@pytest.mark.timeout(30)
def test_nothing_is_read_ahead_while_much_is_being_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the link still has to copy, demands too, goes first."""
    store, device = numbered_store(), FakeDevice(eager=False)
    pool = CudaSlots(store.layout, 12, 2, device, max_pinned_bytes=0)
    cache = moecache.ExpertCache(3, 8, 12, policy="lru")
    with moecache.ExpertRuntime(store, pool, cache, prefetch="hints", loader_threads=0) as runtime:
        ahead = runtime._prefetcher
        assert ahead is not None
        ahead._threaded = False
        runtime.lease(0, np.arange(4)).close()  # four copies that are not done
        runtime.hint(1, np.array([1, 2, 3]))
        with monkeypatch.context() as stalled:
            stalled.setattr(device, "is_done", lambda event: False)
            assert not ahead.run_one()
        device.run()
        assert ahead.run_one()
        assert runtime.cache.slot_table[1].max() >= 0


def test_uploads_ahead_are_in_a_stream_of_their_own() -> None:
    """A demand's copy does not stand behind them."""
    store, device = numbered_store(), FakeDevice()
    pool = CudaSlots(store.layout, 6, 2, device)
    cache = moecache.ExpertCache(3, 8, 6, policy="lru")
    with moecache.ExpertRuntime(store, pool, cache, loader_threads=0) as runtime:
        runtime.lease(0, np.arange(2)).close()
        demands = {stream for stream, _, _ in device.copies}
        device.copies.clear()
        assert runtime._loader.prefetch(1, 3)
        assert runtime._loader.prefetch(1, 4, cause=Cause.WARM_START)
        ahead = {stream for stream, _, _ in device.copies}
    assert len(demands) == len(ahead) == 1
    assert demands != ahead


@pytest.mark.parametrize("busy_ns", [0, 100_000, 10_000_000])
def test_whether_it_pays_counts_what_copies_take(busy_ns: int) -> None:
    """By the device's own clock: a read that is over is not there before it is copied."""
    counts = SimpleNamespace(urgent_ns=0, num_urgent_reads=0, num_steps=0)
    loader: Any = SimpleNamespace(
        counts=counts,
        clock=lambda: loader.now_ns,
        now_ns=0,
        engine=SimpleNamespace(quantum_bytes=None),
        pool=SimpleNamespace(uploads=UploadCounts()),
    )
    even = BreakEven(loader, 1000)
    for _ in range(16):
        loader.now_ns += 1_000_000
        counts.num_steps += 4
        counts.num_urgent_reads += 2
        counts.urgent_ns += 200_000
        done = loader.pool.uploads
        loader.pool.uploads = replace(
            done, num_uploads=done.num_uploads + 2, busy_ns=done.busy_ns + 2 * busy_ns
        )
        even.begin_token()
    read_ns = 100_000 + busy_ns
    idle_ns = 800_000 / 4
    delay, saved = max(0.0, read_ns - idle_ns), min(idle_ns, read_ns)
    assert even.likelihood == pytest.approx(min(max(delay / (delay + saved), 0.25), 0.98))


def results_on(device: FakeDevice, prefetch: str) -> list[np.ndarray]:
    """Return what twelve tokens put out in every layer."""
    outs = []
    with make_runtime(device, FP32, 7, prefetch=prefetch, policy="echo") as runtime:
        for number in range(12):
            hidden, ids, weights = make_step(FP32, 1, number % 5)
            x, w = on(device, hidden, weights)
            outs += [on_device(runtime)(layer, x, ids, w) for layer in range(LAYERS)]
            time.sleep(0.001)
        device.run()
        runtime.cache.check()
        return [np.array(out) for out in outs]


@pytest.fixture(scope="module", name="without")
def _without() -> list[np.ndarray]:
    return results_on(FakeDevice(), "off")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("prefetch", ["echo", "auto", "last"])
def test_what_is_read_ahead_changes_no_bit(
    without: list[np.ndarray], seed: int, prefetch: str
) -> None:
    """On a device that goes on as it likes, with a thread that fetches."""
    found = results_on(FakeDevice(eager=False, seed=seed), prefetch)
    for one, other in zip(without, found, strict=True):
        assert np.array_equal(one, other)


def test_free_slots_are_filled_from_the_first_layer_on() -> None:
    """Without an access being counted, and as many as there are."""
    rng = np.random.default_rng(0)
    store = MemoryStore(
        {
            "gate_up": rng.random((3, 8, 4, 2), np.float32),
            "down": rng.random((3, 8, 2, 2), np.float32),
        },
        top_k=2,
    )
    device = FakeDevice(eager=False)
    pool = CudaSlots(store.layout, 10, 2, device)
    with moecache.ExpertRuntime(store, pool, moecache.ExpertCache(3, 8, 10)) as runtime:
        filling = runtime.usage.fill()
        assert filling.wait(30)
        assert pool.uploads.in_flight_bytes == 0
        assert (runtime.cache.slot_table[0] >= 0).all()
        stats = runtime.stats()
        assert (stats.num_resident, stats.num_hits, stats.num_misses) == (10, 0, 0)
        assert not residency_of(runtime).begin_step(runtime)
        assert runtime.usage.fill().wait(30)
