"""`pack --format bf16`: what was published quantized becomes the tensors that it was made of."""

import contextlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moecache import packing
from moecache.errors import ConfigError, FormatError
from moecache.packing import _plan
from moecache.stores import SafetensorsStore
from tests.helpers import quantized
from tests.helpers.packs import Tensor, library_tensors, tree, weight_map
from tests.helpers.quantized import Tensors, save_tensors, write_experts
from tests.test_quantized_stores import SCHEMES

LAST_EXPERT = "model.layers.1.mlp.experts.3.down_proj"


def plain(values: Tensors) -> dict[str, Tensor]:
    """Return tensors of bfloat16, as the safetensors library reads them, and a norm."""
    norm = {"model.norm.weight": np.ones(96)}
    return {
        name: ("BF16", array.shape, array.astype(ml_dtypes.bfloat16).tobytes())
        for name, array in (norm | values).items()
    }


def configure(directory: Path, **said: Any) -> None:
    """Put something into config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_that_was_quantized_has_the_values_of_its_definition(
    scheme: str, tmp_path: Path
) -> None:
    """Trunk and experts, under their own names, and nothing else; no file says otherwise."""
    _, values = write_experts(SCHEMES[scheme], tmp_path / "model")
    for name in ("quantize_config.json", "hf_quant_config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")

    report = packing.pack(tmp_path / "model", tmp_path / "packed", format="bf16")

    assert packing.verify(tmp_path / "packed") > 0
    assert library_tensors(tmp_path / "packed") == plain(values)
    assert weight_map(tmp_path / "packed").keys() == plain(values).keys()
    assert json.loads((tmp_path / "packed" / "config.json").read_text()) == {
        "num_experts_per_tok": 2
    }
    assert {path.name for path in (tmp_path / "packed").glob("*.json")} == {
        *("config.json", "tokenizer.json", "moecache-pack.json", "model.safetensors.index.json")
    }
    assert report.deviations == ()
    assert report.describe_deviations() == []
    with SafetensorsStore(tmp_path / "packed") as store:
        assert (store.quantization, store.format, store.trunk_matrices) == ("", "", {})
        assert {role.format for roles in store.layout.layers for role in roles} == {""}


def test_what_was_dequantized_is_quantized_again(tmp_path: Path) -> None:
    """As the values would be that the publisher's tensors mean."""
    _, values = write_experts(SCHEMES["fp8"], tmp_path / "model")
    packing.pack(tmp_path / "model", tmp_path / "plain", format="bf16")
    packing.pack(tmp_path / "plain", tmp_path / "packed", format="int4")
    (tmp_path / "same").mkdir()
    rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in values.items()}
    save_tensors(rounded, tmp_path / "same")
    packing.pack(tmp_path / "same", tmp_path / "wanted", format="int4")
    found, wanted = (library_tensors(tmp_path / name) for name in ("packed", "wanted"))
    assert {name: found[name] for name in wanted} == wanted


def test_only_what_is_quantized_is_changed(tmp_path: Path) -> None:
    """Publishers leave layers in other types; scales of activations go, biases stay."""
    tensors, values = write_experts(SCHEMES["modelopt"], tmp_path / "model")
    for name in [key for key in tensors if ".layers.0.mlp." in key]:
        del tensors[name]
    for name in [key for key in values if ".layers.0.mlp." in key]:
        tensors[name] = values[name].astype(np.float16)
    wanted = plain({k: v for k, v in values.items() if ".layers.0.mlp." not in k})
    beside = {
        f"{module}.input_scale": np.ones(1, np.float32)
        for module in (
            *(f"model.layers.1.mlp.experts.{e}.down_proj" for e in range(4)),
            "model.layers.1.self_attn.q_proj",
        )
    }
    kept: Tensors = {name: array for name, array in tensors.items() if ".layers.0.mlp." in name}
    kept["model.layers.1.self_attn.q_proj.bias"] = np.ones(64, np.float32)
    kept["model.layers.1.self_attn.k_scale"] = np.ones(1, np.float32)
    save_tensors(tensors | beside | kept, tmp_path / "model")

    packing.pack(tmp_path / "model", tmp_path / "packed", format="bf16")

    found = library_tensors(tmp_path / "packed")
    assert found.keys() == wanted.keys() | kept.keys()
    assert {name: found[name] for name in wanted} == wanted
    for name, array in kept.items():
        assert found[name][1:] == (array.shape, array.tobytes())


