"""What is given as the path of a checkpoint, and can be none."""

from collections.abc import Callable
from pathlib import Path

import pytest

import moecache
from moecache import cli, packing
from moecache.errors import ConfigError, StoreError
from moecache.stores import SafetensorsStore, open_store

TOO_LONG = ("x" * 300, "x/" * 3000, f"{'x' * 300}.safetensors")
NO_PATHS = ("a\0b", "\ud800", "", None, 5, b"model")
ENTRIES = (
    SafetensorsStore,
    open_store,
    moecache.open,
    lambda path: packing.plan(path, "/nowhere/out"),
    lambda path: packing.pack(path, "/nowhere/out"),
)


@pytest.mark.parametrize("entry", ENTRIES, ids=range(len(ENTRIES)))
def test_a_checkpoint_whose_name_is_too_long_is_a_store_error(
    entry: Callable[[object], object],
) -> None:
    """The message has as much of the name as can be read, and the remedy."""
    for path in TOO_LONG:
        with pytest.raises(StoreError, match="File name too long; check the path") as caught:
            entry(path)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("entry", ENTRIES, ids=range(len(ENTRIES)))
def test_what_is_no_path_is_a_config_error(entry: Callable[[object], object]) -> None:
    """A NUL, half of a surrogate pair, nothing at all, other types."""
    for path in NO_PATHS:
        with pytest.raises(ConfigError, match="path"):
            entry(path)


def test_a_place_to_pack_into_is_checked_before_the_work(tiny_moe: Path, tmp_path: Path) -> None:
    """By `plan` as by `pack`; nothing is left behind."""
    for function in (packing.plan, packing.pack):
        for path in TOO_LONG:
            with pytest.raises(StoreError, match="too long; choose another name"):
                function(tiny_moe, tmp_path / path)
        for no_path in NO_PATHS:
            with pytest.raises(ConfigError, match="path"):
                function(tiny_moe, no_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["warm"],
        ["warm", "--status"],
        ["warm", "--experts-only"],
        ["warm", "--status", "--experts-only"],
        ["pack", "--dry-run"],
        ["bench"],
        ["generate"],
    ],
    ids=" ".join,
)
def test_commands_say_it_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is imported that takes seconds."""
    monkeypatch.setattr("moecache.commands.bench.run_process", None)
    command, *options = arguments
    for path, code in (("x" * 300, 1), ("/no/such/model", 1), ("a\0b", 2), ("\ud800", 2), ("", 2)):
        more = {"generate": ["a prompt"], "pack": ["out"]}.get(command, [])
        assert cli.main([command, *options, path, *more]) == code
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("moecache: ")
        assert len(lines[0]) < 500


def test_a_link_to_itself_is_a_store_error(tmp_path: Path) -> None:
    """The system says why."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StoreError, match="Too many"):
        moecache.open(tmp_path / "loop")
