"""CudaSlots: one copy per expert, events instead of waiting, and nothing lost when it fails."""

import contextlib
import gc
import itertools
import logging
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moecache import ExpertLayout
from moecache.errors import ConfigError, MoeCacheError
from moecache.layout import Role
from moecache.slots import CudaSlots, SlotPool
from tests.helpers.fake_device import FakeDevice

BF16 = np.dtype(ml_dtypes.bfloat16)
LAYOUT = ExpertLayout(
    4,
    2,
    [
        [Role("gate_up", (6, 5), np.dtype(np.float32)), Role("down", (5, 3), BF16)],
        [Role("gate_up", (6, 5), np.dtype(np.float32)), Role("down", (5, 3), BF16)],
    ],
)


def expert(number: int, layer: int = 0, layout: ExpertLayout = LAYOUT) -> dict[str, np.ndarray]:
    """Return an expert whose every value is its number."""
    return {role.name: np.full(role.shape, number, role.dtype) for role in layout.layers[layer]}


def bits(array: Any) -> np.ndarray:
    """Return an array's bytes, whatever the device calls its type."""
    return np.ascontiguousarray(array).view(np.uint8)


def assert_holds(pool: CudaSlots, slot: int, number: int, layer: int = 0) -> None:
    """Assert that a slot holds an expert, once the current stream has come so far."""
    pool.before_compute(np.array([slot], np.int32))
    for name, array in pool.expert(slot, layer).items():
        found = bits(pool.device.to_host(array))
        assert np.array_equal(found, bits(expert(number, layer)[name])), name


def fill(pool: CudaSlots, slot: int, number: int, *, behind: bool = False) -> None:
    """Bring an expert into a slot the way a loader does."""
    parts = pool.buffers(slot, 0)
    for name, array in expert(number).items():
        parts[name][...] = array
    pool.upload(slot, 0, parts, behind=behind)


def test_it_is_a_slot_pool(gpu: Any) -> None:
    """Loaders and steps ask it what they ask of slots in RAM."""
    with CudaSlots(LAYOUT, 2, device=gpu) as pool:
        assert isinstance(pool, SlotPool)


def test_slots_hold_what_was_uploaded(gpu: Any) -> None:
    """Every slot, by buffers and by arrays of one's own, and again after a refill."""
    with CudaSlots(LAYOUT, 3, 1, gpu) as pool:
        assert pool.num_slots == 4
        for slot in range(4):
            fill(pool, slot, slot + 1)
        for slot in range(4):
            assert_holds(pool, slot, slot + 1)
        pool.upload(2, 1, expert(9, 1))
        assert_holds(pool, 2, 9, 1)
        assert_holds(pool, 1, 2)


def test_a_slab_is_all_slots_of_a_role(gpu: Any) -> None:
    """It shares the slots' memory, at one stride."""
    with CudaSlots(LAYOUT, 3, device=gpu) as pool:
        for slot in range(3):
            fill(pool, slot, slot + 1)
        pool.before_compute(np.arange(3, dtype=np.int32))
        slab = pool.slab("gate_up")
        assert slab.shape == (3, 6, 5)
        assert slab.strides[0] == pool.slot_stride
        for slot in range(3):
            assert np.all(gpu.to_host(slab[slot]) == slot + 1)
        with pytest.raises(ConfigError, match="there is no such role"):
            pool.slab("up")


def test_unfilled_slots_are_zeros(gpu: Any) -> None:
    """An unused slot never brings a NaN into a product."""
    with CudaSlots(LAYOUT, 2, device=gpu) as pool:
        assert not bits(gpu.to_host(pool.expert(1, 0)["down"])).any()


def test_bytes_of_an_expert_are_for_dlpack(gpu: Any) -> None:
    """Every library takes uint8; the last axis is longer by the size of the type."""
    with CudaSlots(LAYOUT, 2, device=gpu) as pool:
        fill(pool, 1, 3)
        pool.before_compute(np.array([1], np.int32))
        parts = pool.raw_expert(1, 0)
        assert parts["down"].shape == (5, 6)
        assert parts["down"].dtype == np.uint8
        down = gpu.to_host(parts["down"]).view(BF16)
        assert np.array_equal(down, expert(3)["down"])


