"""Snapshots of a runtime: what they count, their difference, and their forms."""

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import moecache
from moecache.cache._profiler import AccessProfiler
from moecache.telemetry import PrefetchStats, RuntimeStats, stall_percentile_ns
from tests.helpers.pages import wait_until
from tests.helpers.runtimes import drain, make_runtime


@pytest.fixture
def snapshots() -> tuple[RuntimeStats, RuntimeStats]:
    """Return two snapshots of a runtime: after one step, and after three more."""
    with make_runtime(24, staging=0) as runtime:
        drain(runtime, 0, np.array([[1, 2]]))
        earlier = runtime.stats()
        runtime.begin_sequence()
        drain(runtime, 0, np.array([[1, 2]]))
        drain(runtime, 1, np.array([[1, 2], [2, 3]]))
        drain(runtime, 0, np.array([[2, 5]]))
        # One at least: a thread may have read everything before a step waited.
        runtime.profiler.record_miss_stall(1000)
        return earlier, runtime.stats()


def prefetch_stats(**counts: int) -> PrefetchStats:
    """Return statistics of a prefetch that is on."""
    return PrefetchStats("auto", active=True, reason="stalls are shorter with it", **counts)


def test_steps_hits_and_misses_are_counted_by_layer(
    snapshots: tuple[RuntimeStats, RuntimeStats],
) -> None:
    """Their sums are the totals; a step without misses is all resident."""
    _, stats = snapshots

    assert stats.hits_by_layer == (3, 0, 0)
    assert stats.misses_by_layer == (3, 3, 0)
    assert (stats.num_hits, stats.num_misses) == (3, 6)
    assert (stats.num_steps, stats.num_resident_steps, stats.num_sequences) == (4, 1, 1)
    assert stats.hit_rates == (0.5, 0.0, None)
    assert stats.num_layers == 3


def test_bytes_are_counted_by_cause(snapshots: tuple[RuntimeStats, RuntimeStats]) -> None:
    """A step of one token demands, one of several is bulk."""
    _, stats = snapshots
    expert_bytes = stats.bytes_read // 6

    assert stats.bytes_demand == 3 * expert_bytes
    assert stats.bytes_bulk == 3 * expert_bytes
    assert stats.bytes_prefetch == 0
    assert expert_bytes > 0


def test_a_difference_is_what_happened_in_between(
    snapshots: tuple[RuntimeStats, RuntimeStats],
) -> None:
    """Counters are subtracted, the rest is as it is in the later one."""
    earlier, later = snapshots

    between = later - earlier

    assert (between.num_steps, between.num_resident_steps, between.num_sequences) == (3, 1, 1)
    assert (between.hits_by_layer, between.misses_by_layer) == ((3, 0, 0), (1, 3, 0))
    assert (between.num_hits, between.num_misses) == (3, 4)
    assert between.num_reads == 4
    assert between.bytes_read == later.bytes_read - earlier.bytes_read
    assert sum(between.stall_histogram) == between.num_stalls
    assert between.stall_ns == later.stall_ns - earlier.stall_ns
    assert between.num_resident == later.num_resident == 6
    assert between.capacity == 24
    assert between.elapsed_s == pytest.approx((later.taken_ns - earlier.taken_ns) / 1e9)
    assert between.steps_per_s == pytest.approx(3 / between.elapsed_s)
    assert between.bytes_per_s == pytest.approx(between.bytes_read / between.elapsed_s)


def test_every_field_is_a_counter_or_stays(snapshots: tuple[RuntimeStats, RuntimeStats]) -> None:
    """A new field is not forgotten: subtracted from itself, a snapshot counts nothing."""
    _, stats = snapshots
    gauges = {
        *("num_in_flight", "num_resident", "num_pinned", "capacity", "staging_slots"),
        *("total_experts", "pool_bytes", "policy", "scope", "opened_ns", "since_ns"),
        *("taken_ns", "num_resets", "reading", "prefetch", "uploads"),
    }
    nothing = stats - stats

    for field in dataclasses.fields(RuntimeStats):
        if field.name not in gauges:
            value = getattr(nothing, field.name)
            assert not any(value) if isinstance(value, tuple) else value == 0, field.name
    assert nothing.elapsed_s == nothing.bytes_per_s == nothing.steps_per_s == 0.0


def test_after_a_reset_the_difference_is_what_was_counted_since() -> None:
    """Never a negative number; what the reset left alone is subtracted."""
    with make_runtime(24, staging=0) as runtime:
        for expert in range(4):
            drain(runtime, 0, np.array([[expert]]))
        earlier = runtime.stats()
        runtime.profiler.reset()
        drain(runtime, 0, np.array([[1]]))
        between = runtime.stats() - earlier

    assert (between.num_hits, between.num_misses) == (1, 0)
    assert between.hits_by_layer == (1, 0, 0)
    assert (between.num_steps, between.num_reads) == (1, 0)
    assert between.num_stalls == sum(between.stall_histogram) == 0


