"""Llama 4's adapter: what the other families get from the experts interface."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moecache.errors import MoeCacheError
from tests.helpers.families import FAMILIES, write_checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(FAMILIES["llama4"], tmp_path_factory.mktemp("llama4"), "bfloat16")


@pytest.fixture(name="model")
def _model(path: Path) -> Iterator[Any]:
    from moecache.integrations.transformers import load

    model = load(path, memory="100%")
    yield model
    model.moecache.close()


def test_tokens_one_by_one_with_all_experts_there_give_no_warning(model: Any, path: Path) -> None:
    """And the logits of the model in memory."""
    whole = FAMILIES["llama4"].model_class.from_pretrained(path).eval()
    tokens = torch.arange(100)[None]
    with torch.no_grad():
        model(tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for token in (3, 3, 5):
                ids = torch.tensor([[token]])
                assert torch.equal(model(ids).logits, whole(ids).logits)


def test_gradients_are_an_error_rather_than_wrong(model: Any) -> None:
    """By then the slots hold other experts; the forward without them is as it was."""
    loss = model(torch.tensor([[1, 2, 3]])).logits.float().sum()
    with pytest.raises(MoeCacheError, match="cannot be trained through"):
        loss.backward()


def test_after_close_the_error_says_what_to_do(model: Any) -> None:
    """As with every other family."""
    model.moecache.close()
    with torch.no_grad(), pytest.raises(MoeCacheError, match="load the model"):
        model(torch.tensor([[1, 2, 3]]))


def test_experts_are_pinned_though_steps_end_at_their_first_wave(path: Path) -> None:
    """With one expert per token no second wave is asked for."""
    from moecache.integrations.transformers import load

    model = load(path, memory="50%", policy="lru", warmpin=1, warmpin_after=20)
    with model.moecache as offload, torch.no_grad():
        for token in range(30):
            model(torch.tensor([[token]]))
        assert offload.stats().num_pinned > 0
