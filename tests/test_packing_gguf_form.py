"""`pack` of GGUF files in compute form: an expert's bytes are those of its slot."""

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moecache
from moecache import cli, kernels, packing
from moecache.errors import ConfigError, FormatError, MoeCacheError, StoreError
from moecache.slots import HostSlots
from moecache.stores import GgufStore, open_store
from tests.helpers.checkpoints import same_parts
from tests.helpers.gguf_files import NUM_EXPERTS, WIDE, GgufFile, Types, write_gguf
from tests.helpers.kernels import computing

gguf = pytest.importorskip("gguf")

# The last three have types without a form: they stay as they are.
LAYERS = [
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q4_K", "Q4_K", "Q4_K"),
    ("Q2_K", "Q2_K", "IQ4_XS"),
    ("MXFP4", "MXFP4", "Q5_0"),
    ("IQ2_XS", "IQ2_XS", "Q8_0"),
    ("IQ1_S", "IQ1_S", "IQ3_S"),
    ("BF16", "BF16", "F16"),
]
VERSION = b"moecache.form.version" + struct.pack("<I", 4)


def write(directory: Path, layers: Sequence[Types], **options: Any) -> GgufFile:
    """Write a model of whole blocks."""
    return write_gguf(directory / "m.gguf", layers, **(options | WIDE))


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> GgufFile:
    return write(tmp_path, LAYERS[:2])


def held(store: GgufStore, pool: HostSlots, layer: int, expert: int) -> dict[str, np.ndarray]:
    """Return what a slot holds of an expert; what needs no conversion is read into it."""
    buffers = pool.buffers(0, layer)
    store.read_into(layer, expert, buffers)
    pool.upload(0, layer, buffers)
    return pool.expert(0, layer)


def first_part(out: Path) -> Path:
    """Return the file that has the metadata."""
    return out / "m-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("form", "biased", "num_parts", "mapped"),
    [
        ("stacked", False, 1, False),
        ("stacked", True, 2, True),
        ("fused", False, 1, False),
        ("single", False, 1, True),
    ],
)
def test_a_slot_takes_an_expert_as_the_file_has_it(
    form: str, biased: bool, num_parts: int, mapped: bool, tmp_path: Path
) -> None:
    """Each role from a multiple of 4 KiB on, holding what is made of the file that was packed."""
    model = write(tmp_path, LAYERS, form=form, biased=biased, num_parts=num_parts)
    packing.pack(model.path, tmp_path / "out", compute_form=True)
    packing.verify(tmp_path / "out")
    with GgufStore(model.path) as store, GgufStore(tmp_path / "out", mapped=mapped) as packed:
        assert packed.tensor_shapes == store.tensor_shapes
        assert set(packed.tensor_types.values()) == set(store.tensor_types.values())
        pool, straight = HostSlots(store.layout, 1), HostSlots(packed.layout, 1)
        assert pool.converts
        assert not straight.converts
        assert straight.nbytes == pool.nbytes
        for layer, expert in np.ndindex(len(LAYERS), NUM_EXPERTS):
            parts = held(packed, straight, layer, expert)
            assert same_parts(held(store, pool, layer, expert), parts)
            for _, offset, _ in packed.runs(layer, expert):
                assert offset % packing.ALIGNMENT == 0
            # Their sizes are multiples of 4 KiB, but of these types'.
            odd = {"IQ2_XS", "IQ1_S", "Q2_K", "IQ4_XS", "MXFP4"}
            assert len(packed.runs(layer, expert)) == 1 or odd & {*LAYERS[layer]}
        for name in packed.tensor_names:
            if name in store.tensor_names:
                assert np.array_equal(packed.read_tensor(name), store.read_tensor(name))
        down = packed.read_tensor("blk.1.ffn_down.2.weight")
        if form != "single":
            assert np.array_equal(down, model.values["blk.1.ffn_down_exps.weight"][2])


