"""Experts spread over processes: each has its share, and the output is that of one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moecache
from moecache.compute._residency import residency_of
from moecache.errors import ConfigError
from moecache.ranks import Placement, Share
from moecache.stores import open_store
from tests.helpers.checkpoints import NUM_EXPERTS, NUM_LAYERS, write_checkpoint


@given(st.data())
def test_every_pair_is_computed_by_one_rank(data: st.DataObject) -> None:
    """Whatever the placement and the step: the shares of the ranks are all of it."""
    num_ranks = data.draw(st.integers(1, 4))
    num_experts = data.draw(st.integers(num_ranks, 9))
    uses = np.random.default_rng(data.draw(st.integers(0, 2**16))).random((2, num_experts))
    placement = Placement.balanced(uses, num_ranks)
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 4)))
    seed = data.draw(st.integers(0, 2**16))
    ids = np.random.default_rng(seed).integers(0, num_experts, shape)

    shares = [Share(placement, rank) for rank in range(num_ranks)]
    parts = np.array([share.of(1, ids) for share in shares])
    assert (np.sort(parts, axis=0)[:-1] == -1).all()
    assert (parts.max(axis=0) == ids).all()
    for share, part in zip(shares, parts, strict=True):
        assert share.held[1][part[part >= 0]].all()
        assert (share.ranks_of(1, ids) == shares[0].ranks_of(1, ids)).all()
    assert sum(share.num_experts for share in shares) == 2 * num_experts


def test_a_share_refuses_what_no_rank_has() -> None:
    """An id out of range is an error, or dropped where that was asked for."""
    share = Share(Placement.even(2, 4, 2), 1)
    with pytest.raises(ValueError, match=r"expert 4 is not in \[0, 4\)"):
        share.of(0, np.array([[1, 4]]))
    with pytest.raises(ValueError, match=r"layer 2 is not in \[0, 2\)"):
        share.of(2, np.array([[1]]))
    found = share.of(0, np.array([[1, 4, -1, 2]]), ignore_out_of_range=True)
    assert found.tolist() == [[1, -1, -1, -1]]
    with pytest.raises(ConfigError, match=r"rank 2 is not in \[0, 2\)"):
        Share(Placement.even(2, 4, 2), 2)


def test_each_rank_writes_files_of_its_own() -> None:
    """Two ranks on one machine are given the same paths."""
    share = Share(Placement.even(2, 4, 2), 1)
    assert share.own_path("a/b.profile") == Path("a/b.rank1-of-2.profile")
    assert share.own_path(None) is None


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of 11 x 12 experts."""
    return write_checkpoint(tmp_path_factory.mktemp("model"), "mixtral").path


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("memory", [{"memory": "100%"}, {"slots": 13}])
def test_a_runtime_with_a_share_holds_nothing_else(
    path: Path, scope: str, memory: dict[str, Any]
) -> None:
    """A prompt that uses all experts, where ranks have 2 of a layer's 12, or 3."""
    ids = np.arange(60).reshape(20, 3) * 7 % NUM_EXPERTS
    placement = Placement.even(NUM_LAYERS, NUM_EXPERTS, 5)
    for rank in (0, 4):
        share = Share(placement, rank)
        with moecache.open(path, scope=scope, prefetch="last", share=share, **memory) as runtime:
            assert runtime.cache.capacity == memory.get("slots", share.num_experts)
            for layer in (*range(NUM_LAYERS), *range(NUM_LAYERS)):
                pairs: list[int] = []
                for wave in runtime.waves(layer, ids):
                    pairs += wave.pairs.tolist()
                assert sorted(pairs) == np.flatnonzero(share.ranks_of(layer, ids) == rank).tolist()
                for wave in runtime.waves(layer, ids[:1]):
                    assert len(wave.pairs) <= 3
                if scope == "global":
                    with runtime.lease(layer, ids[:1]) as lease:
                        computed = share.ranks_of(layer, ids[:1]) == rank
                        assert ((lease.slots >= 0).reshape(-1) == computed).all()
            runtime.usage.fill().wait()
            stats, resident = runtime.stats(), runtime.cache.slot_table >= 0
            assert not (resident & ~share.held).any()
            assert stats.prefetch is not None
            assert stats.prefetch.num_predictor_errors == 0
            if scope == "global" and "memory" in memory:
                assert stats.num_misses == share.num_experts  # each was read once, all in prompts
                assert residency_of(runtime).begin_step(runtime)


def test_a_profile_is_warm_for_the_share_alone(path: Path, tmp_path: Path) -> None:
    """Even if it was written by a run that had all experts."""
    share = Share(Placement.even(NUM_LAYERS, NUM_EXPERTS, 2), 0)
    given = tmp_path / "a.profile"
    with moecache.open(path, "100%", profile=share.own_path(given)) as runtime:
        for layer in range(NUM_LAYERS):
            list(runtime.waves(layer, np.arange(NUM_EXPERTS).reshape(4, 3)))
    with moecache.open(path, "100%", profile=given, share=share) as runtime:
        assert runtime.warm_start is not None
        runtime.warm_start.wait()
        assert ((runtime.cache.slot_table >= 0) == share.held).all()


def test_a_placement_of_another_model_is_refused(path: Path) -> None:
    """Before anything is allocated."""
    share = Share(Placement.even(2, 5, 2), 0)
    with pytest.raises(ConfigError, match="of 2 x 5 experts, and the model has 11 x 12"):
        moecache.plan(path, "100%", share=share)
    with pytest.raises(ConfigError, match="share must be a"):
        moecache.plan(path, "100%", share=0)


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """Logits of prompts of 1 and 300 and a batch of 3, and 16 tokens: by torch and by kernels."""
    torch = pytest.importorskip("torch")
    from tests.helpers import families, ranks
    from tests.helpers.ranks_at_work import whole

    path, expected = tmp_path / "model", tmp_path / "expected"
    families.write_checkpoint(families.FAMILIES["qwen3_moe"], path, "bfloat16")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole(path, expected, ("torch", "fast"))
    finally:
        torch.set_num_threads(threads)
    # One rank has two thirds of the experts.
    placed = tmp_path / "placement.json"
    with open_store(path) as store:
        layout = store.layout
    counts = np.arange(layout.total_experts).reshape(layout.num_layers, -1)
    Placement.balanced(counts, 2, [2, 1]).save(placed)
    ways = {
        "all": {"memory": "100%"},
        "a quarter": {"memory": "25%", "prefetch": "router"},
        "a quarter, fast": {"memory": "25%", "compute": "fast"},
        "a quarter, placed": {"memory": "25%", "placement": str(placed)},
    }
    found = ranks.call(
        "tests.helpers.ranks_at_work:compared",
        2,
        tmp_path / "run",
        path=path,
        expected=expected,
        options=ways,
    )
    for report in found:
        for name, one in report.items():
            assert one["differing"] == [], name
            assert one["errors"] == 0
            assert one["is_own_alone"]
            assert (one["evictions"] > 0) == ("quarter" in name)
            # Of the prompt of 300 rows went twice where there were misses.
            assert one["early"] > 0 or name == "all"
    assert {report["all"]["rank"] for report in found} == {0, 1}
    assert found[0]["all"]["exchanges"] == found[1]["all"]["exchanges"]
