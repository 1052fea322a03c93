"""A policy of the caller's, in Python or compiled, evicts in a live cache."""

import threading
from pathlib import Path

import numpy as np
import pytest

import moecache
from moecache import ConfigError, ExpertCache, LruCache
from moecache.policies.making import SCOPES
from moecache.policies.registry import policy_names
from tests.helpers.checkpoints import write_checkpoint
from tests.test_replay_policies import ScriptedLru

SHAPE = (4, 24)


def steps(num_steps: int, *, seed: int = 0, top_k: int = 6) -> list[tuple[int, np.ndarray]]:
    """Return what a skewed router chooses, layer after layer."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, SHAPE[1] + 1)
    return [
        (
            step % SHAPE[0],
            rng.choice(SHAPE[1], top_k, replace=False, p=weights / weights.sum()).astype(np.int32),
        )
        for step in range(num_steps)
    ]


def run(cache: ExpertCache, layer: int, ids: np.ndarray) -> list[int]:
    """Take a step through the cache, as a loader does; return its misses' places."""
    slots, misses = np.empty(ids.size, np.int32), np.empty(ids.size, np.int32)
    count = cache.acquire(layer, ids, slots, misses)
    for index in misses[:count].tolist():
        cache.publish(slots[index])
    cache.release(slots)
    return misses[:count].tolist()


@pytest.mark.parametrize("scope", SCOPES)
def test_a_class_in_python_evicts_as_the_compiled_one(scope: str) -> None:
    """LRU in Python has LRU's misses, step by step, and the cache's tables hold."""
    mine = ExpertCache(*SHAPE, 40, policy=ScriptedLru, scope=scope)
    theirs = ExpertCache(*SHAPE, 40, policy="lru", scope=scope)
    for layer, ids in steps(400):
        assert run(mine, layer, ids) == run(theirs, layer, ids)
    mine.check()
    assert mine.num_evictions == theirs.num_evictions > 0
    assert mine.policy == "ScriptedLru"


def test_an_object_or_a_compiled_class_will_do() -> None:
    """One object for all layers; a class of the library without its name."""
    lru = ExpertCache(*SHAPE, 40, policy="lru")
    others = [
        ExpertCache(*SHAPE, 40, policy=policy)
        for policy in (ScriptedLru(40, num_keys=96), LruCache, LruCache(40, num_keys=96))
    ]
    for layer, ids in steps(100):
        expected = run(lru, layer, ids)
        assert [run(cache, layer, ids) for cache in others] == [expected] * 3


class Broken(ScriptedLru):
    """Loses count after some victims."""

    num_victims = 0

    def victim(self, held: object) -> int:
        """Return the oldest key, three times."""
        self.num_victims += 1
        if self.num_victims > 3:
            raise LookupError("nobody left")
        return super().victim(held)


def test_what_a_policy_raises_ends_the_next_steps_and_loses_nothing() -> None:
    """The step at hand is complete, later ones are refused, and all slots come back."""
    cache = ExpertCache(*SHAPE, 40, policy=Broken)
    with pytest.raises(
        ConfigError, match="policy Broken raised LookupError: nobody left"
    ) as caught:
        for layer, ids in steps(400):
            run(cache, layer, ids)
    assert isinstance(caught.value.__cause__, LookupError)
    cache.check()
    before = cache.slot_table.copy()
    with pytest.raises(ConfigError, match="nobody left"):
        run(cache, 0, np.arange(6, dtype=np.int32))
    assert (cache.slot_table == before).all()
    assert cache.claim(0, int(np.flatnonzero(before[0] < 0)[0])) == -1


class Curious(ScriptedLru):
    """Calls the cache that asks it."""

    cache: ExpertCache

    def victim(self, held: object) -> int:
        """Pin what is about to leave."""
        key = super().victim(held)
        self.cache.pin(*divmod(key, SHAPE[1]))
        return key