def test_the_form_is_the_same_on_every_level_and_packed_again(
    model: GgufFile, tmp_path: Path
) -> None:
    """So a file may be packed on another machine, and packing it does nothing more."""
    for level in kernels.levels():
        with computing(level):
            packing.pack(model.path, tmp_path / level, compute_form=True)
    first = tmp_path / kernels.levels()[0]
    packing.pack(first, tmp_path / "plain")
    packing.pack(first, tmp_path / "again", compute_form=True)
    for path in first.iterdir():
        for other in (*kernels.levels(), "plain", "again"):
            assert (tmp_path / other / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("read", ["direct", "buffered", "mmap"])
def test_experts_are_read_into_slots_in_every_way(
    read: str, model: GgufFile, tmp_path: Path
) -> None:
    """The values are those of the file that was packed."""
    packing.pack(model.path, tmp_path / "out", compute_form=True)
    wanted = model.values["blk.1.ffn_down_exps.weight"]
    with moecache.open(tmp_path / "out", slots=3, read=read, prefault="off") as runtime:
        down = next(role for role in runtime.layout.layers[0] if role.name == "down")
        ids = np.arange(NUM_EXPERTS)[:, None]
        for wave in runtime.waves(0, ids):
            for slot, (expert,) in wave:
                found = kernels.values_in(runtime.expert(slot, 0)["down"], down)
                assert np.array_equal(found, wanted[expert])


def test_others_see_bytes(model: GgufFile, tmp_path: Path) -> None:
    """The header is read by the gguf package, which takes experts for integers."""
    packing.pack(model.path, tmp_path / "out", compute_form=True)
    reader = gguf.GGUFReader(tmp_path / "out" / "m-00002-of-00002.gguf")
    types = {tensor.tensor_type for tensor in reader.tensors}
    assert types == {gguf.GGMLQuantizationType.I8}


def test_another_version_of_the_form_is_refused(model: GgufFile, tmp_path: Path) -> None:
    """With both versions, and the remedy."""
    packing.pack(model.path, tmp_path / "out", compute_form=True)
    path = first_part(tmp_path / "out")
    raw = path.read_bytes()
    at = raw.index(VERSION) + len(VERSION)
    path.write_bytes(raw[:at] + struct.pack("<I", 7) + raw[at + 4 :])
    with pytest.raises(FormatError, match=r"version 7 .* reads version 1: pack the original"):
        open_store(tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "index", "value", "message"),
    [
        ("types", 0, 8, r"I8 of \d+ bytes; the compute form of Q8_0 \[512, 256\] is I8 of"),
        ("types", 0, 999, "type 999"),
        ("types", 0, 0, "F32"),
        ("types", 0, 1, "F16 has none"),
        ("rows", 1, 0, "cannot be"),
        ("rows", 1, 2**64 - 1, "the compute form of"),
        ("columns", 0, 255, "whole blocks"),
    ],
)
def test_what_does_not_fit_its_tensors_is_refused(
    key: str, index: int, value: int, message: str, model: GgufFile, tmp_path: Path
) -> None:
    """Before anything of an expert is read."""
    packing.pack(model.path, tmp_path / "out", compute_form=True)
    path = first_part(tmp_path / "out")
    raw = bytearray(path.read_bytes())
    name = f"moecache.form.{key}".encode()
    struct.pack_into("<Q", raw, raw.index(name) + len(name) + 16 + 8 * index, value)
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=message):
        open_store(tmp_path / "out")


def test_damaged_metadata_are_errors_or_are_read(model: GgufFile, tmp_path: Path) -> None:
    """Whatever byte of what is said of the form is another."""
    packing.pack(model.path, tmp_path / "out", compute_form=True)
    path, rng = first_part(tmp_path / "out"), np.random.default_rng(5)
    raw = path.read_bytes()
    begin = raw.index(VERSION)
    end = raw.index(b"split.no", begin)
    for at in rng.integers(begin, end, 200):
        spoilt = bytearray(raw)
        spoilt[at] ^= 1 << rng.integers(8)
        path.write_bytes(spoilt)
        try:
            open_store(tmp_path / "out").close()
        except MoeCacheError as error:
            assert str(tmp_path) in str(error)  # noqa: PT017 - others are read all the same


def test_scales_that_are_no_numbers_are_refused_when_the_form_is_made(tmp_path: Path) -> None:
    """With the tensor's name; what is packed has been looked at."""
    model = write(tmp_path, LAYERS[:1])
    with GgufStore(model.path) as store:
        _, offset, _ = store.runs(0, 1)[0]
    with model.path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff\xff")
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_gate_exps\.weight \[1\]'?: 1 of"):
        packing.pack(model.path, tmp_path / "out", compute_form=True)


def test_a_full_disk_and_an_interruption_lose_nothing(
    model: GgufFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is finished stays, and is not mixed with what is packed without the form."""
    write, writes = os.pwrite, iter(range(2))

    def fail(descriptor: int, data: memoryview, offset: int) -> int:
        if next(writes, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    def stop(done: int, _: int) -> None:
        if done > resumed + 2**16:
            raise KeyboardInterrupt

    packing.pack(model.path, tmp_path / "one", compute_form=True)
    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", fail)
        with pytest.raises(StoreError, match="free some space and pack again"):
            packing.pack(model.path, tmp_path / "two", compute_form=True)
    resumed = 2**20
    with pytest.raises(KeyboardInterrupt):
        packing.pack(model.path, tmp_path / "two", compute_form=True, progress=stop)
    assert packing.pack(model.path, tmp_path / "two", compute_form=True).resumed_bytes > 0
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes()


def test_an_unfinished_pack_without_the_form_is_begun_anew(
    model: GgufFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its bytes are others."""

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packing.pack(model.path, tmp_path / "out", progress=stop)
    assert packing.pack(model.path, tmp_path / "out", compute_form=True).resumed_bytes == 0
    assert "pack.restarted" in caplog.text
    packing.verify(tmp_path / "out")


def test_only_a_gguf_is_packed_so(tiny_moe: Path, tmp_path: Path) -> None:
    """Of safetensors, `format` says what is made; both are refused together."""
    with pytest.raises(ConfigError, match="the compute form is for a GGUF"):
        packing.pack(tiny_moe, tmp_path / "out", compute_form=True)


def test_the_command_packs_and_shows_the_form(
    model: GgufFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once packed, a directory says its own form."""
    out = str(tmp_path / "out")
    assert cli.main(["pack", "--compute-form", "--dry-run", str(model.path), out]) == 0
    assert cli.main(["pack", "--compute-form", "--verify", str(model.path), out]) == 0
    assert cli.main(["inspect", out]) == 0
    assert "q4_k" in capsys.readouterr().out
    assert cli.main(["pack", "--verify", "--compute-form", out]) == 2
    assert "--compute-form is for packing" in capsys.readouterr().err
