"""torch.compile(fullgraph=True): the experts are operators, which a graph calls as eager does."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moecache.errors import MoeCacheError, StoreError
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.offloading import generated, load_in_slots, prompt

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread", "forgotten_graphs"),
    pytest.mark.filterwarnings("ignore"),  # transformers' and torch's own
]


@pytest.fixture(name="forgotten_graphs")
def _forgotten_graphs() -> Iterator[None]:
    """Have each test compile its own, as others count what is compiled."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture(name="model")
def _model(qwen3_moe: Path) -> Iterator[Any]:
    """Return a model with a quarter of its experts in slots."""
    model = load_in_slots(qwen3_moe)
    with model.moecache, torch.no_grad():
        yield model


@pytest.mark.parametrize(
    ("name", "compute", "dtype", "backend"),
    [
        ("qwen3_moe", "torch", "float32", "eager"),
        ("minimax_m2", "fast", "bfloat16", "aot_eager"),
    ],
)
def test_a_token_is_one_graph_with_the_logits_of_eager(
    tmp_path: Path, name: str, compute: str, dtype: str, backend: str
) -> None:
    """To the bit; and the cache, its look-ahead and its sequences do not notice."""
    path = write_checkpoint(FAMILIES[name], tmp_path / name, dtype)
    outcomes = []
    for compiled in (False, True):
        model = load_in_slots(path, compute=compute, prefetch="router")
        # transformers chooses another kernel of attention in a graph than in eager, if it may.
        model.set_attn_implementation("eager")
        call = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        with model.moecache as offload, torch.no_grad():
            logits = decoded(model, call)
            stats = offload.stats()
        foreseen = stats.prefetch.num_used, stats.prefetch.num_found_k
        outcomes.append((logits, stats.num_sequences, stats.num_steps, foreseen))

    (eager, *expected), (graph, *found) = outcomes
    assert torch.equal(graph, eager)
    assert found == expected
    assert found[0] == 1
    assert found[2][1] > 0


def test_generate_compiles_by_itself_with_a_static_cache(tmp_path: Path) -> None:
    """Where it is told to compile on a CPU, too: the tokens are those of eager."""
    import transformers

    path = write_checkpoint(FAMILIES["olmoe"], tmp_path / "olmoe", "bfloat16")
    model = load_in_slots(path, "100%", compute="fast")
    model.set_attn_implementation("eager")
    config: Any = transformers.CompileConfig(backend="eager", fullgraph=True)
    config.mode, config._compile_all_devices = None, True
    with model.moecache:
        tokens = [
            generated(model, num_tokens=4, cache_implementation="static", compile_config=each)
            for each in (None, config)
        ]

    assert torch.equal(*tokens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_inductor_gives_the_experts_bits_and_calls_them_each_time(model: Any) -> None:
    """Two calls with equal inputs are two steps of the cache."""
    experts = first_experts(model)
    hidden, ids, weights = routed(experts)

    def twice(hidden: Any, ids: Any, weights: Any) -> Any:
        return experts(hidden, ids, weights), experts(hidden, ids, weights)

    expected = experts(hidden, ids, weights)
    before = model.moecache.stats().num_steps
    first, second = torch.compile(twice, fullgraph=True)(hidden, ids, weights)

    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert model.moecache.stats().num_steps == before + 2


def test_an_error_of_the_experts_reaches_the_caller_as_it_is(
    qwen3_moe: Path, tmp_path: Path
) -> None:
    """A read that fails loses nothing; a cache that is closed says so."""
    file = shutil.copytree(qwen3_moe, tmp_path / "model") / "model.safetensors"
    contents = file.read_bytes()
    model = load_in_slots(file.parent, read="buffered")
    experts = first_experts(model)
    hidden, ids, weights = routed(experts)
    call = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        with model.moecache:
            first = call(hidden, ids, weights)
            os.truncate(file, 4096)
            with pytest.raises(StoreError, match="the file has only 4096 now"):
                call(hidden, ids + 8, weights)
            with file.open("r+b") as opened:
                opened.write(contents)
            assert torch.equal(call(hidden, ids, weights), first)
            model.moecache.runtime.cache.check()
        with pytest.raises(MoeCacheError, match=r"one that is closed: load the model"):
            call(hidden, ids, weights)


def test_gradients_go_through_experts_beside_the_graph(model: Any) -> None:
    """They break it, and are those of eager."""
    experts = first_experts(model)
    hidden, ids, weights = routed(experts)
    gradients = []
    with torch.enable_grad():
        for call in (experts, torch.compile(experts, backend="eager")):
            given = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
            call(given[0], ids, given[1]).square().sum().backward()
            gradients.append((given[0].grad, given[1].grad))

        for eager, compiled in zip(*gradients, strict=True):
            assert torch.equal(eager, compiled)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"use torch\.no_grad"):
            torch.compile(experts, fullgraph=True, backend="eager")(given[0], ids, weights)


@pytest.mark.parametrize("name", ["routed_experts", "note", "begin_sequence", "linear"])
def test_torch_finds_nothing_wrong_with_an_operator(tmp_path: Path, name: str) -> None:
    """Its schema, its form without data, and what becomes of it in graphs of any shape."""
    path = write_checkpoint(FAMILIES["qwen3_moe"], tmp_path / "model", "bfloat16")
    model = load_in_slots(path, "100%", compute="fast", prefetch="router")
    experts, linear = first_experts(model), model.lm_head
    operators: dict[str, Callable[[], tuple[Any, ...]]] = {
        "routed_experts": lambda: (*routed(experts), experts._moecache_number),
        "note": lambda: (routed(experts)[0], [torch.ones(3)], 0, 0),
        "begin_sequence": lambda: (prompt(), torch.tensor([0]), 0),
        "linear": lambda: (
            routed(experts)[0][None],
            linear.weight.detach(),
            None,
        ),
    }
    with model.moecache, torch.no_grad():
        torch.library.opcheck(getattr(torch.ops.moecache, name).default, operators[name]())


def decoded(model: Any, call: Any, num_tokens: int = 3) -> Any:
    """Return the logits of tokens that `call` makes after a prompt that the model itself read."""
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    logits = [model(prompt(), past_key_values=cache).logits[:, -1]]
    for _ in range(num_tokens):
        token = logits[-1].argmax(-1, keepdim=True)
        logits.append(call(token, past_key_values=cache).logits[:, -1])
    return torch.stack(logits)


def routed(experts: Any) -> tuple[Any, Any, Any]:
    """Return hidden states, chosen experts and their weights, as a router would give them."""
    config = experts.config
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(3, config.hidden_size, generator=generator)
    ids = torch.tensor([[0, 5], [3, 5], [1, 2]])
    dtype = config.dtype or torch.float32
    return hidden.to(dtype), ids, torch.rand(3, 2, generator=generator).to(dtype)


def first_experts(model: Any) -> Any:
    """Return the experts of a model's first layer that has some."""
    return model.get_submodule(model.moecache.paths[0])
