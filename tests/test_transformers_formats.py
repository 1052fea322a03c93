"""Checkpoints packed in a format, in transformers: computed as they lie, and as their values."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moecache import packing
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.offloading import generated, load_in_slots

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

IDS = torch.arange(24).reshape(2, 12) * 7 % 120


@pytest.fixture(name="packed", scope="module", params=["q8_0", "q4_0"])
def _packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a Qwen3-MoE, packed in a format."""
    folder = tmp_path_factory.mktemp("formats")
    family = FAMILIES["qwen3_moe"]
    # Multiples of the 32 columns of a block.
    sizes = {**family.settings, "hidden_size": 64, "moe_intermediate_size": 96}
    model = write_checkpoint(
        dataclasses.replace(family, settings=sizes), folder / "model", "float32"
    )
    packing.pack(model, folder / "packed", format=request.param)
    return folder / "packed"


def logits(model: Any) -> Any:
    """Return a model's logits."""
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_torch_multiplies_the_values_that_detach_gives_back(packed: Path) -> None:
    """Bit for bit the model whose experts are those values, however few slots there are."""
    model = load_in_slots(packed, memory=None, slots=2, compute="torch")
    with model.moecache as offload:
        in_slots = logits(model)
        tokens = generated(model)
        offload.detach()
    assert torch.equal(logits(model), in_slots)
    assert torch.equal(generated(model), tokens)


def test_kernels_multiply_by_default_and_alike_at_every_number_of_slots(packed: Path) -> None:
    """As good as torch's products of the same values; what a report says is so."""
    found = {}
    for slots in (1, 3, 1000):
        model = load_in_slots(packed, memory=None, slots=slots)
        with model.moecache as offload:
            found[slots] = logits(model)
            assert packed_format(packed) in offload.report()
            assert "computed by kernels" in offload.report()
    assert torch.equal(found[1], found[3])
    assert torch.equal(found[1], found[1000])
    model = load_in_slots(packed, memory=None, compute="torch")
    with model.moecache:
        torch.testing.assert_close(found[1], logits(model), rtol=1e-3, atol=1e-4)


def test_gradients_are_those_of_the_values(packed: Path) -> None:
    """Backward reads the experts again, and dequantizes them again."""
    model = load_in_slots(packed, memory=None, slots=2)
    embeddings = model.get_input_embeddings()(IDS[:, :4]).detach().requires_grad_()
    model(inputs_embeds=embeddings).logits.float().sum().backward()
    gradient = embeddings.grad.clone()
    model.moecache.detach()
    embeddings.grad = None
    model(inputs_embeds=embeddings).logits.float().sum().backward()
    torch.testing.assert_close(gradient, embeddings.grad, rtol=1e-4, atol=1e-5)


def packed_format(path: Path) -> str:
    """Return the format that a checkpoint says it is in."""
    from moecache.stores import open_store

    with open_store(path) as store:
        return store.format
