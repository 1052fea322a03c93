"""The examples of docs/study.md run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "study.md").read_text(), re.DOTALL)


def test_the_examples_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one namespace, but for the pictures where matplotlib is missing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names: dict[str, object] = {}
    for block in BLOCKS:
        if "plots" in block:
            matplotlib = pytest.importorskip("matplotlib")
            matplotlib.use("Agg")
        exec(compile(block, "docs/study.md", "exec"), names)
    from matplotlib import pyplot as plt

    plt.close("all")
    shown = capsys.readouterr().out
    assert "policy    echo, scope global" in shown
    assert "use        policy " in shown
    assert (tmp_path / "curves.png").stat().st_size > 0
