"""What cannot be packed, where, and packed directories that are damaged."""

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from moecache import packing
from moecache.errors import ConfigError, FormatError, StoreError
from tests.helpers.checkpoints import Checkpoint, write_checkpoint
from tests.helpers.packs import tree


@pytest.fixture
def small(tmp_path: Path) -> Checkpoint:
    """Return a checkpoint of two MoE layers, three experts each."""
    return write_checkpoint(tmp_path / "model", num_layers=2, num_experts=3)


@pytest.fixture
def packed(small: Checkpoint, tmp_path: Path) -> Path:
    """Return its packed directory."""
    return packing.pack(small.path, tmp_path / "out").path


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    """No experts, no checkpoint, damage: the reader's own errors, and nothing is written."""
    dense = tmp_path / "dense"
    dense.mkdir()
    save_file({"a.weight": np.ones(3)}, dense / "model.safetensors")
    with pytest.raises(ConfigError, match="there are no experts"):
        packing.pack(dense, tmp_path / "out")
    with pytest.raises(StoreError, match="no such file"):
        packing.pack(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "m.bin").write_bytes(b"GGUF")
    with pytest.raises(FormatError, match=r"only \.safetensors"):
        packing.pack(tmp_path / "m.bin", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "m.bin"]


@pytest.mark.parametrize("name", ["q4_0+q8_0", "gptq4[32,f16]"])
def test_a_format_that_nothing_is_packed_in_is_refused(
    name: str, small: Checkpoint, tmp_path: Path
) -> None:
    """Though kernels compute with it."""
    with pytest.raises(ConfigError, match="cannot be packed; "):
        packing.pack(small.path, tmp_path / "out", format=name)


def test_a_header_that_no_reader_accepts_is_refused(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written, with both figures."""
    monkeypatch.setattr("moecache.packing._plan.MAX_HEADER_BYTES", 1000)
    with pytest.raises(FormatError, match=r"would have 4088 bytes, over the 1000"):
        packing.pack(small.path, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def occupy_out(tmp_path: Path) -> Path:
    """Have something in OUT."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    return tmp_path / "out"


def file_as_out(tmp_path: Path) -> Path:
    """Have a file named OUT."""
    (tmp_path / "out").touch()
    return tmp_path / "out"


def file_as_partial(tmp_path: Path) -> Path:
    """Have a file named OUT.partial."""
    (tmp_path / "out.partial").touch()
    return tmp_path / "out"


def foreign_partial(tmp_path: Path) -> Path:
    """Have another program's OUT.partial."""
    (tmp_path / "out.partial" / "files").mkdir(parents=True)
    (tmp_path / "out.partial" / "files" / "precious").touch()
    return tmp_path / "out"


def model_as_partial(tmp_path: Path) -> Path:
    """Have the model where the files would grow."""
    (tmp_path / "out.partial").symlink_to(tmp_path / "model")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (occupy_out, "is not empty; remove it"),
        (file_as_out, "is no directory"),
        (file_as_partial, "is no directory, but the files are to grow there; remove it"),
        (foreign_partial, "is not of moecache"),
        (model_as_partial, "is not of moecache"),
        (lambda tmp_path: tmp_path / "model", "the model's own directory"),
        (lambda tmp_path: tmp_path / "model" / "a" / "b", "the model's own directory"),
        (lambda tmp_path: tmp_path / "model" / ".." / "model", "the model's own directory"),
        (lambda _: Path("/proc"), "is not empty"),
        (lambda _: "", "the path is empty"),
    ],
    ids=range(10),
)
def test_a_place_that_is_taken_is_refused(
    small: Checkpoint, tmp_path: Path, prepare: Callable[[Path], Any], message: str
) -> None:
    """With the remedy, and nothing there is touched."""
    out = prepare(tmp_path)
    before = tree(tmp_path)

    with pytest.raises(ConfigError, match=message):
        packing.plan(small.path, out)
    with pytest.raises(ConfigError, match=message):
        packing.pack(small.path, out)

    assert tree(tmp_path) == before


