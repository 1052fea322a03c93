"""Which files a packed directory has beside the weights, and where it may be made."""

from pathlib import Path

import pytest

from moecache import packing
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


def test_one_file_is_packed_with_the_config_beside_it(small: Checkpoint, tmp_path: Path) -> None:
    """And with nothing else of the directory that it happens to lie in."""
    (small.path / "diary.txt").write_text("private")

    packing.pack(small.path / "model.safetensors", tmp_path / "out")

    with open_store(small.path) as source, open_store(tmp_path / "out") as packed:
        assert packed.layout == source.layout
        assert packed.layout.top_k == 3
    assert not (tmp_path / "out" / "diary.txt").exists()


def test_an_empty_directory_and_a_link_to_one_are_filled(small: Checkpoint, tmp_path: Path) -> None:
    """Whoever made it beforehand gets it."""
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")

    report = packing.pack(small.path, tmp_path / "link")

    assert report.path == tmp_path / "disk" / "out"
    assert packing.verify(tmp_path / "link") > 0
    assert (tmp_path / "link").is_symlink()
