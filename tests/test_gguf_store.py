"""GgufStore: experts and trunk of GGUF files, as the `gguf` package reads them."""

import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import moecache
from moecache import cli, experts
from moecache.errors import ConfigError, ExpertNotFoundError, FormatError, StoreError
from moecache.kernels import values_in
from moecache.stores import FileStore, GgufStore, SafetensorsStore, open_store
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_files import (
    ARCHITECTURE,
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    WIDE,
    WIDTH,
    GgufFile,
    readable_types,
    u32,
    write_gguf,
    write_raw,
)

gguf = pytest.importorskip("gguf")

TYPES = readable_types()
# Each type once as gate and up, once as down, with another beside it.
MIXED = [(kind, kind, other) for kind, other in zip(TYPES, TYPES[1:] + TYPES[:1], strict=True)]


@pytest.fixture(scope="module", name="mixed")
def _mixed(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    """Return a model with all types, in three parts."""
    return write_gguf(tmp_path_factory.mktemp("mixed") / "m.gguf", MIXED, num_parts=3, **WIDE)


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> GgufFile:
    return write_gguf(tmp_path / "small.gguf")


def empty_parts(store: moecache.ExpertStore, layer: int) -> dict[str, np.ndarray]:
    """Return arrays for an expert."""
    roles = store.layout.layers[layer]
    return {role.name: np.empty(role.array_shape, role.dtype) for role in roles}


def read_values(store: moecache.ExpertStore, layer: int, expert: int) -> dict[str, np.ndarray]:
    """Return an expert's values by role, float32."""
    parts = empty_parts(store, layer)
    store.read_into(layer, expert, parts)
    roles = store.layout.layers[layer]
    return {
        role.name: values_in(parts[role.name], role, stored=True, dtype=np.float32)
        for role in roles
    }


def expected(values: dict[str, np.ndarray], layer: int, expert: int) -> dict[str, np.ndarray]:
    """Return what `read_values` should return."""
    start, found = f"blk.{layer + 1}.ffn", {}
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        stacks = {
            piece: values[name][expert]
            for piece in ("gate", "up", "gate_up", "down")
            if (name := f"{start}_{piece}_exps.{kind}") in values
        } or {
            piece: values[name]
            for piece in ("gate", "up", "down")
            if (name := f"{start}_{piece}.{expert}.{kind}") in values
        }
        if "gate" in stacks:
            stacks["gate_up"] = np.concatenate([stacks.pop("gate"), stacks.pop("up")])
        found.update({piece + suffix: array for piece, array in stacks.items()})
    return found


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Compare experts bit for bit."""
    assert found.keys() == wanted.keys()
    for role, array in wanted.items():
        np.testing.assert_array_equal(found[role], array)


def test_experts_of_every_type_have_the_values_of_gguf(mixed: GgufFile) -> None:
    """Types mixed within layers and between them, in parts."""
    with open_store(mixed.path) as store:
        assert isinstance(store, GgufStore)
        assert isinstance(store, FileStore)
        assert store.layout.layer_names == tuple(f"blk.{n + 1}" for n in range(len(MIXED)))
        for layer, expert in np.ndindex(len(MIXED), NUM_EXPERTS):
            assert_same(read_values(store, layer, expert), expected(mixed.values, layer, expert))


def test_bytes_are_those_of_ggufs_reader(mixed: GgufFile) -> None:
    """Of experts, by every way to read them, and of the trunk."""
    parts = sorted(mixed.path.parent.iterdir())
    tensors = {t.name: t for path in parts for t in gguf.GGUFReader(path).tensors}
    with open_store(mixed.path) as store, open_store(mixed.path, mapped=True) as mapped:
        for layer in range(len(MIXED)):
            into, copied = empty_parts(store, layer), empty_parts(store, layer)
            store.read_into(layer, 1, into)
            mapped.read_into(layer, 1, copied)
            start = f"blk.{layer + 1}.ffn"
            gate, up, down = (
                tensors[f"{start}_{piece}_exps.weight"].data[1].tobytes()
                for piece in ("gate", "up", "down")
            )
            views = store.view(layer, 1)
            for found in (into, copied):
                assert found["gate_up"].tobytes() == gate + up
                assert found["down"].tobytes() == down
            assert b"".join(view.tobytes() for view in views.values()) == gate + up + down
        for name in store.trunk_matrices:
            assert store.read_parts(name).tobytes() == tensors[name].data.tobytes()


@pytest.mark.parametrize(
    ("gate", "up"), [("Q4_K", "Q5_K"), ("Q8_0", "F16"), ("BF16", "Q6_K"), ("IQ2_S", "Q4_0")]
)
def test_gate_and_up_may_be_of_two_types(gate: str, up: str, tmp_path: Path) -> None:
    """As quantisations that treat each tensor for itself have them."""
    layers = [(gate, up, "Q8_0"), ("Q8_0", "Q8_0", "Q4_0")]
    model = write_gguf(tmp_path / "m.gguf", layers, **WIDE)
    with open_store(model.path) as store:
        assert store.layout.layers[0][0].format == f"{gate}+{up}".lower()
        for layer, expert in np.ndindex(2, NUM_EXPERTS):
            assert_same(read_values(store, layer, expert), expected(model.values, layer, expert))
    with moecache.open(model.path, slots=2, prefetch="off") as runtime:
        for wave in runtime.waves(0, np.array([[1]])):
            held, roles = runtime.expert(int(wave.slots[0]), 0), runtime.layout.layers[0]
            assert_same(
                {role.name: values_in(held[role.name], role) for role in roles},
                expected(model.values, 0, 1),
            )


def test_an_expert_is_three_ranges(small: GgufFile) -> None:
    """Far apart: its gate, its up, its down."""
    with open_store(small.path) as store:
        runs = store.runs(1, 2)
        spans = [span for _, _, part in runs for span in part]
        half = store.layout.layers[1][0].nbytes // 2
        wanted = [("gate_up", 0, half), ("gate_up", half, 2 * half), ("down", 0, half)]
        assert spans == wanted
        assert len(runs) == 3


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
@pytest.mark.parametrize(
    ("form", "biased"), [("fused", False), ("single", False), ("stacked", True)]
)
def test_every_form_of_experts_is_read(kind: str, form: str, biased: bool, tmp_path: Path) -> None:
    """Gate and up in one tensor, each expert by itself, with biases."""
    layers = [(kind, kind, "Q8_0")]
    model = write_gguf(tmp_path / "m.gguf", layers, form=form, biased=biased)
    with open_store(model.path) as store:
        names = ("gate_up", "down", "gate_up_bias", "down_bias")
        assert store.layout.role_names == names[: 4 if biased else 2]
        gate_up = store.layout.layers[0][0]
        assert gate_up.shape == (2 * WIDTH, HIDDEN)
        assert gate_up.matrices == (1 if form == "fused" or kind == "F16" else 2)
        for expert in range(NUM_EXPERTS):
            assert_same(read_values(store, 0, expert), expected(model.values, 0, expert))
        name = "blk.1.ffn_down"
        wanted = f"{name}.0.weight" if form == "single" else f"{name}_exps.weight"
        assert store.sources(0)["down", 0] == wanted


def test_one_expert_is_a_stack_of_one(tmp_path: Path) -> None:
    """Though ggml leaves its size of 1 out."""
    model = write_gguf(
        tmp_path / "m.gguf", num_experts=1, metadata={f"{ARCHITECTURE}.expert_used_count": 1}
    )
    squeezed = {
        name: array.squeeze(0) if "_exps" in name else array for name, array in model.values.items()
    }
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", ARCHITECTURE)
    for name, array in squeezed.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_store(tmp_path / "one.gguf") as store:
        assert store.layout.num_experts == 1
        assert_same(read_values(store, 1, 0), expected(model.values, 1, 0))


def test_the_trunk_is_what_is_left(mixed: GgufFile) -> None:
    """Router, shared experts and the rest: quantized matrices, and values of any tensor."""
    with open_store(mixed.path) as store:
        trunk = {name for name in mixed.values if "_exps" not in name}
        quantized = {
            name for name in trunk if mixed.values[name].ndim == 2 and "gate_inp" not in name
        }
        assert set(store.trunk_matrices) == quantized
        assert set(store.tensor_names) == set(mixed.values)
        for name, wanted in mixed.values.items():
            found = store.read_tensor(name)
            np.testing.assert_array_equal(found.astype(np.float32), wanted)
            if name in quantized:
                rounded = wanted.astype(ml_dtypes.bfloat16)
                np.testing.assert_array_equal(store.read_matrix(name), wanted)
                np.testing.assert_array_equal(store.read_matrix(name, rounded.dtype), rounded)
        stored = [one for file in store.files for one in gguf.GGUFReader(file.path).tensors]
        assert store.trunk_bytes == sum(one.n_bytes for one in stored if one.name in trunk)
        with pytest.raises(ExpertNotFoundError, match="there is no tensor 'blk'"):
            store.read_tensor("blk")


def test_what_the_file_says_of_itself_is_read(small: GgufFile) -> None:
    """Experts per token, file type, and lists that are made when they are asked for."""
    with open_store(small.path) as store, open_store(small.path, top_k=1, layers=["blk.2"]) as one:
        assert isinstance(store, GgufStore)
        assert (store.layout.top_k, store.layout.num_experts) == (TOP_K, NUM_EXPERTS)
        assert (store.architecture, store.file_type, store.quantization) == (
            ARCHITECTURE,
            "Q4_K_M",
            "Q4_K_M",
        )
        assert store.config["model_type"] == ARCHITECTURE
        assert store.config["num_hidden_layers"] == 3
        assert store.metadata["tokenizer.ggml.tokens"][1] == "token 1 \u00e9"
        assert store.metadata["tokenizer.ggml.scores"][:3] == [0, 0.5, 1]
        reader = gguf.GGUFReader(small.path)
        wanted = {
            key: field.contents() for key, field in reader.fields.items() if "GGUF." not in key
        }
        assert dict(store.metadata) == wanted
        assert one.layout.layer_names == ("blk.2",)
        assert one.layout.top_k == 1


def test_a_file_of_numbers_is_not_quantized(tmp_path: Path) -> None:
    """Its experts are arrays of their type."""
    model = write_gguf(tmp_path / "m.gguf", [("F32", "F32", "BF16")], trunk="F16")
    with open_store(model.path) as store:
        assert store.quantization == ""
        assert store.trunk_matrices == {}
        assert [role.dtype for role in store.layout.layers[0]] == [np.float32, ml_dtypes.bfloat16]
        assert set(store.view(0, 0)) == {"gate", "up", "down"}


@pytest.mark.parametrize("compute", ["numpy", "fast"])
def test_a_step_computes_with_a_ggufs_experts(compute: str, small: GgufFile) -> None:
    """As a plain product does with the values that gguf gives the same bytes."""
    rng, ids = np.random.default_rng(0), np.array([[0, 2], [2, 1]])
    hidden = rng.standard_normal((2, HIDDEN)).astype(np.float32)
    weights = np.full((2, TOP_K), 0.5, np.float32)
    with moecache.open(small.path, slots=2) as runtime:
        for layer in range(2):
            wanted = np.zeros_like(hidden)
            for token, expert in np.ndindex(2, TOP_K):
                parts = expected(small.values, layer, ids[token, expert])
                wanted[token] += experts.gated_rows(hidden[token][None], parts)[0] / 2
            out = experts.feed_forward(runtime, layer, hidden, ids, weights, compute=compute)
            np.testing.assert_allclose(out, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())


def test_a_directory_is_that_of_one_model(tmp_path: Path) -> None:
    """Of a split one any part will do; several models are listed; safetensors come first."""
    directory = tmp_path / "models"
    directory.mkdir()
    model = write_gguf(directory / "m.gguf", num_parts=3)
    (directory / "mmproj-F16.gguf").write_bytes(b"no model of text")
    parts = sorted(directory.glob("m-*.gguf"))
    for path in (directory, *parts):
        with open_store(path) as store:
            assert set(store.tensor_names) == set(model.values)
    write_gguf(directory / "other.gguf")
    with pytest.raises(ConfigError, match=r"several models; .*m-00001-of-00003\.gguf, other\.gguf"):
        open_store(directory)
    write_checkpoint(directory, num_layers=1, num_experts=3)
    with open_store(directory) as store:
        assert isinstance(store, SafetensorsStore)
    with pytest.raises(FormatError, match=r"only \.safetensors files, \.gguf files"):
        open_store(directory / "config.json")


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """Missing, in another's place, alone, of another model, with too few tensors."""
    first, second, third = (tmp_path / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3))
    write_gguf(tmp_path / "m.gguf", num_parts=3)
    whole = second.read_bytes()
    second.unlink()
    with pytest.raises(FormatError, match=r"part 'm-00002-of-00003\.gguf' is missing"):
        open_store(third)
    second.write_bytes(third.read_bytes())
    with pytest.raises(FormatError, match="part 3 of 3, but is part 2 of 3 by its name"):
        open_store(tmp_path)
    first.unlink()
    second.write_bytes(whole)
    second.rename(tmp_path / "alone.gguf")
    with pytest.raises(FormatError, match="part 2 of 3, but is part 1 of 1 by its name"):
        open_store(tmp_path / "alone.gguf")
    count = ("split.count", 2, struct.pack("<H", 2))
    for number, name, total in ((0, "one", 2), (1, "another", 2)):
        said = [("split.no", 2, struct.pack("<H", number)), ("general.name", 8, name)]
        said.append(u32("split.tensors.count", total))
        path = tmp_path / f"n-{number + 1:05}-of-00002.gguf"
        write_raw(path, [count, *said], [(f"w.{number}", [1], 0, 0)], bytes(4))
    with pytest.raises(FormatError, match=r"general\.name is 'another', .*parts of different mod"):
        open_store(tmp_path / "n-00001-of-00002.gguf")
    said = [count, said[0], u32("split.tensors.count", 5)]
    write_raw(path, said, [("w.1", [1], 0, 0)], bytes(4))
    with open_store(path):
        pass


