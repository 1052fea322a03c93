"""Statistics of traces, against the definitions written with loops."""

import json
import math
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from moecache.errors import ConfigError
from moecache.study import Trace, coactivation, statistics
from moecache.study.statistics import SHARES, WINDOWS
from tests.helpers.examples import num_examples
from tests.helpers.traces import random_trace, traces

Sets = list[list[set[int]]]


def sets_of(trace: Trace) -> Sets:
    """Return the experts of each layer and token, without padding."""
    return [
        [{int(e) for e in trace.experts[t, layer] if e >= 0} for t in range(len(trace))]
        for layer in range(trace.num_layers)
    ]


def close(found: float, expected: float) -> bool:
    """Return whether both are NaN or nearly the same."""
    return bool(np.isclose(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True))


@settings(max_examples=num_examples(60))
@given(trace=traces())
def test_popularity_is_what_counting_gives(trace: Trace) -> None:
    """Counts, shares of the busiest, Gini, entropy."""
    found = statistics(trace)
    for layer, tokens in enumerate(sets_of(trace)):
        counts = [sum(e in chosen for chosen in tokens) for e in range(trace.num_experts)]
        total, number = sum(counts), trace.num_experts
        assert found.counts[layer].tolist() == counts
        if total == 0:
            assert np.isnan(found.gini[layer])
            assert np.isnan(found.entropy_bits[layer])
            continue
        for i, share in enumerate(SHARES):
            busiest = sorted(counts, reverse=True)[: max(1, math.ceil(share * number - 1e-9))]
            assert close(found.top_shares[layer, i], sum(busiest) / total)
        differences = sum(abs(a - b) for a in counts for b in counts)
        assert close(found.gini[layer], differences / (2 * number * total))
        bits = -sum(c / total * math.log2(c / total) for c in counts if c)
        assert close(found.entropy_bits[layer], bits)
        if number > 1:
            assert close(found.relative_entropy[layer], bits / math.log2(number))


@settings(max_examples=num_examples(60))
@given(trace=traces())
def test_the_overlap_is_with_the_sequences_token_before(trace: Trace) -> None:
    """Tokens of other sequences in between do not count; nor do tokens without experts."""
    found = statistics(trace).overlap
    for layer, tokens in enumerate(sets_of(trace)):
        shares = []
        for sequence in set(trace.sequence.tolist()):
            rows = [t for t in range(len(trace)) if trace.sequence[t] == sequence]
            for before, after in pairwise(rows):
                if tokens[before] and tokens[after]:
                    shares.append(len(tokens[before] & tokens[after]) / len(tokens[after]))
        assert close(found[layer], sum(shares) / len(shares) if shares else math.nan)


@settings(max_examples=num_examples(60))
@given(trace=traces())
def test_reuse_is_the_distance_to_the_next_use(trace: Trace) -> None:
    """In bins of powers of two; what never comes again is in the last."""
    found = statistics(trace).reuse
    for layer, tokens in enumerate(sets_of(trace)):
        bins: Counter[int] = Counter()
        for t, chosen in enumerate(tokens):
            for expert in chosen:
                later = [u for u in range(t + 1, len(tokens)) if expert in tokens[u]]
                bins[int(math.log2(later[0] - t)) if later else found.shape[1] - 1] += 1
        assert found[layer].tolist() == [bins[b] for b in range(found.shape[1])]


@settings(max_examples=num_examples(60))
@given(trace=traces())
def test_the_working_set_is_averaged_over_all_windows(trace: Trace) -> None:
    """Distinct experts of each window, one by one."""
    found = statistics(trace).working_set
    for layer, tokens in enumerate(sets_of(trace)):
        for i, window in enumerate(WINDOWS):
            sizes = [
                len(set().union(*tokens[start : start + window]))
                for start in range(len(tokens) - window + 1)
            ]
            assert close(found[layer, i], sum(sizes) / len(sizes) if sizes else math.nan)


