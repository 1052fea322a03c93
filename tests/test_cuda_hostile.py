"""What a hostile user of slots on a GPU tried, and found broken once."""

import gc
import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moecache
from moecache.compute import on_device
from moecache.cuda import parse_device
from moecache.errors import CapacityError, ConfigError, MoeCacheError
from moecache.slots import CudaSlots
from moecache.stores.memory import MemoryStore
from tests.helpers.fake_device import FakeDevice
from tests.helpers.runtimes import close_beside
from tests.test_cuda_experts import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    TOP_K,
    TYPES,
    bits,
    make_runtime,
    make_step,
    on,
)
from tests.test_cuda_slots import LAYOUT, fill

FP32 = TYPES["float32"]


def start(*threads: threading.Thread) -> None:
    """Run threads to their end."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("capacity", [5, LAYERS * EXPERTS])
def test_threads_in_one_stream_do_not_share_intermediate_results(gpu: Any, capacity: int) -> None:
    """Every thread's default stream is the same one."""
    steps = [make_step(FP32, size, size) for size in (1, 2, 9)]
    with make_runtime(gpu, FP32, capacity) as runtime:
        compute = on_device(runtime)
        arrays = [(*on(gpu, hidden, weights), ids) for hidden, ids, weights in steps]
        wanted = [bits(gpu, compute(0, x, ids, w)) for x, w, ids in arrays]
        wrong: list[int] = []

        def work(first: int) -> None:
            for turn in range(12):
                which = (first + turn) % len(arrays)
                x, w, ids = arrays[which]
                if not np.array_equal(bits(gpu, compute(0, x, ids, w)), wanted[which]):
                    wrong.append(which)

        start(*(threading.Thread(target=work, args=(number,)) for number in range(3)))
    assert not wrong


@pytest.mark.parametrize("seed", range(8))
def test_a_runtime_may_be_closed_beside_a_step(seed: int) -> None:
    """The step ends, or is told; nothing is used that was freed, and nothing stays."""
    device = FakeDevice(eager=bool(seed % 2), seed=seed)
    hidden, ids, weights = make_step(FP32, 2, seed)
    runtime = make_runtime(device, FP32, 4, loader_threads=1)
    x, w = on(device, hidden, weights)
    compute = on_device(runtime)
    close_beside(runtime, lambda turn: compute(turn % LAYERS, x, ids, w), 0.002 * seed)
    device.run()
    assert device.used_bytes == device.pinned_bytes == 0
    assert device.num_streams == device.num_events == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_lease_in_any_of_many_streams_holds_its_slot(seed: int) -> None:
    """However many streams there are, and however late its product is issued."""
    device = FakeDevice(eager=False, seed=seed)
    pool = CudaSlots(LAYOUT, 1, device=device)
    fill(pool, 0, 1)
    slots = np.zeros(1, np.int32)
    streams = [device.create_stream() for _ in range(40)]
    for stream in streams:
        with device.using(stream):
            pool.before_compute(slots)
    array, seen = pool.expert(0, 0)["gate_up"], []
    for stream in streams:
        device.work(lambda: seen.append(float(array.sum())), stream)
    pool.release_after_compute(slots)
    fill(pool, 0, 2)
    device.run()
    assert seen == [30.0] * len(streams)
    pool.close()


def test_dropped_ids_have_no_slot() -> None:
    """A lease gives -1 for them, and waits for no such slot."""
    device = FakeDevice()
    with make_runtime(device, FP32, 3) as runtime:
        ids = np.array([0, EXPERTS, -1, 2])
        for _ in range(2):
            with runtime.lease(0, ids, ignore_out_of_range=True) as lease:
                assert (lease.slots >= 0).tolist() == [True, False, False, True]


@pytest.mark.parametrize("seed", range(10))
def test_of_two_leases_on_a_slot_the_later_end_counts(seed: int) -> None:
    """Two threads share an expert, each in its stream, and end in any order."""
    device = FakeDevice(eager=False, seed=seed)
    wrong: list[int] = []
    with make_runtime(device, FP32, 1, loader_threads=0) as runtime:
        streams = [device.create_stream() for _ in range(2)]

        def work(stream: Any) -> None:
            with device.using(stream):
                for turn in range(30):
                    expert = turn % 3
                    try:
                        lease = runtime.lease(0, np.array([expert]))
                    except CapacityError:
                        continue
                    array = runtime.expert(int(lease.slots[0]), 0)["down"]
                    wanted = runtime.store.view(0, expert)["down"]

                    def look(array: Any = array, wanted: Any = wanted, turn: int = turn) -> None:
                        if not np.array_equal(array, wanted):
                            wrong.append(turn)

                    device.work(look)
                    lease.close()

        start(*(threading.Thread(target=work, args=(stream,)) for stream in streams))
        device.run()
    assert not wrong


