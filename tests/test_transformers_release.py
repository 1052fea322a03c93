"""What a model gives back when its cache is closed, and how a runtime goes on without it."""

import gc
import logging
import weakref
from pathlib import Path

import ml_dtypes
import pytest

import moecache
from moecache.prefetch.predict import SharedEcho
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.offloading import load_whole

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
FAMILY = FAMILIES["qwen3_moe"]
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(FAMILY, tmp_path_factory.mktemp("release"), "bfloat16")


def test_the_slots_memory_is_free_after_close_while_the_model_lives(path: Path) -> None:
    """No view of it is left behind."""
    from moecache.integrations.transformers import load

    model = load(path, memory="50%", prefetch="router")
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    slab = weakref.ref(model.moecache.runtime.slab("down").base)
    model.moecache.close()
    gc.collect()
    assert slab() is None


def test_a_runtime_guesses_as_before_when_its_model_is_gone(path: Path) -> None:
    """Rounds of attach and detach do not stack up look-aheads."""
    from moecache.integrations.transformers import RouterLookAhead, attach

    dtype = ml_dtypes.bfloat16
    with moecache.open(path, "50%", prefetch="echo", dtype=dtype) as runtime:
        model = load_whole(FAMILY, path, "bfloat16")
        for _ in range(3):
            offload = attach(model, runtime, look_ahead=True)
            assert isinstance(runtime.predictor, RouterLookAhead)
            stats = runtime.stats().prefetch
            assert stats is not None
            assert stats.mode == "router"
            offload.detach()
        assert isinstance(runtime.predictor, SharedEcho)
        stats = runtime.stats().prefetch
        assert stats is not None
        assert stats.mode == "echo"


def test_layers_that_do_not_run_are_warned_of_and_do_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The routers stand at the layers of the runtime; `load` leaves such layers out."""
    from safetensors.torch import load_file, save_file

    from moecache.integrations.transformers import attach, load

    write_checkpoint(FAMILY, tmp_path, "bfloat16")
    shard = tmp_path / "model.safetensors"
    tensors = load_file(shard)
    first = next(name for name in tensors if ".experts." in name).partition(".mlp.")[0]
    tensors |= {
        name.replace(first, "mtp.layers.0"): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(f"{first}.mlp.experts.")
    }
    save_file(tensors, shard, metadata={"format": "pt"})
    prompt = torch.tensor([[1, 2, 3]])

    with load(tmp_path, "50%").moecache as offload:
        assert not any("mtp" in name for name in offload.runtime.layout.layer_names)
        num_layers = offload.runtime.layout.num_layers
    model = load_whole(FAMILY, tmp_path, "bfloat16")
    with (
        moecache.open(tmp_path, "50%", prefetch="echo", dtype=ml_dtypes.bfloat16) as runtime,
        caplog.at_level(logging.WARNING),
    ):
        assert runtime.layout.num_layers == num_layers + 1
        attach(model, runtime, look_ahead=True)
        model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        stats = runtime.stats().prefetch
        assert stats is not None
        assert stats.num_predictor_errors == 0
        assert stats.num_found_k > 0
    assert "layers_that_do_not_run" in caplog.text
