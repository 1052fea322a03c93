"""The benchmark of whole processes, run once and small; at full size it is a script.

python -m bench.first_token --help
"""

import json
import shutil
from pathlib import Path

import pytest

from moecache.files import find_examples


def test_a_process_is_timed_from_its_start_to_its_end(disk: Path) -> None:
    """And reads its model from the disk, and a prompt of as many tokens as were asked for."""
    pytest.importorskip("transformers")
    from bench import first_token

    model, figures = disk / "model", disk / "figures.json"
    shutil.copytree(find_examples() / "tiny_moe", model)
    sizes = ["--prompt-tokens", "12", "--rounds", "1", "--pause", "0", "--json", str(figures)]
    assert first_token.main([str(model), *sizes]) == 0
    (found,) = json.loads(figures.read_text())["figures"]
    assert (found["name"], found["pages"], found["memory"]) == ("moecache", "cold", "the host's")
    assert found["prompt_tokens"] == [12]
    (run,) = found["runs"]
    assert 0 < run["first_s"] <= run["last_s"]
    assert run["end_s"] > 0
    assert run["user_s"] > 0
    assert run["read_bytes"] >= (model / "model.safetensors").stat().st_size
    assert run["peak_bytes"] > 2**20
