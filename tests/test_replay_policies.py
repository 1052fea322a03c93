"""A replay does what the cache does, and never better than the optimum."""

import gc
import weakref
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache._slru import SlruCache
from moecache.errors import CapacityError, ConfigError
from moecache.policies._echo import Echo
from moecache.policies._echo_cache import EchoCache
from moecache.policies._lfu import LfruCache
from moecache.policies._policy import LruCache
from moecache.policies.making import SCOPES, _used
from moecache.policies.replayed._stale import LeastStaleCache
from moecache.study import Trace, miss_ratio_curve, replay
from moecache.study._arguments import POLICIES
from tests.helpers.examples import num_examples
from tests.helpers.routing import (
    ScriptedLru,
    most_hits,
    random_trace,
    requests,
    stack_hits,
    through_the_cache,
    traces,
)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=num_examples(20))
@given(trace=traces(), share=st.floats(0.05, 1))
def test_a_replay_is_the_cache_hit_for_hit(
    policy: str, scope: str, trace: Trace, share: float
) -> None:
    """Every step and layer has the hits and misses that ExpertCache has, driven as by `waves`."""
    least = trace.num_layers if scope == "layer" else 1
    capacity = max(least, int(share * trace.num_layers * trace.num_experts))

    done = replay(trace, policy, capacity, scope=scope)

    hits, misses = through_the_cache(trace, policy, capacity, scope)
    assert done.hits.tolist() == hits.tolist()
    assert done.misses.tolist() == misses.tolist()


@pytest.mark.parametrize("scope", SCOPES)
@settings(max_examples=num_examples(25))
@given(trace=traces(bulk=False), share=st.floats(0.05, 1))
def test_nothing_beats_belady(scope: str, trace: Trace, share: float) -> None:
    """Of steps of one row, all of which find room, no policy finds more than the optimum."""
    least = trace.top_k * (trace.num_layers if scope == "layer" else 1)
    capacity = max(least, int(share * trace.num_layers * trace.num_experts))

    optimum = replay(trace, "belady", capacity, scope=scope)

    for policy in POLICIES:
        assert replay(trace, policy, capacity, scope=scope).num_hits <= optimum.num_hits, policy


@settings(max_examples=num_examples(100))
@given(trace=traces(max_tokens=6, max_layers=2, bulk=False), more=st.integers(0, 4))
def test_belady_is_the_best_of_all_choices(trace: Trace, more: int) -> None:
    """Trying every choice of victims finds no more, over all layers or in each."""
    slots = min(trace.top_k + more, trace.num_layers * trace.num_experts)

    assert replay(trace, "belady", slots).num_hits == most_hits(
        requests(trace, range(trace.num_layers)), slots
    )
    if slots >= trace.num_layers * trace.top_k:
        done = replay(trace, "belady", slots, scope="layer")
        each, rest = divmod(slots, trace.num_layers)
        for layer in range(trace.num_layers):
            asked = requests(trace, range(layer, layer + 1))
            assert int(done.hits[:, layer].sum()) == most_hits(asked, each + (layer < rest))


@settings(max_examples=num_examples(60))
@given(trace=traces(bulk=False))
def test_the_curve_is_a_plain_lru_at_every_capacity(trace: Trace) -> None:
    """Stack distances give what lists of recent keys give, in the router's order."""
    curve = miss_ratio_curve(trace)
    by_layer = miss_ratio_curve(trace, scope="layer")
    asked = requests(trace, range(trace.num_layers))
    accesses = sum(map(len, asked))

    for place, slots in enumerate(curve.capacities):
        hits = stack_hits(asked, int(slots))
        assert curve.miss_ratios[place] == pytest.approx(1 - hits / accesses if accesses else 1)
    for place, slots in enumerate(by_layer.capacities):
        hits = sum(
            stack_hits(requests(trace, range(layer, layer + 1)), int(slots) // trace.num_layers)
            for layer in range(trace.num_layers)
        )
        assert by_layer.miss_ratios[place] == pytest.approx(1 - hits / accesses if accesses else 1)


@pytest.mark.parametrize("scope", SCOPES)
@settings(max_examples=num_examples(25))
@given(trace=traces(), share=st.floats(0.05, 1))
def test_a_policy_in_python_is_driven_like_the_compiled_ones(
    scope: str, trace: Trace, share: float
) -> None:
    """LRU in Python has LRU's hits, step by step, and a compiled class those of its name."""
    least = trace.num_layers if scope == "layer" else 1
    capacity = max(least, int(share * trace.num_layers * trace.num_experts))

    lru = replay(trace, "lru", capacity, scope=scope).hits.tolist()

    assert replay(trace, ScriptedLru, capacity, scope=scope).hits.tolist() == lru
    assert replay(trace, LruCache, capacity, scope=scope).hits.tolist() == lru
    lfru = replay(trace, "lfru", capacity, scope=scope)
    assert replay(trace, LfruCache, capacity, scope=scope).hits.tolist() == lfru.hits.tolist()


def test_a_compiled_object_is_replayed_once() -> None:
    """It would go on where the first ended, and hit more often; a cleared one begins anew."""
    trace = random_trace()
    compiled = LruCache(40, num_keys=96)

    first = replay(trace, compiled, 40)
    with pytest.raises(ConfigError, match=r"this LruCache has keys.*give a new one"):
        replay(trace, compiled, 40)
    compiled.clear()

    assert first.num_hits == replay(trace, compiled, 40).num_hits
    assert first.num_hits == replay(trace, "lru", 40).num_hits
    assert first.policy == "LruCache"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (SlruCache, r"SlruCache is called as SlruCache\(capacity, num_keys=...\).*give a function"),
        (EchoCache, "EchoCache is called as.*lambda capacity, num_keys: EchoCache"),
        (LeastStaleCache, r"make it.*functools.partial\(LeastStaleCache, num_experts=24\)"),
        (lambda capacity: LruCache(capacity, num_keys=96), "lambda.*num_keys"),
    ],
)
def test_a_class_that_wants_other_arguments_is_refused(policy: object, message: str) -> None:
    """The message says how to give it."""
    with pytest.raises(ConfigError, match=message):
        replay(random_trace(), policy, 40)
    fits = partial(LeastStaleCache, num_experts=24)
    named = replay(random_trace(), "least-stale", 40)
    assert replay(random_trace(), fits, 40).num_hits == named.num_hits