def test_a_release_that_fails_loses_no_slot() -> None:
    """Where no event can be recorded the stream is waited for instead."""
    for number in range(12):
        device = FakeDevice(eager=False)
        with make_runtime(device, FP32, 3) as runtime:
            for layer in range(LAYERS):
                runtime.lease(layer, np.arange(2)).close()
            lease = runtime.lease(0, np.arange(3))
            device.fail_at = number % 3
            lease.close()
            device.fail_at = -1
            for wave in runtime.waves(1, np.arange(EXPERTS).reshape(EXPERTS, 1)):
                assert len(wave)
            runtime.lease(0, np.arange(3)).close()


def test_an_interrupt_while_copies_are_looked_at_leaves_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next step does not hang, and no buffer is lost."""
    device = FakeDevice()
    pool = CudaSlots(LAYOUT, 2, device=device, max_pinned_bytes=0)
    slots = np.zeros(1, np.int32)
    asked = device.is_done

    def interrupted(event: int) -> bool:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return asked(event)

    for number in range(8):
        fill(pool, 0, number)
        monkeypatch.setattr(device, "is_done", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.before_compute(slots)
        pool.before_compute(slots)
    assert pool.uploads.pinned_bytes == pool.slot_stride
    pool.close()


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("loader_threads", [0, 2])
def test_a_runtime_that_is_dropped_gives_everything_back(closes: bool, loader_threads: int) -> None:
    """The system too gets it back: pages left pinned would sooner or later be other programs'."""
    device = FakeDevice()
    num_threads = threading.active_count()
    for _ in range(20):
        runtime = make_runtime(device, FP32, 5, loader_threads=loader_threads)
        hidden, ids, weights = make_step(FP32, 2)
        x, w = on(device, hidden, weights)
        on_device(runtime)(0, x, ids, w)
        if closes:
            runtime.close()
        else:
            on_device(runtime).close()
        del runtime
        until = time.monotonic() + 30
        while device.used_bytes or threading.active_count() > num_threads:
            gc.collect()
            assert time.monotonic() < until
            time.sleep(0.001)
        assert device.pinned_bytes == device.num_streams == device.num_events == 0


@pytest.mark.parametrize("seed", range(6))
def test_filled_slots_can_be_captured_at_once(seed: int) -> None:
    """On a device that copies late too: `wait` is for the copies, not for their beginning."""
    device = FakeDevice(eager=False, seed=seed)
    hidden, ids, weights = make_step(FP32, 1)
    with make_runtime(device, FP32) as runtime:
        assert runtime.usage.fill().wait(30)
        compute = on_device(runtime)
        x, w, chosen = on(device, hidden, weights, ids)
        out = device.empty(x.shape, FP32, device.current_stream())
        compute(0, x, chosen, w, out=out)
        device.run()
        with device.capturing():
            compute(0, x, chosen, w, out=out)


