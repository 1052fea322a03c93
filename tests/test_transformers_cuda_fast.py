"""compute="fast" with slots on a GPU: CudaExperts computes what models ask, and nothing else does.

The device made for tests calls itself "cpu" here, so that tensors of a torch without CUDA are
its arrays; the same tests run on a GPU where there is one.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from moecache.errors import ConfigError, MoeCacheError
from moecache.slots import CudaSlots
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.more_families import MORE_FAMILIES
from tests.helpers.nightly import some
from tests.helpers.offloading import generated, load_whole
from tests.helpers.tensor_device import opened

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from moecache.integrations.transformers import load  # noqa: E402
from tests.helpers import torch_graph  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

# SiLU and GELU; a router that normalizes, one that does not, and one with a scale for each expert;
# gates that limit what goes into them; no gate; stored transposed, with biases and without.
COMPUTED = ["qwen3_moe", "olmoe", "gemma4_text", "deepseek_v4", "minimax_m3_vl", "nemotron_h"]
COMPUTED += ["gpt_oss", "qwen3_vl_moe_hub"]
# Why a family's experts, as it publishes them, have no kernel on a GPU.
REFUSED = {
    "inkling2": "gate is one of their own",
    "llama4": "a score multiplies",
    "longcat_flash": "gate is one of their own",
    "muse_spark": "norm of its own",
    "step3p7": "gate is one of their own",
}
# A prompt, one that takes cuBLAS, and a batch of single tokens.
PROMPTS = [torch.arange(n).reshape(b, -1) * 7 % 120 for b, n in ((1, 1), (1, 300), (3, 3), (3, 24))]


@pytest.fixture(params=["fake", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a device as torch knows it; "cuda" opens slots there."""
    return opened(request.param, monkeypatch)


@pytest.fixture(name="checkpoint", scope="module")
def _checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function to the directory of a family's checkpoint in bfloat16."""
    made: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in made:
            directory = tmp_path_factory.mktemp(name) / "model"
            made[name] = write_checkpoint(
                {**MORE_FAMILIES, **FAMILIES}[name], directory, "bfloat16"
            )
        return made[name]

    return write


def fast(path: Path, memory: str = "25%", **options: Any) -> Any:
    """Return a model whose experts the GPU's kernels compute."""
    return load(path, memory, "cuda", **{"compute": "fast", "prefetch": "off", **options})


def logits(model: Any, ids: Any) -> Any:
    """Return a model's logits, without gradients."""
    with torch.no_grad():
        return model(input_ids=ids.to(model.device)).logits


def step(model: Any, num_tokens: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return hidden states, ids and weights of a step of a model's second layer."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    hidden = torch.randn(num_tokens, config.hidden_size, generator=generator).bfloat16()
    order = torch.rand(num_tokens, config.num_experts, generator=generator).argsort(dim=1)
    weights = torch.rand(num_tokens, config.num_experts_per_tok, generator=generator)
    parts = hidden, order[:, : config.num_experts_per_tok].contiguous(), weights
    return tuple(part.to(model.device) for part in parts)  # type: ignore[return-value]


@pytest.mark.parametrize("name", some(COMPUTED, lambda name: name in ("qwen3_moe", "gpt_oss")))
def test_what_is_resident_changes_no_bit_and_the_error_is_that_of_torch(
    gpu: str, checkpoint: Callable[[str], Path], name: str
) -> None:
    """Half more than torch's own in bfloat16 at most, in median, against the model in float32."""
    path = checkpoint(name)
    family = {**MORE_FAMILIES, **FAMILIES}[name]
    exact, torchs = load_whole(family, path), load_whole(family, path, "bfloat16")
    found = {}
    for memory in ("25%", "100%"):
        model = fast(path, memory)
        with model.moecache as offload:
            assert isinstance(offload.runtime.pool, CudaSlots)
            parts = [logits(model, ids).cpu() for ids in PROMPTS]
            found[memory] = [*parts, generated(model, PROMPTS[2].to(gpu), 4).cpu()]
            assert (offload.stats().num_evictions > 0) == (memory == "25%")
            assert "computed by kernels: cuda; bfloat16" in offload.report()
            offload.runtime.cache.check()
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))
    wanted, usual, ours = (
        torch.cat([part.float().flatten() for part in parts])
        for parts in (
            [logits(exact, ids) for ids in PROMPTS],
            [logits(torchs, ids) for ids in PROMPTS],
            found["25%"][: len(PROMPTS)],
        )
    )
    error = (ours - wanted).abs().median()
    assert error <= 1.5 * (usual - wanted).abs().median()
    assert error < wanted.abs().median() / 4