def test_torch_takes_a_slot_without_a_copy(gpu: Any) -> None:
    """By DLPack, as bfloat16."""
    torch = pytest.importorskip("torch")
    with CudaSlots(LAYOUT, 2, device=gpu) as pool:
        part = pool.raw_expert(1, 0)["down"]
        tensor = torch.from_dlpack(part).view(torch.bfloat16)
        fill(pool, 1, 3)
        pool.before_compute(np.array([1], np.int32))
        gpu.synchronize(gpu.current_stream())
        assert tensor.shape == (5, 3)
        assert tensor.float().cpu().eq(3).all()


def test_an_expert_is_one_copy() -> None:
    """Its roles lie side by side, on the host as on the device."""
    device = FakeDevice()
    with CudaSlots(LAYOUT, 2, device=device) as pool:
        fill(pool, 1, 3)
        assert len(device.copies) == 1


def test_nobody_waits_on_the_host() -> None:
    """The host waits neither for the copy, nor for the computation that used the slot before."""
    device = FakeDevice(eager=False)
    pool = CudaSlots(LAYOUT, 2, device=device)
    for number in range(1, 4):
        fill(pool, 0, number)
        pool.before_compute(np.array([0], np.int32))
        pool.release_after_compute(np.array([0], np.int32))
    assert device.num_waits == 0
    assert_holds(pool, 0, 3)
    pool.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_refill_waits_for_those_who_compute(seed: int) -> None:
    """A product that was issued before the release sees the expert that it was issued for."""
    device = FakeDevice(eager=False, seed=seed)
    pool = CudaSlots(LAYOUT, 1, device=device)
    seen: list[float] = []
    for number in range(1, 6):
        fill(pool, 0, number, behind=bool(number % 2))
        pool.before_compute(np.array([0], np.int32))
        array = pool.expert(0, 0)["gate_up"]
        device.work(lambda array=array: seen.append(float(array.min())))  # type: ignore[misc]
        device.work(lambda array=array: seen.append(float(array.max())))  # type: ignore[misc]
        pool.release_after_compute(np.array([0], np.int32))
    device.run()
    assert seen == [number for number in range(1, 6) for _ in range(2)]
    pool.close()


@pytest.mark.parametrize("seed", range(10))
def test_every_stream_that_uses_a_slot_is_waited_for(seed: int) -> None:
    """Two threads may share an expert, each in its stream."""
    device = FakeDevice(eager=False, seed=seed)
    pool = CudaSlots(LAYOUT, 1, device=device)
    streams = [device.create_stream() for _ in range(3)]
    seen: list[float] = []
    for number in range(1, 4):
        fill(pool, 0, number)
        for stream in streams:
            with device.using(stream):
                pool.before_compute(np.array([0], np.int32))
                array = pool.expert(0, 0)["gate_up"]
                device.work(lambda array=array: seen.append(float(array.sum())))  # type: ignore[misc]
        pool.release_after_compute(np.array([0], np.int32))
    device.run()
    assert sorted(seen) == [30.0 * number for number in range(1, 4) for _ in range(3)]
    pool.close()


def test_a_prompt_names_a_slot_once_for_each_of_its_pairs() -> None:
    """It is filled before it is read, and refilled behind that; pairs without a slot are none."""
    device = FakeDevice(eager=False, seed=3)
    pool = CudaSlots(LAYOUT, 2, device=device)
    stream = device.create_stream()
    seen: list[float] = []
    pairs = np.array([1, -1, 1, 0, 1] * 40, np.int32).reshape(-1, 5)
    for number in range(1, 4):
        fill(pool, 0, number)
        fill(pool, 1, number)
        with device.using(stream):
            pool.before_compute(pairs)
            arrays = [pool.expert(slot, 0)["gate_up"] for slot in range(2)]
            device.work(lambda arrays=arrays: seen.append(sum(float(a.sum()) for a in arrays)))  # type: ignore[misc]
        pool.release_after_compute(pairs)
    device.run()
    assert seen == [60.0 * number for number in range(1, 4)]
    pool.close()


