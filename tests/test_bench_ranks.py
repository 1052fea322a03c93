"""bench.ranks, small: what is sent is computed rightly, and a rank that is killed is named."""

import json
from pathlib import Path

import pytest

from bench import ranks
from bench.ranks_kills import kill_often

pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_bytes_are_computed_by_hand(tmp_path: Path) -> None:
    """Two tokens of three choices, two layers, rows of four numbers, two others to send to."""
    sizes = {"hidden_size": 4, "num_experts_per_tok": 3, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    rows = 2 * 3 * 4 * 2
    # A prompt of one token, and a second token: two forwards, a message of each of three ranks.
    assert ranks._sent_bytes(tmp_path, 3, 1, 2, number_bytes=2) == 2 * 2 * (rows + 2 * 3 * 16)


@pytest.mark.nightly
def test_a_killed_rank_is_named_by_the_others(tmp_path: Path) -> None:
    """As fifty times in the benchmark."""
    model = ranks._qwen3(tmp_path / "model", 2, 8, 64, 32)
    found = kill_often(model, tmp_path, 1)
    assert found["wrong"] == []
    assert (found["kills"], found["named"]) == (1, 1)
    # How long it takes is the benchmark's to say: a busy machine delays everything.
    assert found["longest_s"] > 0
