"""Missing experts that the CPU computes: its own bits, and nothing is lost when anything fails."""

import gc
import json
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache import ExpertCache, ExpertRuntime
from moecache.cuda import CpuMisses, CudaExperts
from moecache.errors import ConfigError, MoeCacheError, StoreError
from moecache.kernels import SlotKernel
from moecache.slots import CudaSlots, HostSlots
from moecache.stores import open_store
from moecache.stores.memory import MemoryStore
from tests.helpers.fake_device import FakeDevice
from tests.test_cuda_experts import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    TOP_K,
    TYPES,
    bits,
    expected,
    make_runtime,
    make_step,
    on,
)

FP32 = TYPES["float32"]
CAPACITY = 5
THREAD = "moecache-cpu-misses"


class AllMissing:
    """A split that gives the CPU every missing expert, or all of some."""

    def __init__(self, cache: ExpertCache, wanted: Any = range(EXPERTS)) -> None:
        self.wanted = set(wanted)
        self.chosen: list[list[int]] = []
        self.num_skipped = self.num_timed = 0
        self._cache = cache

    def choose(self, layer: int, ids: np.ndarray) -> list[int]:
        """Choose what is missing and wanted."""
        missing = self._cache.slot_table[layer] < 0
        some = [e for e in dict.fromkeys(ids.reshape(-1).tolist()) if e in self.wanted]
        self.chosen.append([expert for expert in some if missing[expert]])
        return self.chosen[-1]

    def note_cpu(self, ns: int, num_experts: int) -> None:
        """Count it."""
        assert ns >= 0
        self.num_timed += num_experts

    def skip(self) -> None:
        """Count it."""
        self.num_skipped += 1

    def describe(self) -> str:
        """Say that it is one of a test."""
        return "a test's"


def divided(runtime: ExpertRuntime, wanted: Any = range(EXPERTS)) -> tuple[CudaExperts, AllMissing]:
    """Return what computes a runtime's experts, the missing ones on the CPU, and its split."""
    split = AllMissing(runtime.cache, wanted)
    experts = CudaExperts(runtime, cpu=CpuMisses(runtime.store, "silu", split))
    runtime._on_device["test",] = experts  # closed with the runtime
    return experts, split


def oracle(dtype: np.dtype, layer: int, expert: int, hidden: np.ndarray) -> np.ndarray:
    """Return an expert's row by the CPU's kernels, from a copy of its weights."""
    with make_runtime(FakeDevice(), dtype) as runtime:
        parts = {name: array.copy() for name, array in runtime.store.view(layer, expert).items()}
    x = hidden.astype(np.float32) if dtype == np.float16 else hidden
    rows = np.empty((1, HIDDEN), np.float32)
    kernel = SlotKernel(lambda _: parts, 1)
    kernel.compute(x, np.zeros(1, np.int32), np.array([0, 1]), np.zeros(1, np.int64), 1, rows)
    return rows


def is_right(gpu: Any, compute: CudaExperts, num_tokens: int = 2, layer: int = 0) -> bool:
    """Compute a step in float32; return whether the result is what it should be."""
    hidden, ids, weights = make_step(FP32, num_tokens)
    x, w = on(gpu, hidden, weights)
    found = gpu.to_host(compute(layer, x, ids, w))
    return np.allclose(found, expected(FP32, layer, hidden, ids, weights), atol=1e-5)


@pytest.mark.parametrize("dtype", list(TYPES))
def test_a_row_of_the_cpu_has_the_bits_of_its_kernels(gpu: Any, dtype: str) -> None:
    """Computed elsewhere, they would often be others."""
    kind = TYPES[dtype]
    hidden, _, _ = make_step(kind, 1)
    with make_runtime(gpu, kind, CAPACITY) as runtime:
        compute, split = divided(runtime)
        x, one = on(gpu, hidden, np.ones((1, 1), np.float32))
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                found = bits(gpu, compute(layer, x, np.array([[expert]]), one))
                row = oracle(kind, layer, expert, hidden).astype(kind)
                assert np.array_equal(found.view(np.uint8), row.view(np.uint8))
        assert split.num_timed == LAYERS * EXPERTS
        assert runtime.cache.num_resident == 0
        assert runtime.stats().num_misses == LAYERS * EXPERTS