@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        ({"expert_count": 4}, None, r"qwen3moe\.expert_count is 4, but layers have 3 experts"),
        ({"expert_used_count": 5}, None, "top-5 of layers that have 3 experts is impossible"),
        ({}, [("F32", "F16", "Q8_0")], "do not fit together"),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    changes: dict[str, Any], layers: Any, message: str, tmp_path: Path
) -> None:
    """The message names layer, tensors and figures."""
    more = {f"{ARCHITECTURE}.{key}": value for key, value in changes.items()}
    model = write_gguf(tmp_path / "m.gguf", layers or [("Q8_0",) * 3], metadata=more)
    with pytest.raises(FormatError, match=message):
        open_store(model.path)


def test_a_type_without_a_format_is_refused_by_name(tmp_path: Path) -> None:
    """When it is an expert's; a trunk's when it is asked for."""
    model = write_gguf(tmp_path / "a.gguf", [("TQ1_0", "TQ1_0", "Q8_0")], **WIDE)
    with pytest.raises(ConfigError, match=r"blk\.1\.ffn_gate_exps\.weight.*'tq1_0' is not supp"):
        open_store(model.path)
    model = write_gguf(tmp_path / "b.gguf", trunk="TQ1_0", **WIDE)
    with open_store(model.path) as store:
        for use in (store.read_tensor, store.read_matrix):
            with pytest.raises(ConfigError, match=r"token_embd.*'tq1_0' is not supported"):
                use("token_embd.weight")


