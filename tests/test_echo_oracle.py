"""ECHO gives the values, predictions and victims of its plain-Python specification."""

import numpy as np
import numpy.typing as npt
import pytest

from moecache.cache._cache import ExpertCache
from moecache.policies._echo import Echo
from tests.helpers.oracle_echo import EchoValues, OracleEcho

# Observed: 5 and 7. The sums of the votes are rounded in another order, the exponentials differ
# by their last bit.
REUSE_ULPS = 8
PREDICTION_ULPS = 12

# Layers, experts, experts per token, tokens, most tokens per step. 600 tokens are two rings.
SHAPES = [
    (1, 1, 1, 30, 1),
    (2, 1, 1, 30, 3),
    (1, 5, 1, 300, 1),
    (2, 5, 5, 60, 4),
    (3, 64, 8, 600, 1),
    (3, 64, 8, 600, 40),
    (4, 65, 4, 100, 5),
    (6, 128, 8, 60, 1),
    (2, 128, 128, 20, 2),
    (2, 513, 6, 60, 3),
]


def ulps(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> int:
    """Return how many floats of the same sign lie between two arrays at most."""
    apart = a.view(np.int32).astype(np.int64) - b.view(np.int32)
    return int(np.abs(apart).max(initial=0))


def routing(
    shape: tuple[int, int, int, int, int], seed: int
) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Return steps of a Zipf routing, as (layer, ids), in which many tokens repeat the last one."""
    num_layers, num_experts, k, num_tokens, widest = shape
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, num_experts + 1)
    weights /= weights.sum()
    last = [rng.permutation(num_experts)[:k] for _ in range(num_layers)]
    steps, done = [], 0
    while done < num_tokens:
        rows = int(rng.integers(1, widest + 1))
        done += rows
        for layer in range(num_layers):
            ids = [rng.choice(num_experts, k, replace=False, p=weights) for _ in range(rows)]
            if rng.random() < 0.4:
                ids[0] = last[layer]
            last[layer] = ids[-1]
            steps.append((layer, np.array(ids)))
    return steps


def require_agreement(compiled: Echo, oracle: OracleEcho) -> None:
    """Compare everything that can be seen of an Echo."""
    assert compiled.num_tokens == oracle.t
    assert ulps(compiled.reuse, oracle.reuse) <= REUSE_ULPS
    for layer in range(compiled.num_layers):
        ids, scores = compiled.predict(layer, compiled.num_experts)
        if oracle.p[layer, 0] == 0:
            assert len(ids) == 0
            continue
        assert sorted(ids.tolist()) == list(range(compiled.num_experts))
        assert ulps(scores, oracle.chances(layer)[ids]) <= PREDICTION_ULPS


@pytest.mark.parametrize("ring", [True, False], ids=["echo", "haz2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_predictions_are_those_of_the_specification(
    shape: tuple[int, int, int, int, int], ring: bool
) -> None:
    """After every step, with a sequence that begins now and then."""
    compiled, oracle = Echo(*shape[:2], ring=ring), OracleEcho(*shape[:2], ring=ring)

    for number, (layer, ids) in enumerate(routing(shape, seed=1)):
        compiled.observe(layer, ids)
        oracle.observe(layer, ids)
        require_agreement(compiled, oracle)
        if number % 37 == 36:
            compiled.begin_sequence()
            oracle.begin_sequence()


@pytest.mark.parametrize("seed", range(20))
def test_values_are_those_of_the_specification_in_any_order_of_layers(seed: int) -> None:
    """Layers that are skipped, repeated or come backwards, ids out of range, empty rows."""
    rng = np.random.default_rng(seed)
    num_layers, num_experts = int(rng.integers(1, 5)), int(rng.choice([1, 3, 8, 70]))
    ring = seed % 5 != 0
    compiled = Echo(num_layers, num_experts, ring=ring)
    oracle = OracleEcho(num_layers, num_experts, ring=ring)

    for _ in range(80):
        layer, rows = int(rng.integers(num_layers)), int(rng.choice([0, 1, 1, 1, 2, 5]))
        k = int(rng.integers(0, min(num_experts, 6) + 1))
        ids = rng.integers(-1, num_experts + 2, (rows, k))
        compiled.observe(layer, ids)
        oracle.observe(layer, ids)
        require_agreement(compiled, oracle)


def test_more_rows_than_the_ring_holds_are_seen() -> None:
    """Of 300 rows the last 256 are remembered, at later layers too."""
    shape = (2, 16, 2, 1500, 600)
    compiled, oracle = Echo(2, 16), OracleEcho(2, 16)

    for layer, ids in routing(shape, seed=3):
        compiled.observe(layer, ids)
        oracle.observe(layer, ids)
        require_agreement(compiled, oracle)


def test_an_older_row_of_a_layer_may_come_after_a_newer_one() -> None:
    """Its experts' last use is then in the future, which counts as an age of 0."""
    compiled, oracle = Echo(2, 8), OracleEcho(2, 8)
    steps = [(0, [[0], [1], [2], [3]]), (1, [[5]]), (1, [[4], [6], [7], [5]])]

    for layer, ids in steps * 3:
        compiled.observe(layer, np.array(ids))
        oracle.observe(layer, np.array(ids))

    require_agreement(compiled, oracle)


@pytest.mark.parametrize("policy", ["echo", "haz2"])
@pytest.mark.parametrize(
    ("shape", "capacity"),
    [((3, 64, 8, 300, 1), 48), ((2, 16, 2, 200, 3), 8), ((4, 65, 4, 100, 5), 130)],
    ids=str,
)
def test_victims_are_those_of_the_specification(
    shape: tuple[int, int, int, int, int], capacity: int, policy: str
) -> None:
    """One by one, unless two are worth the same but for rounding."""
    num_layers, num_experts = shape[:2]
    cache = ExpertCache(num_layers, num_experts, capacity, policy=policy)
    oracle = EchoValues(OracleEcho(num_layers, num_experts, ring=policy == "echo"))
    resident: set[int] = set()
    num_victims = num_ties = 0

    for number, (layer, ids) in enumerate(routing(shape, seed=2)):
        if number % 37 == 36:
            cache.begin_sequence()
            oracle.begin_sequence()
        slots, misses = np.empty(ids.size, np.int32), np.empty(ids.size, np.int32)
        for index in misses[: cache.acquire(layer, ids, slots, misses)].tolist():
            cache.publish(int(slots[index]))
        cache.release(slots)
        now = {int(key) for key in np.flatnonzero(cache.slot_table.ravel() >= 0)}
        left = resident - now

        oracle.observe(layer, ids)
        request = {layer * num_experts + expert for expert in np.unique(ids).tolist()}
        candidates = resident - request
        chosen = set()
        for _ in range(len(resident | request) - capacity):
            chosen.add(oracle.victim(candidates - chosen))

        assert len(left) == len(chosen)
        num_victims += len(left)
        num_ties += len(left - chosen)
        for one, other in zip(sorted(left - chosen), sorted(chosen - left), strict=True):
            assert ulps(oracle.worth(one), oracle.worth(other)) <= 2 * REUSE_ULPS
        resident = now

    assert num_victims > 100
    assert num_ties < num_victims / 50