def test_snapshots_of_two_runtimes_do_not_subtract() -> None:
    """Nor does a difference, nor the newer from the older."""
    with make_runtime(6) as one, make_runtime(6) as other:
        earlier, foreign = one.stats(), other.stats()
        later = one.stats()
        with pytest.raises(moecache.ConfigError, match="different runtimes"):
            later - foreign
        with pytest.raises(moecache.ConfigError, match="is no snapshot"):
            (later - earlier) - earlier
        with pytest.raises(moecache.ConfigError, match="write later - earlier"):
            earlier - later
        with pytest.raises(TypeError):
            later - 1  # type: ignore[operator]


def test_pins_and_leases_in_flight_are_gauges() -> None:
    """They show what is, not what was."""
    with make_runtime(6) as runtime:
        drain(runtime, 0, np.array([[1, 2]]))
        runtime.cache.pin(0, 1)
        assert runtime.stats().num_pinned == 1
        runtime.cache.unpin(0, 1)
        assert runtime.stats().num_pinned == 0
        assert runtime.stats().num_in_flight == 0


def test_pins_are_counted_over_all_partitions() -> None:
    """Layers with slots of their own have pins of their own."""
    cache = moecache.ExpertCache(2, 4, 4, policy="lru", scope="layer")
    for layer in range(2):
        cache.publish(cache.claim(layer, 1))
        assert cache.pin(layer, 1)

    assert cache.num_pinned == 2


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (50, 5), (90, 9), (99, 2**20), (100, 2**20)]
)
def test_percentiles_come_from_the_histogram(percent: float, expected: int) -> None:
    """They are never too short, and less than 12.5 % too long."""
    profiler = AccessProfiler(1, 1)
    for length_ns in (*range(1, 10), 2**20):
        profiler.record_miss_stall(length_ns)

    found = stall_percentile_ns(profiler.stall_histogram, percent)

    assert expected <= found < expected * 1.125


def test_without_stalls_percentiles_are_zero() -> None:
    """And one that cannot be is an error."""
    assert stall_percentile_ns([0, 0], 99) == 0
    with pytest.raises(ValueError, match=r"percent must be in \[0, 100\], got 101"):
        stall_percentile_ns([1], 101)


def test_an_interval_has_percentiles_of_its_own() -> None:
    """A long stall of before does not count."""
    with make_runtime(24, staging=0) as runtime:
        runtime.profiler.record_miss_stall(10**9)
        earlier = runtime.stats()
        runtime.profiler.record_miss_stall(1000)
        later = runtime.stats()

    assert later.stall_p99_ns >= 10**9
    assert 1000 <= (later - earlier).stall_p99_ns < 1125
    assert (later - earlier).stall_p50_ns == (later - earlier).stall_p99_ns


def test_the_text_says_all_of_it(snapshots: tuple[RuntimeStats, RuntimeStats]) -> None:
    """Experts, policy, steps, reads by cause, stalls; prefetch if there is any."""
    stats = dataclasses.replace(
        snapshots[1],
        prefetch=prefetch_stats(
            num_issued=5, num_useful=3, num_wrong=1, num_used=4, num_found_k=2, num_advised=7
        ),
    )
    text = stats.describe()

    for part in (
        "6 resident, 0 pinned, 0 in flight, 24 slots, 24 in the model",
        "policy lru, scope global, 0 evictions",
        "steps 4, 1 of them all resident (25%); 1 sequences begun",
        "reads 6 (",
        "demand ",
        "bulk ",
        "half of the stalls took at most ",
        "prefetch auto, on: stalls are shorter with it",
        "5 experts read ahead: 3 useful, 0 late, 1 wrong",
        "7 experts advised",
        "at k: recall 0.50",
    ):
        assert part in text
    assert "prefetch" not in snapshots[1].describe()


def test_an_unused_runtime_describes_itself() -> None:
    """No stall, no read, nothing to divide by."""
    with make_runtime(4) as runtime:
        stats = runtime.stats()
        assert "reads 0 (0 B), 0 failed" in stats.describe()
        assert "stalls" not in stats.describe()
        assert "no accesses so far" in stats._repr_html_()
        assert json.loads(stats.to_json())["hit_rates"] == [None, None, None]


def test_json_has_every_field_in_plain_types(
    snapshots: tuple[RuntimeStats, RuntimeStats],
) -> None:
    """Read again, it is the same; the histogram has only buckets that count."""
    stats = dataclasses.replace(snapshots[1], prefetch=prefetch_stats(num_issued=2))

    found = json.loads(stats.to_json())

    assert found == stats.to_dict()
    assert found["version"] == 1
    assert {field.name for field in dataclasses.fields(RuntimeStats)} <= found.keys()
    assert found["bytes_read"] == stats.bytes_read
    assert found["prefetch"]["num_issued"] == 2
    assert sum(number for _, number in found["stall_histogram"]) == stats.num_stalls > 0
    assert all(number for _, number in found["stall_histogram"])


