"""A token of a model as one CUDA graph: eager's logits, also where experts are missing.

On the device made for tests, torch's operators are noted beside the device's work and done again
in the same memory; the same tests run on a GPU where there is one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moecache.errors import CapacityError, ConfigError, MoeCacheError, StoreError
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.nightly import some
from tests.helpers.tensor_device import TensorDevice, opened

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from moecache.integrations.transformers import TokenGraph, load  # noqa: E402
from tests.helpers import torch_graph  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
NUMBERS = (5, 17, 99)


@pytest.fixture(params=["fake", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a device as torch knows it; "cuda" opens slots there."""
    name = opened(request.param, monkeypatch)
    if name != "cpu":
        return name

    def captured(run: Callable[[], Any], _: object) -> tuple[Any, Any]:
        device = Loaded.now.moecache.runtime.pool.device
        with torch_graph.capturing(device, monkeypatch) as replay:
            out = run()
        return replay, out

    monkeypatch.setattr("moecache.integrations.transformers._token_graph._captured", captured)
    return name


class Loaded:
    """The model whose device captures."""

    now: Any = None


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a Qwen3-MoE in bfloat16."""
    directory = tmp_path_factory.mktemp("graph") / "model"
    return write_checkpoint(FAMILIES["qwen3_moe"], directory, "bfloat16")


def fast(path: Path, memory: str | None, **options: Any) -> Any:
    """Return a model whose experts the GPU's kernels compute."""
    model = load(path, memory, "cuda", **{"compute": "fast", "prefetch": "off", **options})
    model.set_attn_implementation("sdpa")
    Loaded.now = model
    return model


def prompted(model: Any, rows: int) -> Any:
    """Return a cache that holds a prompt of each row."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    ids = torch.arange(rows * 6).reshape(rows, 6) * 7 % 120
    with torch.no_grad():
        model(ids.to(model.device), past_key_values=cache)
    return cache


def tokens(model: Any, rows: int, number: int) -> Any:
    """Return a token of each row."""
    return ((torch.arange(rows)[:, None] * 11 + number) % 120).to(model.device)


@pytest.mark.parametrize(
    ("memory", "rows", "prefetch"),
    some(
        [
            ("25%", 1, "off"),
            ("25%", 1, "router"),
            ("50%", 3, "echo"),
            ("100%", 1, "router"),
            ("100%", 4, "off"),
        ],
        lambda case: case in {("25%", 1, "router"), ("50%", 3, "echo"), ("100%", 4, "off")},
    ),
)
def test_logits_are_those_of_eager(
    gpu: str, path: Path, memory: str, rows: int, prefetch: str
) -> None:
    """Whatever is missing: the graph is issued again, and writes to the same places."""
    model = fast(path, memory, prefetch=prefetch)
    with model.moecache as offload, torch.no_grad():
        cache = prompted(model, rows)
        wanted = [
            model(tokens(model, rows, number), past_key_values=cache).logits.clone()
            for number in NUMBERS
        ]
        graph = TokenGraph(model, prompted(model, rows))
        before = offload.stats()
        found = [graph(tokens(model, rows, number)).clone() for number in NUMBERS]
        made = offload.stats() - before
        offload.runtime.cache.check()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert not torch.equal(found[0], found[1])
    assert made.num_steps == len(NUMBERS) * len(offload.paths)
    assert (made.num_misses > 0) == (memory != "100%")


def test_an_error_loses_nothing(gpu: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that fails ends the token, and the same token is computed by the next call."""
    model = fast(path, "25%")
    with model.moecache as offload, torch.no_grad():
        cache = prompted(model, 1)
        wanted = [model(tokens(model, 1, n), past_key_values=cache).logits.clone() for n in NUMBERS]
        graph = TokenGraph(model, prompted(model, 1))
        lease, failures = offload.runtime.lease, 0

        def fail(*args: Any, **options: Any) -> Any:
            nonlocal failures
            if failures < 1:
                failures += 1
                raise StoreError("the disk is gone")
            return lease(*args, **options)

        monkeypatch.setattr(offload.runtime, "lease", fail)
        found = []
        for number in NUMBERS:
            try:
                found.append(graph(tokens(model, 1, number)).clone())
            except StoreError:
                found.append(graph(tokens(model, 1, number)).clone())
        offload.runtime.cache.check()
    assert failures == 1
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_step_that_asks_for_more_than_the_slots_is_an_error(gpu: str, path: Path) -> None:
    """Then as before: a later token may ask for fewer, and eager takes any."""
    model = fast(path, "25%")
    with model.moecache as offload, torch.no_grad():
        graph = TokenGraph(model, prompted(model, 3))
        with pytest.raises(CapacityError, match="experts at once, and the cache of 6 slots"):
            for number in NUMBERS:
                graph(tokens(model, 3, number))
        assert offload.runtime.cache.evicts
        offload.runtime.cache.check()


def test_what_cannot_be_in_a_graph_is_refused(gpu: str, path: Path) -> None:
    """With the reason: torch's products, other caches, many sequences, a model that is closed."""
    model = fast(path, "50%", compute="torch")
    with model.moecache, pytest.raises(ConfigError, match=r'torch computes .* compute="fast"'):
        TokenGraph(model, prompted(model, 1))
    model = fast(path, None, slots=3)
    with model.moecache as offload, pytest.raises(CapacityError, match="a graph needs slots"):
        TokenGraph(model, prompted(model, 1))
    assert offload.runtime.closed
    model = fast(path, "50%")
    with model.moecache:
        for cache in (
            transformers.DynamicCache(),
            transformers.StaticCache(config=model.config, max_cache_len=8),
        ):
            with pytest.raises(ConfigError, match="needs a StaticCache that holds a prompt"):
                TokenGraph(model, cache)
        with pytest.raises(ConfigError, match="up to 4 sequences, and the cache has 5"):
            TokenGraph(model, prompted(model, 5))
        model.set_attn_implementation("eager")
        with pytest.raises(ConfigError, match=r'attention is "eager".*set_attn_impl.*"sdpa"'):
            TokenGraph(model, prompted(model, 1))
        model.set_attn_implementation("sdpa")
        graph = TokenGraph(model, prompted(model, 2))
        with pytest.raises(ConfigError, match=r"token \[1, 1\] is not \[2, 1\]"):
            graph(tokens(model, 1, 5))
    with pytest.raises(MoeCacheError, match="closed"):
        graph(tokens(model, 2, 5))
    with pytest.raises(MoeCacheError, match="one that is closed"):
        TokenGraph(model, None)


def test_a_number_of_the_host_is_no_part_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device made for tests refuses what torch refuses in a capture: a copy to the GPU."""
    with (
        pytest.raises(AssertionError, match="lift_fresh"),
        torch_graph.capturing(TensorDevice(), monkeypatch),
    ):
        torch.tensor(0.0)