class Slotted(ScriptedLru):
    """Cannot be hashed, and equals everything."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize("kind", [ScriptedLru, Slotted])
def test_an_object_in_python_is_replayed_once(kind: type) -> None:
    """A second replay would begin empty, while the object still has its keys."""
    trace = random_trace()
    script = kind(40, num_keys=96)

    assert replay(trace, script, 40).num_hits == replay(trace, "lru", 40).num_hits

    again = "was in a cache before.*; give a new one, or a class or function"
    with pytest.raises(ConfigError, match=again):
        replay(trace, script, 40)
    with pytest.raises(ConfigError, match=again):
        replay(trace, lambda capacity, num_keys: script, 40)
    assert replay(trace, kind(40, num_keys=96), 40).num_accesses == 2400


def test_an_object_that_was_refused_was_not_replayed() -> None:
    """What is wrong with the other arguments can be corrected."""
    script = ScriptedLru(24, num_keys=96)
    with pytest.raises(ConfigError, match="is one object"):
        replay(random_trace(), script, 24, scope="layer")
    with pytest.raises(CapacityError):
        replay(random_trace(), script, 0)
    assert replay(random_trace(), script, 24).num_hits


def test_a_policy_that_is_gone_leaves_nothing_behind() -> None:
    """An object is known for as long as it lives, and not kept for it."""
    script = ScriptedLru(24, num_keys=96)
    gone = weakref.ref(script)
    replay(random_trace(), script, 24)
    assert id(script) in _used
    number = id(script)
    del script
    gc.collect()
    assert gone() is None
    assert number not in _used


class Raises(ScriptedLru):
    """Fails when a key is used again."""

    def access(self, key: int) -> None:
        """Fail."""
        raise LookupError(f"nobody knows key {key}")


class NamesHeld(ScriptedLru):
    """Names a key that the step at hand uses."""

    def victim(self, held: object) -> int:
        """Return the newest key."""
        return next(key for key in reversed(self.recent) if key in held)  # type: ignore[operator]


class NamesAbsent(ScriptedLru):
    """Names a key that is not there."""

    def victim(self, held: object) -> int:
        """Return a key that was never admitted."""
        return next(key for key in range(96) if key not in self.recent)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (Raises, LookupError, "nobody knows key"),
        (NamesHeld, ValueError, "NamesHeld.victim returned .* ask `key in held`"),
        (NamesAbsent, ValueError, "NamesAbsent.victim returned .*, which is not in the cache"),
    ],
)
def test_what_a_python_policy_does_wrong_ends_the_replay(
    scope: str, policy: type, error: type[Exception], message: str
) -> None:
    """The first error reaches the caller, whatever came after it."""
    with pytest.raises(error, match=message):
        replay(random_trace(), policy, 24, scope=scope)


@pytest.mark.parametrize(
    ("policy", "scope", "message"),
    [
        ("best", "global", "policy 'best' is not one of arc, .*, belady"),
        (object(), "global", "object has no access"),
        (ScriptedLru(24, num_keys=96), "layer", "is one object; give a class or function"),
        (LruCache(9, num_keys=96), "global", "9 of 96 keys, the cache 24 of 96"),
        (LruCache(24, num_keys=24), "global", "24 of 24 keys, the cache 24 of 96"),
        (SlruCache(6, 18, num_keys=96, strict=True), "global", "use strict=False"),
        (LeastStaleCache(24, num_keys=96), "global", "make it with num_experts=24"),
        (
            EchoCache(24, num_keys=96, echo=Echo(2, 48)),
            "global",
            "is for 2 x 48 experts, the cache for 4 x 24",
        ),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(policy: object, scope: str, message: str) -> None:
    """The message says what was given, what is needed, and what to do."""
    with pytest.raises(ConfigError, match=message):
        replay(random_trace(), policy, 24, scope=scope)


def test_a_factory_gives_each_layer_its_own() -> None:
    """One object for several layers, pinned keys and mixed classes are refused."""
    trace = random_trace()
    shared = LruCache(6, num_keys=24)
    script = ScriptedLru(6, num_keys=24)
    pinned = LruCache(24, num_keys=96)
    pinned.admit(3)
    pinned.pin(3)
    kinds = iter([LruCache, LfruCache, LruCache, LruCache])

    with pytest.raises(ConfigError, match="each of 4 layers a new policy"):
        replay(trace, lambda capacity, num_keys: shared, 24, scope="layer")
    with pytest.raises(ConfigError, match="each of 4 layers a new policy"):
        replay(trace, lambda capacity, num_keys: script, 24, scope="layer")
    with pytest.raises(ConfigError, match="all of one class"):
        replay(
            trace, lambda size, num_keys: next(kinds)(size, num_keys=num_keys), 24, scope="layer"
        )
    with pytest.raises(ConfigError, match="1 pinned keys; unpin them first"):
        replay(trace, pinned, 24)


def test_an_error_of_a_factory_is_its_own() -> None:
    """One that is called as it should be, and fails."""

    def make(capacity: int, *, num_keys: int) -> object:
        return len(capacity)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"has no len\(\)"):
        replay(random_trace(), make, 40)