def test_more_streams_than_are_noted_are_waited_for() -> None:
    """When one more stream comes, the host waits for the one that was unused for longest."""
    device = FakeDevice(eager=False)
    pool = CudaSlots(LAYOUT, 1, device=device)
    fill(pool, 0, 1)
    seen: list[float] = []
    for _ in range(20):
        with device.using(device.create_stream()):
            pool.before_compute(np.array([0], np.int32))
            array = pool.expert(0, 0)["gate_up"]
            device.work(lambda array=array: seen.append(float(array.sum())))  # type: ignore[misc]
    pool.release_after_compute(np.array([0], np.int32))
    fill(pool, 0, 2)
    device.run()
    assert seen == [30.0] * 20
    pool.close()


def test_no_event_becomes_part_of_another_threads_graph() -> None:
    """A refill waits until the capture is over, and then for what the stream did before it."""
    device = FakeDevice(eager=False)
    with CudaSlots(LAYOUT, 2, device=device) as pool:
        fill(pool, 0, 1)
        fill(pool, 1, 1)
        slots = np.array([0, 1], np.int32)
        seen: list[int] = []
        side = device.create_stream()
        with device.using(side):
            pool.before_compute(slots)
            device.work(lambda: seen.append(int(pool.expert(0, 0)["gate_up"].flat[0])))
        captured, over = threading.Event(), threading.Event()
        graphs = []

        def capture() -> None:
            device.begin_capture(side)
            captured.set()
            over.wait(30)
            graphs.append(device.end_capture(side).owner)

        thread = threading.Thread(target=capture)
        thread.start()
        captured.wait(30)
        try:
            pool.release_after_compute(slots)
            refill = threading.Thread(target=lambda: [fill(pool, slot, 2) for slot in (0, 1)])
            refill.start()
            refill.join(0.2)
            assert refill.is_alive()
        finally:
            over.set()
            thread.join()
        refill.join(30)
        assert_holds(pool, 0, 2)
        assert_holds(pool, 1, 2)
        assert seen == [1]
        assert graphs == [[]]
        device.synchronize(side)
    device.destroy_stream(side)