@settings(max_examples=num_examples(60))
@given(trace=traces())
def test_neighbouring_layers_are_counted_pair_by_pair(trace: Trace) -> None:
    """The matrix, the likeliest follower, and mutual information."""
    found, layers = statistics(trace), sets_of(trace)
    for layer in range(trace.num_layers - 1):
        pairs = Counter(
            (e, f)
            for here, there in zip(layers[layer], layers[layer + 1], strict=True)
            for e in here
            for f in there
        )
        matrix = coactivation(trace, layer)
        assert {(e, f): n for (e, f), n in np.ndenumerate(matrix) if n} == pairs
        uses = Counter(
            e
            for here, there in zip(layers[layer], layers[layer + 1], strict=True)
            for e in here
            if there
        )
        if not pairs:
            assert np.isnan(found.predictability[layer])
            assert np.isnan(found.mutual_information_bits[layer])
            continue
        best = sum(max(n for (e, _), n in pairs.items() if e == one) for one in uses)
        assert close(found.predictability[layer], best / sum(uses.values()))
        total = sum(pairs.values())
        first, second = matrix.sum(1), matrix.sum(0)
        bits = sum(
            n / total * math.log2(n * total / (first[e] * second[f])) for (e, f), n in pairs.items()
        )
        assert close(found.mutual_information_bits[layer], max(0.0, bits)) or abs(bits) < 1e-12


def test_many_experts_need_no_matrix() -> None:
    """Figures of pairs are the same where a matrix would be too large."""
    small = random_trace(7, num_tokens=60, num_experts=16, top_k=3)
    large = Trace(small.experts, num_experts=5000)

    for name in ("predictability", "mutual_information_bits", "overlap"):
        np.testing.assert_allclose(
            getattr(statistics(large), name), getattr(statistics(small), name)
        )
    with pytest.raises(ConfigError, match="5000 x 5000 experts is too large"):
        coactivation(large, 0)
    with pytest.raises(ConfigError, match=r"layer 2 is not in \[0, 2\)"):
        coactivation(small, 2)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.5])
def test_the_zipf_exponent_is_found_again(exponent: float) -> None:
    """Counts that follow the law exactly give its exponent."""
    weights = np.arange(1, 33, dtype=float) ** -exponent
    counts = np.rint(20_000 * weights / weights.sum()).astype(int)
    experts = np.repeat(np.random.default_rng(0).permutation(32), counts)
    found = statistics(Trace(experts[:, None, None], num_experts=32))

    assert abs(found.zipf_exponent[0] - exponent) < 0.02


def test_extremes_have_the_values_that_one_would_say() -> None:
    """Always the same experts; and each once."""
    same = statistics(Trace(np.tile([[[0, 1]]], (300, 1, 1)), num_experts=4))
    once = statistics(Trace(np.arange(64)[:, None, None], num_experts=64))

    assert same.overlap.tolist() == [1.0]
    assert same.working_set[0].tolist() == [2.0] * 5
    assert same.entropy_bits.tolist() == [1.0]
    assert "half of the accesses within 1 tokens" in same.describe()
    assert once.overlap.tolist() == [0.0]
    assert once.gini.tolist() == [0.0]
    assert once.relative_entropy.tolist() == [1.0]
    assert once.working_set[0, :4].tolist() == [1.0, 4.0, 16.0, 64.0]
    assert "100.0% never" in once.describe()


def test_a_determined_next_layer_is_fully_predictable() -> None:
    """A permutation of experts from layer to layer: all bits are shared."""
    first = np.tile(np.arange(8), 4)
    trace = Trace(np.stack([first, (first * 3 + 1) % 8], 1)[:, :, None], num_experts=8)
    found = statistics(trace)

    assert found.predictability.tolist() == [1.0]
    assert found.mutual_information_bits.tolist() == [3.0]


def test_no_tokens_and_one_expert_are_no_errors() -> None:
    """Nothing to count is NaN, and JSON without NaN."""
    nothing = statistics(random_trace(0)[:0])
    single = statistics(Trace(np.zeros((3, 1, 1), int), num_experts=1))

    assert nothing.describe() == "no accesses"
    assert json.loads(nothing.to_json())["gini"] == [None] * 3
    assert single.relative_entropy.tolist() == [1.0]
    assert json.loads(single.to_json())["zipf_exponent"] == [None]
    assert json.loads(single.to_json())["layers"] == [0]


def test_experts_that_are_never_used_take_little_memory() -> None:
    """Beside the counts there is a layer at a time, however many layers and experts."""
    rng = np.random.default_rng(0)
    trace = Trace(rng.integers(0, 2**17, (50, 16, 1)).astype(np.int32), num_experts=2**17)
    tracemalloc.start()
    try:
        found = statistics(trace)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.counts.nbytes == 2**24
    assert peak < 1.5 * 2**24