def test_experts_that_were_split_from_a_stack_are_transposed_alike(tmp_path: Path) -> None:
    """gpt-oss's, packed before: an expert's tensors have the model's [in, out]."""
    _, values = write_experts(SCHEMES["mxfp4"], tmp_path / "model")
    packing.pack(tmp_path / "model", tmp_path / "split")
    packing.pack(tmp_path / "split", tmp_path / "packed", format="bf16")
    apart = {name: array for name, array in values.items() if ".experts." not in name}
    for name in values.keys() - apart.keys():
        path, _, leaf = name.rpartition(".")
        apart |= {f"{path}.{expert}.{leaf}": one for expert, one in enumerate(values[name])}
    assert library_tensors(tmp_path / "packed") == plain(apart)


@pytest.mark.parametrize("level", ["text_config", "language_config"])
def test_the_configuration_of_a_part_says_nothing_more_either(level: str, tmp_path: Path) -> None:
    """Models that read images have it one level down."""
    write_experts(SCHEMES["int4"], tmp_path / "model")
    said = {"quantization_config": dict(SCHEMES["int4"].config), "kept": [1.5, None]}
    configure(tmp_path / "model", quantization_config=None, **{level: said})
    packing.pack(tmp_path / "model", tmp_path / "packed", format="bf16")
    assert json.loads((tmp_path / "packed" / "config.json").read_text()) == {
        "num_experts_per_tok": 2,
        level: {"kept": [1.5, None]},
    }


def test_a_matrix_of_the_trunk_may_lie_in_two_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made for each; what an interrupted run wrote stays."""
    write_experts(SCHEMES["fp8"], tmp_path / "model")
    whole = packing.pack(tmp_path / "model", tmp_path / "whole", format="bf16").path
    monkeypatch.setattr(_plan, "_TRUNK_UNIT_BYTES", 5000)

    def stop(done: int, total: int) -> None:
        if total - done < 9000:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        packing.pack(tmp_path / "model", tmp_path / "cut", format="bf16", progress=stop)
    assert packing.pack(tmp_path / "model", tmp_path / "cut", format="bf16").resumed_bytes > 0
    assert library_tensors(tmp_path / "cut") == library_tensors(whole)
    assert packing.verify(tmp_path / "cut") > 0


def test_what_config_json_says_otherwise_begins_anew(tmp_path: Path) -> None:
    """The same bytes mean something else in blocks of another size."""
    _, values = write_experts(quantized.fp8((64, 96)), tmp_path / "model")
    configure(tmp_path / "model", quantization_config=dict(quantized.fp8((64, 128)).config))
    seen = []

    def stop(done: int, total: int) -> None:
        seen.append(done)
        if done > total // 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        packing.pack(tmp_path / "model", tmp_path / "out", format="bf16", progress=stop)
    configure(tmp_path / "model", quantization_config=dict(quantized.fp8((64, 96)).config))
    report = packing.pack(tmp_path / "model", tmp_path / "out", format="bf16")
    assert report.resumed_bytes == 0
    assert library_tensors(tmp_path / "out") == plain(values)


def damage(scheme: str, directory: Path, suffix: str, value: float) -> None:
    """Write a checkpoint of which two numbers, of an expert and of the trunk, are damaged."""
    tensors, _ = write_experts(SCHEMES[scheme], directory)
    for name in (f"{LAST_EXPERT}{suffix}", f"model.layers.1.self_attn.q_proj{suffix}"):
        if name in tensors:
            tensors[name] = tensors[name].copy()
            tensors[name].reshape(-1)[0] = value
    save_tensors(tensors, directory)


@pytest.mark.parametrize(
    ("scheme", "suffix", "value", "reason"),
    [
        ("gptq_ordered", ".g_idx", 7, "g_idx goes from"),
        ("fp8", ".weight_scale_inv", np.nan, "scales are infinite or NaN"),
        ("mxfp8", ".weight_scale_inv", 255, "scales are infinite or NaN"),
        ("nvfp4", ".weight_global_scale", np.inf, "scales are infinite or NaN"),
        ("awq", ".scales", np.nan, "scales are infinite or NaN"),
        ("int4", ".weight_scale", 3e38, "largest code, 8, times 3.004e[+]38 is infinite"),
    ],
)
def test_damage_that_only_the_parts_show_names_the_tensor(
    scheme: str, suffix: str, value: float, reason: str, tmp_path: Path
) -> None:
    """Nothing of it becomes a checkpoint."""
    damage(scheme, tmp_path / "model", suffix, value)
    wanted = rf"layer 1 .*tensor '{LAST_EXPERT}.weight': .*{reason}"
    with pytest.raises(FormatError, match=wanted):
        packing.pack(tmp_path / "model", tmp_path / "out", format="bf16")
    assert not (tmp_path / "out").exists()


def test_a_matrix_of_the_trunk_that_is_damaged_is_named(tmp_path: Path) -> None:
    """As an expert's is."""
    tensors, _ = write_experts(SCHEMES["fp8"], tmp_path / "model")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[f"{name}_scale_inv"][0] = np.nan
    save_tensors(tensors, tmp_path / "model")
    with pytest.raises(FormatError, match=rf"part 0: tensor '{name}': .*infinite or NaN"):
        packing.pack(tmp_path / "model", tmp_path / "out", format="bf16")


