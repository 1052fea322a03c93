"""Echo learns routing and predicts it; EchoCache evicts what is least likely to be used.

Not tested: the clock, set back once in 2**30 tokens. Getting there takes minutes (2**30 rows of one
layer), and a hook that moves the clock would have to move every expert's last use with it, which
is the very loop to be tested. By reading: it is set back by a multiple of 2**20, so that a token
keeps its slot of the ring (mod 256) and its quarter of the experts (mod 4); all last uses move
alike and stop at "never", which like them is of the highest age; rates are at their floor from
token 1000 on. Tried once without the ring, over the whole way: the 512 values after it had the
bits of the 512 before.
"""

import numpy as np
import numpy.typing as npt
import pytest

from moecache.cache._cache import ExpertCache
from moecache.errors import CapacityError
from moecache.policies._echo import Echo
from moecache.policies._echo_cache import EchoCache

RINGS = pytest.mark.parametrize("ring", [True, False], ids=["echo", "haz2"])


def taught(num_layers: int, num_experts: int, *, ring: bool = True, seed: int = 0) -> Echo:
    """Return an Echo that has seen 50 tokens of random routing, two experts each."""
    echo = Echo(num_layers, num_experts, ring=ring)
    rng = np.random.default_rng(seed)
    for _ in range(50):
        for layer in range(num_layers):
            echo.observe(layer, rng.choice(num_experts, 2, replace=False))
    return echo


def cache_of(echo: Echo, capacity: int, *keys: int) -> EchoCache:
    """Return a cache of all layers with some keys in it."""
    cache = EchoCache(capacity, num_keys=echo.num_layers * echo.num_experts, echo=echo)
    for key in keys:
        assert cache.admit(key) == -1
    return cache


@pytest.mark.parametrize("shape", [(0, 4), (-1, 4), (4, 0), (4, -1), (1, 2**20 + 1)])
def test_a_shape_that_cannot_be_is_refused(shape: tuple[int, int]) -> None:
    """Both numbers are in the message."""
    with pytest.raises(ValueError, match=f"got {shape[0]} and {shape[1]}"):
        Echo(*shape)


def test_what_it_was_made_of_can_be_read() -> None:
    """Attributes are the arguments."""
    echo = Echo(3, 5, ring=False)

    assert (echo.num_layers, echo.num_experts, echo.ring, echo.num_tokens) == (3, 5, False, 0)
    assert Echo(3, 5).ring


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_out_of_range_is_refused(layer: int) -> None:
    """To learn from and to predict."""
    echo = taught(2, 4)
    before = echo.reuse

    with pytest.raises(ValueError, match=rf"layer {layer} is not in \[0, 2\)"):
        echo.observe(layer, [0])
    with pytest.raises(ValueError, match=rf"layer {layer} is not in \[0, 2\)"):
        echo.predict(layer, 1)
    assert np.array_equal(echo.reuse, before)


def test_ids_that_are_not_integers_are_refused() -> None:
    """Nothing is learned from them."""
    echo = Echo(1, 4)

    for ids in ([0.0, 1.0], [True, False], ["0"]):
        with pytest.raises(TypeError, match="ids must be int32 or int64"):
            echo.observe(0, ids)
    assert echo.num_tokens == 0


@RINGS
@pytest.mark.parametrize("form", ["int32", "2-D", "3-D", "strided", "fortran", "list", "0-D"])
def test_ids_may_have_any_form(form: str, ring: bool) -> None:
    """A row per token, whatever the integer, the axes before it and the strides."""
    expected, echo = taught(2, 70, ring=ring), taught(2, 70, ring=ring)
    ids = np.array([[3, 69], [64, 3], [5, 6], [7, 63]])
    if form == "0-D":
        expected.observe(0, np.array([69]))
        echo.observe(0, np.array(69))
        assert np.array_equal(echo.reuse, expected.reuse)
        return
    given: npt.ArrayLike = {
        "int32": ids.astype(np.int32),
        "2-D": ids.astype(np.uint16),
        "3-D": ids.reshape(2, 2, 2),
        "strided": np.repeat(ids, 3, axis=1)[:, ::3],
        "fortran": np.asfortranarray(ids),
        "list": ids.tolist(),
    }[form]

    for row in ids:
        expected.observe(0, row)
    echo.observe(0, given)

    assert echo.num_tokens == expected.num_tokens == 54
    assert np.array_equal(echo.reuse, expected.reuse)