def test_html_is_well_formed_and_names_every_layer(
    snapshots: tuple[RuntimeStats, RuntimeStats],
) -> None:
    """A cell per layer with its rate as title; nothing is loaded, nothing runs."""
    root = ET.fromstring(snapshots[1]._repr_html_())

    titles = [cell.get("title") for cell in root.iter("span")]
    assert titles == ["layer 0: 50.0%", "layer 1: 0.0%", "layer 2: no accesses"]
    assert {element.tag for element in root.iter()} <= {"div", "b", "span", "table", "tr", "td"}
    text = " ".join("".join(root.itertext()).split())
    assert "hit rate 33.3%" in text
    assert "lowest 0.0% in layer 1, highest 50.0% in layer 0" in text


def test_html_escapes_what_others_wrote(snapshots: tuple[RuntimeStats, RuntimeStats]) -> None:
    """A reason or a policy with tags is text."""
    stats = dataclasses.replace(
        snapshots[1],
        policy='<img src="x">',
        prefetch=PrefetchStats("off", active=False, reason="<script>alert(1)</script>"),
    )

    html = stats._repr_html_()

    assert "<img" not in html
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_html_takes_the_pages_colours(snapshots: tuple[RuntimeStats, RuntimeStats]) -> None:
    """On dark and on light: no colour of its own for text or ground but translucent ones."""
    html = snapshots[1]._repr_html_()

    assert "color:inherit" in html
    assert "#" not in html
    assert "rgb(" not in html


def test_a_runtime_shows_itself_in_a_notebook() -> None:
    """As its snapshot does."""
    with make_runtime(4) as runtime:
        drain(runtime, 0, np.array([[1, 2]]))
        assert "hit rate <b>0.0%</b>" in runtime._repr_html_()


def test_prefetch_has_recall_and_precision() -> None:
    """Of predictions at k and 2k, and of what was read ahead."""
    stats = prefetch_stats(
        num_used=10,
        num_predicted_k=8,
        num_found_k=4,
        num_predicted_2k=16,
        num_found_2k=6,
        num_useful=3,
        num_late=3,
        num_wrong=2,
    )

    assert (stats.recall_at_k, stats.recall_at_2k) == (0.4, 0.6)
    assert (stats.precision_at_k, stats.precision_at_2k) == (0.5, 0.375)
    assert stats.precision == 0.75
    unused = prefetch_stats()
    assert unused.recall_at_k == unused.recall_at_2k == unused.precision == 0.0
    assert unused.precision_at_k == unused.precision_at_2k == 0.0


def test_prefetch_counters_are_subtracted_with_the_rest(
    snapshots: tuple[RuntimeStats, RuntimeStats],
) -> None:
    """What it does now is the later one's; one that is new is taken as it is."""
    earlier, later = snapshots
    before = PrefetchStats("auto", active=False, reason="not yet", num_issued=2, in_flight=1)
    after = prefetch_stats(num_issued=7, num_useful=3, in_flight=4)
    with_both = dataclasses.replace(later, prefetch=after) - dataclasses.replace(
        earlier, prefetch=before
    )

    assert with_both.prefetch == prefetch_stats(num_issued=5, num_useful=3, in_flight=4)
    assert (dataclasses.replace(later, prefetch=after) - earlier).prefetch == after
    assert (later - dataclasses.replace(earlier, prefetch=before)).prefetch is None


def test_the_prefetchers_figures_are_in_the_snapshot() -> None:
    """Those of the moment; without one there are none."""
    with make_runtime(4) as runtime:
        assert runtime.stats().prefetch is None
    with make_runtime(4, prefetch="hints") as runtime:
        runtime.hint(1, np.array([3]))
        wait_until(lambda: runtime.stats().num_in_flight == 0 and bool(runtime.cache.num_resident))
        found = runtime.stats().prefetch
        assert found is not None
        assert (found.mode, found.active, found.num_requests, found.num_issued) == (
            "hints",
            True,
            1,
            1,
        )


def test_the_difference_of_reading_is_that_of_its_counters(tiny_moe: Path) -> None:
    """How it reads is as it is now."""
    with moecache.open(tiny_moe, memory="25%", prefault="off") as runtime:
        drain_ids = np.array([[1, 2, 3, 4]])
        for _ in runtime.waves(0, drain_ids):
            pass
        earlier = runtime.stats()
        for _ in runtime.waves(1, drain_ids):
            pass
        later = runtime.stats()

    assert earlier.reading is not None
    assert later.reading is not None
    between = (later - earlier).reading
    assert between is not None
    assert between.num_reads == later.reading.num_reads - earlier.reading.num_reads > 0
    assert between.bytes_read == later.reading.bytes_read - earlier.reading.bytes_read > 0
    assert between.depth == later.reading.depth
