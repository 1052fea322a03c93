"""AccessProfiler, one rule at a time."""

import numpy as np
import pytest

from moecache.cache._profiler import AccessProfiler, stall_bucket_ns


@pytest.fixture
def profiler() -> AccessProfiler:
    """Return counters of 3 layers of 4 experts: 3 hits, 3 misses, layer 2 untouched."""
    profiler = AccessProfiler(3, 4)
    for expert in (2, 2, 1):
        profiler.record_hit(0, expert)
    for layer, expert in ((0, 3), (1, 0), (1, 3)):
        profiler.record_miss(layer, expert)
    return profiler


def test_an_access_is_a_hit_or_a_miss(profiler: AccessProfiler) -> None:
    """Both are counted, and their sum per expert."""
    assert (profiler.num_hits, profiler.num_misses) == (3, 3)
    assert profiler.hit_rate == 0.5
    assert profiler.access_count(0, 2) == 2
    assert profiler.layer_access_count(0) == 4
    assert profiler.layer_hit_rate(0) == 0.75
    assert profiler.layer_hit_rate(1) == 0.0


def test_rates_are_zero_before_the_first_access() -> None:
    """There is nothing to divide by."""
    profiler = AccessProfiler(1, 1)

    assert profiler.hit_rate == 0.0
    assert profiler.layer_hit_rate(0) == 0.0
    assert profiler.pre_warm_hit_rate == 0.0
    assert profiler.post_warm_hit_rate == 0.0


def test_counts_is_a_live_read_only_table(profiler: AccessProfiler) -> None:
    """It shows later accesses, and cannot be written."""
    counts = profiler.counts
    profiler.record_hit(2, 0)

    assert counts.dtype == np.uint64
    assert counts.tolist() == [[0, 1, 2, 1], [1, 0, 0, 1], [1, 0, 0, 0]]
    with pytest.raises(ValueError, match="read-only"):
        counts[0, 0] = 1


def test_counts_outlives_the_profiler() -> None:
    """The view owns what it shows."""
    counts = AccessProfiler(2, 2).counts

    assert counts.tolist() == [[0, 0], [0, 0]]


def test_top_experts_are_the_most_used_ties_by_id(profiler: AccessProfiler) -> None:
    """Experts that were never used are not among them."""
    assert profiler.top_experts(0, 2) == [2, 1]
    assert profiler.top_experts(0, 9) == [2, 1, 3]
    assert profiler.top_experts(0, 0) == []
    assert profiler.top_experts(2, 4) == []


def test_a_negative_number_of_top_experts_is_an_error(profiler: AccessProfiler) -> None:
    """The message names it."""
    with pytest.raises(ValueError, match="n must not be negative, got -1"):
        profiler.top_experts(0, -1)


def test_the_warm_pin_splits_the_hit_rate(profiler: AccessProfiler) -> None:
    """Before and since are told apart from the moment it is recorded."""
    profiler.record_warm_pin([(0, 2), (1, 0)])
    profiler.record_hit(1, 0)

    assert profiler.warm_pinned == ((0, 2), (1, 0))
    assert profiler.pre_warm_hit_rate == 0.5
    assert profiler.post_warm_hit_rate == 1.0
    assert profiler.hit_rate == pytest.approx(4 / 7)


def test_without_a_warm_pin_the_rate_before_is_the_overall_one(profiler: AccessProfiler) -> None:
    """And there is none since."""
    assert profiler.warm_pinned == ()
    assert profiler.pre_warm_hit_rate == 0.5
    assert profiler.post_warm_hit_rate == 0.0


def test_only_the_first_warm_pin_counts(profiler: AccessProfiler) -> None:
    """Later ones change nothing, an empty first one counts too."""
    profiler.record_warm_pin([])
    profiler.record_hit(0, 0)
    profiler.record_warm_pin([(0, 1)])

    assert profiler.warm_pinned == ()
    assert profiler.post_warm_hit_rate == 1.0


def test_a_bad_pair_records_no_warm_pin(profiler: AccessProfiler) -> None:
    """A later good one is still the first."""
    with pytest.raises(ValueError, match=r"expert 4 is not in \[0, 4\)"):
        profiler.record_warm_pin([(0, 1), (0, 4)])
    profiler.record_warm_pin([(0, 1)])

    assert profiler.warm_pinned == ((0, 1),)


def test_stalls_are_added_up(profiler: AccessProfiler) -> None:
    """Their number and their total."""
    profiler.record_miss_stall(1_500_000)
    profiler.record_miss_stall(0)

    assert profiler.miss_stall_ns == 1_500_000
    assert profiler.num_miss_stalls == 2


@pytest.mark.parametrize("length_ns", [0, 7, 8, 15, 16, 17, 18, 1000, 123_456_789, 2**41 - 1])
def test_a_stall_is_counted_with_those_of_its_length(length_ns: int) -> None:
    """Its bucket ends at it or less than 12.5 % above, and the one before ends below."""
    profiler = AccessProfiler(1, 1)
    profiler.record_miss_stall(length_ns)

    bucket = profiler.stall_histogram.index(1)

    assert sum(profiler.stall_histogram) == 1
    assert length_ns <= stall_bucket_ns(bucket) < max(length_ns * 1.125, length_ns + 1)
    assert bucket == 0 or stall_bucket_ns(bucket - 1) < length_ns


