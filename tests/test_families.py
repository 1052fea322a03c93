"""The tiny checkpoints of families: complete, finite, and routed to more than one expert."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.families import FAMILIES, Family, write_checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

PROMPT = [5, 17, 99, 3, 64, 28, 77, 41]


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_loads_and_its_greedy_text_uses_several_experts(
    name: str, tmp_path: Path
) -> None:
    """No weight is missing; 24 tokens differ among themselves, and so do their routes."""
    family = FAMILIES[name]
    model = _load(family, write_checkpoint(family, tmp_path, "bfloat16"), "bfloat16")
    routes = _record_routes(model, family)
    tokens, logits = _generate(model)

    assert bool(torch.isfinite(logits).all())
    assert len(tokens) == 24
    assert len(set(tokens)) >= 5
    assert tuple(routes) == family.expert_layers
    for experts in routes.values():
        assert len(experts) > family.top_k
        assert max(experts) < family.num_experts


@pytest.mark.parametrize("name", FAMILIES)
def test_no_matrix_of_an_expert_has_the_shape_of_its_transpose(name: str) -> None:
    """Nor is a fused gate and up matrix as wide as it is high."""
    text = FAMILIES[name].config().get_text_config()
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    assert text.hidden_size not in {width, 2 * width}


@pytest.mark.parametrize("name", ["qwen3_5_moe_vl", "qwen3_vl_moe"])
def test_published_layouts_hold_the_same_model(name: str, tmp_path: Path) -> None:
    """Stacked or transposed on disk: shapes of expert tensors differ, logits do not."""
    logits, shapes = [], []
    for variant in (name, f"{name}_hub"):
        directory = write_checkpoint(FAMILIES[variant], tmp_path / variant, "float32")
        logits.append(_generate(_load(FAMILIES[variant], directory, "float32"))[1])
        shapes.append(_expert_shapes(directory))

    assert torch.equal(*logits)
    assert shapes[0] != shapes[1]


def test_a_checkpoint_is_the_same_each_time(tmp_path: Path) -> None:
    """The seed is the family's; the caller's random state is left as it was."""
    family = FAMILIES["gpt_oss"]
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, second = (write_checkpoint(family, tmp_path / run, "float32") for run in ("a", "b"))

    assert torch.equal(torch.rand(3), expected)
    shards = [(directory / "model.safetensors").read_bytes() for directory in (first, second)]
    assert shards[0] == shards[1]


def _load(family: Family, directory: Path, dtype: str) -> Any:
    """Load a checkpoint all of whose tensors are used, and no other."""
    model, report = family.model_class.from_pretrained(
        directory, dtype=getattr(torch, dtype), output_loading_info=True, **family.reference
    )
    assert not any(report.values()), report
    return model


def _generate(model: Any) -> tuple[list[int], Any]:
    """Return 24 greedy tokens and their logits."""
    step = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=24,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return step.sequences[0, len(PROMPT) :].tolist(), torch.cat(step.logits)


def _record_routes(model: Any, family: Family) -> dict[int, set[int]]:
    """Return the experts by layer, filled as the model runs."""
    routes: dict[int, set[int]] = defaultdict(set)

    def record(layer: int, chosen: Any) -> None:
        routes[layer] |= set(chosen.flatten().tolist())

    for name, module in model.named_modules():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), -1)
        if family.has_interface and name.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda _, call, layer=layer: record(layer, call[1])  # hidden states, ids, weights
            )
        elif not family.has_interface and name.endswith(".router"):
            module.register_forward_hook(
                lambda _, call, scores, layer=layer: record(layer, scores[0].nonzero()[:, 1])
            )
    return routes


def _expert_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes on disk of the tensors of experts."""
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    return {name: tuple(tensors[name].shape) for name in tensors if ".experts." in name}
