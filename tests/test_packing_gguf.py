"""`pack` of GGUF files: experts side by side, in the types, with the names and values they had."""

from pathlib import Path

import numpy as np
import pytest

from moecache import cli, packing
from moecache.errors import ConfigError
from moecache.stores import GgufStore, open_store
from tests.helpers.checkpoints import same_parts
from tests.helpers.gguf_files import ARCHITECTURE, NUM_EXPERTS, GgufFile, write_gguf

gguf = pytest.importorskip("gguf")

LAYERS = [("Q8_0", "Q8_0", "Q4_0"), ("Q4_0", "Q4_0", "Q8_0"), ("F16", "F16", "BF16")]


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> GgufFile:
    return write_gguf(tmp_path / "m.gguf", LAYERS)


def read_expert(store: GgufStore, layer: int, expert: int) -> dict[str, np.ndarray]:
    """Return an expert's bytes by role."""
    roles = store.layout.layers[layer]
    parts = {role.name: np.empty(role.nbytes, np.uint8) for role in roles}
    store.read_into(layer, expert, parts)
    return parts


@pytest.mark.parametrize(
    ("form", "biased", "num_parts"),
    [("stacked", False, 1), ("stacked", True, 3), ("fused", False, 2), ("single", False, 1)],
)
def test_an_expert_is_one_range_with_the_same_bytes(
    form: str, biased: bool, num_parts: int, tmp_path: Path
) -> None:
    """At a multiple of 4 KiB; trunk and metadata are as they were, too."""
    model = write_gguf(tmp_path / "m.gguf", LAYERS, form=form, biased=biased, num_parts=num_parts)
    packing.pack(model.path, tmp_path / "out")
    packing.verify(tmp_path / "out")
    with open_store(model.path) as store, open_store(tmp_path / "out") as packed:
        assert isinstance(store, GgufStore)
        assert isinstance(packed, GgufStore)
        assert packed.layout == store.layout
        # What a model is made by knows stacks alone.
        assert packed.tensor_shapes == store.tensor_shapes
        for layer, expert in np.ndindex(len(LAYERS), NUM_EXPERTS):
            one, two = (read_expert(each, layer, expert) for each in (store, packed))
            assert same_parts(one, two)
            ((_, offset, _),) = packed.runs(layer, expert)
            assert offset % packing.ALIGNMENT == 0
        trunk = [name for name in packed.tensor_names if name in model.values]
        assert len(trunk) == 3 + 3 * len(LAYERS) + (3 * 3 * NUM_EXPERTS if form == "single" else 0)
        for name in trunk:
            assert np.array_equal(packed.read_tensor(name), store.read_tensor(name))
        ours, theirs = (
            {key: value for key, value in each.metadata.items() if "split." not in key}
            for each in (store, packed)
        )
        assert ours == theirs


def test_what_is_packed_is_a_gguf_to_others(model: GgufFile, tmp_path: Path) -> None:
    """The gguf package reads each expert's tensors under the names that they had before stacks."""
    packing.pack(model.path, tmp_path / "out")
    parts = sorted((tmp_path / "out").glob("*.gguf"))
    assert [part.name for part in parts] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    tensors = {tensor.name: tensor for part in parts for tensor in gguf.GGUFReader(part).tensors}
    down = tensors["blk.2.ffn_down.1.weight"]
    values = gguf.dequantize(down.data, down.tensor_type)
    assert np.array_equal(values, model.values["blk.2.ffn_down_exps.weight"][1])


def test_packing_twice_and_after_an_interruption_gives_the_same_files(
    model: GgufFile, tmp_path: Path
) -> None:
    """What was packed is packed to itself."""

    def stop(done: int, _: int) -> None:
        if done > 2**16:
            raise KeyboardInterrupt

    packing.pack(model.path, tmp_path / "one")
    packing.pack(tmp_path / "one", tmp_path / "two")
    with pytest.raises(KeyboardInterrupt):
        packing.pack(model.path, tmp_path / "three", progress=stop)
    assert packing.pack(model.path, tmp_path / "three").resumed_bytes > 0
    for path in (tmp_path / "one").iterdir():
        for other in ("two", "three"):
            assert (tmp_path / other / path.name).read_bytes() == path.read_bytes()


def test_a_gguf_keeps_its_types_and_its_alignment(tmp_path: Path) -> None:
    """Another format is refused before anything is written."""
    key = "general.alignment"
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", ARCHITECTURE)
    writer.add_custom_alignment(128)
    for piece in ("gate", "up", "down"):
        writer.add_tensor(f"blk.0.ffn_{piece}_exps.weight", np.ones((2, 4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="keeps its types, so that it cannot be packed in q4_0"):
        packing.pack(tmp_path / "m.gguf", tmp_path / "out", format="q4_0")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    packing.pack(tmp_path / "m.gguf", tmp_path / "out")
    with open_store(tmp_path / "out") as packed:
        assert isinstance(packed, GgufStore)
        assert packed.metadata[key] == 128
        assert [offset % 128 for _, offset, _ in packed.runs(0, 1)] == [0, 0, 0]


def test_the_command_packs_a_gguf(
    model: GgufFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what it would write, writes it, and compares it."""
    out = str(tmp_path / "out")
    assert cli.main(["pack", "--dry-run", str(model.path), out]) == 0
    assert "3 layers x 3 experts" in capsys.readouterr().out
    assert cli.main(["pack", "--verify", str(model.path), out]) == 0
    assert "every checksum agrees" in capsys.readouterr().out
    assert cli.main(["inspect", out]) == 0
