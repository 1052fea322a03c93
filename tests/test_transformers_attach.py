"""attach: experts of a model that was loaded otherwise come from a runtime of the caller's."""

import copy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import moecache
from moecache.errors import ConfigError, MoeCacheError
from tests.helpers.cuts import cut_at
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.offloading import generated, load_in_slots, load_whole, realigned
from tests.helpers.runtimes import make_runtime

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

FAMILY = FAMILIES["qwen3_moe"]


@pytest.fixture(name="model")
def _model(whole_model: Any) -> Any:
    """Return a model that has all its experts."""
    return copy.deepcopy(whole_model)


@pytest.fixture(name="runtime")
def _runtime(qwen3_moe: Path) -> Iterator[moecache.ExpertRuntime]:
    with moecache.open(qwen3_moe, "25%") as runtime:
        yield runtime


def attach(*arguments: Any, **options: Any) -> Any:
    """Import late: transformers may not be there."""
    from moecache.integrations.transformers import attach as attach_to

    return attach_to(*arguments, **options)


def load_trunk(path: Path) -> Any:
    """Return what transformers loads when it is told to leave the experts in the file."""
    from moecache.integrations.transformers import MoeCacheConfig

    return realigned(FAMILY.model_class.from_pretrained(path, quantization_config=MoeCacheConfig()))


def test_a_complete_model_gives_up_its_experts(
    model: Any, whole_model: Any, runtime: moecache.ExpertRuntime
) -> None:
    """Their memory is free, and the output as before."""
    weights = weakref.ref(model.model.layers[1].mlp.experts.gate_up_proj)
    num_parameters = model.num_parameters()
    offload = attach(model, runtime)

    assert weights() is None
    assert model.num_parameters() < num_parameters / 3
    assert model.moecache is offload
    assert offload.runtime is runtime
    assert torch.equal(generated(model), generated(whole_model))


def test_a_trunk_is_attached_to_a_runtime(
    qwen3_moe: Path, whole_model: Any, runtime: moecache.ExpertRuntime
) -> None:
    """Which is what `load` does."""
    model = load_trunk(qwen3_moe)
    attach(model, runtime)

    assert torch.equal(generated(model), generated(whole_model))
    assert not hasattr(model, "_moecache_source")


@pytest.mark.parametrize(
    "use",
    [
        generated,
        lambda model: model.save_pretrained("nowhere"),
        lambda model: model.push_to_hub("nobody/nothing"),
        lambda model: model.set_experts_implementation("eager"),
        copy.deepcopy,
    ],
    ids=["generate", "save", "push", "eager", "copy"],
)
def test_a_trunk_alone_says_what_it_lacks(qwen3_moe: Path, use: Callable[[Any], Any]) -> None:
    """Before anything is attached to it."""
    with pytest.raises(MoeCacheError, match="experts"):
        use(load_trunk(qwen3_moe))

    assert not Path("nowhere").exists()


@pytest.mark.parametrize("trunk_only", [False, True])
def test_detach_gives_the_experts_back_and_leaves_the_runtime_open(
    qwen3_moe: Path, model: Any, whole_model: Any, runtime: moecache.ExpertRuntime, trunk_only: bool
) -> None:
    """It is the caller's, who can attach the model again."""
    model = load_trunk(qwen3_moe) if trunk_only else model
    attach(model, runtime).detach()

    assert not runtime.closed
    assert model.config._experts_implementation == "grouped_mm"
    assert torch.equal(generated(model), generated(whole_model))
    assert model.num_parameters() == whole_model.num_parameters()
    attach(model, runtime)
    assert torch.equal(generated(model), generated(whole_model))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_detach_goes_back_to_the_implementation_before(
    model: Any, runtime: moecache.ExpertRuntime, implementation: str
) -> None:
    """Which need not be the default."""
    model.set_experts_implementation(implementation)
    attach(model, runtime).detach()

    assert model.config._experts_implementation == implementation


def test_a_timeout_at_any_line_of_close_leaves_none_of_it_out(qwen3_moe: Path) -> None:
    """What its handler raises comes out; a model of `load` has closed its runtime then."""
    found: list[bool | None] = []
    while None not in found:
        model = load_in_slots(qwen3_moe, "25%", compute="fast")
        offload = model.moecache
        # Every third line: loading takes longer than the test.
        found.append(cut_at(offload.close, ("transformers/_offload.py",), 3 * len(found) + 1))
        offload.close()
        assert offload.closed, found
        assert offload.runtime.closed, found
        assert "forward" not in vars(model)
    assert found.count(True) > 3


def test_after_close_another_runtime_can_be_attached(
    qwen3_moe: Path, model: Any, whole_model: Any, runtime: moecache.ExpertRuntime
) -> None:
    """A larger one, say; detach works as if there had been no other."""
    attach(model, runtime).close()
    assert not runtime.closed
    with pytest.raises(MoeCacheError, match="closed"):
        generated(model)

    with moecache.open(qwen3_moe, "50%") as other:
        offload = attach(model, other)
        assert torch.equal(generated(model), generated(whole_model))
        offload.detach()
    assert model.config._experts_implementation == "grouped_mm"
    assert torch.equal(generated(model), generated(whole_model))


