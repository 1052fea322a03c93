"""Quantized checkpoints in transformers: the model of their values, at any number of slots.

The reference is the same model in bfloat16, of values that tests/helpers/quantized.py reads on its
own; where transformers dequantizes such a checkpoint rightly, that is compared, too.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from moecache.errors import ConfigError, FormatError
from tests.helpers import quantized
from tests.helpers.families import FAMILIES as FAMILIES_OF
from tests.helpers.offloading import generated, load_in_slots, load_whole

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

FAMILIES = {
    "qwen3_moe-fp8": (quantized.QWEN3_MOE, quantized.fp8()),
    "deepseek_v3-fp8": (quantized.DEEPSEEK_V3, quantized.fp8((8, 32), "bf16")),
    "qwen3_moe-mxfp8": (quantized.QWEN3_MOE, quantized.fp8((1, 32), "e8m0")),
    "qwen3_moe-channels": (quantized.QWEN3_MOE, quantized.channels()),
    "gpt_oss-mxfp4": (quantized.GPT_OSS, quantized.mxfp4()),
    "deepseek_v3-int4": (quantized.DEEPSEEK_V3, quantized.int4()),
    "qwen3_moe-nvfp4": (quantized.QWEN3_MOE, quantized.nvfp4()),
    "glm4_moe-awq": (quantized.GLM4_MOE, quantized.grouped("awq")),
    "qwen2_moe-gptq": (quantized.QWEN2_MOE, quantized.grouped("gptq")),
    "qwen2_moe-gptq_ordered": (quantized.QWEN2_MOE, quantized.grouped("gptq", is_ordered=True)),
}
# What transformers dequantizes on the CPU, and rightly.
READ_BY_TRANSFORMERS = ("fp8", "mxfp8", "mxfp4")
PROMPTS = [
    torch.arange(length * batch).reshape(batch, length) * 7 % 120 + 1
    for batch, length in ((1, 1), (3, 7), (1, 64))
]


@pytest.fixture(name="checkpoint", scope="module", params=FAMILIES)
def _checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, Path, str]:
    """Return a family, its directory as published and in bfloat16, and what it is."""
    family, scheme = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("quantized")
    return family, *quantized.write_quantized(family, scheme, folder), request.param


@pytest.fixture(name="rounded", scope="module")
def _rounded(checkpoint: tuple[Any, Path, Path, str]) -> tuple[list[Any], Any]:
    """Return logits and greedy tokens of the whole model in bfloat16."""
    family, _, plain, _ = checkpoint
    whole = load_whole(family, plain, "bfloat16")
    return logits(whole), generated(whole, num_tokens=8)


def logits(model: Any) -> list[Any]:
    """Return a model's logits of each prompt, one after the other."""
    with torch.no_grad():
        return [model(input_ids=ids).logits for ids in PROMPTS]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    """Compare logits bit for bit."""
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one, two)


def test_torch_multiplies_the_values_of_the_definition(
    checkpoint: tuple[Any, Path, Path, str], rounded: tuple[list[Any], Any]
) -> None:
    """Logits and greedy tokens are those of the model in bfloat16, bit for bit; so is `detach`."""
    family, published, _, name = checkpoint
    wanted, tokens = rounded
    if name.endswith(READ_BY_TRANSFORMERS):
        assert_same(logits(load_whole(family, published, "bfloat16")), wanted)
    for memory, slots in (("25%", None), (None, family.top_k)):
        model = load_in_slots(published, memory, slots=slots, compute="torch")
        with model.moecache as offload:
            assert_same(logits(model), wanted)
            assert torch.equal(generated(model, num_tokens=8), tokens)
            if slots is not None:
                offload.detach()
                assert_same(logits(model), wanted)


