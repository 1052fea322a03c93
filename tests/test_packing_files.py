"""Which files a packed directory has beside the weights, and where it may be made."""

import os
from pathlib import Path

import pytest

from moecache import packing
from moecache.errors import ConfigError, StoreError
from moecache.stores import open_store
from tests.helpers.checkpoints import Checkpoint, write_checkpoint
from tests.helpers.packs import tree


@pytest.fixture
def small(tmp_path: Path) -> Checkpoint:
    """Return a checkpoint of two MoE layers, three experts each."""
    return write_checkpoint(tmp_path / "model", num_layers=2, num_experts=3)


def test_the_other_files_go_along_and_other_weights_do_not(
    small: Checkpoint, tmp_path: Path
) -> None:
    """Links are followed to their file; hidden files and unfinished downloads stay."""
    (small.path / "sub").mkdir()
    (small.path / ".cache").mkdir()
    (small.path / "empty").mkdir()
    for name in ("tokenizer.json", "sub/template.jinja", "merges.txt", "weird\nname"):
        (small.path / name).write_bytes(name.encode() * 3)
    (tmp_path / "blob").write_bytes(b"vocabulary")
    (small.path / "vocab.json").symlink_to(tmp_path / "blob")
    (small.path / "broken.json").symlink_to(tmp_path / "nothing")
    stay = (
        *("pytorch_model.bin", "pytorch_model.bin.index.json", "a.gguf", ".hidden", "b.partial"),
        *("sub/consolidated.00.pth", ".cache/x", "sub/adapter.safetensors", "moecache-pack.json"),
    )
    for name in stay:
        (small.path / name).write_bytes(b"x")

    packing.pack(small.path, tmp_path / "out")

    expected = {
        *("tokenizer.json", "sub/template.jinja", "merges.txt", "weird\nname", "vocab.json"),
        *("config.json", "experts.safetensors", "trunk.safetensors"),
        *("moecache-pack.json", "model.safetensors.index.json"),
    }
    assert tree(tmp_path / "out").keys() == expected
    assert (tmp_path / "out" / "vocab.json").read_bytes() == b"vocabulary"
    assert not (tmp_path / "out" / "vocab.json").is_symlink()
    assert packing.verify(tmp_path / "out") > 0


def test_links_out_of_the_checkpoint_are_named(tmp_path: Path) -> None:
    """As a cache of the hub has them: every file is one; links within are nothing special."""
    made = write_checkpoint(tmp_path / "blobs", num_layers=2, num_experts=3)
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (snapshot / "merges.txt").write_text("a b")
    (snapshot / "same.txt").symlink_to("merges.txt")

    planned = packing.plan(snapshot, tmp_path / "out")
    report = packing.pack(snapshot, tmp_path / "out")

    names = ("config.json", "model.safetensors")
    assert planned.linked == tuple((name, str(made.path / name)) for name in names)
    assert report.plan.linked == planned.linked
    assert report.plan.left_behind == ()
    [line] = planned.describe_links()
    assert line.endswith(f"{made.path}: config.json, model.safetensors")
    assert packing.plan(made.path, tmp_path / "other").linked == ()
    assert (tmp_path / "out" / "same.txt").read_text() == "a b"
    with open_store(tmp_path / "out") as packed:
        assert packed.layout.top_k == 3


def test_links_that_stay_behind_are_named(small: Checkpoint, tmp_path: Path) -> None:
    """To directories, wherever those are, and to nothing."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "diary.txt").write_text("dear diary")
    (small.path / "sub").mkdir()
    (small.path / "sub" / "notes").symlink_to(tmp_path / "private")
    (small.path / "lost.json").symlink_to("nowhere.json")
    (small.path / "turn.json").symlink_to("turn.json")

    report = packing.pack(small.path, tmp_path / "out")

    assert report.plan.left_behind == (
        ("lost.json", "nowhere.json"),
        ("turn.json", "turn.json"),
        ("sub/notes", str(tmp_path / "private")),
    )
    assert len(report.plan.describe_links()) == 3
    assert not (tmp_path / "out" / "sub").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "sub/notes.txt", "config.json"])
@pytest.mark.parametrize("linked", [True, False])
def test_devices_and_pipes_are_refused_by_name(
    name: str, linked: bool, small: Checkpoint, tmp_path: Path
) -> None:
    """Before anything is written: reading one could take for ever."""
    path = small.path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if linked:
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    for function in (packing.plan, packing.pack):
        with pytest.raises(StoreError, match=f"{name}: is (a device, pipe|not a regular file)"):
            function(small.path, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_file_without_an_end_is_not_copied_for_ever(small: Checkpoint, tmp_path: Path) -> None:
    """Files of /proc say that they have no bytes, and some never stop."""
    (small.path / "notes.txt").symlink_to("/proc/self/maps")
    with pytest.raises(StoreError, match=r"notes\.txt: has more than the 0 bytes"):
        packing.pack(small.path, tmp_path / "out")


@pytest.mark.parametrize("name", ["moecache-pack.jsonl", "moecache-pack.lock", "files"])
def test_links_where_the_files_grow_are_refused(
    name: str, small: Checkpoint, tmp_path: Path
) -> None:
    """What they point to is neither read nor removed nor written to."""
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "moecache-pack.lock").touch()
    (partial / name).unlink(missing_ok=True)
    (partial / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"{name} is not of moecache, but a link"):
        packing.pack(small.path, tmp_path / "out")


def test_a_link_among_the_unfinished_files_is_replaced(small: Checkpoint, tmp_path: Path) -> None:
    """The file that it points to keeps its bytes."""
    (tmp_path / "mine").write_text("mine")
    expected = packing.pack(small.path, tmp_path / "expected").path
    partial = tmp_path / "out.partial"

    def stop(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packing.pack(small.path, tmp_path / "out", progress=stop)
    (partial / "files" / "trunk.safetensors").unlink()
    (partial / "files" / "trunk.safetensors").symlink_to(tmp_path / "mine")
    packing.pack(small.path, tmp_path / "out")
    assert (tmp_path / "mine").read_text() == "mine"
    assert tree(tmp_path / "out") == tree(expected)


def test_one_file_is_packed_with_the_config_beside_it(small: Checkpoint, tmp_path: Path) -> None:
    """And with nothing else of the directory that it happens to lie in."""
    (small.path / "diary.txt").write_text("private")

    packing.pack(small.path / "model.safetensors", tmp_path / "out")

    with open_store(small.path) as source, open_store(tmp_path / "out") as packed:
        assert packed.layout == source.layout
        assert packed.layout.top_k == 3
    assert not (tmp_path / "out" / "diary.txt").exists()


def test_an_empty_directory_and_a_link_to_one_are_filled(small: Checkpoint, tmp_path: Path) -> None:
    """A directory that was made beforehand is used."""
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")

    report = packing.pack(small.path, tmp_path / "link")

    assert report.path == tmp_path / "disk" / "out"
    assert packing.verify(tmp_path / "link") > 0
    assert (tmp_path / "link").is_symlink()
