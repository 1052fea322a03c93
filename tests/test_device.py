"""The simulated device: times as reckoned by hand, demands first, one transfer at a time."""

import math

import pytest

from moecache.errors import ConfigError, MoeCacheError, StoreError
from moecache.loading._load import Load
from moecache.loading.engine import Read
from moecache.study.clock import VirtualClock
from tests.helpers.devices import bench


def test_a_clock_goes_only_where_it_is_told() -> None:
    """It goes forwards, by the time that is asked for."""
    clock = VirtualClock()
    clock.advance(7)
    clock.advance(0)
    assert clock() == clock.now_ns == 7
    assert not clock.skip()
    with pytest.raises(ValueError, match="back by 1 ns"):
        clock.advance(-1)


def test_reads_begun_together_pay_their_latency_at_once() -> None:
    """Transfers follow each other; 100 ns, then 1000, 1000 and 400."""
    made = bench()
    made.demand(1, 2)
    made.demand(3, layer=1)

    made.run_out()

    assert made.spans == [(1, 100, 1100), (2, 1100, 2100), (3, 2100, 2500)]
    assert made.finished == [(1, 1100), (2, 2100), (3, 2500)]
    assert made.device.busy_ns == 2400
    assert not made.device._transfers


def test_reads_arrive_while_the_host_computes_each_at_its_time() -> None:
    """A host that computes for longer does not wait."""
    made = bench()
    made.demand(1, 2)

    made.clock.advance(1500)
    assert made.finished == [(1, 1100)]
    assert made.wait() == 2
    assert made.clock() == 2100


def test_looking_takes_no_time() -> None:
    """Reads that are due are taken in, the others are not."""
    made = bench(bandwidth=math.inf, latency_ns=0)
    made.demand(1)
    assert made.finished == []
    assert made.device.poll()
    slow = bench()
    slow.demand(1)
    assert not slow.device.poll()
    assert slow.clock() == 0


def test_a_demand_overtakes_at_the_end_of_the_chunk() -> None:
    """The prefetch's first 500 bytes are there at 600, when a demand of 480 begins."""
    made = bench()
    made.prefetch(1)
    made.clock.advance(380)
    made.demand(2)

    made.run_out()

    assert made.spans == [(1, 100, 600), (2, 600, 1600), (1, 1600, 2100)]
    assert made.device.num_overtaken == 1
    assert made.device.busy_ns == 2000


def test_a_demand_that_is_ready_at_a_chunk_s_end_takes_it() -> None:
    """The next chunk is not the prefetch's."""
    made = bench()
    made.prefetch(1)
    made.clock.advance(250)
    made.demand(2)

    made.run_out()

    assert made.spans[:2] == [(1, 100, 350), (2, 350, 1350)]


def test_a_demand_of_the_moment_a_transfer_begins_goes_first() -> None:
    """Not a byte of the prefetch was sent."""
    made = bench()
    made.prefetch(1)
    second = made.prefetch(2)
    made.clock.advance(100)
    made.device.hasten(second)

    made.run_out()

    assert made.spans == [(2, 100, 1100), (1, 1100, 2100)]
    assert made.device.num_overtaken == 0
    assert (1, 2100) in made.finished


def test_nothing_is_cut_in_its_last_chunk() -> None:
    """The prefetch is done before the demand begins."""
    made = bench()
    made.prefetch(1)
    made.clock.advance(800)
    made.demand(2)

    made.run_out()

    assert made.spans == [(1, 100, 1100), (2, 1100, 2100)]
    assert made.device.num_overtaken == 0


def test_a_prefetch_that_a_demand_joined_is_overtaken_no_more() -> None:
    """Neither by the next prefetch in line nor by demands that came later."""
    made = bench()
    made.prefetch(1)
    second, third = made.prefetch(2), made.prefetch(3)
    made.clock.advance(150)
    made.device.hasten(third)
    made.demand(4)
    made.device.hasten(second)
    made.device.hasten(second)

    made.run_out()

    # The first is cut for the third; what is left of it comes last.
    assert [expert for expert, _, _ in made.spans] == [1, 3, 4, 2, 1]
    assert [expert for expert, _ in made.finished] == [3, 4, 2, 1]
    assert made.spans[0] == (1, 100, 350)


