"""A model in slots is saved, copied, switched, closed and given back: rightly, or with an error."""

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moecache.errors import MoeCacheError
from tests.helpers.families import FAMILIES
from tests.helpers.leaks import nothing_left
from tests.helpers.offloading import generated, load_in_slots, load_whole, prompt

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

FAMILY = FAMILIES["qwen3_moe"]


@pytest.fixture(name="shared", scope="module")
def _shared(qwen3_moe: Path) -> Iterator[Any]:
    """Return a model in slots that is left as it is."""
    model = load_in_slots(qwen3_moe)
    yield model
    model.moecache.close()


@pytest.fixture(name="model")
def _model(qwen3_moe: Path) -> Iterator[Any]:
    """Return a model in slots to do anything with."""
    model = load_in_slots(qwen3_moe)
    offload = model.moecache
    yield model
    offload.close()


@pytest.mark.parametrize(
    "write",
    [
        lambda model, to: model.save_pretrained(to),
        lambda model, to: model.save_pretrained(to, push_to_hub=True),
        lambda model, to: model.model.save_pretrained(to),
        lambda model, to: model.push_to_hub("nobody/nothing"),
        torch.save,
        lambda model, to: pickle.dumps(model),
        lambda model, to: pickle.dumps(model.moecache),
        lambda model, to: pickle.dumps(model.model.layers[1].mlp.experts),
    ],
    ids=["save", "save_and_push", "inner", "push", "torch", "pickle", "offload", "experts"],
)
def test_nothing_is_written_without_its_experts(
    shared: Any, tmp_path: Path, write: Callable[[Any, Path], None]
) -> None:
    """The error names the way to have them back, and no checkpoint is there."""
    with pytest.raises(MoeCacheError, match=r"model\.moecache\.detach\(\)"):
        write(shared, tmp_path / "saved")

    assert not (tmp_path / "saved").is_dir()


@pytest.mark.parametrize(
    "part",
    [
        lambda model: model,
        lambda model: model.model,
        lambda model: model.model.layers[1],
        lambda model: model.moecache,
    ],
    ids=["model", "inner", "layer", "offload"],
)
def test_what_has_experts_in_a_cache_is_not_copied(shared: Any, part: Callable[[Any], Any]) -> None:
    """Two models would share one's threads and files, and close them."""
    with pytest.raises(MoeCacheError, match=r"cannot be copied.*detach\(\)"):
        copy.deepcopy(part(shared))


