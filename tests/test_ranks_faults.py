"""What goes wrong on one rank is a clear error on all, and none waits for ever."""

import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from moecache.errors import ConfigError
from tests.helpers import families, ranks

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint."""
    found = tmp_path_factory.mktemp("models") / "qwen3_moe"
    families.write_checkpoint(families.FAMILIES["qwen3_moe"], found, "bfloat16")
    return found


def test_ranks_that_differ_or_fail_say_so_on_all(path: Path, tmp_path: Path) -> None:
    """Arguments, checkpoints, tokens, a load and a step that fail, training, one that closed."""
    import torch
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    for changed, part in {"trunk": "layernorm", "expert": ".mlp.experts.1."}.items():
        shutil.copytree(path, other / changed)
        weights = load_file(path / "model.safetensors")
        name = max(name for name in weights if part in name)
        weights[name] = weights[name] + torch.ones_like(weights[name])
        save_file(weights, other / changed / "model.safetensors", {"format": "pt"})

    first, second = ranks.call(
        "tests.helpers.ranks_in_trouble:trouble",
        2,
        tmp_path / "run",
        path=path,
        other=other,
        each=[{"rank": 0}, {"rank": 1}],
    )
    for found in (first, second):
        assert found["forked"] == "0"
        assert found["compute"].startswith(
            "ConfigError: ranks differ in compute: rank 0 has torch, rank 1 has fast"
        )
        for changed in ("checkpoint", "expert"):
            assert "ranks differ in the checkpoint: rank 0 has " in found[changed]
        assert found["dtype"] == (
            "ConfigError: ranks differ in dtype: rank 0 has torch.bfloat16, rank 1 has "
            "torch.float32; give all of them the same"
        )
        assert found["tokens"].startswith(
            "MoeCacheError: rank 1 goes on with other tokens than rank 0 (8 after 0 and 8 after 0)"
        )
        assert "spread over ranks cannot be trained through" in found["training"]
    assert second["not there"].startswith("StoreError: ")
    assert first["not there"].startswith(
        "MoeCacheError: the model was not loaded on all ranks; rank 1: it failed: StoreError: "
    )
    for read in ("read", "read of many"):
        assert second[read] == "OSError: the disk is on fire"
        assert first[read] == (
            "MoeCacheError: layer 1 was not computed on all ranks; rank 1: it failed: OSError: "
            "the disk is on fire"
        )
    assert "rank 1: it has closed its model" in first["closed"]
    assert float(first["seconds"]) < 18
    assert "closed" in second["closed"]


def test_a_text_that_fails_is_not_the_end(path: Path, tmp_path: Path) -> None:
    """A read on the other rank, rank 0 itself between two steps or after the last one."""
    found, _ = ranks.call(
        "tests.helpers.ranks_in_trouble:going_on",
        2,
        tmp_path / "run",
        path=path,
        each=[{"rank": rank} for rank in range(2)],
    )
    assert found[0].startswith("MoeCacheError: layer ")
    assert found[0].endswith("rank 1: it failed: OSError: the disk is on fire")
    assert found[1:3] == ["ValueError: nobody reads this"] * 2
    assert found[3].startswith("[")
    assert found[4] == (
        "MoeCacheError: rank 1 does not go on with this text; rank 1: it failed: OSError: no room"
    )
    assert found[5] == found[3]
    # What all have read is not kept.
    assert found[6] == "[False, False, False, False, True, True]"


def _blames(error: str, victim: int) -> bool:
    """Return whether an error is that this rank is gone, and no other one."""
    store = (
        r"rank 0 or the launcher, which (kept the ranks' store, is gone \(.*\)|keeps the ranks' "
        r"store, is stopped, or its machine hangs or is not to be reached: the ranks' store has "
        r"not answered for \d+ s)"
    )
    gone = rf"rank {victim} is gone, or its process is stopped: no sign of life for \d+ s"
    told = rf"(rank \d: stopped, as )*({gone}{'|' + store if victim == 0 else ''})"
    return re.match(rf"(MoeCacheError: )?rank \d waited in vain [^:;]*: {told};", error) is not None


def _wait_until_ready(folder: Path, num_ranks: int) -> None:
    until = time.monotonic() + 120
    while len(list(folder.glob("[0-9]"))) < num_ranks:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "victim", "num_ranks", "timeout_s"),
    [
        pytest.param(signal.SIGKILL, 1, 3, 6.0, id="killed"),
        pytest.param(signal.SIGKILL, 0, 2, 6.0, id="killed-with-the-store"),
        pytest.param(signal.SIGSTOP, 1, 2, 3.0, id="stopped", marks=pytest.mark.nightly),
        pytest.param(
            *(signal.SIGSTOP, 0, 2, 3.0), id="stopped-with-the-store", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_rank_that_is_gone_is_named(
    path: Path,
    tmp_path: Path,
    number: signal.Signals,
    victim: int,
    num_ranks: int,
    timeout_s: float,
) -> None:
    """On every other one, within the time-out, and again at the next try."""
    found = ranks.start(
        "tests.helpers.ranks_in_trouble:forever",
        num_ranks,
        tmp_path / "run",
        path=path,
        timeout_s=timeout_s,
        each=[{"ready": tmp_path / str(rank)} for rank in range(num_ranks)],
    )
    try:
        _wait_until_ready(tmp_path, num_ranks)
        time.sleep(0.3)
        found[victim].signal(number)
        for rank, one in enumerate(found):
            if rank != victim:
                assert one.wait(60) == 0, one.err
                assert _blames(one.result["error"], victim), one.result["error"]
                assert _blames(one.result["again"], victim), one.result["again"]
                # What a store that is gone says comes at once, the rest within two time-outs.
                assert one.result["seconds"] < 2 * timeout_s + 10
    finally:
        for one in found:
            one.kill()


def test_ranks_end_when_the_network_loses_the_store(path: Path, tmp_path: Path) -> None:
    """The one that cannot reach it says so, and the others, who can, that it is silent."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ranks.Network(server.port) as network:
        found = ranks.start(
            "tests.helpers.ranks_in_trouble:idle",
            2,
            tmp_path / "run",
            path=path,
            timeout_s=2.0,
            each=[
                {"rank": rank, "ready": tmp_path / str(rank), "port": port}
                for rank, port in enumerate((server.port, network.port))
            ],
        )
        try:
            _wait_until_ready(tmp_path, 2)
            network.lose()
            assert [one.wait(60) for one in found] == [0, 0], found[0].err + found[1].err
        finally:
            for one in found:
                one.kill()
    first, second = (one.result for one in found)
    assert _blames(first["error"], 1), first
    assert _blames(second["error"], 0), second
    assert "the ranks' store has not answered for" in second["error"]
    for one in (first, second):
        assert one["again"].startswith("MoeCacheError: rank ")
        assert one["closed"] == ""


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_rank_that_stops_while_it_loads_is_named(path: Path, tmp_path: Path, victim: int) -> None:
    """Long before the time that a rank may take to load."""
    found = ranks.start(
        "tests.helpers.ranks_in_trouble:stops_while_loading",
        2,
        tmp_path / "run",
        path=path,
        victim=victim,
        each=[{"rank": rank} for rank in range(2)],
    )
    try:
        other = found[1 - victim]
        assert other.wait(60) == 0, other.err
        assert _blames(other.result, victim), other.result
        assert "while the ranks were compared" in other.result
    finally:
        for one in found:
            one.kill()