def test_a_file_without_experts_is_opened(tmp_path: Path) -> None:
    """As a dense checkpoint is: nothing runs with it."""
    model = write_gguf(tmp_path / "m.gguf", [])
    with open_store(model.path) as store:
        assert store.layout.total_experts == 0
    with pytest.raises(ConfigError, match="there are no experts; is it a mixture-of-experts"):
        moecache.open(model.path)


def test_a_file_that_is_replaced_or_cut_is_a_store_error(small: GgufFile) -> None:
    """What was opened stays readable under another name; no read goes beyond a cut."""
    with open_store(small.path) as store:
        copy = small.path.with_name("copy.gguf")
        copy.write_bytes(small.path.read_bytes())
        small.path.unlink()
        copy.rename(small.path)
        assert_same(read_values(store, 1, 2), expected(small.values, 1, 2))
    with open_store(small.path) as store:
        _, offset, _ = store.runs(1, 2)[1]
        with small.path.open("r+b") as file:
            file.truncate(offset + 100)
        assert_same(read_values(store, 0, 1), expected(small.values, 0, 1))
        with pytest.raises(StoreError, match=r"small\.gguf: expert 2 of layer 1 needs .* has only"):
            read_values(store, 1, 2)
        with pytest.raises(StoreError, match="cannot be mapped"):
            store.view(1, 2)


