"""compute="fast": as good as torch's products, the same bits whatever is resident, and undone."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moecache
from moecache import experts, kernels
from moecache.errors import ConfigError
from moecache.formats import quantize
from moecache.slots import HostSlots
from moecache.stores import MemoryStore
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.kernels import computing
from tests.helpers.more_families import MORE_FAMILIES
from tests.helpers.offloading import generated, load_whole, prompt

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread", "one_kernel_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

FAMILY = FAMILIES["qwen3_moe"]
# Gates that limit what goes into them, and one that computes in float32.
GATED = ("beam", "deepseek_v4", "hy_v4", "minimax_m3_vl")
IDS = torch.arange(96).reshape(2, 48) * 7 % 120


@pytest.fixture(scope="module")
def one_kernel_thread() -> Iterator[None]:
    """Have the kernels compute in one thread, where a test does not say otherwise."""
    with computing(threads=1):
        yield


@pytest.fixture(name="checkpoint", scope="module")
def _checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a Qwen3-MoE in bfloat16."""
    return write_checkpoint(FAMILY, tmp_path_factory.mktemp("fast") / "model", "bfloat16")


def load(path: Path, memory: str | None = "25%", **options: Any) -> Any:
    """Return a model whose experts are computed by the kernels."""
    from moecache.integrations.transformers import load as load_model

    return load_model(path, memory=memory, **{"compute": "fast", **options})


def attach(model: Any, runtime: moecache.ExpertRuntime, compute: str = "fast") -> Any:
    """Import late: transformers may not be there."""
    from moecache.integrations.transformers import attach as attach_to

    return attach_to(model, runtime, compute=compute)


def logits(model: Any, ids: Any = IDS) -> Any:
    """Return a model's logits, those of single tokens and of several."""
    with torch.no_grad():
        return model(input_ids=ids).logits


def linears(model: Any) -> list[type]:
    """Return the classes of a model's linear layers."""
    return [type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)]


@pytest.mark.parametrize("name", [*FAMILIES, *GATED])
def test_the_error_is_that_of_torch(tmp_path: Path, name: str) -> None:
    """In median, against the model in float32: half more than torch's own in bfloat16 at most."""
    family = {**MORE_FAMILIES, **FAMILIES}[name]
    path = write_checkpoint(family, tmp_path, "bfloat16")
    # Few tokens, so that the trunk's kernels compute, too.
    ids = IDS[:, :4]
    exact = logits(load_whole(family, path), ids)
    torchs = logits(load_whole(family, path, "bfloat16"), ids).float()
    model = load(path)
    with model.moecache as offload:
        found = logits(model, ids).float()
        assert offload.num_products > 0

    assert (found - exact).abs().median() <= 1.5 * (torchs - exact).abs().median()
    # The model is no other: what is left over is far below what the logits are.
    assert (found - exact).abs().median() < exact.abs().median() / 4