def test_the_last_bucket_has_all_longer_stalls() -> None:
    """Half an hour and a year are one bucket."""
    profiler = AccessProfiler(1, 1)
    for length_ns in (2**41 - 1, 2**41, 10**18):
        profiler.record_miss_stall(length_ns)

    assert profiler.stall_histogram[-1] == 3


@pytest.mark.parametrize("bucket", [-1, 312])
def test_a_bucket_that_is_not_there_has_no_length(bucket: int) -> None:
    """The message has the range."""
    assert len(AccessProfiler(1, 1).stall_histogram) == 312
    with pytest.raises(ValueError, match=rf"bucket {bucket} is not in \[0, 312\)"):
        stall_bucket_ns(bucket)


def test_layers_have_counts_of_their_own(profiler: AccessProfiler) -> None:
    """Copies: what is counted later is not in them."""
    hits, misses = profiler.hits_by_layer, profiler.misses_by_layer
    profiler.record_hit(2, 0)

    assert hits.dtype == misses.dtype == np.uint64
    assert (hits.tolist(), misses.tolist()) == ([3, 0, 0], [1, 2, 0])
    assert profiler.hits_by_layer.tolist() == [3, 0, 1]


def test_a_negative_stall_is_an_error(profiler: AccessProfiler) -> None:
    """Nothing is counted then."""
    with pytest.raises(ValueError, match="a stall cannot last -1 ns"):
        profiler.record_miss_stall(-1)
    assert profiler.num_miss_stalls == 0


def test_the_report_says_everything_without_a_warm_pin(profiler: AccessProfiler) -> None:
    """Overall, stalls, then a line per layer."""
    profiler.record_miss_stall(1_500_000)

    assert profiler.report().splitlines() == [
        "hit rate 50.0%: 3 of 6 accesses",
        "stalls 1, 1.5 ms in all",
        "layer 0: hit rate 75.0%, top 2 (2), 1 (1), 3 (1)",
        "layer 1: hit rate 0.0%, top 0 (1), 3 (1)",
        "layer 2: no accesses recorded",
    ]


def test_the_report_splits_at_the_warm_pin(profiler: AccessProfiler) -> None:
    """With the pinned ids of each layer, the layers in order."""
    profiler.record_warm_pin([(1, 0), (0, 2), (0, 1)])

    assert profiler.report().splitlines()[2:5] == [
        "warm pin: 3 experts, hit rate 50.0% before, 0.0% since",
        "  layer 0 pinned: 2, 1",
        "  layer 1 pinned: 0",
    ]


def test_an_unused_profiler_reports_too() -> None:
    """Every layer says so."""
    assert AccessProfiler(2, 2).report().splitlines() == [
        "hit rate 0.0%: 0 of 0 accesses",
        "stalls 0, 0.0 ms in all",
        "layer 0: no accesses recorded",
        "layer 1: no accesses recorded",
    ]


def test_reset_sets_everything_to_zero(profiler: AccessProfiler) -> None:
    """The warm pin is forgotten, a new one can be recorded."""
    profiler.record_miss_stall(5)
    profiler.record_warm_pin([(0, 2)])

    profiler.reset()

    assert not profiler.counts.any()
    assert (profiler.num_hits, profiler.num_misses) == (0, 0)
    assert (profiler.miss_stall_ns, profiler.num_miss_stalls) == (0, 0)
    assert not any(profiler.warm_pinned)
    assert not any(profiler.stall_histogram)
    assert not profiler.hits_by_layer.any()
    assert not profiler.misses_by_layer.any()
    assert profiler.num_resets == 1
    assert profiler.layer_access_count(0) == 0
    profiler.record_warm_pin([(0, 1)])
    assert profiler.warm_pinned == ((0, 1),)


@pytest.mark.parametrize(("layer", "expert"), [(-1, 0), (3, 0), (0, -1), (0, 4)])
def test_what_does_not_exist_is_not_counted(
    profiler: AccessProfiler, layer: int, expert: int
) -> None:
    """The message names the layer or the expert and the range."""
    before = profiler.counts.tolist()
    wrong = f"layer {layer}" if layer else f"expert {expert}"

    for call in (profiler.record_hit, profiler.record_miss, profiler.access_count):
        with pytest.raises(ValueError, match=rf"{wrong} is not in \[0, {3 if layer else 4}\)"):
            call(layer, expert)
    assert profiler.counts.tolist() == before
    assert (profiler.num_hits, profiler.num_misses) == (3, 3)


@pytest.mark.parametrize(("layers", "experts"), [(0, 1), (1, 0), (-1, 5)])
def test_a_model_without_experts_is_an_error(layers: int, experts: int) -> None:
    """The message names both figures."""
    with pytest.raises(ValueError, match=f"1 layer and 1 expert, got {layers} and {experts}"):
        AccessProfiler(layers, experts)
