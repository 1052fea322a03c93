"""Checkpoints packed in a format: quantized, in the order that kernels want."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import moecache
from moecache import experts, kernels, packing
from moecache.cli import main
from moecache.errors import ConfigError, FormatError, StoreError
from moecache.slots import HostSlots
from moecache.stores import SafetensorsStore
from tests.helpers import formats as oracle
from tests.helpers.packs import library_tensors, tree

HIDDEN, WIDTH, EXPERTS = 64, 32, 3


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
    transposed = tmp_path / "transposed"
    transposed.mkdir()
    stack = {
        "l.experts.gate_up_proj": np.zeros((2, 64, 96), np.float32),
        "l.experts.down_proj": np.zeros((2, 48, 64), np.float32),
    }
    save_file(stack, transposed / "model.safetensors")
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    stack = {
        "l.experts.gate_up_proj": np.zeros((2, 16, 64), np.float32),
        "l.experts.down_proj": np.zeros((2, 64, 8), np.float32),
    }
    save_file(stack, narrow / "model.safetensors")
    for path, name, message in (
        (model, "q9", "'q9' cannot be packed; q8_0 and q4_0 can"),
        (tmp_path / "packed", "q8_0", "in q4_0 already; pack the original"),
        (transposed, "q8_0", "stored transposed cannot be packed"),
        (narrow, "q8_0", "a width of 8 and a hidden size of 64 are no multiples of 16"),
    ):
        with pytest.raises(ConfigError, match=message):
            packing.pack(path, tmp_path / "out", format=name)
        with pytest.raises(ConfigError, match=message):
            packing.plan(path, tmp_path / "out", format=name)
    assert not (tmp_path / "out").exists()


def test_values_that_a_format_has_not_are_named(tmp_path: Path) -> None:
    """With their layer; what is finished stays unfinished."""
    model = _checkpoint(tmp_path / "model", stacked=True)
    with SafetensorsStore(model) as store:
        _, offset, _ = store.runs(1, 2)[0]
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(offset)
        file.write(np.float32(np.nan).tobytes())

    with pytest.raises(ConfigError, match=r"layer 1 .*q8_0 has no infinity and no NaN"):
        packing.pack(model, tmp_path / "out", format="q8_0")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("q5_9", "'q5_9' is not supported"),
        ("q8_0", "is not q8_0: that takes"),
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
    """And `inspect` names it."""
    model = _checkpoint(tmp_path / "model")

    assert main(["pack", str(model), str(tmp_path / "packed"), "--format", "q4_0"]) == 0
    assert main(["inspect", str(tmp_path / "packed")]) == 0

    assert "q4_0" in capsys.readouterr().out
    assert main(["pack", "--verify", str(tmp_path / "packed"), "--format", "q8_0"]) == 2
    assert "--format is for packing" in capsys.readouterr().err
