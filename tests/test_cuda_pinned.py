"""PinnedBuffers: one slab, pinned in the background, and whatever the system gives of it."""

import logging
import time

import numpy as np
import pytest

from moecache.slots import CudaSlots
from moecache.slots._memory import aligned_rows
from tests.helpers.fake_device import FakeDevice
from tests.test_cuda_slots import LAYOUT, assert_holds, fill


def test_buffers_are_pinned_in_the_background() -> None:
    """In one slab, side by side; nothing is pinned while an expert waits."""
    device = FakeDevice()
    pool = CudaSlots(LAYOUT, 9, device=device)
    pool.pin_ahead()
    until = time.monotonic() + 30
    while pool.uploads.pinned_bytes < 64 * pool.slot_stride:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert len(device._pinned) == 1
    calls = device.num_calls
    lent = [pool.buffers(slot, 0) for slot in range(9)]
    assert device.num_calls == calls
    addresses = sorted(parts["gate_up"].ctypes.data for parts in lent)
    assert set(np.diff(addresses)) == {4096}
    for slot in range(9):
        pool.reclaim(slot)
    pool.close()
    assert device.pinned_bytes == 0


@pytest.mark.parametrize("most", [0, 1, 5])
def test_what_the_system_refuses_to_pin_ahead_is_pageable(
    most: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, whoever pins first, and experts arrive all the same."""
    device = FakeDevice(max_pinned_bytes=most * 4096)
    with caplog.at_level(logging.WARNING), CudaSlots(LAYOUT, 6, device=device) as pool:
        pool.pin_ahead()
        for slot in range(6):
            fill(pool, slot, slot + 1)
        for slot in range(6):
            assert_holds(pool, slot, slot + 1)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["cuda.not_pinned"]
    assert device.pinned_bytes == 0


def test_a_pool_may_be_closed_while_its_buffers_are_pinned() -> None:
    """Whatever was pinned by then is unpinned."""
    for _ in range(20):
        device = FakeDevice()
        pool = CudaSlots(LAYOUT, 2, device=device)
        pool.pin_ahead()
        pool.close()
        assert device.pinned_bytes == 0


def test_a_host_without_memory_for_all_buffers_gives_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many, and so on."""

    def scarce(rows: int, stride: int) -> np.ndarray:
        if rows > 5:
            raise MemoryError
        return aligned_rows(rows, stride)

    monkeypatch.setattr("moecache.slots._pinned.aligned_rows", scarce)
    device = FakeDevice()
    with CudaSlots(LAYOUT, 9, device=device) as pool:
        for slot in range(9):
            pool.buffers(slot, 0)
        assert pool.uploads.pinned_bytes == 4 * pool.slot_stride