def test_a_capture_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refill says what it waited for; after the capture it works."""
    monkeypatch.setattr("moecache.slots._uploads._LONGEST_CAPTURE_S", 0.05)
    device = FakeDevice()
    with CudaSlots(LAYOUT, 1, device=device) as pool:
        fill(pool, 0, 1)
        side, slots = device.create_stream(), np.array([0], np.int32)
        with device.using(side):
            pool.before_compute(slots)
        device.begin_capture(side)
        pool.release_after_compute(slots)
        with pytest.raises(MoeCacheError, match=r"captured for 0.05 s .* slot 0"):
            fill(pool, 0, 2)
        device.end_capture(side)
        fill(pool, 0, 3)
        assert_holds(pool, 0, 3)
    device.destroy_stream(side)


def test_uploads_are_counted_and_timed(gpu: Any) -> None:
    """What was copied, how long the device took, and what it still has to do."""
    with CudaSlots(LAYOUT, 4, device=gpu) as pool:
        for slot in range(4):
            fill(pool, slot, slot)
        gpu.synchronize(gpu.current_stream())
        for slot in range(4):
            assert_holds(pool, slot, slot)
        counts = pool.uploads
        assert (counts.num_uploads, counts.in_flight_bytes) == (4, 0)
        assert counts.num_bytes == 4 * LAYOUT.expert_bytes(0)
        assert counts.busy_ns > 0
        assert counts.pinned_bytes >= pool.slot_stride


def test_buffers_are_bounded_and_used_again() -> None:
    """However many experts pass, and however late the device is."""
    device = FakeDevice(eager=False)
    pool = CudaSlots(LAYOUT, 50, device=device, max_pinned_bytes=0)
    for slot in range(50):
        fill(pool, slot, slot)
    assert pool.uploads.pinned_bytes == 4 * pool.slot_stride
    for slot in range(50):
        assert_holds(pool, slot, slot)
    pool.close()


def test_a_buffer_that_all_are_lent_of_is_pageable() -> None:
    """To wait here could last for ever: the reads that hold all buffers may wait for this one."""
    device = FakeDevice()
    pool = CudaSlots(LAYOUT, 9, device=device, max_pinned_bytes=0)
    lent = [pool.buffers(slot, 0) for slot in range(9)]
    assert pool.uploads.pinned_bytes == 4 * pool.slot_stride
    for slot, parts in enumerate(lent):
        for name, array in expert(slot + 1).items():
            parts[name][...] = array
        pool.upload(slot, 0, parts)
    for slot in range(9):
        assert_holds(pool, slot, slot + 1)
    assert pool.uploads.pinned_bytes == 4 * pool.slot_stride
    pool.close()


def test_buffers_given_back_are_used_again() -> None:
    """A read that failed keeps none."""
    device = FakeDevice()
    with CudaSlots(LAYOUT, 2, device=device) as pool:
        for _ in range(100):
            pool.buffers(1, 0)
            pool.reclaim(1)
        assert pool.uploads.pinned_bytes == pool.slot_stride


def test_where_nothing_can_be_pinned_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """With pageable buffers, and one warning that says what to look at."""
    device = FakeDevice(eager=False, max_pinned_bytes=0)
    with caplog.at_level(logging.WARNING), CudaSlots(LAYOUT, 6, device=device) as pool:
        for slot in range(6):
            fill(pool, slot, slot + 1)
        for slot in range(6):
            assert_holds(pool, slot, slot + 1)
    (record,) = caplog.records
    assert "cuda.not_pinned" in record.getMessage()
    assert "ulimit -l" in record.getMessage()


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"gate_up": expert(1)["gate_up"]}, "'down' has shape"),
        ({**expert(1), "down": np.zeros((5, 4), BF16)}, "got an array of shape"),
        ({**expert(1), "down": np.zeros((5, 3), np.float32)}, "is bfloat16, got float32"),
    ],
)
def test_wrong_parts_leave_the_slot_as_it_was(
    gpu: Any, parts: dict[str, np.ndarray], problem: str
) -> None:
    """And say which role is wrong."""
    with CudaSlots(LAYOUT, 2, device=gpu) as pool:
        fill(pool, 1, 4)
        with pytest.raises(ValueError, match=problem):
            pool.upload(1, 0, parts)
        assert_holds(pool, 1, 4)


def test_wrong_slots_and_layers_are_refused(gpu: Any) -> None:
    """With the number."""
    with CudaSlots(LAYOUT, 2, device=gpu) as pool:
        with pytest.raises(ValueError, match="slot 2 is not in"):
            pool.buffers(2, 0)
        with pytest.raises(ValueError, match="layer 2 is not in"):
            pool.expert(0, 2)
    with pytest.raises(MoeCacheError, match="closed"):
        pool.expert(0, 0)
    pool.close()


def test_impossible_pools_are_refused() -> None:
    """Before anything is allocated."""
    device = FakeDevice()
    with pytest.raises(ConfigError, match="at least 1 slot"):
        CudaSlots(LAYOUT, 0, device=device)
    with pytest.raises(ConfigError, match="no experts"):
        CudaSlots(ExpertLayout(0, 0, []), 1, device=device)
    assert device.used_bytes == 0


def test_too_little_memory_says_how_much() -> None:
    """And leaves nothing allocated."""
    device = FakeDevice(total_bytes=4096)
    with pytest.raises(MemoryError, match=r"cuda:0 \(fake\) has no memory for 1000 slots"):
        CudaSlots(LAYOUT, 1000, device=device)
    assert device.used_bytes == 0
    assert device.num_streams == 0


def run_through(device: FakeDevice) -> None:
    """Do everything once, in a pool that is closed at the end, whatever comes."""
    with CudaSlots(LAYOUT, 3, 1, device) as pool:
        for number, slot in enumerate(itertools.islice(itertools.cycle(range(4)), 12)):
            fill(pool, slot, number, behind=bool(number % 3))
            pool.before_compute(np.array([slot], np.int32))
            pool.release_after_compute(np.array([slot], np.int32))


@pytest.mark.parametrize("eager", [False, True])
def test_whatever_call_fails_nothing_leaks(eager: bool) -> None:
    """Each call of the device fails once: memory, streams, events and pins are all given back."""
    whole = FakeDevice(eager=eager)
    run_through(whole)
    # Torch may have been imported since the file began.
    gc.collect()
    gc.freeze()
    for number in range(whole.num_calls):
        device = FakeDevice(eager=eager)
        device.fail_at = number
        with contextlib.suppress(MemoryError):
            run_through(device)
        device.run()
        gc.collect()
        assert device.used_bytes == 0, number
        assert device.pinned_bytes == 0, number
        assert device.num_streams == 0, number
        assert device.num_events == 0, number


@pytest.mark.parametrize("number", range(40))
def test_an_upload_that_fails_leaves_the_others(number: int) -> None:
    """The slot can be filled again, and the buffer is not lost."""
    device = FakeDevice(eager=False, seed=number)
    pool = CudaSlots(LAYOUT, 3, device=device)
    fill(pool, 0, 1)
    fill(pool, 1, 2)
    device.fail_at = number % 12
    for attempt in range(20):
        try:
            fill(pool, 2, attempt)
        except MemoryError:
            pool.reclaim(2)
    device.fail_at = -1
    fill(pool, 2, 3)
    for slot in range(3):
        assert_holds(pool, slot, slot + 1)
    pool.close()
    assert device.pinned_bytes == device.used_bytes == device.num_events == 0


def test_a_lost_device_is_an_error_everywhere_and_close_returns() -> None:
    """With what to do about it; nothing hangs."""
    device = FakeDevice()
    pool = CudaSlots(LAYOUT, 2, device=device)
    fill(pool, 0, 1)
    device.lost = True
    with pytest.raises(MoeCacheError, match="lost"):
        fill(pool, 1, 2)
    with pytest.raises(MoeCacheError, match="lost"):
        pool.close()
    pool.close()
    assert device.used_bytes == 0


def test_rounds_of_opening_and_closing_keep_nothing() -> None:
    """Fifty times; memory, pins, streams and events are as before."""
    device = FakeDevice()
    for _ in range(50):
        run_through(device)
    assert device.used_bytes == device.pinned_bytes == 0
    assert device.num_events == device.num_streams == 0


def test_memory_stays_the_same_over_many_refills(gpu: Any) -> None:
    """Nothing is allocated by a refill, nor are events ever more than are in use."""
    with CudaSlots(LAYOUT, 4, device=gpu) as pool:
        run = np.arange(4, dtype=np.int32)
        free = gpu.free_bytes()
        for number in range(500):
            fill(pool, number % 4, number)
            pool.before_compute(run)
            pool.release_after_compute(run)
        assert gpu.free_bytes() == free
        if isinstance(gpu, FakeDevice):
            assert gpu.num_events < 30


def test_threads_fill_different_slots_at_once(gpu: Any) -> None:
    """Loader threads and callers do."""
    with CudaSlots(LAYOUT, 8, device=gpu, max_pinned_bytes=0) as pool:

        def work(first: int) -> None:
            for number in range(50):
                fill(pool, first, number, behind=bool(first % 2))
                pool.before_compute(np.array([first], np.int32))
                pool.release_after_compute(np.array([first], np.int32))

        threads = [threading.Thread(target=work, args=(slot,)) for slot in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for slot in range(8):
            assert_holds(pool, slot, 49)