def test_nothing_is_computed_by_torch(
    gpu: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither products nor activations of experts; nor do tensors go to the host's memory."""
    model = fast(checkpoint("qwen3_moe"), "100%")
    with model.moecache as offload:
        offload.runtime.usage.fill().wait()
        hidden, ids, weights = step(model, 3)
        experts = model.model.layers[1].mlp.experts
        before = offload.num_products
        for name in ("mm", "matmul", "bmm", "sigmoid"):
            monkeypatch.setattr(torch, name, None)
        monkeypatch.setattr(torch.Tensor, "cpu", None)
        monkeypatch.setattr(torch.Tensor, "numpy", None)
        with torch.no_grad():
            out = experts(hidden, ids, weights)
        assert out.shape == hidden.shape
        assert out.dtype == torch.bfloat16
        assert offload.num_products - before == ids.numel()


@pytest.mark.parametrize("num_tokens", [1, 4, 9])
def test_a_step_takes_tensors_as_models_have_them(
    gpu: str, checkpoint: Callable[[str], Path], num_tokens: int
) -> None:
    """Ids of 32 bits, weights of the model's type, hidden states of another, not contiguous."""
    model = fast(checkpoint("qwen3_moe"))
    with model.moecache, torch.no_grad():
        experts = model.model.layers[1].mlp.experts
        hidden, ids, weights = step(model, num_tokens)
        rounded = weights.bfloat16()
        plain = experts(hidden, ids, rounded.float())
        assert torch.equal(experts(hidden, ids.int(), rounded), plain)
        assert torch.equal(experts(hidden, ids.to(torch.int16), rounded.double()), plain)
        wide = torch.cat([hidden, hidden], dim=1)[:, : hidden.shape[1]]
        assert num_tokens == 1 or not wide.is_contiguous()
        assert torch.equal(experts(wide, ids.t().contiguous().t(), rounded), plain)
        found = experts(hidden.float(), ids, rounded)
        assert found.dtype == torch.float32
        assert torch.equal(found, plain.float())
        assert experts(hidden[:0], ids[:0], weights[:0]).shape == (0, hidden.shape[1])
        with pytest.raises(ConfigError, match="experts take"):
            experts(hidden[:, :-8].contiguous(), ids, weights)


def test_a_graph_holds_a_step(gpu: str, checkpoint: Callable[[str], Path]) -> None:
    """Of what is all resident; the ids that it reads are those of the replay."""
    model = fast(checkpoint("qwen3_moe"), "100%")
    with model.moecache as offload, torch.no_grad():
        runtime, experts = offload.runtime, model.model.layers[1].mlp.experts
        runtime.usage.fill().wait()
        device = runtime.pool.device
        hidden, ids, weights = step(model, 2)
        others = step(model, 2, seed=1)
        wanted = [experts(hidden, ids, weights).clone(), experts(*others).clone()]
        if gpu == "cpu":
            with device.capturing() as works:
                out = experts(hidden, ids, weights)
            replay: Any = lambda: [work() for work in works]  # noqa: E731
        else:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                experts(hidden, ids, weights)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = experts(hidden, ids, weights)
            replay = graph.replay
        for now, expected in zip(((hidden, ids, weights), others), wanted, strict=True):
            for place, value in zip((hidden, ids, weights), now, strict=True):
                place.copy_(value)
            replay()
            assert torch.equal(out, expected)


def test_a_compiled_step_is_that_of_eager(gpu: str, checkpoint: Callable[[str], Path]) -> None:
    """The experts are an operator there."""
    model = fast(checkpoint("qwen3_moe"))
    with model.moecache, torch.no_grad():
        experts = model.model.layers[1].mlp.experts
        hidden, ids, weights = step(model, 3)
        torch.compiler.reset()
        call = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(call(hidden, ids, weights), experts(hidden, ids, weights))
        torch.compiler.reset()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_graph_holds_a_token(
    gpu: str, checkpoint: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole model, with a static cache: each replay is a token with the logits of eager."""
    model = fast(checkpoint(name), "100%", prefetch="router")
    model.set_attn_implementation("sdpa")
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with model.moecache as offload, torch.no_grad():
        offload.runtime.usage.fill().wait()
        side = None if gpu == "cpu" else torch.cuda.Stream()
        with nullcontext() if side is None else torch.cuda.stream(side):
            found = []
            for captures in (False, True):
                cache = transformers.StaticCache(config=model.config, max_cache_len=32)
                model(PROMPTS[3][:1].to(gpu), past_key_values=cache)
                model(token, past_key_values=cache)
                replay: Any = None
                if captures:
                    replay, logits_of = captured(model, cache, token, side, monkeypatch)
                parts = []
                for number in (5, 17, 99):
                    token.fill_(number)
                    if replay is None:
                        parts.append(model(token, past_key_values=cache).logits.clone())
                    else:
                        replay()
                        parts.append(logits_of.clone())
                token.zero_()
                found.append(parts)
    assert len(found[0]) == 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(*found[0][:2])


def captured(
    model: Any, cache: Any, token: Any, side: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any]:
    """Return what computes a token again, and where its logits are then."""
    if side is None:
        before = [[t.clone() for t in tensors(layer)] for layer in cache.layers]
        device = model.moecache.runtime.pool.device
        with torch_graph.capturing(device, monkeypatch) as replay:
            out = model(token, past_key_values=cache).logits
        # What is captured is not computed.
        for layer, kept in zip(cache.layers, before, strict=True):
            for place, value in zip(tensors(layer), kept, strict=True):
                place.copy_(value)
        return replay, out
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        out = model(token, past_key_values=cache).logits
    return graph.replay, out


def tensors(layer: Any) -> list[Any]:
    """Return the tensors of a cache's layer."""
    return [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]


def test_a_graph_of_what_is_not_resident_is_refused(
    gpu: str, checkpoint: Callable[[str], Path]
) -> None:
    """It would hold the slots that happened to be right."""
    if gpu != "cpu":
        pytest.skip("an error while torch captures ends the capture, which torch then refuses")
    model = fast(checkpoint("qwen3_moe"))
    with model.moecache as offload, torch.no_grad():
        experts = model.model.layers[1].mlp.experts
        hidden, ids, weights = step(model, 2)
        experts(hidden, ids, weights)
        with (
            offload.runtime.pool.device.capturing(),
            pytest.raises(MoeCacheError, match="what happened to be resident"),
        ):
            experts(hidden, ids, weights)


@pytest.mark.parametrize("name", REFUSED)
def test_experts_without_a_kernel_are_refused(
    gpu: str, checkpoint: Callable[[str], Path], name: str
) -> None:
    """The message says why, and what to ask for instead; the model can be loaded so."""
    with pytest.raises(ConfigError, match=rf'compute="fast": .*{REFUSED[name]}.*; use "torch"'):
        fast(checkpoint(name))


def test_torch_computes_layers_that_have_no_kernel(
    gpu: str,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one reason in the report and the log; whatever is resident, the bits are the same."""
    from moecache.integrations.transformers import _kernels

    whole = _kernels.device_kernel_of

    def partly(module: Any, runtime: Any, layer: int, *args: Any, **order: Any) -> Any:
        if layer == 0:
            raise ConfigError("no kernel today")
        return whole(module, runtime, layer, *args, **order)

    monkeypatch.setattr(_kernels, "device_kernel_of", partly)
    found = []
    for memory in ("25%", "100%"):
        with caplog.at_level(logging.WARNING):
            model = fast(checkpoint("qwen3_moe"), memory)
        with model.moecache as offload:
            found.append(logits(model, PROMPTS[3]))
            assert "layers by torch: no kernel today" in offload.compute_stats().describe()
        assert "left_to_torch layers=1 of=" in caplog.text
    assert torch.equal(*found)


def test_gradients_are_torchs(gpu: str, qwen3_moe: Path, whole_model: Any) -> None:
    """As in RAM: they go through the experts, which torch multiplies then."""
    ids = PROMPTS[3].to(gpu)
    whole = whole_model.to(gpu)
    model = fast(qwen3_moe, dtype=torch.float32)
    with model.moecache:
        found, wanted = (
            torch.autograd.grad(one(ids).logits.sum(), one.model.norm.weight)[0]
            for one in (model, whole)
        )
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    whole_model.to("cpu")


def test_a_cache_that_is_closed_in_the_middle_is_an_error(
    gpu: str, checkpoint: Callable[[str], Path]
) -> None:
    """Of the step that finds it, whether the model's cache is closed or its runtime."""
    for close, message in (
        (lambda offload: offload.close(), "closed"),
        (lambda offload: offload.runtime.close(), "the runtime is closed"),
    ):
        model = fast(checkpoint("qwen3_moe"))
        norm = model.model.layers[1].post_attention_layernorm
        norm.register_forward_hook(lambda *_, close=close, model=model: close(model.moecache))
        with pytest.raises(MoeCacheError, match=message):
            logits(model, PROMPTS[3])
        model.moecache.close()


def test_detach_gives_the_experts_back(gpu: str, checkpoint: Callable[[str], Path]) -> None:
    """And torch's products with them."""
    path = checkpoint("qwen3_moe")
    model = fast(path)
    before = logits(model, PROMPTS[1])
    model.moecache.detach()
    after = logits(model, PROMPTS[1])
    whole = load_whole(FAMILIES["qwen3_moe"], path, "bfloat16").to(gpu)
    assert torch.equal(after, logits(whole, PROMPTS[1]))
    assert not torch.equal(before, after)
