"""The first example of docs/telemetry.md runs as it stands; the second one would take a port."""

import re
from pathlib import Path

import pytest

import moecache

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "telemetry.md").read_text(), re.DOTALL)


def test_the_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints the report, and figures of an interval."""
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(compile(BLOCKS[0], "docs/telemetry.md", "exec"), names)
    runtime = names["runtime"]
    assert isinstance(runtime, moecache.ExpertRuntime)
    runtime.close()

    shown = capsys.readouterr().out
    assert "layer 7: no accesses recorded" in shown
    assert shown.endswith("0.0 0.0 0\n")
