"""Packed checkpoints in transformers: dequantized ones by itself, those in a format by moecache."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import moecache
from moecache import packing
from moecache.errors import MoeCacheError
from tests.helpers import families, quantized
from tests.helpers.families import Family, write_checkpoint
from tests.helpers.more_families import MORE_FAMILIES
from tests.helpers.offloading import generated, load_in_slots, load_whole
from tests.helpers.packs import library_tensors

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
attach = pytest.importorskip("moecache.integrations.transformers").attach
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

# Per expert and in stacks, with a quantized trunk and without one.
FAMILIES = {
    "qwen3_moe-fp8": (quantized.QWEN3_MOE, quantized.fp8()),
    "deepseek_v3-fp8": (quantized.DEEPSEEK_V3, quantized.fp8((8, 32), "bf16")),
    "gpt_oss-mxfp4": (quantized.GPT_OSS, quantized.mxfp4()),
    "deepseek_v3-int4": (quantized.DEEPSEEK_V3, quantized.int4()),
    "qwen3_moe-nvfp4": (quantized.QWEN3_MOE, quantized.nvfp4()),
    "glm4_moe-awq": (quantized.GLM4_MOE, quantized.grouped("awq")),
    "qwen2_moe-gptq": (quantized.QWEN2_MOE, quantized.grouped("gptq", is_ordered=True)),
}
GEMMA4 = dataclasses.replace(
    families.FAMILIES["gemma4_text"],
    settings={
        **families.FAMILIES["gemma4_text"].settings,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
    },
)
IDS = torch.arange(24).reshape(2, 12) * 7 % 120


def logits(model: Any) -> Any:
    """Return a model's logits."""
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_dequantized_is_the_model_in_bfloat16(name: str, tmp_path: Path) -> None:
    """In transformers and in slots, bit for bit; so are its files."""
    family, scheme = FAMILIES[name]
    published, plain = quantized.write_quantized(family, scheme, tmp_path)

    packing.pack(published, tmp_path / "packed", format="bf16")

    assert library_tensors(tmp_path / "packed") == library_tensors(plain)
    wanted = logits(load_whole(family, plain, "bfloat16"))
    assert torch.equal(logits(load_whole(family, tmp_path / "packed", "bfloat16")), wanted)
    model = load_in_slots(tmp_path / "packed", None, slots=family.top_k)
    with model.moecache:
        assert torch.equal(logits(model), wanted)


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model in bfloat16."""
    folder = tmp_path_factory.mktemp("model")
    return quantized.write_quantized(quantized.QWEN3_MOE, quantized.fp8(), folder)[1]


@pytest.mark.parametrize("name", ["mxfp4", "fp8[32x32,f32]", "int4", "nvfp4"])
def test_what_was_packed_in_a_format_is_computed_as_it_lies(
    name: str, model: Path, tmp_path: Path
) -> None:
    """Alike at every number of slots, and as good as torch's products of the same values."""
    packing.pack(model, tmp_path / "packed", format=name)
    found = []
    for slots in (1, 1000):
        loaded = load_in_slots(tmp_path / "packed", None, slots=slots)
        with loaded.moecache as offload:
            found.append(logits(loaded))
            assert "computed by kernels" in offload.report()
    assert torch.equal(*found)
    loaded = load_in_slots(tmp_path / "packed", None, slots=2, compute="torch")
    with loaded.moecache as offload:
        by_torch = logits(loaded)
        tokens = generated(loaded)
        offload.detach()
    assert torch.equal(logits(loaded), by_torch)
    assert torch.equal(generated(loaded), tokens)
    # A program's are float32.
    torch.testing.assert_close(found[0].float(), by_torch.float(), rtol=0.1, atol=0.1)


def test_what_is_stored_transposed_is_packed_and_computed(tmp_path: Path) -> None:
    """gpt-oss in bfloat16, of values that MXFP4 has: packed in it, they are the same."""
    plain = quantized.write_quantized(quantized.GPT_OSS, quantized.mxfp4(), tmp_path)[1]
    packing.pack(plain, tmp_path / "packed", format="mxfp4")
    found = []
    for path in (plain, tmp_path / "packed"):
        loaded = load_in_slots(path, None, slots=2, compute="torch", dtype=torch.bfloat16)
        with loaded.moecache:
            found.append(logits(loaded))
    assert torch.equal(*found)
    found = []
    for path in (plain, tmp_path / "packed"):
        loaded = load_in_slots(path, None, slots=2, compute="fast", dtype=torch.bfloat16)
        with loaded.moecache:
            found.append(logits(loaded))
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)


def test_a_stack_whose_name_has_no_experts_in_it_is_packed_too(tmp_path: Path) -> None:
    """Step 3.7's: transformers knows the name of the whole alone."""
    family = MORE_FAMILIES["step3p7"]
    path = write_checkpoint(family, tmp_path / "model", "bfloat16")
    wanted = logits(load_whole(family, path, "bfloat16"))
    packing.pack(path, tmp_path / "packed")
    model = load_in_slots(tmp_path / "packed", None, dtype=torch.bfloat16)
    with model.moecache:
        assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("family", [quantized.QWEN3_MOE, GEMMA4], ids=["apart", "stacked"])
def test_transformers_alone_refuses_tiles(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of what computes them: it would leave out a stack's experts, and draw others."""
    from transformers.integrations.moe import ExpertsInterface
    from transformers.quantizers import auto

    packing.pack(
        write_checkpoint(family, tmp_path / "model", "bfloat16"), tmp_path / "packed", format="int4"
    )
    model = load_in_slots(tmp_path / "packed", None)
    with model.moecache:
        assert torch.isfinite(logits(model)).all()
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "moecache")
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "moecache")
    monkeypatch.delitem(ExpertsInterface._global_mapping, "moecache")
    with pytest.raises(ValueError, match='experts_implementation="moecache"` is not supported'):
        family.model_class.from_pretrained(tmp_path / "packed")


def test_with_moecache_it_loads_the_trunk_which_says_what_is_missing(
    model: Path, tmp_path: Path
) -> None:
    """As with `MoeCacheConfig`, which the configuration stands for."""
    packing.pack(model, tmp_path / "packed", format="int4")
    trunk = load_whole(quantized.QWEN3_MOE, tmp_path / "packed")
    with pytest.raises(MoeCacheError, match="needs a cache"):
        logits(trunk)
    with moecache.open(tmp_path / "packed") as runtime, attach(trunk, runtime):
        found = logits(trunk)
    loaded = load_in_slots(tmp_path / "packed", None, dtype=torch.float32)
    with loaded.moecache:
        assert torch.equal(logits(loaded), found)