@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_hits_misses_and_what_the_cpu_computes_make_one_result(num_tokens: int) -> None:
    """However the streams overtake each other, of any part of the experts the same bits."""
    hidden, ids, weights = make_step(FP32, num_tokens)
    wanted = expected(FP32, 1, hidden, ids, weights)
    some = np.unique(ids)[::2].tolist()
    results = []
    for seed in range(4):
        device = FakeDevice(eager=seed == 0, seed=seed)
        with make_runtime(device, FP32, CAPACITY) as runtime:
            compute, split = divided(runtime, some)
            x, w = on(device, hidden, weights)
            device.synchronize(device.current_stream())
            results.append(bits(device, compute(1, x, ids, w)))
            assert sorted(split.chosen[0]) == some
            assert np.allclose(results[-1].view(np.float32), wanted, atol=1e-5)
            # What was copied is there now, as far as it fits; the rest is not.
            resident = np.flatnonzero(runtime.cache.slot_table[1] >= 0)
            assert not np.isin(resident, some).any()
            device.synchronize(device.current_stream())
            runtime.cache.check()
        assert device.used_bytes == 0
    assert all(np.array_equal(result, results[0]) for result in results)


def test_what_is_copied_keeps_the_bits_of_the_gpu() -> None:
    """Only what the CPU computes is added up in another order."""
    hidden, ids, weights = make_step(FP32, 2)
    found = []
    for cpu in (False, True):
        device = FakeDevice()
        with make_runtime(device, FP32, CAPACITY) as runtime:
            compute = divided(runtime, ())[0] if cpu else runtime.on_device()
            x, w = on(device, hidden, weights)
            found += [bits(device, compute(0, x, ids, w)) for _ in range(2)]
    assert all(np.array_equal(one, found[0]) for one in found)


def test_prompts_are_not_divided() -> None:
    """The trial is told."""
    device = FakeDevice()
    with make_runtime(device, FP32, CAPACITY) as runtime:
        compute, split = divided(runtime)
        assert is_right(device, compute, 9)
        assert (split.chosen, split.num_skipped) == ([], 1)


def test_the_policy_and_the_trace_see_every_expert() -> None:
    """As misses, whoever computes them."""
    device = FakeDevice()
    with make_runtime(device, FP32, CAPACITY, policy="echo") as runtime:
        compute, _ = divided(runtime)
        for _ in range(3):
            assert is_right(device, compute)
        _, ids, _ = make_step(FP32, 2)
        counts = np.bincount(ids.reshape(-1), minlength=EXPERTS) > 0
        assert np.array_equal(runtime.cache.profiler.counts[0], 3 * counts)
        assert runtime.cache.echo is not None
        assert set(runtime.cache.echo.predict(0, int(counts.sum()))[0]) == set(ids.reshape(-1))