@pytest.mark.parametrize("strange", [-1, 8, 2**31 - 1, -(2**31), 2**32, 2**63 - 1])
def test_ids_out_of_range_are_dropped(strange: int) -> None:
    """Also if they would be in range when cut to 32 bits; and a second of an id is none."""
    expected, echo = taught(1, 8), taught(1, 8)

    expected.observe(0, [1, 7])
    echo.observe(0, [1, strange, 7, 1])

    assert np.array_equal(echo.reuse, expected.reuse)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (0, 0), (2, 0, 4)])
def test_no_ids_teach_nothing(shape: tuple[int, ...]) -> None:
    """Neither a token nor a probability."""
    echo = taught(2, 8)
    before = echo.reuse

    echo.observe(0, np.empty(shape, np.int32))

    assert echo.num_tokens == 50
    assert np.array_equal(echo.reuse, before)


def test_a_first_request_of_nobody_begins_nothing() -> None:
    """How many experts a token uses is taken from the first that uses any."""
    expected, echo = Echo(1, 8), Echo(1, 8)

    echo.observe(0, [[-1, -1], [-1, 8]])
    assert echo.num_tokens == 0
    assert not echo.reuse.any()
    echo.observe(0, [[-1, -1], [2, 3]])
    expected.observe(0, [2, 3])

    assert np.array_equal(echo.reuse, expected.reuse)


def test_tokens_are_counted_at_the_lowest_layer_seen() -> None:
    """The first layers of a model may have no experts."""
    echo = Echo(4, 8)

    for _ in range(5):
        for layer in (1, 2, 3):
            echo.observe(layer, [0, 1])

    assert echo.num_tokens == 5
    assert not echo.reuse[0].any()


def test_nothing_is_predicted_for_a_layer_that_was_never_seen() -> None:
    """Both arrays are empty, of their types."""
    echo = Echo(2, 4)
    echo.observe(0, [1])

    ids, scores = echo.predict(1, 4)

    assert (ids.shape, scores.shape) == ((0,), (0,))
    assert (ids.dtype, scores.dtype) == (np.int32, np.float32)
    assert len(echo.predict(0, 4)[0]) == 4


@RINGS
@pytest.mark.parametrize("layer", [0, 1])
def test_the_likeliest_come_first_and_ties_by_id(layer: int, ring: bool) -> None:
    """Fewer are the first of more; more than all are all; none and fewer are none and an error."""
    echo = taught(2, 40, ring=ring)
    echo.observe(0, [0, 39])
    every, scores = echo.predict(layer, 40)

    assert every.tolist() == sorted(
        every.tolist(), key=lambda e: (-scores[list(every).index(e)], e)
    )
    assert len(np.unique(scores)) < 40, "there should be ties"
    for n in (0, 1, 2, 7, 39, 41, 2**40):
        ids, best = echo.predict(layer, n)
        assert ids.tolist() == every[:n].tolist()
        assert best.tolist() == scores[:n].tolist()
    with pytest.raises(ValueError, match="n must not be negative, got -1"):
        echo.predict(layer, -1)


def test_a_prediction_changes_nothing() -> None:
    """Asked or not, what follows is the same."""
    expected, echo = taught(3, 16), taught(3, 16)

    for layer in range(3):
        echo.predict((layer + 1) % 3, 5)
        echo.observe(layer, [1, 2])
        expected.observe(layer, [1, 2])

    assert np.array_equal(echo.reuse, expected.reuse)
    assert echo.predict(0, 16)[1].tolist() == expected.predict(0, 16)[1].tolist()


