"""Checkpoints packed in a format: quantized, in the order that kernels want."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import moecache
from moecache import experts, kernels, packing
from moecache.cli import main
from moecache.errors import ConfigError, FormatError, StoreError
from moecache.formats import find_format
from moecache.packing._plan import EXPERTS_NAME
from moecache.slots import HostSlots
from moecache.stores import SafetensorsStore
from tests.helpers import formats as oracle
from tests.helpers import quantized
from tests.helpers.packs import library_tensors, tensor_entries, tree
from tests.helpers.quantized import SCHEMES, write_experts

HIDDEN, WIDTH, EXPERTS = 64, 32, 3
# What packs in these sizes, and its full name.
FORMATS = {
    "q8_0": "q8_0",
    "q4_0": "q4_0",
    "mxfp4": "mxfp4",
    "int4": "int4[1x32,bf16]",
    "int3[1x32,f16]": "int3[1x32,f16]",
    # Neither gate nor up has whole blocks: each for itself has others than both together.
    "fp8[48x32,f32]": "fp8[48x32,f32]",
    "fp8[1x*,bf16]": "fp8[1x*,bf16]",
    "fp8[1x32,e8m0]": "fp8[1x32,e8m0]",
    "nvfp4": "nvfp4",
}

KILL_WHEN_HALF = """
import os, signal, sys
from moecache import packing

def kill(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)

packing.pack(sys.argv[1], sys.argv[2], format=sys.argv[3], progress=kill)
"""


def _checkpoint(folder: Path, *, stacked: bool = False, dtype: str = "float32") -> Path:
    """Write two layers of experts; return the directory."""
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {"model.norm.weight": np.ones(3, np.float32)}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        shapes = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
        for name, shape in shapes.items():
            values = rng.standard_normal((EXPERTS, *shape)).astype(dtype) / 8
            if stacked:
                tensors[f"{path}.{name}"] = values
                tensors[f"{path}.{name}_bias"] = values[:, :, 0].copy()
                continue
            for expert, matrix in enumerate(values):
                parts = {name: matrix}
                if name == "gate_up_proj":
                    parts = {"gate_proj": matrix[:WIDTH], "up_proj": matrix[WIDTH:]}
                for part, array in parts.items():
                    tensors[f"{path}.{expert}.{part}.weight"] = array
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"num_experts_per_tok": 2}')
    return folder


@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_a_packed_expert_has_the_blocks_of_ggmls_quantiser(
    tmp_path: Path, name: str, stacked: bool
) -> None:
    """Read straight into its slot; biases and the trunk keep their bits."""
    model = _checkpoint(tmp_path / "model", stacked=stacked)

    packing.pack(model, tmp_path / "packed", format=name)

    assert packing.verify(tmp_path / "packed") > 0
    with SafetensorsStore(model) as source, SafetensorsStore(tmp_path / "packed") as packed:
        assert packed.format == name
        pool = HostSlots(packed.layout, 1)
        assert pool.max_buffers is None, "an expert is converted on its way"
        for layer in range(2):
            roles = {role.name: role for role in packed.layout.layers[layer]}
            for expert in range(EXPERTS):
                buffers = pool.buffers(0, layer)
                packed.read_into(layer, expert, buffers)
                pool.upload(0, layer, buffers)
                values = source.view(layer, expert)
                gate_up = values.get("gate_up")
                if gate_up is None:
                    gate_up = np.concatenate([values["gate"], values["up"]])
                wanted = {"gate_up": gate_up, "down": values["down"]}
                for role, array in pool.expert(0, layer).items():
                    if role not in wanted:
                        np.testing.assert_array_equal(array, values[role])
                        continue
                    assert roles[role].shape == wanted[role].shape
                    blocks = oracle.blocks_of(name, wanted[role])
                    found = kernels.values_in(array, roles[role])
                    np.testing.assert_array_equal(found, oracle.values_of(name, blocks))
        assert packed.read_tensor("model.norm.weight").tolist() == [1, 1, 1]


def _tiles(values: np.ndarray, name: str) -> np.ndarray:
    """Return the compute form of a matrix's blocks."""
    known = find_format(name)
    assert known.form is not None
    parts = [part.reshape(-1).view(np.uint8) for part in known.quantize(values).values()]
    out = np.empty(known.form.nbytes(*values.shape), np.uint8)
    kernels.tile(np.concatenate(parts), name, *values.shape, out)
    return out


