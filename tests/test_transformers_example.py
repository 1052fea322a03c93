"""The example of the documentation is run as a reader would."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformers_chat.py"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def test_a_chat_answers_and_reports(tmp_path: Path) -> None:
    """Two questions, two answers, then the figures of the cache."""
    from bench.qwen3_moe import make_config, write_checkpoint

    config = make_config(2, 16, 4, hidden=64, width=32, vocabulary=320)
    config.max_position_embeddings = 1100
    write_checkpoint(tmp_path, config)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "generation_config.json").write_text('{"max_length": 8}')
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path)],
        input="Hello\nAnd now?\n\n",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=EXAMPLE.parents[1],
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("> ") == 3
    assert "hit rate" in done.stdout
    assert "experts of" in done.stdout