def test_a_model_with_a_cache_gets_no_second_one(
    model: Any, whole_model: Any, runtime: moecache.ExpertRuntime
) -> None:
    """Neither one that was attached nor one that was loaded."""
    attach(model, runtime)
    with pytest.raises(MoeCacheError, match=r"in a cache already; detach\(\) it first"):
        attach(model, runtime)

    assert torch.equal(generated(model), generated(whole_model))


def test_two_models_share_a_runtime(
    model: Any, whole_model: Any, runtime: moecache.ExpertRuntime
) -> None:
    """One gets its experts back, the other goes on."""
    other = copy.deepcopy(whole_model)
    attach(model, runtime)
    attach(other, runtime)
    model.moecache.detach()

    assert torch.equal(generated(other), generated(whole_model))
    assert torch.equal(generated(model), generated(whole_model))


def test_a_runtime_that_is_closed_first_is_an_error(
    model: Any, runtime: moecache.ExpertRuntime
) -> None:
    """Of the model's, which says which."""
    offload = attach(model, runtime)
    runtime.close()

    with pytest.raises(MoeCacheError, match="runtime is closed"):
        generated(model)
    with pytest.raises(MoeCacheError, match="closed"):
        offload.detach()


def test_experts_of_another_model_are_refused_and_the_model_is_as_it_was(
    model: Any, whole_model: Any, tmp_path: Path
) -> None:
    """Another family's, and the same family's of other sizes."""
    wider = {**FAMILY.settings, "moe_intermediate_size": 48}
    checkpoints = [
        write_checkpoint(FAMILIES[name], tmp_path / name, "float32")
        for name in ("gpt_oss", "mixtral")
    ]
    config = copy.deepcopy(whole_model.config)
    config.moe_intermediate_size = wider["moe_intermediate_size"]
    type(whole_model)(config).save_pretrained(tmp_path / "wider")
    for checkpoint in (*checkpoints, tmp_path / "wider"):
        with (
            moecache.open(checkpoint, "50%") as runtime,
            pytest.raises(ConfigError, match=rf"{checkpoint.name}: .*of another model"),
        ):
            attach(model, runtime)

    _check_untouched(model, whole_model)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_slots_of_another_dtype_are_refused_with_the_remedy(
    qwen3_moe: Path, model: Any, whole_model: Any, dtype: Any
) -> None:
    """The output would be another one's."""
    with (
        moecache.open(qwen3_moe, "25%", dtype=dtype) as runtime,
        pytest.raises(ConfigError, match="model computes in float32; open the runtime with dtype="),
    ):
        attach(model, runtime)

    _check_untouched(model, whole_model)


def test_slots_in_the_models_dtype_are_accepted(qwen3_moe: Path) -> None:
    """The runtime converts what the file has."""
    whole = load_whole(FAMILY, qwen3_moe, "bfloat16")
    model = copy.deepcopy(whole)
    with moecache.open(qwen3_moe, "25%", dtype=ml_dtypes.bfloat16) as runtime:
        attach(model, runtime)
        assert torch.equal(generated(model), generated(whole))


def test_a_store_without_files_is_refused(model: Any, whole_model: Any) -> None:
    """It does not say which experts are whose."""
    with (
        make_runtime(6) as runtime,
        pytest.raises(ConfigError, match=r"cannot be matched.*moecache\.open"),
    ):
        attach(model, runtime)

    _check_untouched(model, whole_model)


def test_what_is_no_mixture_of_experts_is_refused(runtime: moecache.ExpertRuntime) -> None:
    """A linear layer, say."""
    with pytest.raises(ConfigError, match="Linear has no experts module"):
        attach(torch.nn.Linear(2, 2), runtime)


def test_closing_what_was_loaded_closes_its_runtime_alone(
    qwen3_moe: Path, whole_model: Any
) -> None:
    """What `load` opened is its own."""
    loaded = load_in_slots(qwen3_moe)
    other = load_in_slots(qwen3_moe)
    loaded.moecache.close()
    with other.moecache:
        assert loaded.moecache.runtime.closed
        assert torch.equal(generated(other), generated(whole_model))


def _check_untouched(model: Any, whole: Any) -> None:
    """Check that a model has its experts, and nothing of a cache."""
    assert model.config._experts_implementation == "grouped_mm"
    assert not hasattr(model, "moecache")
    for (_, module), (_, original) in zip(
        model.named_modules(), whole.named_modules(), strict=True
    ):
        assert type(module) is type(original)
        assert module.__dict__.keys() == original.__dict__.keys()
    assert torch.equal(generated(model), generated(whole))