def test_similar_tokens_tell_what_comes() -> None:
    """In a cycle of five tokens the next token is foreseen, and within a token the next layer."""
    echo = Echo(2, 20)

    for token in range(60):
        for layer in (0, 1):
            echo.observe(layer, [token % 5 + 5 * layer, token % 5 + 10])

    for token in range(60, 65):
        assert echo.predict(0, 1)[0] == [token % 5]
        echo.observe(0, [token % 5, token % 5 + 10])
        assert sorted(echo.predict(1, 2)[0]) == [token % 5 + 5, token % 5 + 10]
        echo.observe(1, [token % 5 + 5, token % 5 + 10])


@RINGS
@pytest.mark.parametrize("num_experts", [1, 2, 64, 65, 130])
@pytest.mark.parametrize("kind", ["one", "each", "all", "half", "alternating"])
def test_degenerate_routing_gives_probabilities(num_experts: int, kind: str, ring: bool) -> None:
    """Whatever was used always, once, never: no value is NaN, or outside of [0, 1]."""
    echo = Echo(2, num_experts, ring=ring)

    for token in range(320):
        ids = {
            "one": [0],
            "each": [token % num_experts],
            "all": list(range(num_experts)),
            "half": list(range((num_experts + 1) // 2)),
            "alternating": [0] if token % 2 else list(range(num_experts)),
        }[kind]
        for layer in (0, 1):
            echo.observe(layer, ids)
        if token % 20 == 0:
            echo.begin_sequence()
        values = [echo.reuse, echo.predict(0, num_experts)[1], echo.predict(1, num_experts)[1]]
        for value in values:
            assert ((value >= 0) & (value <= 1)).all()
    if kind in ("one", "all"):
        assert echo.reuse[:, 0].min() > 0.9


def test_reuse_is_a_copy() -> None:
    """Writing to it teaches nothing."""
    echo = taught(2, 8)
    expected = echo.reuse

    echo.reuse[:] = 7

    assert np.array_equal(echo.reuse, expected)
    assert (echo.reuse.shape, echo.reuse.dtype) == ((2, 8), np.float32)


def test_a_new_sequence_lets_recent_habits_go() -> None:
    """At the next request, experts that only the last tokens used are worth less."""
    going, ended = (Echo(1, 32, ring=False) for _ in range(2))
    for echo in (going, ended):
        for token in range(2000):
            echo.observe(0, [0 if token > 1980 else token % 32])
    before = ended.reuse

    ended.begin_sequence()
    assert np.array_equal(ended.reuse, before)
    going.observe(0, [5])
    ended.observe(0, [5])

    assert ended.reuse[0, 0] < going.reuse[0, 0]
    assert ended.num_tokens == going.num_tokens


def test_a_reset_echo_is_a_new_one() -> None:
    """Nothing is left, not even how many experts a token uses."""
    echo, new = taught(2, 16, seed=1), Echo(2, 16)

    echo.reset()
    assert echo.num_tokens == 0
    assert not echo.reuse.any()
    assert len(echo.predict(0, 1)[0]) == 0
    for layer in (1, 0, 1, 0):
        echo.observe(layer, [[1, 2, 3], [4, 5, 6]])
        new.observe(layer, [[1, 2, 3], [4, 5, 6]])
        assert np.array_equal(echo.reuse, new.reuse)


def test_a_cache_must_fit_its_echo() -> None:
    """The keys are its experts, of all layers or of one."""
    echo = Echo(2, 8)

    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        EchoCache(0, num_keys=16, echo=echo)
    with pytest.raises(ValueError, match="num_keys is 8, but there are 2 x 8 experts"):
        EchoCache(4, num_keys=8, echo=echo)
    with pytest.raises(ValueError, match="num_keys is 16, but there are 1 x 8 experts"):
        EchoCache(4, num_keys=16, echo=echo, layer=1)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=rf"layer {layer} is not in \[0, 2\)"):
            EchoCache(4, num_keys=8, echo=echo, layer=layer)
    with pytest.raises(TypeError):
        EchoCache(4, num_keys=8, echo=None)  # type: ignore[arg-type]
    assert EchoCache(4, num_keys=8, echo=echo, layer=1).echo is echo


def test_of_equal_values_the_lower_key_leaves() -> None:
    """At first no expert is worth anything; the order of arrival does not count."""
    cache = cache_of(Echo(2, 4), 3, 6, 2, 5)

    assert [cache.admit(key) for key in (7, 1, 0)] == [2, 5, 1]
    assert cache.keys() == [0, 7, 6]


def test_accesses_teach_nothing_but_their_order() -> None:
    """What a token uses is observed, once, before its accesses."""
    echo = taught(1, 8)
    before = echo.reuse
    cache = cache_of(echo, 3, 1, 2, 3)

    assert cache.touch(2)
    assert not cache.touch(7)

    assert np.array_equal(echo.reuse, before)
    assert cache.keys() == [2, 3, 1]


def test_the_wait_until_a_layer_comes_is_discounted() -> None:
    """Of two equal values, the one whose layer was just seen is worth less: it is used last."""
    echo = Echo(2, 4)
    for _ in range(9):
        echo.observe(0, [1])
        echo.observe(1, [1])
    first, second = echo.reuse[0, 2], echo.reuse[1, 2]
    assert first * 0.6**0.5 > second * 0.6

    assert cache_of(echo, 2, 2, 6).admit(0) == 6
    echo.observe(0, [1])
    assert cache_of(echo, 2, 2, 6).admit(0) == 2


def test_a_cache_of_pinned_keys_admits_nobody() -> None:
    """An error, after which everything is as before; unpinned it is a victim again."""
    cache = cache_of(taught(1, 8), 2, 3, 4)
    assert cache.pin(3)
    assert cache.pin(4)

    with pytest.raises(CapacityError, match="all 2 keys are pinned"):
        cache.admit(5)
    assert sorted(cache.keys()) == [3, 4]
    cache.unpin(4)

    assert cache.admit(5) == 4


@RINGS
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_cache_of_one_slot_per_layer_works(scope: str, ring: bool) -> None:
    """The one expert of a request takes it."""
    capacity = 1 if scope == "global" else 2
    cache = ExpertCache(2, 4, capacity, policy="echo" if ring else "haz2", scope=scope)
    slots, misses = np.empty(1, np.int32), np.empty(1, np.int32)

    for token in range(30):
        for layer in (0, 1):
            if cache.acquire(layer, [token % 3], slots, misses):
                cache.publish(int(slots[0]))
            cache.release(slots)
            assert cache.slot_table[layer, token % 3] >= 0
            assert cache.num_resident <= capacity
            cache.check()


@RINGS
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_cache_passes_the_boundary_on(scope: str, ring: bool) -> None:
    """Other experts stay than if the sequence had gone on."""
    caches = [
        ExpertCache(2, 32, 16, policy="echo" if ring else "haz2", scope=scope) for _ in range(2)
    ]
    rng = np.random.default_rng(0)
    slots, misses = np.empty(2, np.int32), np.empty(2, np.int32)
    num_different = 0

    for token in range(300):
        if token % 30 == 0:
            caches[1].begin_sequence()
        for layer in (0, 1):
            ids = rng.integers(token // 30, token // 30 + 12, 2)
            for cache in caches:
                for index in misses[: cache.acquire(layer, ids, slots, misses)].tolist():
                    cache.publish(int(slots[index]))
                cache.release(slots)
        going, ended = (cache.slot_table >= 0 for cache in caches)
        num_different += int((going != ended).any())

    assert num_different > 0