def test_a_policy_cannot_call_its_cache() -> None:
    """It would find half a change; that is an error rather than a deadlock."""
    policy = Curious(40, num_keys=96)
    policy.cache = cache = ExpertCache(*SHAPE, 40, policy=policy)
    with pytest.raises(ConfigError, match="Curious may not call the cache that asks it"):
        for layer, ids in steps(400):
            run(cache, layer, ids)
    cache.check()


class Slow(ScriptedLru):
    """Lets other threads run wherever it is asked."""

    def victim(self, held: object) -> int:
        """Wait a moment."""
        threading.Event().wait(0.0005)
        return super().victim(held)


def test_threads_take_turns_where_the_policy_is_in_python() -> None:
    """Python may run another thread in the middle of a policy: it waits for the call's end."""
    cache = ExpertCache(*SHAPE, 60, policy=Slow)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for layer, ids in steps(60, seed=seed, top_k=4):
                slots, misses = np.empty(4, np.int32), np.empty(4, np.int32)
                count = cache.acquire(layer, ids, slots, misses)
                for index in misses[:count].tolist():
                    if index >= 0:  # others are filled by whoever claimed them
                        cache.publish(slots[index])
                cache.release(slots)
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    cache.check()


class Loyal(ScriptedLru):
    """Gives up a slot for what has an even number."""

    def prefers(self, candidate: int, resident: int) -> bool:
        """Return whether the candidate is even."""
        return candidate % 2 == 0


def test_a_policy_may_say_what_is_worth_reading_ahead() -> None:
    """Without `prefers` only free slots are claimed; with it the slots of worse keys, too."""
    for policy, even in ((ScriptedLru, False), (Loyal, True)):
        cache = ExpertCache(*SHAPE, 12, policy=policy)
        run(cache, 0, np.arange(12, dtype=np.int32))
        assert cache.claim(1, 1) == -1
        assert (cache.claim(1, 2) >= 0) is even


def test_pinned_experts_stay() -> None:
    """The policy is told by `held`; one that names a pinned key is refused."""
    cache = ExpertCache(*SHAPE, 40, policy=ScriptedLru)
    run(cache, 0, np.arange(6, dtype=np.int32))
    assert all(cache.pin(0, expert) for expert in range(6))
    for layer, ids in steps(300):
        run(cache, layer, ids)
    assert (cache.slot_table[0, :6] >= 0).all()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("best", f"policy 'best' is not one of {', '.join(policy_names())}$"),
        ("arc", "policy 'arc' is not one of .*; it is for replays"),
        (object(), "object has no access"),
        (3, "int has no access"),
    ],
)
def test_open_refuses_what_cannot_evict(tiny_moe: Path, policy: object, message: str) -> None:
    """Before the checkpoint is looked at."""
    with pytest.raises(ConfigError, match=message):
        moecache.plan(tiny_moe / "missing", policy=policy)


def test_a_compiled_policy_is_of_one_cache_and_begins_empty() -> None:
    """Its keys are those of the tables."""
    policy = LruCache(40, num_keys=96)
    ExpertCache(*SHAPE, 40, policy=policy)
    with pytest.raises(ConfigError, match="LruCache has keys, or is in another cache"):
        ExpertCache(*SHAPE, 40, policy=policy)
    policy = LruCache(40, num_keys=96)
    policy.admit(3)
    with pytest.raises(ConfigError, match="LruCache has keys"):
        ExpertCache(*SHAPE, 40, policy=policy)


def test_a_runtime_runs_with_a_policy_of_the_callers(tmp_path: Path) -> None:
    """`open` takes the class; bytes are right, and the statistics name it."""
    path = write_checkpoint(tmp_path / "model", num_layers=4, num_experts=24).path
    with moecache.open(path, slots=40, policy=ScriptedLru, prefault="off") as runtime:
        for layer, ids in steps(80, top_k=2):
            for _wave in runtime.waves(layer, ids[None]):
                pass
        assert runtime.stats().policy == "ScriptedLru"
        assert runtime.stats().num_evictions > 0
        assert "ScriptedLru" in runtime.report()