def test_gate_and_up_may_be_apart_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they are brought together; the same bits."""
    whole = MemoryStore.view

    def view(store: MemoryStore, layer: int, expert: int) -> dict[str, np.ndarray]:
        parts = whole(store, layer, expert)
        gate, up = np.split(parts.pop("gate_up"), 2)
        return {"gate": gate, "up": up, **parts}

    def read_into(store: MemoryStore, layer: int, expert: int, out: dict[str, np.ndarray]) -> None:
        for name, array in whole(store, layer, expert).items():
            out[name][:] = array

    hidden, ids, weights = make_step(FP32, 2)
    results = []
    for apart in (False, True):
        device = FakeDevice()
        with make_runtime(device, FP32, CAPACITY) as runtime:
            compute, split = divided(runtime)
            if apart:
                monkeypatch.setattr(MemoryStore, "view", view)
                monkeypatch.setattr(MemoryStore, "read_into", read_into)
            x, w = on(device, hidden, weights)
            results.append(bits(device, compute(0, x, ids, w)))
            assert split.num_timed == len(np.unique(ids))
    assert np.array_equal(*results)


def test_experts_come_from_the_page_cache(tmp_path: Path) -> None:
    """Where the file has them, at any multiple of 2 bytes; the same bits as from a copy."""
    size, width, kind = 48, 24, TYPES["bfloat16"]
    rng = np.random.default_rng(0)
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": rng.normal(
            0, 0.2, (size, width) if name == "down" else (width, size)
        ).astype(kind)
        for layer in range(2)
        for expert in range(4)
        for name in ("down", "gate", "up")
    }
    write_tensors(tmp_path / "experts.safetensors", tensors, shift=2)
    hidden = rng.normal(size=(1, size)).astype(kind)
    device = FakeDevice()
    store = open_store(tmp_path / "experts.safetensors", top_k=1)
    pool = CudaSlots(store.layout, 2, 1, device)
    with ExpertRuntime(store, pool, ExpertCache(2, 4, 2)) as runtime:
        compute, split = divided(runtime)
        x, one = on(device, hidden, np.ones((1, 1), np.float32))
        for layer in range(2):
            for expert in range(4):
                found = bits(device, compute(layer, x, np.array([[expert]]), one))
                roles = store.layout.layers[layer]
                parts = {role.name: np.empty(role.array_shape, role.dtype) for role in roles}
                store.read_into(layer, expert, parts)
                row = np.empty((1, size), np.float32)
                SlotKernel(lambda _, parts=parts: parts, 1).compute(  # type: ignore[misc]
                    *(hidden, np.zeros(1, np.int32), np.array([0, 1]), np.zeros(1, np.int64)),
                    *(1, row),
                )
                assert np.array_equal(found.view(np.uint8), row.astype(kind).view(np.uint8))
        assert split.num_timed == 8


def write_tensors(path: Path, tensors: dict[str, np.ndarray], *, shift: int) -> None:
    """Write bfloat16 tensors side by side, so many bytes beside a multiple of 64."""
    entries, end = {}, 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        entries[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % 64 + shift)
    data = b"".join(array.tobytes() for array in tensors.values())
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def hold_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the thread begin what it is given before the caller looks; return what lets it go on."""
    submit, go_on = CpuMisses.submit, threading.Event()

    def submit_and_wait(self: CpuMisses, *arguments: Any) -> Any:
        job = submit(self, *arguments)
        while not job._claim.locked():
            time.sleep(0.0001)
        return job

    compute = SlotKernel.compute

    def wait_and_compute(self: SlotKernel, *arguments: Any) -> None:
        if threading.current_thread().name == THREAD:
            assert go_on.wait(10)
        compute(self, *arguments)

    monkeypatch.setattr(CpuMisses, "submit", submit_and_wait)
    monkeypatch.setattr(SlotKernel, "compute", wait_and_compute)
    return go_on


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_in_the_middle_is_an_error_and_another_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step can be called again."""
    go_on = hold_back(monkeypatch)
    go_on.set()
    waiting = SlotKernel.compute

    def die(*_: Any) -> None:
        raise SystemExit

    device = FakeDevice()
    with make_runtime(device, FP32, CAPACITY) as runtime:
        compute, _ = divided(runtime)
        for _ in range(2):
            monkeypatch.setattr(SlotKernel, "compute", die)
            with pytest.raises(MoeCacheError, match="ended by SystemExit; call again"):
                is_right(device, compute)
            compute.cpu._thread.join(10)  # type: ignore[union-attr]
            monkeypatch.setattr(SlotKernel, "compute", waiting)
            assert is_right(device, compute)
        runtime.cache.check()


def test_without_a_thread_the_caller_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system makes no more of them."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    device = FakeDevice()
    with make_runtime(device, FP32, CAPACITY, loader_threads=0) as runtime:
        compute, split = divided(runtime)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert is_right(device, compute)
        assert is_right(device, compute, layer=1)
        assert split.num_timed > 0


def test_an_expert_that_cannot_be_read_is_the_steps_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is computed when it can be."""
    whole = MemoryStore.view

    def view(store: MemoryStore, layer: int, expert: int) -> dict[str, np.ndarray]:
        if threading.current_thread().name == THREAD:
            raise StoreError("the disk is gone")
        return whole(store, layer, expert)

    device = FakeDevice()
    with make_runtime(device, FP32, CAPACITY) as runtime:
        compute, _ = divided(runtime)
        with monkeypatch.context() as patched:
            hold_back(patched).set()
            patched.setattr(MemoryStore, "view", view)
            with pytest.raises(StoreError, match="the disk is gone"):
                is_right(device, compute)
        assert is_right(device, compute)
        runtime.cache.check()


def test_any_call_of_the_device_may_fail() -> None:
    """The error is the step's; the next one is right, and the CPU has its part of it."""
    device = FakeDevice()
    with make_runtime(device, FP32, CAPACITY, loader_threads=0) as runtime:
        compute, split = divided(runtime, range(0, EXPERTS, 2))
        hidden, ids, weights = make_step(FP32, 2)
        x, w = on(device, hidden, weights)
        wanted = expected(FP32, 0, hidden, ids, weights)
        num_failed = 0
        for fail_at in range(200):
            device.fail_at = fail_at
            try:
                compute(0, x, ids, w)
            except (MoeCacheError, MemoryError):
                num_failed += 1
            had_failed = device.fail_at < 0
            device.fail_at = -1
            split.chosen.clear()
            found = device.to_host(compute(0, x, ids, w))
            assert np.allclose(found, wanted, atol=1e-5)
            assert len(split.chosen) == 1
            assert split.chosen[0]
            runtime.cache.check()
            if not had_failed:
                break
        assert num_failed > 5
    assert (device.used_bytes, device.num_events) == (0, 0)