def test_commands_take_a_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`inspect` says of what types it is, layer by layer; `warm` brings its experts in."""
    layers = [("Q4_0", "Q4_0", kind) for kind in ("Q8_0", "Q4_0", "Q4_0", "Q8_0", "Q4_0")]
    model = write_gguf(tmp_path / "m.gguf", layers, num_parts=2)
    for path in (model.path, tmp_path):
        assert cli.main(["inspect", str(path)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        for part in (
            f"{path} {ARCHITECTURE} ",
            "5 MoE layers x 3 experts, top-2",
            "quantized with Q4_K_M; experts: gate_up q4_0, down q4_0 (3 layers) and q8_0 (2",
            "layers); trunk: 7 matrices in q8_0",
            "0, 3 blk.1 ...",
            "1-2, 4 blk.2 ...",
        ):
            assert part in shown
    assert cli.main(["warm", str(model.path), "--status", "--layers", "1,4"]) == 0
    assert "layer 4" in capsys.readouterr().out
    assert cli.main(["warm", str(tmp_path), "--experts-only"]) == 0


def test_the_status_of_several_models_is_that_of_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory of GGUF files is no checkpoint, but has files all the same."""
    for name in ("one", "other"):
        write_gguf(tmp_path / f"{name}.gguf")
    assert cli.main(["warm", str(tmp_path), "--status"]) == 0
    shown = capsys.readouterr().out
    assert "one.gguf" in shown
    assert "other.gguf" in shown
    assert cli.main(["warm", str(tmp_path), "--experts-only"]) == 2
    assert "give the path of one of them" in capsys.readouterr().err
