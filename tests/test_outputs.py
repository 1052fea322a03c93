"""Outputs: what a command or a call writes replaces its like, and nothing else."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moecache
from moecache import cli
from moecache.errors import ConfigError
from moecache.study import Table, load_any, sweep
from tests.helpers.traces import random_trace

CONFIG = '{"architectures": ["SomeMoe"]}\n'
Write = Callable[..., None]


def table(seed: int = 1) -> Table:
    """Return a table of one replay."""
    return sweep({"one": random_trace(seed)}, "lru", 2)


WRITERS: dict[str, Write] = {
    "trace": random_trace(1).save,
    "csv": table().to_csv,
    "json": table().to_json,
    "parquet": table().to_parquet,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a model's config.json, which no output may replace."""
    path = tmp_path / "config.json"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def writer(request: pytest.FixtureRequest) -> Write:
    """Return what writes a kind of file."""
    if request.param == "parquet":
        pytest.importorskip("pyarrow")
    return WRITERS[request.param]


@pytest.mark.parametrize("writer", WRITERS, indirect=True)
def test_something_else_is_replaced_only_by_force(writer: Write, config: Path) -> None:
    """The message says how; an empty file, as mktemp makes, may be written to."""
    with pytest.raises(ConfigError, match=r"config\.json: is not a.* force it \(--force, force="):
        writer(config)
    assert config.read_text() == CONFIG
    writer(config, force=True)
    written = config.read_bytes()
    assert written != CONFIG.encode()
    config.write_bytes(b"")
    writer(config)
    assert config.read_bytes() == written


@pytest.mark.parametrize("writer", WRITERS, indirect=True)
def test_what_is_of_the_same_kind_is_replaced(writer: Write, tmp_path: Path) -> None:
    """As often as one likes, and also where the first is longer than what is looked at."""
    path = tmp_path / "out"
    random_trace(2, num_tokens=5000).save(path)
    if writer is not WRITERS["trace"]:
        writer(path, force=True)
    for _ in range(2):
        writer(path)
    assert path.stat().st_size < 10_000


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("trace record OUT --max-new-tokens 1", "OUT.npz"),
        ("trace convert TRACE OUT", "OUT.npz"),
        ("replay TRACE --csv OUT", "--csv"),
        ("replay TRACE --parquet OUT", "--parquet"),
        ("replay TRACE --plot OUT", "--plot"),
        ("simulate TRACE --csv OUT", "--csv"),
        ("bench no-such-model --json OUT", "--json"),
        ("generate no-such-model hello --record-trace OUT", "--record-trace"),
    ],
)
def test_a_command_refuses_before_it_runs(
    command: str, option: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, the file as it was; --help has the remedy."""
    random_trace(1).save(tmp_path / "run.npz")
    given = {"OUT": str(config), "TRACE": str(tmp_path / "run.npz")}
    arguments = [given.get(word, word) for word in command.split()]

    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{option}: {config}: is not a" in shown.err
    assert shown.err.count("\n") == 1
    assert config.read_text() == CONFIG
    with pytest.raises(SystemExit):
        cli.main([*arguments[: 2 if arguments[0] == "trace" else 1], "--help"])
    assert "--force" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    ["trace convert TRACE OUT", "replay TRACE --policy lru --csv OUT", "simulate TRACE --csv OUT"],
)
def test_a_command_replaces_its_own_and_by_force_anything(
    command: str, config: Path, tmp_path: Path
) -> None:
    """The second time without being told to."""
    random_trace(1, num_tokens=4).save(tmp_path / "run.npz")
    given = {"OUT": str(config), "TRACE": str(tmp_path / "run.npz")}
    arguments = [given.get(word, word) for word in command.split()]
    if arguments[0] == "simulate":
        arguments += ["--expert-bytes", "1MiB", "--prefetch", "off"]

    assert cli.main([*arguments, "--force"]) == 0
    assert cli.main(arguments) == 0


def test_a_recording_is_refused_before_the_run(config: Path, tiny_moe: Path) -> None:
    """Not when the run is over, and the routing lost."""
    with pytest.raises(ConfigError, match="is not a routing trace, and would be lost"):
        moecache.open(tiny_moe, slots=40, prefault="off", record_trace=config)
    with moecache.open(tiny_moe, slots=40, prefault="off") as runtime:
        with pytest.raises(ConfigError, match="is not a routing trace"):
            runtime.record_trace(config)
        with runtime.record_trace(config, force=True), runtime.lease(0, np.arange(4)):
            pass
        with runtime.record_trace(config) as recording, runtime.lease(0, np.arange(4)):
            pass
    assert recording.saved
    assert load_any(config).num_layers == 8


@pytest.mark.parametrize("variable", ["RECORD_TRACE", "EXPERT_STATS"])
def test_the_environment_replaces_nothing_else_either(
    variable: str,
    config: Path,
    tiny_moe: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of any setting, that is a warning."""
    options: dict[str, Any] = {"slots": 40, "prefault": "off"}
    monkeypatch.setenv(f"MOECACHE_{variable}", str(config))
    with caplog.at_level(logging.WARNING), moecache.open(tiny_moe, **options):
        pass
    assert "config.json: is not a" in caplog.text
    assert config.read_text() == CONFIG
    config.unlink()
    for _ in range(2):
        with moecache.open(tiny_moe, **options):
            pass
    assert caplog.text.count("\n") == 1