@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_expert_is_its_matrices_quantized_each_for_itself(
    tmp_path: Path, name: str, stacked: bool
) -> None:
    """Tile by tile; file, config.json and store say the format, and the report how far it is."""
    full = FORMATS[name]
    model = _checkpoint(tmp_path / "model", stacked=stacked)

    report = packing.pack(model, tmp_path / "packed", format=name)

    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "moecache", "format": full}
    with SafetensorsStore(model) as source, SafetensorsStore(tmp_path / "packed") as packed:
        assert (packed.format, packed.quantization) == (full, "moecache")
        for layer in range(2):
            errors, values = [], []
            roles = {role.name: role for role in packed.layout.layers[layer]}
            for expert in range(EXPERTS):
                views, found = source.view(layer, expert), {}
                gate_up = views.get("gate_up")
                if gate_up is not None:
                    views |= {"gate": gate_up[:WIDTH], "up": gate_up[WIDTH:]}
                stored = {
                    role: np.empty(roles[role].array_shape, roles[role].dtype) for role in roles
                }
                packed.read_into(layer, expert, stored)
                halves = stored["gate_up"].reshape(2, -1)
                found = {"gate": halves[0], "up": halves[1], "down": stored["down"]}
                for matrix, tiles in found.items():
                    np.testing.assert_array_equal(tiles, _tiles(views[matrix], full))
                    parts = find_format(full).quantize(views[matrix])
                    errors.append(np.abs(find_format(full).dequantize(parts) - views[matrix]))
                    values.append(np.abs(views[matrix]))
            one, two = (np.concatenate([a.ravel() for a in every]) for every in (errors, values))
            deviation = report.deviations[layer]
            assert deviation is not None
            assert deviation.mean == pytest.approx(one.mean() / two.mean(), rel=1e-5)
            assert deviation.largest == pytest.approx(one.max() / two.max())
            line = f"layer {layer}: mean {deviation.mean:.3%}, largest {deviation.largest:.3%}"
            assert line in report.describe_deviations()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4[modelopt]"])
def test_tiles_that_begin_with_a_factor_are_of_any_width(name: str, tmp_path: Path) -> None:
    """Their bytes are no multiple of the groups of columns, such as 6 of 96 or 128 of 2048."""
    write_experts(SCHEMES["int4"], tmp_path / "published", num_layers=1, num_experts=2)
    plain = packing.pack(tmp_path / "published", tmp_path / "plain", format="bf16").path
    with SafetensorsStore(packing.pack(plain, tmp_path / "packed", format=name).path) as packed:
        (roles,) = packed.layout.layers
        assert {role.name: role.shape for role in roles} == {"gate_up": (128, 96), "down": (96, 64)}
        stored = {role.name: np.empty(role.array_shape, role.dtype) for role in roles}
        packed.read_into(0, 1, stored)
        with SafetensorsStore(plain) as source:
            views = source.view(0, 1)
        wanted = {"gate_up": np.split(views["gate_up"], 2), "down": [views["down"]]}
        for role in roles:
            tiles = np.concatenate([_tiles(matrix, name) for matrix in wanted[role.name]])
            np.testing.assert_array_equal(stored[role.name].reshape(-1), tiles)


