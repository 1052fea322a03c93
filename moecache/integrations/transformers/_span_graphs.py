"""SpanGraphs: a forward as CUDA graphs one behind the other, cut before each layer's experts.

A token that misses experts goes on with the graph that begins with them, so the graphs before it
leave what it reads. They share one pool of memory, as torch advises for graphs that run in the
order of their capture; memory that one frees is another's. Each operator is looked at while it is
captured: a tensor that a later graph reads is kept.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moecache.errors import ConfigError
from moecache.integrations.transformers._on_device import DeviceKernel


class Capture:
    """Graphs that torch captures in the current stream, one after the other, in one pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: Any = None
        self._pool: Any = None
        self._kept: Sequence[torch.Tensor] = ()

    def __enter__(self) -> Self:
        """Prepare as `torch.cuda.graph` does; once, as collecting garbage takes a while."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End a capture that failed; its own error is the one that counts."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()

    def begin(self) -> None:
        """Begin a graph."""
        graph: Any = torch.cuda.CUDAGraph()
        # Threads that read experts query events meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> Callable[[], object]:
        """End the graph, and return what issues it."""
        graph, self._graph = self._graph, None
        graph.capture_end()
        replay: Callable[[], object] = graph.replay
        return replay

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep memory of the pool as long as the graphs."""
        self._kept = tensors


class SpanGraphs:
    """The graphs of a forward, and from which one a layer's experts can be computed again.

    Parameters
    ----------
    capture : Capture
    lengths : sequence of Tensor
        Numbers of the model's cache that a forward adds to; the caller puts them back.
    overwritten : sequence of Tensor
        Memory to which a forward writes the same again: keys and values.
    """

    def __init__(
        self, capture: Capture, lengths: Sequence[torch.Tensor], overwritten: Sequence[torch.Tensor]
    ) -> None:
        self._capture = capture
        self._issue: list[Callable[[], object]] = []
        self._first: dict[int, int] = {}  # the graph that begins with a layer's experts
        self._watch = _Watch(lengths, overwritten)

    def __len__(self) -> int:
        """Return how many graphs there are."""
        return len(self._issue)

    def issue(self, number: int) -> None:
        """Issue a graph."""
        self._issue[number]()

    def start_of(self, layer: int) -> int:
        """Return the graph to go on with where a layer's experts were missing."""
        start = self._first.get(layer, 0)
        # What a later graph has written over has to be made anew.
        while any(made < start <= written for made, written in self._watch.written):
            start -= 1
        return start

    def lengths_from(self, start: int) -> list[int]:
        """Return which of the lengths the graphs from one on add to."""
        added = self._watch.added
        return sorted({index for number, index in added if number >= start})

    @contextlib.contextmanager
    def capturing(self, kernels: Sequence[DeviceKernel]) -> Iterator[None]:
        """Return a context whose work the graphs hold; they are cut where a kernel begins.

        Raises
        ------
        ConfigError
            If the work adds to memory that is not put back.
        """
        with self._capture as capture, contextlib.ExitStack() as undo:
            for kernel in kernels:
                kernel.before = self._cut
                undo.callback(setattr, kernel, "before", None)
            capture.begin()
            with self._watch:
                yield
            self._issue.append(capture.end())
        self._watch.check()
        capture.keep(list(self._watch.kept.values()))

    def _cut(self, layer: int, inputs: Sequence[torch.Tensor]) -> None:
        if layer not in self._first:
            # torch sets the state of its random numbers when a capture begins.
            with self._watch.paused():
                self._issue.append(self._capture.end())
                self._watch.number += 1
                self._first[layer] = len(self._issue)
                self._capture.begin()
        self._watch.note_read(inputs)


class _Watch(TorchDispatchMode):
    """Notes which tensors of a graph later ones read, or write to.

    Attributes
    ----------
    number : int
        Number of the graph that is captured.
    kept : dict of int to Tensor
        Tensors that later graphs read, by address: as long as they are there, no other tensor
        gets their memory.
    written : list of (int, int)
        Graphs that made a tensor, and later ones that have written to it.
    added : set of (int, int)
        Graphs, and the lengths that they add to.
    """

    def __init__(
        self, lengths: Sequence[torch.Tensor], overwritten: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self.number = 0
        self.kept: dict[int, torch.Tensor] = {}
        self.written: list[tuple[int, int]] = []
        self.added: set[tuple[int, int]] = set()
        self._lengths = {_address(tensor): index for index, tensor in enumerate(lengths)}
        self._overwritten = {_address(tensor) for tensor in overwritten}
        self._made: dict[int, int] = {}  # the graph that made what is at an address
        self._foreign: list[str] = []
        self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute, and note what was read, written and made."""
        named = kwargs or {}
        if self._is_paused:
            return func(*args, **named)
        given = _tensors((args, named))
        self.note_read(given)
        if func._schema.is_mutable:
            for number, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[number] if number < len(args) else named.get(argument.name)
                    self._note_written(_tensors(value), str(func))
        out = func(*args, **named)
        known = {_address(tensor) for tensor in given}
        for tensor in _tensors(out):
            if _address(tensor) not in known:
                self._made[_address(tensor)] = self.number
        return out

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose work is not looked at."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def note_read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note what the graph that is captured reads."""
        for tensor in tensors:
            address = _address(tensor)
            if self._made.get(address, self.number) != self.number:
                self.kept.setdefault(address, tensor)

    def check(self) -> None:
        """Raise ConfigError if memory was written to that is nobody's to put back."""
        if self._foreign:
            raise ConfigError(
                f"a forward of this model writes to memory that it had before ({self._foreign[0]} "
                "among others), and a graph that is issued again would do that twice"
            )

    def _note_written(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        for tensor in tensors:
            address = _address(tensor)
            made = self._made.get(address)
            if made is not None:
                if made != self.number:
                    self.written.append((made, self.number))
            elif address in self._lengths:
                self.added.add((self.number, self._lengths[address]))
            elif address not in self._overwritten and tensor.numel():
                self._foreign.append(name)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
