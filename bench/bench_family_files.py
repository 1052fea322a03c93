"""The benchmark of several families' files, run once and small; at full size it is a script.

python -m bench.family_files --help
"""

import json
from pathlib import Path

import pytest


def test_a_familys_ways_are_given_the_same_tokens(tmp_path: Path) -> None:
    """And choose the same next ones, mostly: weights are random, and sums differ in their order."""
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    from bench import family_files

    figures = tmp_path / "figures.json"
    sizes = ["--layers", "4", "--hidden", "64", "--prompt", "70", "--rounds", "1"]
    only = ["--only", "qwen35moe", "--json", str(figures)]
    assert family_files.main([str(tmp_path), *sizes, *only]) == 0
    found = json.loads(figures.read_text())["figures"]["qwen35moe"]
    ways = {one["name"]: one for one in found}
    assert {"without torch", "with torch"} <= ways.keys()
    for one in found:
        assert one["token_ms"] > 0
        assert one["prompt_s"] > 0
        assert one["same_choice"] > 0.5
