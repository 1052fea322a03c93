"""The comparison of simulated ranks with ranks, run once and small: what is no question of time.

python -m bench.ranks_model --help
"""

import json
from pathlib import Path

import pytest


def test_simulated_ranks_miss_and_send_what_ranks_do(tmp_path: Path) -> None:
    """To the last expert and byte; how long it takes is for a quiet machine."""
    pytest.importorskip("transformers")
    from bench import ranks_model

    figures = tmp_path / "figures.json"
    sizes = ["--layers", "2", "--experts", "24", "--hidden", "64", "--width", "64"]
    given = ["--ranks", "2", "--tokens", "12", "--share", "0.5", "--json", str(figures)]
    ranks_model.main([*sizes, *given, "--directory", str(tmp_path)])
    for row in json.loads(figures.read_text())["rows"]:
        assert row["measured_misses"] == row["simulated_misses"] > 0
        assert row["measured_sent_bytes"] == row["simulated_sent_bytes"]
        assert row["measured_tokens_per_s"] > 0
        assert row["simulated_tokens_per_s"] > 0
