"""The benchmark of a whole model on a GPU runs small on a device made for tests."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("greenlet")
from bench import gpu_model  # noqa: E402
from bench.gpu_bits import culprits  # noqa: E402
from tests.helpers.gpu_models import MODEL_OPTIONS, made_small  # noqa: E402
from tests.helpers.offloading import load_in_slots  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
WAYS = ["100%, graphs", "100%, modules", "50%, graphs", "50%, modules", "transformers alone"]


def test_every_way_decodes_and_leaves_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says how fast it was, and how much was there."""
    device, size = made_small(monkeypatch)
    out = tmp_path / "figures"
    assert gpu.main(["model", *MODEL_OPTIONS, "--json", str(out)], device, size) == 0
    found = json.loads(out.read_text())
    assert list(found["ways"]) == WAYS
    for name, way in found["ways"].items():
        assert way["tokens_per_s"] > 0
        assert way["differs"] == {}
        assert way.get("culprits", {"turns": 0})["turns"] == 0
        assert (way["hit_rate"] < 1) == name.startswith("50%")
    # The aim is the whole model's.
    assert [one["name"] for one in found["bounds"]] == [
        "our ways with other bits than a graph, or than before"
    ]
    assert not list(tmp_path.glob("moecache-gpu-*"))


def test_other_bits_are_told(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """From which layer and token on."""
    device, size = made_small(monkeypatch)
    seen = gpu_model._seen
    calls = 0

    def wrong(*given: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        found = seen(*given)
        if calls == 2:
            found["keys"][1, gpu_model.PROMPT_TOKENS + 2 :] += 1
            found["logits"][2:] += 1
        return found

    monkeypatch.setattr(gpu_model, "_seen", wrong)
    assert gpu.main(["model", *MODEL_OPTIONS, "--no-anchor"], device, size) == 1
    said = capsys.readouterr().out
    assert "100%, modules, run 1: other bits than the first graph's" in said
    assert "'layers_of_keys': [1], 'tokens_of_keys': [11, 12]" in said
    assert "NO   1.000 <= 0  our ways with other bits than a graph, or than before" in said


@pytest.mark.parametrize("name", ["q_proj", "self_attn", "experts"])
def test_the_module_that_gives_other_bits_is_named(
    name: str, qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those behind it, which get other inputs, nor the one that holds it."""
    model = load_in_slots(qwen3_moe, "100%", compute="torch")
    with model.moecache:
        modules = dict(model.named_modules())
        path = next(path for path in modules if path.endswith(f"layers.1.{PLACES[name]}{name}"))
        forward = modules[path].forward
        calls = 0

        def wrong(*given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            out = forward(*given, **named)
            if calls < 3:
                return out
            return (out[0] + 1, *out[1:]) if isinstance(out, tuple) else out + 1

        monkeypatch.setattr(modules[path], "forward", wrong)
        found = culprits(model, lambda: model(torch.tensor([[3, 4]])), 4)
    assert found["turns"] == 2
    assert list(found["modules"].values()) == [2]
    assert list(found["first"].values()) == [path]


PLACES = {"q_proj": "self_attn.", "self_attn": "", "experts": "mlp."}