def test_a_layer_without_experts_is_copied_as_ever(shared: Any) -> None:
    """It has nothing in a cache."""
    copied = copy.deepcopy(shared.model.layers[0])

    assert torch.equal(copied.mlp.up_proj.weight, shared.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("inner", [False, True])
def test_other_experts_implementations_are_refused(
    shared: Any, whole_model: Any, inner: bool
) -> None:
    """They need all weights; the one it has may be set again."""
    model = shared.model if inner else shared
    for name in ("eager", "grouped_mm", {"": "eager"}):
        with pytest.raises(MoeCacheError, match=r"detach\(\)"):
            model.set_experts_implementation(name)
    model.set_experts_implementation("moecache")

    assert torch.equal(generated(shared), generated(whole_model))


def test_a_weight_that_is_asked_for_says_where_it_is(shared: Any) -> None:
    """Also where other code than moecache's runs into it."""
    experts = shared.model.layers[1].mlp.experts

    with pytest.raises(MoeCacheError, match=r"gate_up_proj.*not in memory as a whole.*detach"):
        experts.gate_up_proj  # noqa: B018
    assert not hasattr(experts, "down_proj")
    with pytest.raises(AttributeError, match="nothing"):
        experts.nothing  # noqa: B018


@pytest.mark.parametrize("inner", [False, True])
def test_a_state_dict_warns_once_that_it_has_no_experts(
    shared: Any, caplog: pytest.LogCaptureFixture, inner: bool
) -> None:
    """It is of use for the trunk, and no whole model."""
    state = (shared.model if inner else shared).state_dict()

    assert len(state) > 40
    assert not any(".experts." in name for name in state)
    warned = [record for record in caplog.records if "without_experts" in record.message]
    assert len(warned) == 1


def test_configurations_are_saved_as_the_checkpoint_has_them(
    shared: Any, qwen3_moe: Path, tmp_path: Path
) -> None:
    """Nothing of moecache is in them."""
    shared.config.save_pretrained(tmp_path)
    shared.generation_config.save_pretrained(tmp_path)
    saved, original = (
        json.loads((directory / "config.json").read_text()) for directory in (tmp_path, qwen3_moe)
    )

    assert saved == original
    assert "moecache" not in (tmp_path / "generation_config.json").read_text()


def test_a_model_is_an_ordinary_one_to_its_users(shared: Any, whole_model: Any) -> None:
    """Of its class, on its device, not quantized; its trunk's parameters are its own."""
    trunk = {name for name, _ in whole_model.named_parameters() if ".experts." not in name}

    assert type(shared) is type(whole_model)
    assert shared.device == whole_model.device
    assert not getattr(shared, "is_quantized", False)
    assert {name for name, _ in shared.named_parameters()} == trunk
    experts = shared.model.layers[1].mlp.experts
    assert isinstance(experts, type(whole_model.model.layers[1].mlp.experts))


def test_detach_gives_an_ordinary_model_back(model: Any, whole_model: Any, tmp_path: Path) -> None:
    """Equal output, weights and implementation; it is saved, copied and switched as ever."""
    model.moecache.detach()

    assert not hasattr(model, "moecache")
    assert model.config._experts_implementation == "grouped_mm"
    assert torch.equal(generated(model), generated(whole_model))
    assert torch.equal(generated(copy.deepcopy(model)), generated(whole_model))
    assert torch.equal(generated(pickle.loads(pickle.dumps(model))), generated(whole_model))
    model.save_pretrained(tmp_path / "saved")
    saved = load_whole(FAMILY, tmp_path / "saved").state_dict()
    assert saved.keys() == whole_model.state_dict().keys()
    assert all(
        torch.equal(tensor, saved[name]) for name, tensor in whole_model.state_dict().items()
    )
    model.set_experts_implementation("eager")
    torch.testing.assert_close(model(prompt()).logits, whole_model(prompt()).logits)


def test_nothing_of_the_cache_stays_in_a_detached_model(
    model: Any, whole_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No hook, no attribute, no class."""
    model.moecache.detach()

    for (name, module), (_, original) in zip(
        model.named_modules(), whole_model.named_modules(), strict=True
    ):
        assert type(module) is type(original), name
        assert not [key for key in module.__dict__ if "moecache" in key], name
        # transformers' own note of a quantizer that was there
        assert module.__dict__.keys() - {"is_quantized"} == original.__dict__.keys(), name
        assert not module._forward_pre_hooks, name
    model.state_dict()
    assert not caplog.records


def test_detach_and_close_may_be_called_twice(model: Any) -> None:
    """The second time nothing is to be done."""
    offload = model.moecache
    offload.detach()
    offload.detach()
    offload.close()
    offload.close()

    assert offload.runtime.closed


def test_a_detach_that_fails_leaves_the_model_as_it_was(
    model: Any, whole_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory, or a file that cannot be read."""
    monkeypatch.setattr(
        "moecache.integrations.transformers._offload.free_host_bytes", lambda: 100_000
    )
    with pytest.raises(MoeCacheError, match=r"all experts take 720.* are free"):
        model.moecache.detach()

    assert torch.equal(generated(model), generated(whole_model))
    with pytest.raises(MoeCacheError, match="would be saved"):
        model.save_pretrained("nowhere")


def test_a_closed_model_says_so(model: Any) -> None:
    """Generating, saving, getting experts back: each an error; figures can still be had."""
    generated(model)
    offload = model.moecache
    offload.close()

    with pytest.raises(MoeCacheError, match="closed"):
        generated(model)
    with pytest.raises(MoeCacheError, match="would be saved"):
        model.save_pretrained("nowhere")
    with pytest.raises(MoeCacheError, match="closed; load the model again"):
        offload.detach()
    assert offload.stats().num_misses > 0
    assert "slots" in offload.report()


def test_leaving_the_context_closes(qwen3_moe: Path) -> None:
    """As a file's would."""
    model = load_in_slots(qwen3_moe)
    with model.moecache as offload:
        assert not offload.runtime.closed

    assert offload.runtime.closed


def test_one_checkpoint_is_loaded_twice(shared: Any, model: Any, whole_model: Any) -> None:
    """The models have nothing in common but the file."""
    assert torch.equal(generated(shared), generated(whole_model))
    assert torch.equal(generated(model), generated(whole_model))
    model.moecache.close()
    assert torch.equal(generated(shared), generated(whole_model))


@pytest.mark.parametrize("closed", [False, True])
def test_a_model_without_references_is_collected_with_its_runtime(
    qwen3_moe: Path, closed: bool
) -> None:
    """Files and threads are given back, whether it was closed or not."""
    with nothing_left():
        model = load_in_slots(qwen3_moe)
        generated(model)
        if closed:
            model.moecache.close()
        references = [weakref.ref(model), weakref.ref(model.moecache.runtime)]
        del model
        gc.collect()

        assert [reference() for reference in references] == [None, None]


def test_a_trunk_in_another_dtype_runs_and_goes_back(model: Any, whole_model: Any) -> None:
    """`to` converts what is in the model; the slots stay as they are."""
    model.to(torch.bfloat16)
    assert model(prompt()).logits.dtype == torch.bfloat16
    logits = whole_model(prompt()).logits
    assert (model(prompt()).logits - logits).abs().max() < 0.1 * logits.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_are_converted_to_the_dtype_that_is_asked_for(qwen3_moe: Path, dtype: Any) -> None:
    """As the whole model is when it is loaded."""
    name = str(dtype).removeprefix("torch.")
    model = load_in_slots(qwen3_moe, dtype=dtype)
    with model.moecache:
        assert torch.equal(generated(model), generated(load_whole(FAMILY, qwen3_moe, name)))
