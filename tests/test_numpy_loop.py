"""The NumPy host loop against transformers' model of the same checkpoint."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import moecache
from moecache.commands.demo import resident_experts
from moecache.stores import open_store


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_logits_agree_with_transformers(
    tiny_moe: Path, numpy_loop: ModuleType, prompt: bytes
) -> None:
    """Prefill and decode give transformers' float32 logits, up to rounding."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = transformers.OlmoeForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32)
    tokens = np.frombuffer(prompt[:120], np.uint8).astype(np.int64) + 3
    with torch.no_grad():
        logits = reference(input_ids=torch.from_numpy(tokens)[None]).logits[0].numpy()

    with open_store(tiny_moe) as store:
        model = numpy_loop.NumpyMoe(store, resident_experts(store))
        prefilled = model.forward(tokens[:100])
        decoded = [model.forward(tokens[i : i + 1]) for i in range(100, 120)]

    assert np.abs(logits[99]).max() > 5
    assert np.allclose(prefilled, logits[99], atol=2e-3)
    assert np.allclose(np.stack(decoded), logits[100:], atol=2e-3)


@pytest.mark.filterwarnings("ignore")
def test_greedy_text_agrees_with_transformers(tiny_moe: Path, numpy_loop: ModuleType) -> None:
    """Forty likeliest tokens are the same, with a quarter of the experts in memory."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = transformers.OlmoeForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32)
    text = b"import os\n\n\ndef "
    ids = torch.tensor([[byte + 3 for byte in text]])
    expected = reference.generate(ids, max_new_tokens=40, do_sample=False)[0, len(text) :]

    with (
        open_store(tiny_moe) as store,
        moecache.open(tiny_moe, "25%", dtype=np.float32) as runtime,
    ):
        model = numpy_loop.NumpyMoe(store, numpy_loop.through_moecache(runtime))
        steps = list(numpy_loop.generate(model, text, 40, temperature=0, seed=0))

    assert [token for token, _ in steps] == expected.tolist()


def test_chunks_of_a_prompt_give_the_same_sequence(
    tiny_moe: Path, numpy_loop: ModuleType, prompt: bytes
) -> None:
    """A prompt in two parts attends to the first part."""
    tokens = np.frombuffer(prompt[:64], np.uint8).astype(np.int64) + 3
    with open_store(tiny_moe) as store:
        experts = resident_experts(store)
        whole = numpy_loop.NumpyMoe(store, experts)
        parts = numpy_loop.NumpyMoe(store, experts)
        logits = whole.forward(tokens)
        parts.forward(tokens[:40])
        assert np.allclose(parts.forward(tokens[40:]), logits, atol=1e-3)


def test_a_sequence_that_is_too_long_is_refused(tiny_moe: Path, numpy_loop: ModuleType) -> None:
    """The message names the model's limit; the sequence is as it was."""
    with open_store(tiny_moe) as store:
        model = numpy_loop.NumpyMoe(store, resident_experts(store))
        with pytest.raises(moecache.ConfigError, match="1 to 1024"):
            model.forward(np.full(1025, 40))
        with pytest.raises(moecache.ConfigError, match="1 to 1024"):
            model.forward(np.array([], np.int64))
        assert model.num_tokens == 0


def test_the_shipped_model_has_learnt(tiny_moe: Path, numpy_loop: ModuleType) -> None:
    """Held-out loss of the record is far below single bytes; text looks like Python."""
    import json

    record = json.loads((tiny_moe / "training.json").read_text())
    assert record["loss_curve"][-1]["held_out_loss"] < 0.4 * record["byte_unigram_entropy_nats"]

    source = (
        b"class Node:\n    def __init__(self, name, value):\n        self.name = name\n"
        b"        self.value = value\n"
    )
    with open_store(tiny_moe) as store:
        model = numpy_loop.NumpyMoe(store, resident_experts(store))
        tokens = np.frombuffer(source, np.uint8).astype(np.int64) + 3
        losses = []
        for index in range(len(tokens) - 1):
            logits = model.forward(tokens[index : index + 1]).astype(np.float64)
            losses.append(
                np.log(np.exp(logits - logits.max()).sum())
                - (logits[tokens[index + 1]] - logits.max())
            )
    assert np.mean(losses) < 1.5
