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
BATCH_ERROR = 2e-6

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


def require_agreement(compiled: Echo, oracle: OracleEcho, *, several: bool = False) -> None:
    """Compare everything that can be seen of an Echo.

    Of several sequences, small probabilities are differences to 1.
    """
    assert compiled.num_tokens == oracle.t
    if several:
        assert np.abs(compiled.reuse - oracle.reuse).max() < BATCH_ERROR
    else:
        assert ulps(compiled.reuse, oracle.reuse) <= REUSE_ULPS
    for layer in range(compiled.num_layers):
        ids, scores = compiled.predict(layer, compiled.num_experts)
        if oracle.p[layer, 0] == 0:
            assert len(ids) == 0
            continue
        assert sorted(ids.tolist()) == list(range(compiled.num_experts))
        if several:
            assert np.abs(scores - oracle.chances(layer)[ids]).max() < BATCH_ERROR
        else:
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


@pytest.mark.parametrize("seed", range(8))
def test_batches_are_those_of_the_specification(seed: int) -> None:
    """Sequences join, leave, come back and mix with rows without a name, in more than a ring."""
    rng = np.random.default_rng(seed)
    num_layers, num_experts, k = 3, int(rng.choice([8, 64, 70])), 3
    compiled = Echo(num_layers, num_experts, ring=seed % 4 != 0)
    oracle = OracleEcho(num_layers, num_experts, ring=seed % 4 != 0)
    names: npt.NDArray[np.int64] | None = None

    for number in range(120):
        if number % 3 == 0:
            size = int(rng.choice([0, 1, 2, 4, 9]))
            names = rng.choice(12, size, replace=False) if size else None
            if names is not None and rng.random() < 0.2:
                names = names.repeat(rng.integers(1, 4, size))
        rows = 1 if names is None else len(names)
        for layer in range(num_layers):
            ids = rng.integers(0, num_experts, (rows, k)) % rng.integers(1, num_experts + 1)
            ids[rng.random(rows) < 0.2] = -1
            compiled.observe(layer, ids, sequences=names)
            oracle.observe(layer, ids, sequences=names)
            require_agreement(compiled, oracle, several=True)
        if rng.random() < 0.05:
            compiled.begin_sequence()
            oracle.begin_sequence()


def test_the_sequence_that_came_last_the_longest_ago_gives_its_place() -> None:
    """There are 64 places; 70 sequences in turns never find theirs again."""
    compiled, oracle = Echo(2, 8), OracleEcho(2, 8)
    rng = np.random.default_rng(0)

    for number in range(100):
        names = (number * 5 + np.arange(10)) % 70
        for layer in range(2):
            ids = rng.integers(0, 8, (10, 2))
            compiled.observe(layer, ids, sequences=names)
            oracle.observe(layer, ids, sequences=names)
            require_agreement(compiled, oracle, several=True)


def test_rows_before_the_first_expert_are_no_tokens() -> None:
    """In the first step ever, whatever sequence they are of."""
    compiled, oracle = Echo(2, 8), OracleEcho(2, 8)
    names = np.arange(40)
    for first in (39, 5, 0):
        for layer in range(2):
            ids = np.arange(80).reshape(40, 2) % 8
            ids[:first] = -1
            compiled.observe(layer, ids, sequences=names)
            oracle.observe(layer, ids, sequences=names)
            require_agreement(compiled, oracle, several=True)


def test_a_sequence_that_has_a_name_is_like_one_that_has_none() -> None:
    """To the last bit; a new name is a sequence that begins."""
    named, unnamed = Echo(3, 64), Echo(3, 64)

    for number, (layer, ids) in enumerate(routing((3, 64, 8, 300, 3), seed=4)):
        if number % 60 == 0:
            unnamed.begin_sequence()
        unnamed.observe(layer, ids)
        named.observe(layer, ids, sequences=np.full(len(ids), number // 60))
        assert np.array_equal(named.reuse, unnamed.reuse)


@pytest.mark.parametrize(
    ("sequences", "error", "message"),
    [
        ([1], ValueError, "a number for each of 2 rows"),
        ([1, -1], ValueError, "sequence -1 is not in"),
        ([1, 2**31], ValueError, "sequence 2147483648 is not in"),
        ([0.5, 1.0], TypeError, "must be integers"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(
    sequences: list[float], error: type[Exception], message: str
) -> None:
    """Before anything is learned."""
    echo = Echo(1, 8)
    with pytest.raises(error, match=message):
        echo.observe(0, np.zeros((2, 2), int), sequences=sequences)
    assert echo.num_tokens == 0


def test_a_step_of_more_sequences_than_are_told_apart_is_refused() -> None:
    """64 are taken."""
    echo = Echo(1, 8)
    echo.observe(0, np.zeros((64, 2), int), sequences=np.arange(64))
    with pytest.raises(ValueError, match="of 65 sequences, but 64 at most"):
        echo.observe(0, np.zeros((65, 2), int), sequences=np.arange(65))


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