def test_a_prefetch_in_transfer_that_is_joined_goes_on() -> None:
    """A later demand does not cut it."""
    made = bench()
    load = made.prefetch(1)
    made.clock.advance(150)
    made.device.hasten(load)
    made.demand(2)

    made.run_out()

    assert made.spans == [(1, 100, 1100), (2, 1100, 2100)]


def test_a_prefetch_joined_in_its_latency_is_a_demand() -> None:
    """It interrupts the reads that a demand would interrupt."""
    made = bench()
    made.prefetch(1)
    made.clock.advance(50)
    load = made.prefetch(2)
    made.device.hasten(load)

    made.run_out()

    assert made.finished == [(2, 1350), (1, 2100)]


def test_hastening_what_is_done_is_nothing() -> None:
    """The read may have arrived in between."""
    made = bench()
    load = made.prefetch(1)
    made.run_out()
    made.device.hasten(load)
    assert not made.device._transfers


def test_idle_is_called_while_no_demand_is_under_way() -> None:
    """When time is about to pass, and at the end of each read, at its time."""
    made = bench(prefetch_depth=1)
    asked: list[int] = []

    def idle() -> bool:
        asked.append(made.clock())
        if len(asked) > 2:
            return False
        made.prefetch(10 + len(asked))
        return True

    made.device.idle = idle
    made.demand(1)
    made.clock.advance(5000)

    assert asked == [1100, 2200, 3300]
    assert made.finished == [(1, 1100), (11, 2200), (12, 3300)]


def test_with_depth_two_a_latency_hides_behind_a_transfer() -> None:
    """The link has no gap."""
    made = bench()
    todo = [3, 2, 1]

    def idle() -> bool:
        if todo:
            made.prefetch(todo.pop())
            return True
        return False

    made.device.idle = idle
    made.clock.advance(10_000)

    assert made.spans == [(1, 100, 1100), (2, 1100, 2100), (3, 2100, 3100)]


def test_a_disturbance_delays_or_fails_a_read() -> None:
    """The others go on; what fails fails after its latency."""

    def disturb(load: Read) -> int:
        if load.expert == 2:
            raise StoreError("unreadable")
        return 50 if load.expert == 1 else 0

    made = bench()
    made.device.disturb = disturb
    made.demand(1, 2, 3)
    done: list[tuple[Load, Exception | None]] = []
    while made.device.wait(made.device.epoch) and len(done) < 1:
        made.device.take(done)  # type: ignore[arg-type]
    made.run_out()

    assert [(load.expert, str(error)) for load, error in done] == [(2, "unreadable")]
    assert made.finished == [(3, 1100), (1, 2100)]


def test_a_prefetch_can_be_taken_back_and_frees_the_link() -> None:
    """It ends as cancelled; a demand goes on."""
    made = bench()
    load, other = made.prefetch(1), made.prefetch(2)
    made.clock.advance(150)
    made.device.hasten(other)
    made.device.cancel(load)
    made.device.cancel(other)
    made.run_out()
    assert made.finished == [(1, 150), (2, 1150)]
    assert load.is_cancelled
    assert other.error is None


def test_waiting_for_nothing_is_an_error_not_a_hang() -> None:
    """With one thread nothing else can end the wait."""
    made = bench()
    with pytest.raises(MoeCacheError, match="it would wait for ever"):
        made.device.wait(made.device.epoch)
    seen = made.device.epoch
    made.device.announce()
    assert not made.device.wait(seen)
    assert made.clock() == 0


def test_closing_finishes_what_is_under_way_within_the_time() -> None:
    """What takes longer is counted."""
    made = bench(bandwidth=1000)
    made.demand(1, 2, 3)
    assert made.device.close(2.0) == 2
    assert made.clock() < 2 * 10**9
    assert [expert for expert, _ in made.finished] == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latency_ns": -1}, "latency_ns must not be negative, got -1"),
        ({"chunk_bytes": 0}, "at least 1, got 0 and 2"),
        ({"prefetch_depth": 0}, "at least 1, got 250 and 0"),
        ({"bandwidth": "fast"}, "'fast' is no rate"),
        ({"bandwidth": 0}, "0 is no rate"),
    ],
)
def test_impossible_figures_are_refused(options: dict[str, object], message: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=message):
        bench(**options)  # type: ignore[arg-type]
