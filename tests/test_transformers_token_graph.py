"""A token of a model as one CUDA graph: eager's logits, also where experts are missing.

On the device made for tests, torch's operators are noted beside the device's work and done again
in the same memory; the same tests run on a GPU where there is one.
"""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moecache.errors import CapacityError, ConfigError, MoeCacheError, StoreError
from tests.helpers import quantized
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.nightly import some
from tests.helpers.tensor_device import TensorDevice

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from moecache.integrations.transformers import (  # noqa: E402
    TokenGraph,
    _token_graph,
    token_cache,
)
from moecache.integrations.transformers._span_graphs import SpanGraphs  # noqa: E402
from tests.helpers import torch_graph  # noqa: E402
from tests.helpers.token_graphs import eager, fast, prepared, prompted, tokens  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
NUMBERS = (5, 17, 99)


@pytest.fixture(params=["fake", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a device as torch knows it; "cuda" opens slots there."""
    return prepared(request.param, monkeypatch)


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a Qwen3-MoE in bfloat16."""
    directory = tmp_path_factory.mktemp("graph") / "model"
    return write_checkpoint(FAMILIES["qwen3_moe"], directory, "bfloat16")


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
        wanted = eager(model, prompted(model, rows), rows, NUMBERS)
        graph = TokenGraph(model, prompted(model, rows))
        before = offload.stats()
        found = [graph(tokens(model, rows, number)).clone() for number in NUMBERS]
        made = offload.stats() - before
        offload.runtime.cache.check()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert not torch.equal(found[0], found[1])
    assert made.num_steps == len(NUMBERS) * len(offload.paths)
    assert (made.num_misses > 0) == (memory != "100%")


def test_a_token_goes_on_from_the_layer_that_missed(
    gpu: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before that layer's experts is computed once, however many layers miss."""
    issued: list[int] = []
    issue = SpanGraphs.issue

    def note(self: Any, number: int) -> None:
        issued.append(number)
        issue(self, number)

    monkeypatch.setattr(SpanGraphs, "issue", note)
    model = fast(path, "25%")
    num_stalls = 0
    with model.moecache as offload, torch.no_grad():
        graph = TokenGraph(model, prompted(model, 1))
        num_layers = len(offload.paths)
        for number in NUMBERS:
            issued.clear()
            graph(tokens(model, 1, number))
            # A graph that comes again is that of the layer that missed.
            again = [b for a, b in itertools.pairwise(issued) if b <= a]
            num_stalls += len(again)
            assert issued[0] == 0
            assert again == sorted(set(again))
            assert 0 not in again
            assert issued[-1] == num_layers
            if gpu == "cpu":
                # There a miss is known at once, and nothing is issued behind it.
                assert sorted(issued) == sorted([*range(num_layers + 1), *again])
    assert num_stalls > 0


class Mark:
    """An event that is done when it was asked three times."""

    in_flight: list["Mark"]
    most = 0

    def __init__(self) -> None:
        self._num_asked = 0

    def record(self) -> None:
        """Stand for what was issued."""
        self._num_asked = 0
        assert self not in Mark.in_flight, "an event is recorded while it is waited for"
        Mark.in_flight.append(self)
        Mark.most = max(Mark.most, len(Mark.in_flight))

    def query(self) -> bool:
        """Return whether it is done; then those before it are, too."""
        self._num_asked += 1
        if self._num_asked < 3:
            return False
        if self in Mark.in_flight:
            del Mark.in_flight[: Mark.in_flight.index(self) + 1]
        return True


@pytest.mark.parametrize("ahead", [1, 2])
def test_only_some_graphs_are_issued_and_not_done(
    path: Path, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is issued behind a miss runs for nothing; the host waits, and looks for a miss."""
    prepared("fake", monkeypatch)
    monkeypatch.setattr(_token_graph, "_AHEAD", ahead)
    monkeypatch.setattr(_token_graph, "_new_mark", lambda _: Mark())
    model = fast(path, "100%")
    with model.moecache, torch.no_grad():
        wanted = eager(model, prompted(model, 1), 1, NUMBERS)
        graph = TokenGraph(model, prompted(model, 1))
        assert len(graph._graphs) == 3
        for number, logits in zip(NUMBERS, wanted, strict=True):
            Mark.in_flight, Mark.most = [], 0
            assert torch.equal(graph(tokens(model, 1, number)), logits)
            assert Mark.most == ahead


@pytest.mark.parametrize("name", ["gemma4_text", "gpt_oss"])
def test_sliding_windows_are_a_matter_of_the_mask(gpu: str, name: str, tmp_path: Path) -> None:
    """A prompt longer than the window: eager's bits, and nearly transformers' own cache's logits.

    gpt-oss has attention "eager", in MXFP4 as it is published.
    """
    if name == "gpt_oss":
        checkpoint, _ = quantized.write_quantized(quantized.GPT_OSS, quantized.mxfp4(), tmp_path)
    else:
        checkpoint = write_checkpoint(FAMILIES[name], tmp_path / "model", "bfloat16")
    model = fast(checkpoint, "50%")
    assert model.config.sliding_window == 16
    with model.moecache, torch.no_grad():
        assert model.config._attn_implementation == ("eager" if name == "gpt_oss" else "sdpa")
        wanted = eager(model, prompted(model, 1, 20), 1, NUMBERS)
        own = eager(model, prompted(model, 1, 20, own=True), 1, NUMBERS)
        graph = TokenGraph(model, prompted(model, 1, 20))
        found = [graph(tokens(model, 1, number)).clone() for number in NUMBERS]
        with pytest.raises(ConfigError, match="StaticSlidingWindowLayer; token_cache makes one"):
            TokenGraph(model, prompted(model, 1, 20, own=True))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    for one, other in zip(found, own, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=float(other.abs().max()) / 32)


def test_an_error_loses_nothing(gpu: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that fails ends the token, and the same token is computed by the next call."""
    model = fast(path, "25%")
    with model.moecache as offload, torch.no_grad():
        wanted = eager(model, prompted(model, 1), 1, NUMBERS)
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
        with pytest.raises(CapacityError, match=r"experts at once, and the cache of \d slots"):
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
        graph = TokenGraph(model, prompted(model, 2))
        with pytest.raises(ConfigError, match=r"token \[1, 1\] is not \[2, 1\]"):
            graph(tokens(model, 1, 5))
    with pytest.raises(MoeCacheError, match="closed"):
        graph(tokens(model, 2, 5))
    with pytest.raises(MoeCacheError, match="one that is closed"):
        TokenGraph(model, None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("qwen3_next", "its cache has states: LinearAttentionLayer"), ("llama4", "goes by chunks")],
)
def test_states_and_chunks_have_no_cache_for_graphs(name: str, reason: str) -> None:
    """They cannot be computed twice, or keep another window."""
    with pytest.raises(ConfigError, match=reason):
        token_cache(SimpleNamespace(config=FAMILIES[name].config()), 8)


def test_a_number_of_the_host_is_no_part_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device made for tests refuses what torch refuses in a capture: a copy to the GPU."""
    with (
        pytest.raises(AssertionError, match="lift_fresh"),
        torch_graph.capturing(TensorDevice(), monkeypatch),
    ):
        torch.tensor(0.0)
