"""The example of the documentation is run as a reader would."""

import io
import json
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformers_chat.py"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_chat_answers_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two questions, two answers, then the figures of the cache."""
    from bench.qwen3_moe import make_config, write_checkpoint

    config = make_config(2, 16, 4, hidden=64, width=32, vocabulary=320)
    config.max_position_embeddings = 1100
    write_checkpoint(tmp_path, config)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    # A token in sixteen ends an answer; 512 would take their time.
    defaults = {"max_length": 8, "eos_token_id": list(range(3, 320, 16))}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAnd now?\n\n"))

    found = runpy.run_path(str(EXAMPLE), run_name="__main__")

    found["model"].moecache.close()
    shown = capsys.readouterr().out
    assert shown.count("> ") == 3
    assert [message["role"] for message in found["chat"]] == ["user", "assistant"] * 2
    assert "hit rate" in shown
    assert "experts of" in shown
