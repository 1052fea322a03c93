"""Where `load` finds a model, as which class, and models of unusual routing."""

import dataclasses
import importlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moecache.errors import MoeCacheError
from moecache.runtime import opening
from moecache.runtime.plan import Plan
from moecache.runtime.runtime import ExpertRuntime
from moecache.stores import SafetensorsStore
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.more_families import MORE_FAMILIES
from tests.helpers.offloading import generated, load_in_slots, load_whole, prompt

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

FAMILY = FAMILIES["qwen3_moe"]


@pytest.fixture(name="shards", params=[False, True], ids=["file", "shards"])
def _shards(
    request: pytest.FixtureRequest, qwen3_moe: Path, whole_model: Any, tmp_path: Path
) -> Iterator[Path]:
    """Return the checkpoint in one file, and in several."""
    if not request.param:
        yield qwen3_moe
        return
    whole_model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    yield tmp_path / "shards"


def test_a_name_on_the_hub_is_found_in_the_local_cache(
    shards: Path, whole_model: Any, tmp_path: Path
) -> None:
    """Whose snapshots are links to files named by their hash."""
    cached, revision = tmp_path / "hub" / "models--some--model", "0" * 40
    snapshot = cached / "snapshots" / revision
    for directory in (snapshot, cached / "blobs", cached / "refs"):
        directory.mkdir(parents=True)
    (cached / "refs" / "main").write_text(revision)
    for number, file in enumerate(shards.iterdir()):
        shutil.copy(file, cached / "blobs" / f"{number:064d}")
        os.symlink(f"../../blobs/{number:064d}", snapshot / file.name)

    model = load_in_slots(
        "some/model",  # type: ignore[arg-type]
        cache_dir=str(tmp_path / "hub"),
        local_files_only=True,
    )
    with model.moecache:
        assert torch.equal(generated(model), generated(whole_model))
        with pytest.raises(MoeCacheError, match=revision):
            model.save_pretrained(tmp_path / "saved")


def test_a_subfolder_is_loaded(shards: Path, whole_model: Any, tmp_path: Path) -> None:
    """The experts are those in it."""
    shutil.copytree(shards, tmp_path / "parent" / "sub")
    model = load_in_slots(tmp_path / "parent", subfolder="sub")
    with model.moecache:
        assert torch.equal(generated(model), generated(whole_model))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AutoModel", "Qwen3MoeModel"),
        ("AutoModelForCausalLM", "Qwen3MoeForCausalLM"),
        ("AutoModelForSequenceClassification", "Qwen3MoeForSequenceClassification"),
    ],
)
def test_another_class_is_loaded_from_the_same_checkpoint(
    qwen3_moe: Path, whole_model: Any, name: str, expected: str
) -> None:
    """Its experts are found wherever its modules are."""
    model = load_in_slots(qwen3_moe, model_class=getattr(transformers, name))
    body = model if expected.endswith("MoeModel") else model.model
    with model.moecache, torch.no_grad():
        states = body(prompt()).last_hidden_state

    assert type(model).__name__ == expected
    assert torch.equal(states, whole_model.model(prompt()).last_hidden_state)


def test_the_default_dtype_of_torch_changes_nothing(qwen3_moe: Path, whole_model: Any) -> None:
    """A checkpoint says which one it is in."""
    expected = generated(whole_model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = load_in_slots(qwen3_moe)
        with model.moecache:
            assert torch.equal(generated(model), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("slots", [1, 8, 32])
def test_a_router_may_choose_all_experts(tmp_path: Path, slots: int) -> None:
    """Each token takes every expert of a layer: the worst a cache can be asked for."""
    family = dataclasses.replace(
        FAMILY, settings={**FAMILY.settings, "num_experts": 8, "num_experts_per_tok": 8}
    )
    path = write_checkpoint(family, tmp_path, "float32")
    whole, model = load_whole(family, path), load_in_slots(path, None, slots=slots)
    with model.moecache:
        assert torch.equal(generated(model), generated(whole))
        with torch.no_grad():
            assert torch.equal(model(prompt()).logits, whole(prompt()).logits)


def test_a_router_may_choose_one_expert(tmp_path: Path) -> None:
    """As those of switch-like models do."""
    family = dataclasses.replace(FAMILY, settings={**FAMILY.settings, "num_experts_per_tok": 1})
    path = write_checkpoint(family, tmp_path, "float32")
    whole, model = load_whole(family, path), load_in_slots(path, None, slots=2)
    with model.moecache:
        assert torch.equal(generated(model), generated(whole))


def test_four_threads_and_the_routers_look_ahead_do_not_get_in_each_others_way(
    qwen3_moe: Path, whole_model: Any
) -> None:
    """Each thread is at a layer of its own, and what it saw there is its own."""
    expected = generated(whole_model)
    model = load_in_slots(qwen3_moe, prefetch="router")
    equal: list[bool] = []

    def run() -> None:
        equal.extend(torch.equal(generated(model), expected) for _ in range(3))

    with model.moecache as offload:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        offload.runtime.cache.check()

    assert equal == [True] * 12


@pytest.mark.parametrize(
    ("name", "nbytes"), [("qwen3_moe", 0), ("deepseek_v3", 64 * 2**20), ("mimo_v2_flash", 2**26)]
)
def test_a_plan_leaves_room_for_scores_that_torch_holds(name: str, nbytes: int) -> None:
    """Four matrices of 4 heads and 1,024 tokens, where values are narrower than keys."""
    from moecache.integrations.transformers.prompts import planned_bytes

    model = SimpleNamespace(config={**MORE_FAMILIES, **FAMILIES}[name].config())
    assert planned_bytes(model, 2, "torch") - planned_bytes(model, 2, "fast") == nbytes


def test_a_plan_leaves_room_for_what_a_loaded_model_will_still_take(
    qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped trunk, torch's products, prompts, kept pages; MOECACHE_RESERVE says otherwise."""
    from moecache.integrations.transformers.prompts import planned_bytes

    plans = []

    def open_with(plan: Plan, store: SafetensorsStore) -> ExpertRuntime:
        plans.append(plan)
        return opening.open_with(plan, store)

    monkeypatch.setattr(importlib.import_module("moecache.runtime.open"), "open_with", open_with)
    for compute in ("torch", "fast"):
        model = load_in_slots(qwen3_moe, compute=compute, prefix_memory="3MiB")
        with model.moecache:
            trunk = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        room = plans[-1].headroom
        others = 256 * 2**20 if compute == "torch" else 0
        others += planned_bytes(model, plans[-1].layout.top_k, compute) + 3 * 2**20
        assert others <= room.trunk_bytes <= others + trunk
        assert "trunk, products and prompts" in plans[-1].reasons["reserve_bytes"]
    monkeypatch.setenv("MOECACHE_RESERVE", "100MiB")
    with load_in_slots(qwen3_moe).moecache:
        assert plans[-1].reserve_bytes == 100 * 2**20
