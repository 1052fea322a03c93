"""CopyRing: what is copied is what was given, however late the device comes to it."""

import gc
import threading

import numpy as np
import pytest

from moecache.cuda._ring import CopyRing
from moecache.errors import MoeCacheError
from tests.helpers.examples import num_examples
from tests.helpers.fake_device import FakeDevice


@pytest.mark.parametrize("seed", range(num_examples(6)))
@pytest.mark.parametrize("max_pinned_bytes", [None, 0])
def test_arrays_may_change_at_once(seed: int, max_pinned_bytes: int | None) -> None:
    """Many times the ring's size, in two streams, pinned or not."""
    device = FakeDevice(eager=False, seed=seed, max_pinned_bytes=max_pinned_bytes)
    streams = [device.create_stream() for _ in range(2)]
    ring = CopyRing(device, 4096)
    rng = np.random.default_rng(seed)
    made = []
    for number in range(200):
        array = rng.integers(0, 1000, int(rng.integers(1, 300)))
        copy = ring.to_device(array, streams[number % 2])
        made.append((array.copy(), copy))
        array[...] = -1
        device.run(int(rng.integers(0, 6)))
    device.run()
    for array, copy in made:
        assert np.array_equal(array, copy)
    ring.close()
    ring.close()
    assert device.pinned_bytes == device.num_events == 0


def test_a_place_is_written_again_only_when_its_copy_is_done() -> None:
    """The host waits for the oldest copies, and for no more than it must."""
    device = FakeDevice(eager=False)
    stream = device.create_stream()
    ring = CopyRing(device, 1024)
    copies = [ring.to_device(np.full(64, number), stream) for number in range(2)]
    assert device.num_waits == 0
    device.num_waits = 0
    copies.append(ring.to_device(np.full(64, 2), stream))
    assert device.num_waits == 1
    device.run()
    assert [int(copy[0]) for copy in copies] == [0, 1, 2]
    ring.close()


def test_an_array_larger_than_the_ring_is_waited_for() -> None:
    """It is copied from where it is."""
    device = FakeDevice(eager=False)
    ring = CopyRing(device, 64)
    array = np.arange(1000)
    copy = ring.to_device(array, device.current_stream())
    array[...] = 0
    assert np.array_equal(copy, np.arange(1000))
    ring.close()


@pytest.mark.parametrize("eager", [True, False])
def test_any_call_may_fail(eager: bool) -> None:
    """The array is not copied then, and the next one is; nothing stays behind."""
    for number in range(40):
        device = FakeDevice(eager=eager, seed=number)
        stream = device.create_stream()
        ring = CopyRing(device, 1024)
        device.fail_at = number
        made = []
        for value in range(8):
            array = np.full(40, value)
            try:
                made.append((value, ring.to_device(array, stream)))
            except MemoryError:
                array[...] = -1
        device.run()
        assert len(made) >= 7
        for value, copy in made:
            assert (copy == value).all()
        try:
            ring.close()
        except MemoryError:
            ring.close()
        assert device.pinned_bytes == device.num_events == 0, number
        with pytest.raises(MoeCacheError, match="closed"):
            ring.to_device(np.zeros(1), stream)


def test_a_ring_that_is_dropped_is_unpinned() -> None:
    """Its pages may be others' at once."""
    device = FakeDevice(eager=False)
    ring = CopyRing(device)
    copy = ring.to_device(np.arange(5), device.current_stream())
    assert device.pinned_bytes
    del ring
    gc.collect()
    assert device.pinned_bytes == device.num_events == 0
    assert np.array_equal(copy, np.arange(5))


def test_threads_share_a_ring() -> None:
    """Each finds its own arrays on the device."""
    device = FakeDevice(eager=False)
    ring = CopyRing(device, 2048)
    wrong: list[int] = []

    def work(number: int) -> None:
        stream = device.create_stream()
        made = [ring.to_device(np.full(50, 100 * number + turn), stream) for turn in range(30)]
        device.synchronize(stream)
        wrong.extend(
            turn for turn, copy in enumerate(made) if not (copy == 100 * number + turn).all()
        )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    ring.close()