def test_a_process_that_is_no_rank_is_told_how_to_be_one(path: Path) -> None:
    """Before the trunk is read."""
    from moecache.integrations.transformers import load

    with pytest.raises(ConfigError, match="start the program with torchrun"):
        load(path, expert_parallel=True)
    with pytest.raises(ConfigError, match="placement and rank_timeout_s are for expert_parallel"):
        load(path, rank_timeout_s=3)
    for given in (-1, 0.5, float("nan"), float("inf"), 1e300, "5", True):
        with pytest.raises(ConfigError, match="rank_timeout_s must be a number of seconds from 1"):
            load(path, expert_parallel=True, rank_timeout_s=given)


def test_a_mesh_is_several_groups_that_know_nothing_of_each_other(
    path: Path, tmp_path: Path
) -> None:
    """Of four processes each two have a model, loaded when they like, with other tokens."""
    import torch

    from tests.helpers.offloading import load_in_slots, prompt

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = load_in_slots(path)
    with model.moecache, torch.no_grad():
        torch.save([model(prompt() + copy).logits for copy in range(2)], tmp_path / "expected")
    torch.set_num_threads(threads)
    found = ranks.call(
        "tests.helpers.ranks_in_trouble:in_a_mesh",
        4,
        tmp_path / "run",
        path=path,
        expected=tmp_path / "expected",
        each=[{"rank": rank} for rank in range(4)],
    )
    assert found == [[], [], [], []]