def test_a_value_that_float32_has_may_be_infinite_in_bfloat16(tmp_path: Path) -> None:
    """A scale may be as large as float32 allows; the rest is as good as ever."""
    damage("fp8", tmp_path / "model", ".weight_scale_inv", 3.4e38 / 448)
    packing.pack(tmp_path / "model", tmp_path / "out", format="bf16")
    with SafetensorsStore(tmp_path / "out") as store:
        found = store.read_tensor(f"{LAST_EXPERT}.weight").astype(np.float32)
    assert np.isinf(found[:16]).any()
    assert np.isfinite(found[16:]).all()


def test_names_that_would_be_there_twice_are_refused(tmp_path: Path) -> None:
    """A weight beside its own codes."""
    tensors, _ = write_experts(SCHEMES["awq"], tmp_path / "model")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_tensors({**tensors, name: np.ones((64, 96), np.float32)}, tmp_path / "model")
    with pytest.raises(FormatError, match=r"q_proj.weight' has no meaning in awq"):
        packing.pack(tmp_path / "model", tmp_path / "out", format="bf16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("depth", [900, 5000])
def test_a_configuration_of_many_levels_is_written_or_refused(depth: int, tmp_path: Path) -> None:
    """How many Python reads and writes depends on its version."""
    write_experts(SCHEMES["fp8"], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    text = path.read_text().removesuffix("}")
    path.write_text(f'{text}, "deep": {"[" * depth}{"]" * depth}' + "}")
    with contextlib.suppress(ConfigError, FormatError):
        packing.pack(tmp_path / "model", tmp_path / "out", format="bf16")
        assert "deep" in json.loads((tmp_path / "out" / "config.json").read_text())


def test_packing_dequantized_is_the_same_whenever_made(tmp_path: Path) -> None:
    """Byte by byte."""
    write_experts(SCHEMES["nvfp4"], tmp_path / "model")
    for name in ("one", "two"):
        packing.pack(tmp_path / "model", tmp_path / name, format="bf16")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
