"""What ECHO has learned can be kept: a restored one goes on as the original does, bit for bit."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import moecache
from moecache.policies._echo import Echo

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.lists(st.lists(st.integers(-1, 130), min_size=3, max_size=3), min_size=1, max_size=3),
    ),
    max_size=40,
)
Request = tuple[int, list[list[int]]]


def same_state(one: Echo, other: Echo) -> bool:
    """Return whether two have learned the same, to the last bit."""
    left, right = one.state(), other.state()
    return set(left) == set(right) and all(
        array.tobytes() == right[name].tobytes() for name, array in left.items()
    )


def observe(echo: Echo, requests: list[Request]) -> None:
    """Let it see requests, at the layers there are."""
    for layer, rows in requests:
        echo.observe(layer % echo.num_layers, np.array(rows))


def learned(num_layers: int = 3, num_experts: int = 70, *, ring: bool = True) -> Echo:
    """Return one that has seen more tokens than its ring holds."""
    echo = Echo(num_layers, num_experts, ring=ring)
    rng = np.random.default_rng(7)
    for _ in range(300):
        for layer in range(num_layers):
            echo.observe(layer, rng.choice(num_experts, 4, replace=False))
    return echo


@example(2, 1, False, [(0, [[1, 1, 1]]), (1, [[0, 0, 0]])], [(0, [[0]])], [])  # layer 1 first
@given(
    num_layers=st.integers(1, 4),
    num_experts=st.sampled_from([1, 4, 63, 64, 65, 128, 130]),
    ring=st.booleans(),
    before=REQUESTS,
    after=REQUESTS,
    others=REQUESTS,
)
def test_a_restored_echo_goes_on_as_the_original(
    num_layers: int,
    num_experts: int,
    ring: bool,
    before: list[Request],
    after: list[Request],
    others: list[Request],
) -> None:
    """Whatever the other had learned before, and across the beginning of a sequence."""
    original = Echo(num_layers, num_experts, ring=ring)
    restored = Echo(num_layers, num_experts, ring=ring)
    observe(original, before)
    observe(restored, others)

    restored.restore(original.state())

    for start in range(0, len(after) + 1, 10):
        assert same_state(original, restored)
        for layer in range(num_layers):
            for one, two in zip(
                original.predict(layer, 9), restored.predict(layer, 9), strict=True
            ):
                assert one.tobytes() == two.tobytes()
        observe(original, after[start : start + 10])
        observe(restored, after[start : start + 10])
        original.begin_sequence()
        restored.begin_sequence()


def test_a_ring_that_came_round_is_restored_too() -> None:
    """After more tokens than it holds, the next ones overwrite the same entries."""
    original, restored = learned(), Echo(3, 70)
    restored.restore(original.state())
    rng = np.random.default_rng(8)

    for _ in range(300):
        ids = rng.choice(70, 4, replace=False)
        for layer in range(3):
            original.observe(layer, ids)
            restored.observe(layer, ids)

    assert same_state(original, restored)
    assert original.num_tokens == restored.num_tokens == 600


def test_a_state_is_a_copy() -> None:
    """Later requests do not change it, and changes to it teach nothing."""
    echo = learned()
    state = echo.state()
    kept = {name: array.copy() for name, array in state.items()}
    echo.restore(state)
    for array in state.values():
        array.fill(1)
    other = Echo(3, 70)
    other.restore(kept)

    assert same_state(echo, other)
    echo.observe(0, np.arange(4))
    assert not same_state(echo, other)


def changed(name: str, value: object) -> dict[str, np.ndarray]:
    """Return a state with one array filled with a value, or put in the place of another."""
    state = learned().state()
    if isinstance(value, np.ndarray):
        state[name] = value
    else:
        state[name].flat[-1] = value
    return state


def clock(top_k: int = 4, lowest: int = 0, layer: int = 2, token: int = 300) -> np.ndarray:
    """Return the clock of a state."""
    return np.array([top_k, lowest, layer, token], np.int64)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, np.nan) for name in ("table", "samples", "scores", "fast", "slow", "own")),
        *((name, np.inf) for name in ("table", "samples", "scores", "values", "next_use")),
        *((name, -0.5) for name in ("table", "samples", "fast", "slow", "own", "values")),
        *((name, 1.5) for name in ("table", "fast", "slow", "own", "next_use", "values")),
        ("cells", 192),
        ("cells", 255),
        ("last", 301),
        ("last", -100001),
        ("masks", 1 << 6),
        ("masks", 1 << 63),
        ("clock", clock(top_k=-1)),
        ("clock", clock(top_k=71)),
        ("clock", clock(lowest=-1)),
        ("clock", clock(lowest=3)),
        ("clock", clock(layer=-1)),
        ("clock", clock(layer=3)),
        ("clock", clock(token=0)),
        ("clock", clock(token=-5)),
        ("clock", clock(token=2**30 + 1)),
        ("clock", clock(token=2**62)),
        ("clock", np.zeros(3, np.int64)),
        ("clock", np.zeros(4, np.int32)),
        ("table", np.zeros(191, np.float32)),
        ("table", np.zeros(192, np.float64)),
        ("table", np.zeros(192, ">f4")),
        ("scores", np.zeros(0, np.float32)),
        ("fast", np.zeros((70, 3), np.float32)),
        ("fast", np.zeros((3, 71), np.float32)),
        ("last", np.zeros((3, 70), np.int64)),
        ("cells", np.zeros((3, 70), np.int8)),
        ("masks", np.zeros((3, 256, 1), np.uint64)),
        ("masks", np.zeros((3, 255, 2), np.uint64)),
        ("other", np.zeros(3)),
    ],
    ids=lambda value: (
        f"{value.dtype}-{value.shape}-{value.size and value.flat[-1]}-{value.sum()}"
        if isinstance(value, np.ndarray)
        else str(value)
    ),
)
def test_a_state_that_cannot_be_is_refused(name: str, value: object) -> None:
    """And what was learned stays as it was."""
    echo, untouched = learned(), learned()

    with pytest.raises(ValueError, match=name if name != "clock" else "."):
        echo.restore(changed(name, value))

    assert same_state(echo, untouched)


@pytest.mark.parametrize("name", sorted(learned().state()))
@pytest.mark.parametrize("instead", [None, [0.0], "text"])
def test_a_part_that_is_missing_or_no_array_is_named(name: str, instead: object) -> None:
    """Every part is needed, but for the one that states of earlier versions have not."""
    if (name, instead) == ("before", None):
        return
    echo = learned()
    state: dict[str, object] = dict(echo.state())
    del state[name]
    if instead is not None:
        state[name] = instead

    with pytest.raises(ValueError, match=f"{name} must be"):
        echo.restore(state)  # type: ignore[arg-type]


def test_a_state_that_knows_of_one_sequence_only_is_taken() -> None:
    """As earlier versions wrote it: each token follows the one before."""
    original, restored = learned(), Echo(3, 70)
    state = original.state()
    del state["before"]

    restored.restore(state)

    assert same_state(original, restored)
    for echo in (original, restored):
        observe(echo, [(layer, [[1, 5, 9]]) for layer in range(3)] * 5)
    assert same_state(original, restored)


@pytest.mark.parametrize(
    ("slot", "back"), [(0, 255), (200, 200), (3, 2)], ids=["overwritten", "gone", "taken"]
)
def test_links_that_no_ring_could_have_are_refused(slot: int, back: int) -> None:
    """To a token that is not there any more, or that another one follows."""
    state = learned().state()
    state["before"][slot] = back
    with pytest.raises(ValueError, match="before must lead to an earlier token"):
        Echo(3, 70).restore(state)


def test_states_of_other_shapes_are_refused() -> None:
    """Of other layers, experts, or without a ring."""
    others: list[Mapping[str, np.ndarray]] = [
        Echo(2, 70).state(),
        Echo(3, 71).state(),
        Echo(3, 70, ring=False).state(),
        {},
    ]
    for state in others:
        with pytest.raises(ValueError, match=r"must be|unknown"):
            Echo(3, 70).restore(state)
    with pytest.raises(ValueError, match="unknown parts: before, masks"):
        Echo(3, 70, ring=False).restore(Echo(3, 70).state())


def test_a_restored_cache_evicts_what_the_original_would() -> None:
    """The cache's minima follow the values that came with the state."""
    ids = np.random.default_rng(3).integers(0, 16, (200, 2, 2))
    for scope in ("global", "layer"):
        kept = []
        for resumed in (False, True):
            cache = moecache.ExpertCache(2, 16, 8, policy="echo", scope=scope)
            slots, misses = np.empty(2, np.int32), np.empty(2, np.int32)
            for token, row in enumerate(ids):
                if token == 100 and resumed:
                    assert cache.echo is not None
                    state = cache.echo.state()
                    cache.echo.reset()
                    cache.echo.restore(state)
                for layer in range(2):
                    count = cache.acquire(layer, row[layer], slots, misses)
                    for position in misses[:count]:
                        cache.publish(int(slots[position]))
                    cache.release(slots)
            cache.check()
            kept.append(cache.slot_table.tobytes())
        assert kept[0] == kept[1]


def test_only_caches_that_learn_have_an_echo() -> None:
    """One for all layers, whatever the scope."""
    for policy, ring in (("echo", True), ("haz2", False)):
        echo = moecache.ExpertCache(2, 4, 4, policy=policy, scope="layer").echo
        assert echo is not None
        assert (echo.num_layers, echo.num_experts, echo.ring) == (2, 4, ring)
    assert moecache.ExpertCache(2, 4, 4, policy="lru").echo is None