def test_one_of_several_threads_has_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have their experts copied meanwhile, and all results are right."""
    go_on = hold_back(monkeypatch)
    device = FakeDevice()
    with make_runtime(device, FP32, 2 * TOP_K) as runtime:
        compute, split = divided(runtime)
        found: list[bool] = []
        first = threading.Thread(target=lambda: found.append(is_right(device, compute, 1)))
        first.start()
        while not split.chosen:
            time.sleep(0.001)
        # In another stream: that of the first waits for the CPU.
        with device.using(device.create_stream()):
            assert is_right(device, compute, 1, layer=1)
        assert len(split.chosen) == 1
        go_on.set()
        first.join(10)
        assert found == [True]


def test_close_does_not_wait_for_ever_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it computes from stays; the step that waits ends, and so does the thread."""
    monkeypatch.setattr("moecache.cuda.experts._CLOSE_TIMEOUT_S", 0.05)
    go_on = hold_back(monkeypatch)
    device = FakeDevice()
    runtime = make_runtime(device, FP32, CAPACITY)
    compute, split = divided(runtime)
    ended: list[object] = []

    def step() -> None:
        try:
            ended.append(is_right(device, compute))
        except MoeCacheError as error:
            ended.append(error)

    caller = threading.Thread(target=step)
    caller.start()
    while not split.chosen:
        time.sleep(0.001)
    started = time.monotonic()
    runtime.close()
    assert time.monotonic() - started < 2
    go_on.set()
    caller.join(10)
    assert "closed" in str(ended[0])
    worker = compute.cpu._thread  # type: ignore[union-attr]
    assert worker is not None
    worker.join(10)
    assert not worker.is_alive()
    with pytest.raises(MoeCacheError, match="closed"):
        is_right(device, compute)


def test_the_thread_ends_with_a_runtime_that_is_dropped() -> None:
    """Without `close`."""
    device = FakeDevice()
    runtime = make_runtime(device, FP32, CAPACITY)
    compute, _ = divided(runtime)
    assert is_right(device, compute)
    worker, cpu = compute.cpu._thread, weakref.ref(compute.cpu)  # type: ignore[union-attr, arg-type]
    assert worker is not None
    del runtime, compute
    gc.collect()
    assert cpu() is None
    worker.join(10)
    assert not worker.is_alive()


def test_a_runtime_divides_and_measures_by_itself() -> None:
    """The rule of `MissSplit`, its trial switched on here, over many tokens."""
    device = FakeDevice()
    with make_runtime(device, FP32, CAPACITY, policy="echo") as runtime:
        compute = runtime.on_device(cpu_misses=True)
        assert compute is runtime.on_device(cpu_misses=True)
        assert compute is not runtime.on_device()
        assert compute.cpu is not None
        split: Any = compute.cpu._split
        assert "0 misses computed by the CPU" in compute.cpu.describe()
        assert "; off: not tried yet" in compute.cpu.describe()
        split.trial = None
        for seed in range(30):
            for layer in range(LAYERS):
                hidden, ids, weights = make_step(FP32, 1, seed)
                x, w = on(device, hidden, weights)
                found = device.to_host(compute(layer, x, ids, w))
                assert np.allclose(found, expected(FP32, layer, hidden, ids, weights), atol=1e-5)
        assert split.cpu_ns > 0 < split.link_ns
        assert 0 < split.num_cpu < runtime.stats().num_misses
        runtime.cache.check()


def test_what_the_cpu_cannot_compute_is_refused() -> None:
    """Before anything is made."""
    rng = np.random.default_rng(0)
    shapes = {"gate_up": (32, 8), "gate_up_bias": (32,), "down": (8, 16), "down_bias": (8,)}
    arrays = {name: rng.random((1, 4, *shape)).astype(np.float32) for name, shape in shapes.items()}
    store = MemoryStore(arrays, top_k=1)
    pool = CudaSlots(store.layout, 2, 1, FakeDevice())
    with ExpertRuntime(store, pool, ExpertCache(1, 4, 2)) as runtime:
        with pytest.raises(ConfigError, match="without biases; leave cpu_misses out"):
            runtime.on_device(cpu_misses=True)
        runtime.on_device()
    store = MemoryStore({"gate_up": arrays["gate_up"], "down": arrays["down"]}, top_k=1)
    with (
        ExpertRuntime(store, HostSlots(store.layout, 3), ExpertCache(1, 4, 2)) as runtime,
        pytest.raises(ConfigError, match='open with device="cuda"'),
    ):
        runtime.on_device(cpu_misses=True)