def test_a_lost_device_is_told_once_and_figures_are_still_to_be_had(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A thread that reads ahead does not fill the log, and `close` returns."""
    device = FakeDevice(eager=False)
    runtime = make_runtime(device, FP32, 5, prefetch="hints")
    runtime.lease(0, np.arange(3)).close()
    device.lost = True
    with caplog.at_level(logging.WARNING):
        for turn in range(20):
            runtime.hint(1, np.arange(TOP_K))
            time.sleep(0.01)
            assert "uploads to" in runtime.report(), turn
    assert len(caplog.records) < 8
    with pytest.raises(MoeCacheError, match="lost"):
        runtime.close()


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint64, np.dtype(">i4"), np.int32, list]
)
@pytest.mark.parametrize("capacity", [5, LAYERS * EXPERTS])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_ids_of_the_host_may_be_any_integers(dtype: Any, capacity: int, num_tokens: int) -> None:
    """Whatever is resident: what works at first works later."""
    device = FakeDevice()
    hidden, ids, weights = make_step(FP32, num_tokens)
    with make_runtime(device, FP32, capacity) as runtime:
        x, w = on(device, hidden, weights)
        compute = on_device(runtime)
        wanted = bits(device, compute(0, x, ids, w))
        runtime.usage.fill().wait()
        other = ids.tolist() if dtype is list else ids.astype(dtype)
        assert np.array_equal(bits(device, compute(0, x, other, w)), wanted)
        for wrong in (ids.astype(np.float32), ids.astype(str), ids[:, :0]):
            with pytest.raises(ConfigError, match=r"not integers|choose no expert|must both be"):
                compute(0, x, wrong, w)


def test_a_step_whose_experts_are_all_leased_is_one_launch() -> None:
    """Also where others are missing: the same kernel, its slots given instead of looked up."""
    device = FakeDevice()
    hidden, ids, weights = make_step(FP32, 1)
    with make_runtime(device, FP32, 5) as runtime:
        x, w = on(device, hidden, weights)
        compute = on_device(runtime)
        wanted = bits(device, compute(0, x, ids, w))
        device.num_launches.clear()
        assert np.array_equal(bits(device, compute(0, x, ids, w)), wanted)
        assert device.num_launches == {"decode_f32": 1}


@pytest.mark.parametrize("kib", [100, 150, 200, 400])
def test_a_small_gpu_holds_as_many_experts_as_it_can(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, kib: int
) -> None:
    """Slots for staging are those of the smaller plan, not of the one that did not fit."""
    device = FakeDevice(total_bytes=kib * 1024)
    monkeypatch.setattr("moecache.runtime.plan.open_device", lambda name: device)
    with moecache.open(tiny_moe, slots=64, device="cuda", prefault="off") as runtime:
        assert 1 <= runtime.cache.capacity <= kib // 48
        assert (runtime.pool.num_slots + 1) * 48 > kib
        for wave in runtime.waves(0, np.arange(8).reshape(8, 1)):
            assert len(wave)


def test_what_a_full_gpu_says_has_no_negative_sizes(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has what is free, and what is asked for."""
    device = FakeDevice(total_bytes=2**20)
    device.allocate(2**20 - 8192)
    monkeypatch.setattr("moecache.runtime.plan.open_device", lambda name: device)
    with pytest.raises(CapacityError) as error:
        moecache.open(tiny_moe, device="cuda")
    assert "8.00 KiB are free" in str(error.value)
    assert "-" not in str(error.value).replace("mixture-of-experts", "")


def test_names_of_devices_are_ascii() -> None:
    """Other scripts have digits too."""
    with pytest.raises(ConfigError):
        parse_device("cuda:\N{ARABIC-INDIC DIGIT THREE}")


def test_roles_without_axes_have_bytes() -> None:
    """A scale of an expert, say."""
    device = FakeDevice()
    store = MemoryStore(
        {"down": np.ones((1, 2, 3), np.float32), "scale": np.full((1, 2), 7, np.float32)},
        top_k=1,
    )
    with CudaSlots(store.layout, 2, device=device) as pool:
        pool.upload(1, 0, store.view(0, 1))
        pool.before_compute(np.array([1], np.int32))
        assert pool.raw_expert(1, 0)["scale"].view(np.float32).item() == 7


def test_an_activation_is_a_name() -> None:
    """Anything else is an error of its own, not of a dict."""
    with make_runtime(FakeDevice(), FP32) as runtime:
        for activation in (["silu"], None, np.tanh):
            with pytest.raises(ConfigError, match="must be a name"):
                on_device(runtime, activation)  # type: ignore[arg-type]


def test_slots_take_what_was_planned_and_give_it_back(gpu: Any) -> None:
    """The bytes really gone: whole allocations of the device, and none after `close`."""
    layout = moecache.ExpertLayout.uniform(
        num_layers=1, num_experts=64, top_k=1, expert_bytes=2**20
    )
    with CudaSlots(layout, 1, device=gpu):  # what a device itself takes at first is not the slots'
        pass
    before = gpu.free_bytes()
    with CudaSlots(layout, 60, 4, gpu) as pool:
        planned = 64 * CudaSlots.bytes_per_slot(layout)
        assert pool.nbytes == planned
        grown = -(-planned // gpu.allocation_bytes) * gpu.allocation_bytes
        assert before - gpu.free_bytes() == grown
    assert gpu.free_bytes() == before


def test_hidden_states_may_be_their_own_result(gpu: Any) -> None:
    """A loop that no longer needs its input can pass it as `out`."""
    hidden, ids, weights = make_step(FP32, 3)
    with make_runtime(gpu, FP32, 5) as runtime:
        x, w = on(gpu, hidden, weights)
        assert x.shape == (3, HIDDEN)
        wanted = bits(gpu, on_device(runtime)(0, x, ids, w))
        assert np.array_equal(bits(gpu, on_device(runtime)(0, x, ids, w, out=x)), wanted)


def test_a_prompt_that_finds_no_memory_asks_the_other_library_once() -> None:
    """Then it goes on; without one, or where there is nothing, it is an error."""
    device = FakeDevice()
    hidden, ids, weights = make_step(TYPES["bfloat16"], 9)
    with make_runtime(device, TYPES["bfloat16"], 5) as runtime:
        x, w = on(device, hidden, weights)
        compute = on_device(runtime)
        free, device.total_bytes = device.total_bytes, device.used_bytes
        with pytest.raises(MemoryError):
            compute(0, x, ids, w)
        asked: list[int] = []
        device.on_out_of_memory = lambda: asked.append(0)
        with pytest.raises(MemoryError):
            compute(0, x, ids, w)
        assert len(asked) == 1

        def give_back() -> None:
            asked.append(1)
            device.total_bytes = free

        device.on_out_of_memory = give_back
        found = bits(device, compute(0, x, ids, w))
        assert asked == [0, 1]
        assert np.array_equal(bits(device, compute(0, x, ids, w)), found)
        assert asked == [0, 1]
