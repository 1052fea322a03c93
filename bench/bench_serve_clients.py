"""The benchmark of several clients, run once and small; at full size it is a script.

python -m bench.serve_clients --help
"""

import json
from pathlib import Path

import pytest

from moecache.files import find_examples


def test_clients_at_once_get_the_answers_that_each_gets_alone(tmp_path: Path) -> None:
    """And all the tokens that they ask for."""
    for module in ("transformers", "uvicorn"):
        pytest.importorskip(module)
    from bench import serve_clients

    figures = tmp_path / "figures.json"
    sizes = ["--clients", "2", "--new-tokens", "8", "--rounds", "1", "--json", str(figures)]
    assert serve_clients.main([str(find_examples() / "tiny_moe"), *sizes]) == 0
    found = json.loads(figures.read_text())
    assert found["equal"]
    assert [found["figures"][way]["num_tokens"] for way in ("alone", "together")] == [16, 16]