def test_the_model_may_not_lie_where_the_files_grow(tmp_path: Path) -> None:
    """`pack x.partial x` would write into what it reads."""
    made = write_checkpoint(tmp_path / "out.partial", num_layers=1)
    with pytest.raises(ConfigError, match="has the model in it"):
        packing.pack(made.path, tmp_path / "out")


def test_a_mount_point_is_refused_before_the_work(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename at the end could not replace it."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(ConfigError, match="mount point"):
        packing.pack(small.path, tmp_path / "out")


def test_too_little_room_is_told_before_anything_is_written(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both figures."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(StoreError, match=r"KiB are needed, but only 9\.77 KiB are free"):
        packing.pack(small.path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_second_process_is_refused(small: Checkpoint, tmp_path: Path) -> None:
    """While the first is at work; what that one writes is not disturbed."""

    def pack_too(done: int, total: int) -> None:
        with pytest.raises(StoreError, match=r"out\.partial: another process is packing into it"):
            packing.pack(small.path, tmp_path / "out")

    packing.pack(small.path, tmp_path / "out", progress=pack_too)

    assert packing.verify(tmp_path / "out") > 0
    assert not (tmp_path / "out.partial").exists()


def test_whoever_locks_what_the_first_process_removed_is_refused(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a file that has no name any more locks out no process."""
    lock = fcntl.flock

    def lock_late(descriptor: int, mode: int) -> None:
        shutil.rmtree(tmp_path / "out.partial")
        lock(descriptor, mode)

    monkeypatch.setattr("fcntl.flock", lock_late)
    with pytest.raises(StoreError, match="another process"):
        packing.pack(small.path, tmp_path / "out")


def test_a_place_that_is_taken_meanwhile_is_not_overwritten(
    small: Checkpoint, tmp_path: Path
) -> None:
    """Whatever appears at OUT while the files grow stays, and so do the files."""

    def take(done: int, total: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "mine").touch()

    with pytest.raises(StoreError, match="cannot be renamed"):
        packing.pack(small.path, tmp_path / "out", progress=take)
    shutil.rmtree(tmp_path / "out")

    report = packing.pack(small.path, tmp_path / "out")
    assert report.resumed_bytes == report.plan.total_bytes - report.plan.other_bytes


def test_a_model_that_is_changed_meanwhile_is_an_error_and_packed_anew(
    small: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The message names the file, and how far the work was; the next call begins again."""
    file = small.path / "model.safetensors"

    def change(done: int, total: int) -> None:
        if done > total // 2:
            os.utime(file, ns=(1, 1))

    with pytest.raises(StoreError, match=r"model\.safetensors: was changed while layer \d .*byte"):
        packing.pack(small.path, tmp_path / "out", progress=change)
    assert not (tmp_path / "out").exists()

    with caplog.at_level(logging.WARNING):
        report = packing.pack(small.path, tmp_path / "out")
    assert "pack.restarted" in caplog.text
    assert report.resumed_bytes == 0
    packing.verify(tmp_path / "out")


def test_a_model_that_is_cut_short_meanwhile_is_an_error(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a signal; the message has the file and the byte, and what is there stays."""
    monkeypatch.setattr("moecache.packing._copy.CHUNK_BYTES", 512)

    def cut(done: int, total: int) -> None:
        if done > 10_000:  # in the first layer, of 24 KiB after a header of 4
            os.truncate(small.path / "model.safetensors", 100)

    with pytest.raises(StoreError, match=r"model\.safetensors: layer 0 .* byte \d+"):
        packing.pack(small.path, tmp_path / "out", progress=cut)
    assert (tmp_path / "out.partial" / "files" / "experts.safetensors").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("experts.safetensors", "header"),
        ("experts.safetensors", "layer 0 (model.layers.1.mlp)"),
        ("experts.safetensors", "layer 1 (model.layers.2.mlp)"),
        ("trunk.safetensors", "part 0"),
        ("config.json", "whole"),
        ("model.safetensors.index.json", "whole"),
    ],
)
def test_verify_names_the_part_that_differs(packed: Path, file: str, name: str) -> None:
    """One bit anywhere, in padding too."""
    manifest = json.loads((packed / "moecache-pack.json").read_text())
    part = next(part for part in manifest["files"][file]["parts"] if part["name"] == name)
    for offset in (part["offset"], part["offset"] + part["nbytes"] - 1):
        packing.verify(packed)
        with (packed / file).open("rb+") as opened:
            opened.seek(offset)
            byte = opened.read(1)[0]
            opened.seek(offset)
            opened.write(bytes([byte ^ 1]))
        with pytest.raises(StoreError) as caught:
            packing.verify(packed)
        assert f"{file}: {name} differs" in str(caught.value)
        with (packed / file).open("rb+") as opened:
            opened.seek(offset)
            opened.write(bytes([byte]))


def test_verify_finds_what_is_missing_or_cut(packed: Path) -> None:
    """The sizes are compared before anything is read."""
    path = packed / "experts.safetensors"
    nbytes = path.stat().st_size
    os.truncate(path, nbytes - 1)
    with pytest.raises(StoreError, match=rf"has {nbytes - 1} bytes, packed were {nbytes}"):
        packing.verify(packed)
    path.unlink()
    with pytest.raises(StoreError, match=r"experts\.safetensors: is missing"):
        packing.verify(packed)


def test_verify_leaves_other_files_alone_and_counts_all_it_reads(packed: Path) -> None:
    """It does not look at files that were put there later."""
    (packed / "notes.txt").write_text("mine")
    calls: list[tuple[int, int]] = []

    found = packing.verify(packed, progress=lambda *call: calls.append(call))

    mine = {"notes.txt", "moecache-pack.json"}
    expected = sum(path.stat().st_size for path in packed.iterdir() if path.name not in mine)
    assert found == expected
    assert calls[-1] == (expected, expected)


def test_what_was_not_packed_cannot_be_verified(small: Checkpoint, tmp_path: Path) -> None:
    """Any other directory, or none."""
    for path in (small.path, tmp_path / "nothing", small.path / "config.json"):
        with pytest.raises(FormatError, match="was not made by moecache pack"):
            packing.verify(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: "", "is not JSON"),
        (lambda _: "[" * 100_000, "is not JSON"),
        (lambda _: "[]", "does not say"),
        (lambda text: text.replace('"moecache-pack"', '"x"'), "does not say"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "is of version 2"),
        (lambda text: text.replace('"files"', '"x"'), "is damaged"),
        (lambda text: text.replace('"offset": 0', '"offset": null'), "is damaged"),
        (lambda text: text.replace('"offset": 0', '"offset": 1e999'), "is damaged"),
        (lambda text: text.replace('"offset": 0', '"offset": 0.0'), "is damaged"),
        (lambda text: text.replace('"offset": 0', '"offset": false'), "is damaged"),
        (lambda text: re.sub('"nbytes": [0-9]+', '"nbytes": Infinity', text), "is damaged"),
        (lambda text: re.sub('"nbytes": [0-9]+', '"nbytes": -1', text), "is damaged"),
        (lambda text: re.sub('"nbytes": [0-9]+', '"nbytes": 1' + "0" * 99, text), "is damaged"),
        (lambda text: text.replace('"offset": 0', '"offset": 1'), "what it says of"),
        (lambda text: text.replace('"config.json"', '"../model/config.json"'), "what it says of"),
        (lambda text: text.replace('"config.json"', '"a\\u0000b"'), "cannot be read|is missing"),
    ],
    ids=range(16),
)
def test_a_damaged_manifest_is_an_error(
    packed: Path, change: Callable[[str], str], message: str
) -> None:
    """Whatever is in it."""
    path = packed / "moecache-pack.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(StoreError, match=message):
        packing.verify(packed)
