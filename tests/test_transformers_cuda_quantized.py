"""Quantized experts of transformers' models on a GPU: as published, whatever is resident.

The device made for tests calls itself "cpu" here, so that tensors of a torch without CUDA are
its arrays; the same tests run on a GPU where there is one.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moecache.errors import ConfigError, MoeCacheError
from moecache.slots import CudaSlots
from tests.helpers import quantized
from tests.helpers.gguf_members import MODELS
from tests.helpers.gguf_models import build_from, read_gguf, write_gguf
from tests.helpers.offloading import generated, load_whole
from tests.helpers.tensor_device import opened

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from moecache.integrations.transformers import load  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

# gpt-oss has biases, a gate of its own and rows of gate and up in turns; Nemotron has no gate.
FAMILIES = {
    "gpt_oss-mxfp4": (quantized.GPT_OSS, quantized.mxfp4()),
    "qwen3_moe-fp8": (quantized.QWEN3_MOE, quantized.fp8()),
    "deepseek_v3-int4": (quantized.DEEPSEEK_V3, quantized.int4()),
    "qwen3_moe-nvfp4": (quantized.QWEN3_MOE, quantized.nvfp4()),
    "nemotron_h-nvfp4": (quantized.NEMOTRON_H, quantized.nvfp4()),
}
PROMPTS = [torch.arange(n).reshape(b, -1) * 7 % 120 + 1 for b, n in ((1, 1), (3, 3), (1, 9))]

Checkpoint = Callable[[str], tuple[Any, Path, Path]]


@pytest.fixture(params=["fake", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a device as torch knows it; "cuda" opens slots there."""
    return opened(request.param, monkeypatch)


@pytest.fixture(name="checkpoint", scope="module")
def _checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a function to a family, and its directories as published and in bfloat16."""
    made: dict[str, tuple[Any, Path, Path]] = {}

    def write(name: str) -> tuple[Any, Path, Path]:
        if name not in made:
            family, scheme = FAMILIES[name]
            folder = tmp_path_factory.mktemp("quantized")
            made[name] = family, *quantized.write_quantized(family, scheme, folder)
        return made[name]

    return write


def logits(model: Any) -> Any:
    """Return a model's logits of all prompts, in float32."""
    with torch.no_grad():
        found = [model(input_ids=ids.to(model.device)).logits for ids in PROMPTS]
    return torch.cat([one.cpu().float().flatten() for one in found])


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_stay_as_they_are_published(gpu: str, checkpoint: Checkpoint, name: str) -> None:
    """The same bits at any number of slots, and as near to their values as bfloat16 is."""
    family, published, plain = checkpoint(name)
    found = {}
    for memory in ("25%", "100%"):
        model = load(published, memory, "cuda", prefetch="off")
        with model.moecache as offload:
            assert isinstance(offload.runtime.pool, CudaSlots)
            found[memory] = logits(model)
            tokens = generated(model, PROMPTS[1].to(gpu), 3)
            assert tokens.shape == (3, 4)
            assert "computed by kernels: cuda; " in offload.report()
            assert (offload.stats().num_evictions > 0) == (memory == "25%")
    assert torch.equal(found["25%"], found["100%"])
    exact = logits(load_whole(family, plain, "float32"))
    rounded = logits(load_whole(family, plain, "bfloat16"))
    assert (found["25%"] - exact).abs().mean() < 1.5 * (rounded - exact).abs().mean() + 1e-4


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3moe", "Q8_0"), ("gpt-oss", "Q4_0"), ("nemotron_h_moe", "Q8_0")]
)
def test_a_gguf_file_stays_as_it_is(gpu: str, name: str, kind: str, tmp_path: Path) -> None:
    """Its experts, that is: nearly what torch makes of their values, alike in any slots."""
    pytest.importorskip("gguf")
    widths = [key for key in MODELS[name].settings if key.endswith("intermediate_size")]
    sizes = {"hidden_size": 64, **dict.fromkeys(widths, 32)}
    tiny = replace(MODELS[name], settings={**MODELS[name].settings, **sizes})
    original, path = tiny.build(), tmp_path / "model.gguf"
    types = {"exps.weight": kind, "attn_q.": "Q8_0"}
    write_gguf(path, tiny.metadata(original.config), tiny.tensors(original), types)
    found = []
    for memory in ("25%", "100%"):
        model = load(path, memory, "cuda", dtype=torch.float32)
        with model.moecache as offload:
            found.append(logits(model))
            assert "computed by kernels: cuda; " in offload.report()
            assert kind.lower() in offload.compute_stats().formats
    assert torch.equal(*found)
    wanted = logits(build_from(*read_gguf(path)))
    torch.testing.assert_close(found[0], wanted, rtol=0, atol=1e-4)


def test_what_torch_cannot_do_is_refused(gpu: str, checkpoint: Checkpoint) -> None:
    """Its products before the trunk is read, gradients when they are asked for."""
    _, published, _ = checkpoint("qwen3_moe-fp8")
    with pytest.raises(ConfigError, match=r'fp8.* by kernels alone; use compute="fast"'):
        load(published, "25%", "cuda", compute="torch")
    with pytest.raises(ConfigError, match='trunk="native" is computed in RAM'):
        load(published, "25%", "cuda", trunk="native")
    model = load(published, "25%", "cuda")
    with model.moecache as offload:
        before = logits(model)
        with pytest.raises(MoeCacheError, match=r"no gradients go: use torch\.no_grad"):
            model(input_ids=PROMPTS[2].to(gpu)).logits.sum().backward()
        assert torch.equal(logits(model), before)
        offload.runtime.cache.check()


def test_detach_gives_the_values_back(gpu: str, checkpoint: Checkpoint) -> None:
    """In the model's dtype, on its device."""
    family, published, plain = checkpoint("qwen3_moe-fp8")
    model = load(published, "25%", "cuda")
    model.moecache.detach()
    assert {parameter.device for parameter in model.parameters()} == {torch.device(gpu)}
    assert torch.equal(logits(model), logits(load_whole(family, plain, "bfloat16").to(gpu)))


def test_a_format_without_a_kernel_is_refused(gpu: str, tmp_path: Path) -> None:
    """Before the trunk is read, with what to do."""
    scheme = quantized.grouped("gptq", is_ordered=True)
    published, _ = quantized.write_quantized(quantized.QWEN2_MOE, scheme, tmp_path)
    with pytest.raises(ConfigError, match=r'no kernel on a GPU.*device="cpu"'):
        load(published, "25%", "cuda")
