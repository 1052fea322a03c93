"""The distance from the dequantized model in float64, run once and small: without llama.cpp.

python -m bench.faithful --help
"""

import json
from pathlib import Path

import pytest


def test_float32_has_the_tokens_of_the_dequantized_model(tmp_path: Path) -> None:
    """Torch's products but for float32's rounding, kernels but for that of activations."""
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    from bench import faithful

    figures = tmp_path / "figures.json"
    arguments = ["gpt-oss", "--mixes", "Q4_0", "--prompts", "1", "--no-llama"]
    assert faithful.main([*arguments, "--json", str(figures)]) == 0
    (figure,) = json.loads(figures.read_text())["figures"]
    assert figure["types"].keys() == {"Q4_0"}
    found = figure["contestants"]
    assert found.keys() == set(faithful.OURS)
    for name, most in (("torch float32", 1e-5), ("fast float32", 1e-3)):
        assert found[name]["tokens"] == faithful.NEW_TOKENS
        assert found[name]["same_experts"] < most
    assert 0 < found["torch float32"]["kl"] < found["fast float32"]["kl"] < found["fast"]["kl"]