@pytest.mark.parametrize("level", kernels.levels())
def test_slots_threads_and_prefetch_change_no_bit(checkpoint: Path, level: str) -> None:
    """Of logits of a prompt and of single tokens."""
    found = {}
    for memory, threads, prefetch in [
        ("100%", 1, "off"),
        ("100%", 2, "off"),
        ("25%", 1, "router"),
        ("25%", 2, "echo"),
        ("25%", 2, "off"),
    ]:
        with computing(level, threads):
            model = load(checkpoint, memory, prefetch=prefetch)
            with model.moecache as offload:
                parts = [logits(model), *(logits(model, IDS[:1, i : i + 1]) for i in range(6))]
                tokens = generated(model)
                assert (offload.stats().num_evictions > 0) == (memory == "25%")
        found[memory, threads, prefetch] = [*parts, tokens]
    first, *others = found.values()
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_token_has_the_same_bits_alone_and_among_others(checkpoint: Path) -> None:
    """Of its experts; attention is torch's."""
    model = load(checkpoint)
    with model.moecache:
        experts = model.model.layers[1].mlp.experts
        hidden = torch.randn(9, model.config.hidden_size).bfloat16()
        ids = torch.arange(18).reshape(9, 2) % model.config.num_experts
        weights = torch.full((9, 2), 0.5).bfloat16()
        with torch.no_grad():
            together = experts(hidden, ids, weights)
            alone = [
                experts(hidden[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(9)
            ]
        assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_models_of_other_dtypes_are_computed(tmp_path: Path, dtype: str) -> None:
    """Those of float16 from fp32 activations; their trunk stays torch's."""
    path = write_checkpoint(FAMILY, tmp_path, dtype)
    exact = logits(load_whole(FAMILY, path), IDS[:, :4])
    model = load(path)
    with model.moecache:
        assert model.dtype == getattr(torch, dtype)
        found = logits(model, IDS[:, :4])
    assert found.dtype == getattr(torch, dtype)
    bound = 1e-4 if dtype == "float32" else 3e-2
    assert (found.float() - exact).abs().median() <= bound * exact.abs().median()


def test_gradients_are_those_of_torch(checkpoint: Path) -> None:
    """The forward of training is torch's, too; the order in which experts come is not in them."""
    gradients = []
    for compute, memory in (("torch", "100%"), ("fast", "25%"), ("fast", "60%")):
        model = load(checkpoint, memory, compute=compute)
        with model.moecache:
            inputs = model.get_input_embeddings()(prompt()).detach().requires_grad_()
            model(inputs_embeds=inputs).logits.float().square().mean().backward()
            gradients.append(inputs.grad)
    assert gradients[0].abs().max() > 0
    for gradient in gradients[1:]:
        assert torch.equal(gradient, gradients[0])


def test_detach_gives_linear_layers_back(checkpoint: Path) -> None:
    """And the plain model's output, bit for bit."""
    whole = load_whole(FAMILY, checkpoint, "bfloat16")
    model = copy.deepcopy(whole)
    with moecache.open(checkpoint, "25%") as runtime:
        offload = attach(model, runtime)
        assert torch.nn.Linear not in linears(model)
        logits(model, IDS[:1, :1])
        offload.detach()
    assert set(linears(model)) == {torch.nn.Linear}
    for module, original in zip(model.modules(), whole.modules(), strict=True):
        assert type(module) is type(original)
        assert module.__dict__.keys() == original.__dict__.keys()
    for ids in (IDS, IDS[:1, :1]):
        assert torch.equal(logits(model, ids), logits(whole, ids))


def test_another_way_of_computing_can_follow_a_closed_one(checkpoint: Path) -> None:
    """Torch's products are torch's again."""
    whole = load_whole(FAMILY, checkpoint, "bfloat16")
    model = copy.deepcopy(whole)
    with moecache.open(checkpoint, "25%") as runtime:
        attach(model, runtime).close()
        attach(model, runtime, "torch")
        assert torch.equal(logits(model, IDS[:1, :1]), logits(whole, IDS[:1, :1]))
        model.moecache.close()
        attach(model, runtime).detach()
    assert set(linears(model)) == {torch.nn.Linear}


def test_weights_that_were_replaced_are_those_that_are_multiplied(checkpoint: Path) -> None:
    """A linear layer's matrix follows its parameter."""
    model = load(checkpoint)
    with model.moecache:
        ids = IDS[:1, :1]
        before = logits(model, ids)
        head = model.get_output_embeddings()
        head.weight.data = head.weight.data * 2
        assert torch.equal(logits(model, ids), before * 2)
        head.weight.data.mul_(2)
        assert torch.equal(logits(model, ids), before * 4)


def test_a_compiled_block_runs(checkpoint: Path) -> None:
    """Router, experts and all; its linear layers are torch's."""
    model = load(checkpoint)
    with model.moecache:
        block = model.model.layers[1].mlp
        hidden = torch.randn(1, 4, model.config.hidden_size).bfloat16()
        with torch.no_grad():
            expected = block(hidden).float()
            found = torch.compile(block, backend="eager")(hidden).float()
    assert (found - expected).abs().median() <= 0.02 * expected.abs().median()


@pytest.mark.parametrize("compute", ["nonsense", 3, ["fast"]])
def test_another_way_of_computing_is_refused_before_the_trunk_is_read(compute: object) -> None:
    """The path is not looked at; the message lists the ways."""
    with pytest.raises(ConfigError, match=r"compute .* is not one of torch, fast"):
        load(Path("nowhere"), compute=compute)


def test_experts_of_integers_have_the_bits_of_a_loop_in_numpy() -> None:
    """In q4_0, by the same kernels."""
    from moecache.integrations.transformers._fast import fast_experts, kernel_of

    rng = np.random.default_rng(0)
    shapes = {"gate_up": (64, 64), "down": (64, 32)}
    stacks = {
        role: np.stack([[quantize(rng.standard_normal(shape), "q4_0")["blocks"] for _ in range(4)]])
        for role, shape in shapes.items()
    }
    formats = {role: ("q4_0", shape) for role, shape in shapes.items()}
    store = MemoryStore(stacks, top_k=2, formats=formats)
    module = torch.nn.Module()
    module.has_gate, module.act_fn = False, torch.nn.SiLU()
    hidden, weights = torch.randn(3, 64), torch.full((3, 2), 0.5)
    ids = torch.tensor([[0, 1], [2, 3], [1, 2]])
    cache = moecache.ExpertCache(1, 4, 4)
    with moecache.ExpertRuntime(store, HostSlots(store.layout, 6), cache) as runtime:
        kernel = kernel_of(module, runtime, 0, "fast")
        found, _ = fast_experts(module, runtime, 0, kernel, hidden, ids, weights)
        expected = experts.feed_forward(
            runtime, 0, hidden.numpy(), ids.numpy(), weights.numpy(), compute="fast"
        )
        np.testing.assert_array_equal(found.numpy(), expected)


def test_attach_refuses_another_way_of_computing(checkpoint: Path) -> None:
    """The model is as it was."""
    model = load_whole(FAMILY, checkpoint, "bfloat16")
    with (
        moecache.open(checkpoint, "25%") as runtime,
        pytest.raises(ConfigError, match="compute 'nonsense' is not one of torch, fast"),
    ):
        attach(model, runtime, "nonsense")
    assert set(linears(model)) == {torch.nn.Linear}
    assert not hasattr(model, "moecache")


def test_the_report_says_who_computes(checkpoint: Path) -> None:
    """Level and threads of the kernels, or torch's threads."""
    for level in kernels.levels():
        with computing(level, 2):
            model = load(checkpoint)
            with model.moecache as offload:
                assert f"computed by kernels: {level}, 2 threads" in offload.report()
    model = load(checkpoint, compute="torch")
    with model.moecache as offload:
        assert "computed by torch, 1 thread" in offload.report()


def test_the_report_counts_the_weights_of_a_token(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of top-k experts per layer and of the trunk's linear layers; what was decoded."""
    monkeypatch.setattr("moecache.profiles.bandwidth.measure_bandwidth", lambda: 1e12)
    monkeypatch.setattr("moecache.profiles.bandwidth._measured", {})
    model = load(checkpoint)
    with model.moecache as offload:
        layout = offload.runtime.layout
        logits(model, IDS[:1])
        before = offload.compute_stats()
        logits(model, IDS[:1, :1])
        after = offload.compute_stats()

        assert before.bytes_computed == before.busy_ns == 0
        assert before.bytes_per_s is None  # nothing was measured: nobody knows a share yet
        of_experts = sum(map(layout.expert_bytes, range(layout.num_layers))) * layout.top_k
        assert after.bytes_computed == after.expert_bytes == of_experts
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        assert after.trunk_bytes == sum(m.weight.nbytes for m in linear)
        assert after.formats == ("bfloat16",)
        assert after.bandwidth_share == after.reached_bytes_per_s / 1e12
        assert "that this machine reads" in offload.report()
    assert "that this machine reads" in offload.report()  # closed
    model = load(checkpoint, compute="torch")
    with model.moecache as offload:
        logits(model, IDS[:1, :1])
        assert offload.compute_stats().bytes_per_token == after.bytes_per_token
        assert offload.compute_stats().bandwidth_share is None


def test_routers_are_computed_by_the_kernels_and_given_back(checkpoint: Path) -> None:
    """Their rows have the kernels' bits, alone and among others, and torch's afterwards."""
    from moecache.integrations.transformers import _fast

    model = load(checkpoint)
    router = model.model.layers[1].mlp.gate
    kind = type(router)
    hidden = torch.randn(5 * _fast.MAX_ROWS, router.hidden_dim, dtype=router.weight.dtype)
    with torch.no_grad():
        whole = router(hidden)[0]
        wanted = torch.ops.moecache.linear(hidden, router.weight, None, True)
        assert torch.equal(whole, wanted)
        assert torch.equal(router(hidden[3:4])[0], wanted[3:4])
        model.moecache.close()
        assert type(router) is not kind
        assert torch.equal(router(hidden)[0], torch.nn.functional.linear(hidden, router.weight))


@pytest.mark.parametrize(
    ("columns", "bias"),
    [(63, None), (65, None), (64, "short"), (64, "strided"), (64, "trained"), (64, "float16")],
)
def test_what_does_not_fit_a_linear_layer_is_left_to_torch(columns: int, bias: str | None) -> None:
    """Its own errors, and its own gradients; no byte beyond a tensor is read."""
    from moecache.integrations.transformers import _fast

    linear = torch.nn.Linear(64, 32, bias=bias is not None).requires_grad_(False)
    if bias == "short":
        linear.bias.data = torch.zeros(3)
    elif bias == "strided":
        linear.bias.data = torch.randn(64)[::2]
    elif bias == "trained":
        linear.bias.requires_grad_()
    elif bias == "float16":
        linear.bias.data = torch.zeros(32, dtype=torch.float16)
    whole = copy.deepcopy(linear)
    (quick,) = _fast.quicken(linear, [])
    given = torch.randn(2, columns)

    def outcome(module: Any) -> Any:
        try:
            return module(given)
        except RuntimeError as error:
            return str(error)

    found, wanted = outcome(quick), outcome(whole)
    if isinstance(wanted, str):
        assert found == wanted
        with pytest.raises(RuntimeError):
            torch.ops.moecache.linear(given, quick.weight, quick.bias)
    else:
        assert torch.equal(found, wanted)
        assert found.requires_grad == wanted.requires_grad


def test_what_torch_follows_is_torchs_own(checkpoint: Path) -> None:
    """Forward-mode gradients, traces, vmap and autocast: none sees what kernels do."""
    from torch.autograd import forward_ad

    from moecache.integrations.transformers import _fast

    (linear,) = _fast.quicken(torch.nn.Linear(64, 32), [])
    given = torch.randn(2, 64)
    with torch.no_grad():
        linear(given)
        with forward_ad.dual_level():
            dual = linear(forward_ad.make_dual(given, torch.ones_like(given)))
            assert forward_ad.unpack_dual(dual).tangent is not None
        assert torch.vmap(linear)(given[None]).shape == (1, 2, 32)
        traced = torch.jit.trace(linear, (given,))
        assert torch.equal(
            traced(given * 2), torch.nn.functional.linear(given * 2, *parameters(linear))
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(given).dtype == torch.bfloat16


def parameters(linear: Any) -> tuple[Any, Any]:
    """Return weight and bias."""
    return linear.weight, linear.bias


def test_a_weight_that_changes_in_place_is_multiplied_as_it_is(checkpoint: Path) -> None:
    """Pruned at the same address; and a copy has a matrix of its own."""
    from moecache.integrations.transformers import _fast

    (linear,) = _fast.quicken(torch.nn.Linear(64, 32, bias=False), [])
    given = torch.randn(3, 64)
    with torch.no_grad():
        whole = linear(given)
        copied = copy.deepcopy(linear)
        linear.weight = torch.nn.Parameter(linear.weight[:16])
        assert torch.equal(linear(given), whole[:, :16])
        assert torch.equal(copied(given), whole)


@pytest.mark.parametrize("wrong", ["narrow", "wide", "rows", "weights"])
def test_tensors_that_do_not_fit_the_experts_are_refused(checkpoint: Path, wrong: str) -> None:
    """Before an address is given away."""
    model = load(checkpoint)
    experts_module = next(m for m in model.modules() if "Experts" in type(m).__name__)
    size, top_k = model.config.hidden_size, model.config.num_experts_per_tok
    hidden = torch.ones(1, {"narrow": size // 2, "wide": 2 * size}.get(wrong, size))
    ids = torch.arange(top_k)[None]
    weights = torch.ones(ids.shape)
    if wrong == "rows":
        ids, weights = ids.repeat(3, 1), weights.repeat(3, 1)
    if wrong == "weights":
        weights = torch.ones(5, 400)
    with model.moecache, torch.no_grad(), pytest.raises(ConfigError, match="are not"):
        experts_module(hidden.to(model.dtype), ids, weights.to(model.dtype))
