"""The benchmark of a model larger than memory, run once and small; at full size it is a script.

python -m bench.bigger_than_ram --help
"""

import json
from pathlib import Path

import pytest

from bench import bigger_than_ram
from bench.limits import MemoryLimit, NoLimitError


def test_contestants_agree_under_a_limit(disk: Path, tmp_path: Path) -> None:
    """Every contestant computes the same within the limit, and the figures are written."""
    try:
        with MemoryLimit(2**30):
            pass
    except NoLimitError as error:
        pytest.skip(str(error))
    code = bigger_than_ram.main(
        [
            *("--dir", str(disk), "--json", str(tmp_path / "figures.json")),
            *("--expert-size", "768KiB", "--memory", "0.75", "--reserve", "24MiB"),
            *("--warm", "2", "--tokens", "4", "--runs", "1", "--policies", "lru"),
        ]
    )

    assert code == 0
    summary = json.loads((tmp_path / "figures.json").read_text())
    assert len(summary["rows"]) == 9
    assert all(0 < row["peak_bytes"] <= summary["limit_bytes"] for row in summary["rows"])
    cached = [row for row in summary["rows"] if row["contestant"].startswith("own")]
    assert len({row["hit_rate"] for row in cached if row["slots"] == cached[0]["slots"]}) == 1
    assert all(row["hit_rate"] <= summary["belady_hit_rate"] for row in cached)
