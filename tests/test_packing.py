"""A packed checkpoint: the same experts and trunk, every expert one aligned piece."""

import itertools
import json
import os
import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import moecache
from moecache import packing
from moecache.stores import open_store
from tests.helpers.checkpoints import (
    FAMILIES,
    Checkpoint,
    random_bits,
    read_expert,
    same_bits,
    same_parts,
    write_checkpoint,
    write_raw,
)
from tests.helpers.packs import (
    expert_ranges,
    library_tensors,
    tensor_entries,
    tree,
    weight_map,
)

EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.{}"


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing written through to it: tests of what a kill leaves do that."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor: None)


@pytest.fixture
def small(tmp_path: Path) -> Checkpoint:
    """Return a checkpoint of two MoE layers, three experts each."""
    return write_checkpoint(tmp_path / "model", num_layers=2, num_experts=3)


def save(directory: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    """Write a checkpoint of one file."""
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_trunk_are_the_same_bit_for_bit(
    tmp_path: Path, family: str, num_shards: int
) -> None:
    """Equal layout, equal bytes of every expert, equal tensors of the trunk."""
    made = write_checkpoint(tmp_path / "model", family, num_shards=num_shards)

    packing.pack(made.path, tmp_path / "out")

    with open_store(made.path) as source, open_store(tmp_path / "out") as packed:
        assert packed.layout == source.layout
        for layer, experts in enumerate(made.experts):
            for expert, parts in enumerate(experts):
                assert same_parts(read_expert(packed, layer, expert), parts)
        trunk = {name for name, file in weight_map(tmp_path / "out").items() if "trunk" in file}
        assert trunk == {name for name in made.tensors if not is_of_experts(name)}
        for name in trunk:
            assert same_bits(packed.read_tensor(name), made.tensors[name])


def is_of_experts(name: str) -> bool:
    """Return whether a tensor of `write_checkpoint` belongs to experts."""
    return ".experts." in name or "_linear." in name


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_is_one_aligned_range(tmp_path: Path, family: str, num_shards: int) -> None:
    """In the order they run, without overlap; each role at a multiple of 4 KiB."""
    made = write_checkpoint(tmp_path / "model", family, num_shards=num_shards)
    packing.pack(made.path, tmp_path / "out")

    with open_store(tmp_path / "out") as store:
        found = expert_ranges(store)
        roles = store.layout.layers[0]
    entries = tensor_entries(tmp_path / "out" / "experts.safetensors")
    end = min(entry.offset for entry in entries.values())
    for runs in found:
        # Small roles are runs of their own: the padding between them is not read.
        assert len(runs) == len(roles)
        for (offset, nbytes), role in zip(runs, roles, strict=True):
            assert offset == end
            assert offset % packing.ALIGNMENT == 0
            assert nbytes == role.nbytes
            end = -(-(offset + nbytes) // packing.ALIGNMENT) * packing.ALIGNMENT
    assert end == (tmp_path / "out" / "experts.safetensors").stat().st_size


def test_an_expert_whose_roles_fill_blocks_is_one_run(tmp_path: Path) -> None:
    """No padding, and one call reads it."""
    tensors = {
        EXPERT.format(0, expert, piece, "weight"): np.full(shape, expert, np.float32)
        for expert in range(3)
        for piece, shape in (("down", (32, 64)), ("gate", (16, 32)), ("up", (16, 32)))
    }
    model = save(tmp_path / "model", tensors, {})

    report = packing.pack(model, tmp_path / "out")

    assert report.plan.padding_bytes == 0
    with open_store(tmp_path / "out") as store:
        found = expert_ranges(store)
    assert [[nbytes for _, nbytes in runs] for runs in found] == [[12288]] * 3
    assert all(runs[0][0] % packing.ALIGNMENT == 0 for runs in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_safetensors_library_reads_every_tensor(tmp_path: Path, family: str) -> None:
    """It accepts both files; stacks stand there expert by expert, all else by its name."""
    made = write_checkpoint(tmp_path / "model", family, num_layers=2, num_shards=2)
    packing.pack(made.path, tmp_path / "out")

    found = library_tensors(tmp_path / "out")
    for name, tensor in library_tensors(made.path).items():
        if name in found:
            assert found.pop(name) == tensor
            continue
        dtype, (num_experts, *shape), data = tensor
        before, after = (
            name.rsplit(".experts.", 1)
            if ".experts." in name
            else (name[: name.index(".input")], name[name.index("input") :])
            if ".input" in name
            else (name[: name.index(".output")], name[name.index("output") :])
        )
        size = len(data) // num_experts
        for expert in range(num_experts):
            part = found.pop(f"{before}.experts.{expert}.{after}")
            assert part == (dtype, tuple(shape), data[expert * size :][:size])
    assert not found


def test_padding_is_in_the_files_but_not_in_the_index(small: Checkpoint, tmp_path: Path) -> None:
    """Readers that go by the index never see it; the store does not either."""
    packing.pack(small.path, tmp_path / "out")

    with safe_open(tmp_path / "out" / "experts.safetensors", "np") as file:
        padding = [name for name in file.keys() if name.startswith("__moecache_padding__.")]  # noqa: SIM118 - no mapping
        assert padding
        assert not any(file.get_tensor(name).any() for name in padding)
        assert file.metadata() == {"format": "pt"}
    assert weight_map(tmp_path / "out").keys() == small.tensors.keys()
    with open_store(tmp_path / "out") as store:
        assert set(store.tensor_names) == small.tensors.keys()


@pytest.mark.parametrize("stacked", [False, True])
def test_scalars_of_experts_stay_scalars(tmp_path: Path, stacked: bool) -> None:
    """One of each expert, or stacked: in the layout both are one element."""
    tensors: dict[str, np.ndarray] = {}
    for number, piece in enumerate(("gate", "up", "down")):
        weights = np.arange(24, dtype=np.float32).reshape(3, 4, 2) + number
        scales = np.arange(3.0) * number
        if stacked:
            tensors[f"layers.0.mlp.experts.{piece}_proj"] = weights
            tensors[f"layers.0.mlp.experts.{piece}_proj_scale"] = scales
            continue
        for expert in range(3):
            tensors[f"layers.0.mlp.experts.{expert}.{piece}_proj.weight"] = weights[expert].copy()
            scale = np.array(scales[expert])
            tensors[f"layers.0.mlp.experts.{expert}.{piece}_proj.input_scale"] = scale
    model = save(tmp_path / "model", tensors, {})

    packing.pack(model, tmp_path / "out")

    with open_store(model) as source, open_store(tmp_path / "out") as packed:
        assert packed.layout == source.layout
        assert (1,) in [role.shape for role in packed.layout.layers[0]]
        for expert in range(3):
            assert same_parts(read_expert(packed, 0, expert), read_expert(source, 0, expert))
    shapes = {shape for name, (_, shape, _) in library_tensors(tmp_path / "out").items()}
    assert () in shapes


def test_a_trunk_of_any_dtype_and_size_is_copied(tmp_path: Path) -> None:
    """Types below a byte, no bytes at all, odd sizes: the same bytes, and aligned."""
    header: dict[str, Any] = {}
    data = b""
    shapes = [
        ("four_bits", "F4", [3, 2], 3),
        ("none", "F32", [0, 5], 0),
        ("odd", "U8", [5], 5),
        ("scalar", "F64", [], 8),
        ("six_bits", "F6_E2M3", [4], 3),
        *((EXPERT.format(0, 0, piece, "weight"), "I8", [2, 3], 6) for piece in ("gate", "down")),
        ("empty_bool", "BOOL", [0], 0),
    ]
    for name, dtype, shape, nbytes in shapes:
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + nbytes],
        }
        data += bytes(range(len(data), len(data) + nbytes))
    write_raw(tmp_path / "m.safetensors", header, data)

    packing.pack(tmp_path / "m.safetensors", tmp_path / "out")

    path = tmp_path / "out" / "trunk.safetensors"
    entries, raw = tensor_entries(path), path.read_bytes()
    assert list(entries) == [name for name, *_ in shapes if "experts" not in name]
    for name, entry in entries.items():
        begin, end = header[name]["data_offsets"]
        assert (entry.dtype_name, list(entry.shape)) == (
            header[name]["dtype"],
            header[name]["shape"],
        )
        assert raw[entry.offset : entry.offset + entry.nbytes] == data[begin:end]
        assert entry.offset % 64 == 0
    assert library_tensors(tmp_path / "out").keys() == {name for name, *_ in shapes}


def test_a_checkpoint_without_a_trunk_is_packed(tmp_path: Path) -> None:
    """The trunk's file has no tensor then."""
    tensors = {
        EXPERT.format(0, 0, piece, "weight"): np.ones((2, 2)) for piece in ("gate", "up", "down")
    }
    packing.pack(save(tmp_path / "model", tensors, {}), tmp_path / "out")

    assert not tensor_entries(tmp_path / "out" / "trunk.safetensors")
    assert packing.verify(tmp_path / "out") > 0
    assert library_tensors(tmp_path / "out").keys() == tensors.keys()


def test_the_trunk_keeps_the_order_of_the_files(tmp_path: Path) -> None:
    """First file first, within a file by offset: a loader reads it front to back."""
    made = write_checkpoint(tmp_path / "model", num_layers=3, num_shards=3)
    packing.pack(made.path, tmp_path / "out")

    expected = [
        name
        for file in sorted(made.path.glob("*.safetensors"))
        for name, _ in sorted(tensor_entries(file).items(), key=lambda item: item[1].offset)
        if not is_of_experts(name)
    ]
    found = tensor_entries(tmp_path / "out" / "trunk.safetensors")
    assert sorted(found, key=lambda name: found[name].offset) == expected


def test_a_trunk_larger_than_a_unit_is_cut_within_tensors(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are parts of one file that is the same."""
    packing.pack(small.path, tmp_path / "whole")
    monkeypatch.setattr("moecache.packing._plan._TRUNK_UNIT_BYTES", 100)
    packing.pack(small.path, tmp_path / "cut")

    assert packing.verify(tmp_path / "cut") > 0
    manifests = [path / "moecache-pack.json" for path in (tmp_path / "whole", tmp_path / "cut")]
    trunks = [
        json.loads(manifest.read_text())["files"]["trunk.safetensors"]["parts"]
        for manifest in manifests
    ]
    assert len(trunks[0]) == 2
    assert len(trunks[1]) > 5
    for manifest in manifests:
        manifest.unlink()
    assert tree(tmp_path / "whole") == tree(tmp_path / "cut")


def test_a_chunk_may_end_anywhere(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a header, an expert or padding: the files are the same."""
    packing.pack(small.path, tmp_path / "out")
    for nbytes in (1000, 4096, 4097):
        monkeypatch.setattr("moecache.packing._copy.CHUNK_BYTES", nbytes)
        packing.pack(small.path, tmp_path / f"out{nbytes}")
        assert tree(tmp_path / f"out{nbytes}") == tree(tmp_path / "out")
        packing.verify(tmp_path / f"out{nbytes}")


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_again_gives_the_same_files(tmp_path: Path, family: str) -> None:
    """At another time, under another name; and of what was packed, the same once more."""
    made = write_checkpoint(tmp_path / "model", family, num_layers=2, num_shards=2)
    packing.pack(made.path, tmp_path / "out")
    os.utime(made.path / "config.json", ns=(1, 1))
    packing.pack(made.path, tmp_path / "other" / "name")
    packing.pack(tmp_path / "out", tmp_path / "twice")
    packing.pack(tmp_path / "out" / "experts.safetensors", tmp_path / "experts")

    assert tree(tmp_path / "other" / "name") == tree(tmp_path / "out") == tree(tmp_path / "twice")
    name = "experts.safetensors"
    assert tree(tmp_path / "experts")[name] == tree(tmp_path / "out")[name]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("experts", "model", "other", "out", "twice")
    ]


def test_the_packed_tiny_model_gives_the_resident_logits(
    tiny_moe: Path,
    tmp_path: Path,
    numpy_loop: ModuleType,
    prompt: bytes,
    resident_logits: dict[int, list[np.ndarray]],
) -> None:
    """Bit by bit, with a quarter of the experts in memory."""
    packing.pack(tiny_moe, tmp_path / "out")

    for length in (7, 600):
        with moecache.open(tmp_path / "out", slots=64, dtype=np.float32) as runtime:
            with open_store(tmp_path / "out") as store:
                model = numpy_loop.NumpyMoe(store, numpy_loop.through_moecache(runtime))
            steps = numpy_loop.generate(model, prompt[:length], 6, temperature=0.7, seed=length)
            logits = [scores for _, scores in steps]
        expected = resident_logits[length]
        assert [one.tobytes() for one in logits] == [one.tobytes() for one in expected]


def test_the_report_says_what_was_done(small: Checkpoint, tmp_path: Path) -> None:
    """All bytes add up to the files' sizes; progress goes from 0 to all of them."""
    calls: list[tuple[int, int]] = []
    planned = packing.plan(small.path, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()

    report = packing.pack(
        small.path, tmp_path / "out", progress=lambda done, total: calls.append((done, total))
    )

    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    plan = report.plan
    assert plan.expert_bytes == 2 * 3 * 3 * 64
    assert plan.trunk_bytes == 16 * 8 * 2 + 2 * 64 + 2 * 3 * 8 * 4
    assert plan.total_bytes == sum(
        sizes[name] for name in ("experts.safetensors", "trunk.safetensors", "config.json")
    )
    assert sum(sizes.values()) <= plan.disk_bytes <= plan.free_bytes
    assert calls[0][0] == 0
    assert calls[-1] == (plan.total_bytes, plan.total_bytes)
    assert all(one <= two for one, two in itertools.pairwise(calls))
    assert planned.total_bytes == plan.total_bytes
    assert planned.padding_share == plan.padding_share > 0.8
    assert report.path == tmp_path / "out"
    assert report.resumed_bytes == 0
    assert "packed 2 layers x 3 experts" in report.describe()


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """64 MiB of trunk and of experts go through a few chunks."""
    rng = np.random.default_rng(0)
    tensors = {"embed": random_bits(rng, (2**26,), np.uint8)}
    for piece, shape in (("gate_up", (2, 16, 2**20)), ("down", (2, 16, 2**20))):
        tensors[f"model.layers.0.mlp.experts.{piece}_proj"] = random_bits(rng, shape, np.uint8)
    model = save(tmp_path / "model", tensors, {})
    del tensors

    tracemalloc.start()
    try:
        packing.pack(model, tmp_path / "out")
        packing.verify(tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 20 * 2**20
    with open_store(model) as source, open_store(tmp_path / "out") as packed:
        assert same_bits(packed.read_tensor("embed"), source.read_tensor("embed"))
        assert same_parts(read_expert(packed, 0, 1), read_expert(source, 0, 1))


def test_a_model_of_bfloat16_loads_through_safe_open(small: Checkpoint, tmp_path: Path) -> None:
    """The way that other programs read it."""
    packing.pack(small.path, tmp_path / "out")
    for name, file in weight_map(tmp_path / "out").items():
        with safe_open(tmp_path / "out" / file, "np") as opened:
            found = opened.get_tensor(name)
        expected = small.tensors[name]
        assert found.tobytes() == expected.tobytes()
        assert expected.dtype in (found.dtype, np.dtype(ml_dtypes.bfloat16))