def test_kernels_compute_what_lies_in_slots(
    checkpoint: tuple[Any, Path, Path, str],
    rounded: tuple[list[Any], Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By default; alike at every number of slots, and as near to the values as bfloat16 is.

    Of most tokens: where two experts are tied, the router may take the other.
    """
    family, published, plain, name = checkpoint
    if name.endswith("ordered"):
        with pytest.raises(ConfigError, match=r'no compute form.*use "torch"'):
            load_in_slots(published, compute="fast")
        model = load_in_slots(published)
        with model.moecache as offload:
            assert "torch" in offload.report()
        return
    found = []
    for slots in (1, family.top_k, 1000):
        model = load_in_slots(published, None, slots=slots)
        with model.moecache as offload:
            found.append(logits(model))
            assert "computed by kernels" in offload.report()
        # What is in the file and not in the model is meant to be.
        assert "UNEXPECTED" not in capfd.readouterr().err
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
    exact = logits(load_whole(family, plain, "float32"))
    for one, two, three in zip(found[0], exact, rounded[0], strict=True):
        ours, theirs = ((values.float() - two).abs().mean(-1).median() for values in (one, three))
        assert ours < 1.5 * theirs + 1e-4


def test_a_native_trunk_is_computed_as_it_is_stored(
    checkpoint: tuple[Any, Path, Path, str], rounded: tuple[list[Any], Any]
) -> None:
    """In as many bytes, alike for any number of rows; `detach` gives the values of bfloat16."""
    _, published, _, name = checkpoint
    if name not in ("qwen3_moe-fp8", "deepseek_v3-int4", "qwen2_moe-gptq_ordered"):
        pytest.skip("one of each kind will do")
    model = load_in_slots(published, "25%", trunk="native")
    other = load_in_slots(published, "25%")
    with model.moecache as offload, other.moecache:
        found, others = logits(model), logits(other)
        footprint = model.get_memory_footprint() < other.get_memory_footprint()
        assert footprint == ("ordered" not in name)
        for one, two in zip(found, others, strict=True):
            assert (one - two).float().abs().mean() < 0.1 * two.float().abs().mean()
        with torch.no_grad():
            tokens = torch.cat([model(input_ids=row[None]).logits for row in PROMPTS[1]])
        if "qwen3" in name:  # whose attention has the same bits in any batch
            assert torch.equal(tokens, found[1])
        offload.detach()
    assert_same(logits(model), rounded[0])


def test_gradients_go_through_a_native_trunk(checkpoint: tuple[Any, Path, Path, str]) -> None:
    """As through the values that it has."""
    _, published, _, name = checkpoint
    if name != "qwen3_moe-fp8":
        pytest.skip("one will do")
    model = load_in_slots(published, "25%", trunk="native", dtype=torch.float32)
    layer = model.model.layers[0].self_attn.q_proj
    inputs = torch.randn(3, layer.in_features, requires_grad=True)
    layer(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, layer.weight.sum(0).expand(3, -1))
    with pytest.raises(RuntimeError, match="cannot be multiplied"), torch.no_grad():
        layer(torch.randn(3, layer.in_features + 1))
    for wrong in ("int8", ""):
        with pytest.raises(ConfigError, match=r"trunk .* is not one of bf16, native"):
            load_in_slots(published, trunk=wrong)


def test_a_native_layer_does_what_a_linear_layer_does(
    checkpoint: tuple[Any, Path, Path, str],
) -> None:
    """Gradients of all kinds, other dtypes, autocast, graphs; errors are torch's."""
    _, published, _, name = checkpoint
    if name != "qwen2_moe-gptq":
        pytest.skip("one will do")
    model = load_in_slots(published, "25%", trunk="native")
    layer = model.model.layers[0].self_attn.q_proj
    plain = torch.nn.Linear(layer.in_features, layer.out_features, dtype=torch.bfloat16)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    inputs = torch.randn(3, layer.in_features, dtype=torch.bfloat16)

    def gradient(module: Any) -> Any:
        module(inputs).float().sum().backward()
        return module.bias.grad

    assert torch.equal(gradient(layer), gradient(plain))
    with torch.no_grad():
        found = [m(inputs) for m in (layer, plain)]
        torch.testing.assert_close(*found, rtol=0.02, atol=0.02)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        assert torch.equal(compiled(inputs), found[0])
        tangents = [torch.func.jvp(m, (inputs,), (inputs,))[1] for m in (layer, plain)]
        assert torch.equal(*tangents)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(inputs.float()).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="dtype"):
            layer(inputs.float())
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(inputs), plain(inputs))
    model.float()
    assert layer.weight.dtype == layer(inputs.float()).dtype == torch.float32
    model.moecache.detach()
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.float32
    logits(model)


def test_routers_and_tied_heads_that_are_quantized(tmp_path: Path) -> None:
    """Routers are read like any matrix; a head that is the embedding, too, is not read twice."""
    scheme = dataclasses.replace(
        quantized.fp8(), chosen=r"\.(\w+_proj|mlp\.gate|shared_expert_gate)\.weight$|lm_head"
    )
    family = dataclasses.replace(
        FAMILIES_OF["qwen3_next"], settings={**FAMILIES_OF["qwen3_next"].settings, **quantized.WIDE}
    )
    published, plain = quantized.write_quantized(family, scheme, tmp_path)
    model = load_in_slots(published, "25%", compute="torch")
    with model.moecache:
        assert_same(logits(model), logits(load_whole(family, plain, "bfloat16")))


@pytest.mark.parametrize("said", [[1], "fp8", {}])
def test_a_quantization_that_is_no_object_is_refused(said: Any, tmp_path: Path) -> None:
    """As by everything that opens a checkpoint."""
    published, _ = quantized.write_quantized(quantized.QWEN3_MOE, quantized.fp8(), tmp_path)
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    with pytest.raises((ConfigError, FormatError), match="quantiz"):
        load_in_slots(published)