def test_short_names_are_those_of_what_publishers_use(tmp_path: Path) -> None:
    """FP8 has blocks of 128 x 128; the source may have any width of float."""
    rng = np.random.default_rng(3)
    (tmp_path / "model").mkdir()
    matrices = {"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}
    tensors = {
        f"layers.0.mlp.experts.0.{name}.weight": rng.standard_normal(shape).astype(np.float16)
        for name, shape in matrices.items()
    }
    save_file(tensors, tmp_path / "model" / "model.safetensors")

    packing.pack(tmp_path / "model", tmp_path / "packed", format="fp8")

    assert not (tmp_path / "packed" / "config.json").exists()
    found = library_tensors(tmp_path / "packed")
    for name, values in tensors.items():
        dtype, shape, raw = found[name]
        assert (dtype, shape[:2]) == ("U8", (len(values) // 16, values.shape[1] // 128))
        np.testing.assert_array_equal(
            np.frombuffer(raw, np.uint8), _tiles(values, "fp8[128x128,f32]")
        )


def test_a_kill_while_quantizing_loses_nothing(tmp_path: Path) -> None:
    """Neither files nor what an earlier run found out of errors."""
    model = _checkpoint(tmp_path / "model", dtype="float16")
    whole = packing.pack(model, tmp_path / "whole", format="int4")
    done = subprocess.run(
        [sys.executable, "-c", KILL_WHEN_HALF, model, tmp_path / "out", "int4"],
        check=False,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL

    report = packing.pack(model, tmp_path / "out", format="int4")

    assert report.resumed_bytes > 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert report.deviations == whole.deviations


@pytest.mark.parametrize("figures", [None, "x", {"error_sum": []}, {"error_sum": 1.0}, {"x": 1.0}])
def test_errors_that_an_earlier_run_did_not_note_are_not_known(
    tmp_path: Path, figures: object
) -> None:
    """The report says so of the layer; figures that are none make a damaged journal."""
    model = _checkpoint(tmp_path / "model")
    _interrupted(model, tmp_path / "out", "q8_0")
    journal = tmp_path / "out.partial" / "moecache-pack.jsonl"
    source, header, *layers = map(json.loads, journal.read_text().splitlines())
    for layer in layers:
        del layer["deviation"]
        layer |= {} if figures is None else {"deviation": figures}
        del layer["check"]
        text = json.dumps(layer).encode()
        layer["check"] = hashlib.blake2b(text, digest_size=8).hexdigest()
    lines = [source, header, *layers]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))

    report = packing.pack(model, tmp_path / "out", format="q8_0")

    known = [deviation is not None for deviation in report.deviations]
    assert known == [figures is not None, True]
    said = "layer 0: not known, packed by an earlier run" in report.describe_deviations()
    assert said is (figures is None)


def test_what_is_packed_in_a_format_is_computed_as_it_lies(tmp_path: Path) -> None:
    """The same bits at every number of slots and in every way to read."""
    packing.pack(_checkpoint(tmp_path / "model"), tmp_path / "packed", format="q4_0")
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((3, HIDDEN)).astype(np.float32)
    ids = np.array([[0, 1], [2, 0], [1, 2]])
    weights = rng.random((3, 2)).astype(np.float32)
    found = []
    for slots, read in ((6, "mmap"), (1, "buffered"), (2, "mmap")):
        with moecache.open(tmp_path / "packed", slots=slots, read=read) as runtime:
            out = [
                experts.feed_forward(runtime, 1, hidden, ids, weights, compute=compute)
                for compute in ("fast", "numpy")
            ]
            np.testing.assert_allclose(*out, rtol=1e-3, atol=1e-4)
            found.append(out[0])
    assert all((one == found[0]).all() for one in found)


@pytest.mark.parametrize("name", ["q4_0", "fp8[32x32,f32]", "nvfp4"])
def test_what_is_stored_transposed_is_packed_as_rows(tmp_path: Path, name: str) -> None:
    """The same bytes as of the same matrices that are not."""
    model, turned = _checkpoint(tmp_path / "model", stacked=True), tmp_path / "turned"
    shutil.copytree(model, turned)
    tensors = load_file(model / "model.safetensors")
    for tensor in [one for one in tensors if one.endswith("_proj")]:
        tensors[tensor] = np.ascontiguousarray(tensors[tensor].transpose(0, 2, 1))
    save_file(tensors, turned / "model.safetensors")

    for path in (model, turned):
        packing.pack(path, tmp_path / f"{path.name}_packed", format=name)

    found = [(tmp_path / f"{one}_packed" / EXPERTS_NAME) for one in ("model", "turned")]
    assert found[0].read_bytes() == found[1].read_bytes()


def test_a_pack_in_a_format_is_the_same_whenever_made_and_packed_again(tmp_path: Path) -> None:
    """The name of the format goes along; an unfinished pack in another one is begun anew."""
    model = _checkpoint(tmp_path / "model", dtype="float16")
    packing.pack(model, tmp_path / "one", format="q8_0")
    _interrupted(model, tmp_path / "two", "q4_0")
    packing.pack(model, tmp_path / "two", format="q8_0")
    packing.pack(tmp_path / "one", tmp_path / "again")

    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    with SafetensorsStore(tmp_path / "one") as one, SafetensorsStore(tmp_path / "again") as again:
        assert again.format == "q8_0"
        assert again.layout == one.layout
    assert library_tensors(tmp_path / "again") == library_tensors(tmp_path / "one")


def _interrupted(model: Path, out: Path, name: str) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        packing.pack(model, out, format=name, progress=stop)


def test_what_cannot_be_quantized_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """By what is wrong with it."""
    model = _checkpoint(tmp_path / "model")
    packing.pack(model, tmp_path / "packed", format="q4_0")
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    stack = {
        "l.experts.gate_up_proj": np.zeros((2, 16, 64), np.float32),
        "l.experts.down_proj": np.zeros((2, 64, 8), np.float32),
    }
    save_file(stack, narrow / "model.safetensors")
    quantized.write_experts(quantized.fp8(), tmp_path / "fp8")
    down = r"down of model.layers.0.mlp is \[64, 32\]"
    for path, name, message in (
        (model, "q9", r"'q9' cannot be packed; q8_0, q4_0, mxfp4, fp8, int4, bf16 can"),
        (model, "gptq4[32,f16]", r"'gptq4\[32,f16\]' cannot be packed"),
        (model, "int4[1x48,bf16]", r"'int4\[1x48,bf16\]' cannot be packed"),
        (model, 4, "format 4 cannot be packed"),
        (model, "fp8", r"gate or up of model.layers.0.mlp is \[32, 64\]; .*columns of 128; choose"),
        (model, "int4[1x64,bf16]", rf"{down}; in int4\[1x64,bf16\] rows .*of 16 and columns of 64"),
        (tmp_path / "packed", "q8_0", "in q4_0 already; pack the original"),
        (tmp_path / "packed", "bf16", "were packed in q4_0; use the original"),
        (
            tmp_path / "fp8",
            "int4",
            r"in fp8\[16x32,f32\] already; pack the original, or --format bf16",
        ),
        (model, "bf16", "no weight is quantized, so there is nothing to dequantize"),
        (narrow, "q8_0", r"gate or up of l is \[8, 64\]; .*a multiple of 16"),
    ):
        with pytest.raises(ConfigError, match=message):
            packing.pack(path, tmp_path / "out", format=name)
        with pytest.raises(ConfigError, match=message):
            packing.plan(path, tmp_path / "out", format=name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize(
    ("stacked", "named"),
    [(False, r"experts\.2\.gate_proj\.weight"), (True, r"experts\.gate_up_proj \[2\]")],
)
def test_values_that_a_format_has_not_are_named(
    tmp_path: Path, stacked: bool, named: str, value: float
) -> None:
    """With their layer and their tensor; what is not finished stays so."""
    model = _checkpoint(tmp_path / "model", stacked=stacked)
    path = "model.layers.1.mlp.experts"
    name = f"{path}.gate_up_proj" if stacked else f"{path}.2.gate_proj.weight"
    entry = tensor_entries(model / "model.safetensors")[name]
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(entry.offset + (2 * entry.nbytes // EXPERTS if stacked else 0))
        file.write(np.float32(value).tobytes())

    for known in ("q8_0", "mxfp4"):
        with pytest.raises(ConfigError, match=rf"layer 1 .*mlp\.{named}.*{known} .*no NaN"):
            packing.pack(model, tmp_path / "out", format=known)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("q5_9", "'q5_9' is not supported"),
        ("q8_0", "is not q8_0: that takes"),
        ("fp8[1x*,f32]", r"is not fp8\[1x\*,f32\]: that takes 0"),
        ("gptq4[32,f16,g_idx]", "has no compute form"),
        ("f32", "is the format of a dtype"),
    ],
)
def test_a_file_that_says_another_format_is_damaged(
    tmp_path: Path, said: str, message: str
) -> None:
    """The stack's size tells."""
    packing.pack(_checkpoint(tmp_path / "model"), tmp_path / "packed", format="q4_0")
    file = tmp_path / "packed" / "experts.safetensors"
    raw = file.read_bytes()
    place = raw.index(b'"moecache.format":"q4_0"')
    file.write_bytes(raw[:place] + raw[place:].replace(b'"q4_0"', f'"{said}"'.encode(), 1))
    if len(said) != 4:
        # The header has another length.
        length = int.from_bytes(raw[:8], "little") + len(said) - 4
        file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])

    with pytest.raises((FormatError, StoreError), match=message):
        SafetensorsStore(tmp_path / "packed").close()


def test_the_command_packs_in_a_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says what it costs, layer by layer; `inspect` names it."""
    model = _checkpoint(tmp_path / "model")

    assert main(["pack", str(model), str(tmp_path / "packed"), "--format", "q4_0"]) == 0
    text = capsys.readouterr().out
    assert "mean |error| / mean |value|" in text
    assert "layer 1: mean " in text
    assert main(["inspect", str(tmp_path / "packed")]) == 0

    assert "q4_0" in capsys.readouterr().out
    assert main(["pack", "--verify", str(tmp_path / "packed"), "--format", "q8_0"]) == 2
    assert "--format is for packing" in capsys.readouterr().err
