"""The benchmark of conversations, run once and small; at full size it is a script.

python -m bench.conversation --help
"""

import json
from pathlib import Path

import pytest

from moecache.files import find_examples


def test_a_conversation_has_the_same_logits_whatever_is_kept(tmp_path: Path) -> None:
    """And a later turn knows the pages of the one before it, in memory and after a restart."""
    pytest.importorskip("transformers")
    from bench import conversation

    model = tmp_path / "model"
    model.symlink_to(find_examples() / "tiny_moe")
    figures = tmp_path / "figures.json"
    sizes = ["--prompt-tokens", "300", "--turns", "2", "--turn-tokens", "20", "--new-tokens", "4"]
    # The first of these two begins with nothing kept; a process more would show it once more.
    ways = ["--ways", "in files", "after a restart"]
    assert conversation.main([str(model), *sizes, *ways, "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    known = {
        way: [turn["known"] for turn in runs[0]["turns"]] for way, runs in found["figures"].items()
    }
    # Within a page where the processor multiplies bfloat16; see `_fast.most_rows`.
    assert known in (
        {"in files": [0, 256], "after a restart": [256, 256]},
        {"in files": [0, 288], "after a restart": [288, 320]},
    )
