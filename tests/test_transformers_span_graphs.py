"""A forward as graphs: what a later one reads stays, and what cannot be done twice is refused."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moecache.errors import ConfigError
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.mutants import mutated
from tests.helpers.tensor_device import TensorDevice

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from moecache.integrations.transformers import TokenGraph, _span_graphs, _token_graph  # noqa: E402
from moecache.integrations.transformers._span_graphs import SpanGraphs  # noqa: E402
from tests.helpers.token_graphs import eager, fast, prepared, prompted, tokens  # noqa: E402
from tests.helpers.torch_graph import FakeCapture  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
NUMBERS = (5, 17, 99)
# Without these lines of `_span_graphs` or `_token_graph` other logits come out, or more is issued.
MUTANTS = {
    "what later graphs read is not kept": (
        "capture.keep(list(self._watch.kept.values()))",
        "capture.keep([])",
    ),
    "a graph begins behind the experts": (
        "self._first[layer] = len(self._issue)",
        "self._first[layer] = len(self._issue) + 1",
    ),
    "a token begins anew": ("start = self._first.get(layer, 0)", "start = 0"),
    "lengths are not put back": ("        if added:\n", "        if False:\n"),
    "lengths of earlier layers are put back": ("if number >= start}", "if number >= 0}"),
    "nobody looks for a miss": ("while not self._experts.has_stalled:", "while True:"),
    "what the kernel reads is not kept": ("        self._watch.note_read(inputs)\n", ""),
}


class Kernel:
    """A layer's experts, of which only the beginning counts."""

    before: Callable[[int, Any], None] | None = None

    def __call__(self, layer: int, hidden: Any) -> Any:
        """Return something of hidden states."""
        if self.before is not None:
            self.before(layer, [hidden])
        return hidden * 2


def captured(
    forward: Callable[[Kernel], Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    lengths: Any = (),
    overwritten: Any = (),
) -> tuple[SpanGraphs, Any]:
    """Return the graphs of a forward, and its result."""
    graphs = SpanGraphs(FakeCapture(TensorDevice(), monkeypatch), lengths, overwritten)  # type: ignore[arg-type]
    kernel: Any = Kernel()
    with torch.no_grad(), graphs.capturing([kernel]):
        out = forward(kernel)
    assert kernel.before is None
    return graphs, out


def test_what_a_later_graph_reads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views, too, and over more than one graph; what is read no more is not."""
    given = torch.arange(12.0)

    def forward(kernel: Kernel) -> Any:
        read_later = given * 3
        view = (given + 1)[2:6]
        first = kernel(0, view)
        second = kernel(1, first + 1)
        return second + read_later[:4] + view

    graphs, out = captured(forward, monkeypatch)
    wanted = forward(Kernel())
    assert len(graphs) == 3
    for starts in ((0,), (0, 1), (0, 1, 2), (0, 2, 2, 1)):
        for start in starts:
            for number in range(start, 3):
                graphs.issue(number)
            assert torch.equal(out, wanted)
    assert [graphs.start_of(layer) for layer in (0, 1, 7)] == [1, 2, 0]


def test_what_a_later_graph_writes_over_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum in place would be added to twice: the token goes on from where its place was filled."""
    given = torch.arange(4.0)

    def forward(kernel: Kernel) -> Any:
        total = given * 3
        for layer in range(3):
            made = kernel(layer, given + layer)
            if layer < 2:
                total += made
            else:
                total = total + made
        return total

    graphs, out = captured(forward, monkeypatch)
    assert len(graphs) == 4
    # The sum was made in the first graph, and the third is the last one to write to it.
    assert [graphs.start_of(layer) for layer in range(3)] == [0, 0, 3]
    for start in (0, 0, 3, 3):
        for number in range(start, 4):
            graphs.issue(number)
        assert torch.equal(out, forward(Kernel()))


def test_lengths_are_those_of_the_graphs_that_add_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are written over; a number that is put back may be added to."""
    lengths = [torch.zeros((), dtype=torch.int64) for _ in range(3)]
    keys = torch.zeros(4)

    def forward(kernel: Kernel) -> Any:
        lengths[0].add_(1)
        kernel(0, keys * 1)
        lengths[2].add_(1)
        keys.index_copy_(0, torch.arange(1), torch.ones(1))
        kernel(1, keys * 1)
        lengths[1].add_(1)
        return keys * 1

    graphs, _ = captured(forward, monkeypatch, lengths=lengths, overwritten=[keys])
    assert [graphs.lengths_from(start) for start in range(3)] == [[0, 1, 2], [1, 2], [1]]


def test_memory_that_nobody_puts_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of the model's that counts would count twice."""
    buffer = torch.zeros(3)

    def forward(kernel: Kernel) -> Any:
        return kernel(0, buffer.add_(1))

    with pytest.raises(ConfigError, match=r"writes to memory that it had before .*add_"):
        captured(forward, monkeypatch)


def test_an_error_ends_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """And comes through; the next capture is like any."""

    def fail(kernel: Kernel) -> Any:
        kernel(0, torch.ones(2))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captured(fail, monkeypatch)
    _, out = captured(lambda kernel: kernel(0, torch.ones(2)), monkeypatch)
    assert out.tolist() == [2, 2]


def mutate(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> Any:
    """Return `TokenGraph` with a piece of the text exchanged."""
    spans, token = mutated(monkeypatch, [_span_graphs, _token_graph], old, new)
    token.SpanGraphs = spans.SpanGraphs
    token._new_capture = _token_graph._new_capture
    return token.TokenGraph


def check(path: Path, graph_of: type[Any]) -> None:
    """Compare with eager, and count what is issued for tokens that miss."""
    model = fast(path, "25%")
    with model.moecache, torch.no_grad():
        wanted = eager(model, prompted(model, 1), 1, NUMBERS)
        graph = graph_of(model, prompted(model, 1))
        graphs, issued = graph._graphs, []
        issue = graphs.issue
        graphs.issue = lambda number: (issued.append(number), issue(number))
        for number, logits in zip(NUMBERS, wanted, strict=True):
            issued.clear()
            assert torch.equal(graph(tokens(model, 1, number)), logits)
            again = [b for a, b in itertools.pairwise(issued) if b <= a]
            assert 0 not in again
            assert sorted(issued) == sorted([*range(len(graphs)), *again])


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("spans") / "model"
    return write_checkpoint(FAMILIES["qwen3_moe"], directory, "bfloat16")


def test_each_graph_is_issued_once_and_again_where_experts_were_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that is done at once; the logits are eager's."""
    prepared("fake", monkeypatch)
    check(path, TokenGraph)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_line_that_is_left_out_is_noticed(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A test of the tests."""
    prepared("fake", monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check(path, mutate(monkeypatch, *MUTANTS[name]))
