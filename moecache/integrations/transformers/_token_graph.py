"""TokenGraph: a token of a model as CUDA graphs, with experts that may be missing."""

import contextlib
import time
from typing import Any

import torch
import transformers

from moecache.compute import CudaExperts
from moecache.errors import ConfigError, MoeCacheError
from moecache.integrations.transformers._experts import NotCopied
from moecache.integrations.transformers._on_device import DeviceKernel
from moecache.integrations.transformers._slots import LAYER, SlotLayer
from moecache.integrations.transformers._span_graphs import Capture, SpanGraphs
from moecache.integrations.transformers._static_cache import masks_of, parts_of

_MAX_ROWS = 4
# Graphs that are issued and not done: those behind a miss run for nothing, and the token waits for
# them. A layer takes a GPU 0.1 ms and more, its graph the host 0.01.
_AHEAD = 8


class TokenGraph(NotCopied):
    """Computes single tokens by CUDA graphs, captured once for any experts in slots.

    There is a graph for each layer of experts, and one for what comes before the first. A step
    whose experts are in their slots costs the host nothing. Where one misses some, the steps
    behind it return at once, and no further graph is issued; the experts are brought in, and the
    token goes on with that layer's graph. The logits are those of eager, bit for bit.

    One token at a time, of one thread. Reading ahead sees only steps that missed. Making the
    graphs computes token 0 once, in eager; that counts as any token does.

    Parameters
    ----------
    model : PreTrainedModel
        With its experts in slots on a GPU, and `compute="fast"`.
    cache : StaticCache
        Holds the prompt, of up to 4 sequences; each call adds a token of each. `token_cache`
        makes one for models with sliding windows, too.

    Raises
    ------
    ConfigError
        If torch computes some experts, the cache has layers that are not simply static, or the
        model's forward adds to memory of its own.
    CapacityError
        If the cache has fewer slots than a token has experts in a layer.
    MoeCacheError
        If the model's cache is closed.
    """

    def __init__(self, model: transformers.PreTrainedModel, cache: Any) -> None:
        self._model: Any = model
        self._kernels = kernels_of(model)
        self._experts = _experts_of(self._kernels)
        self._lengths, self._contents = parts_of(cache)
        rows = len(cache.layers[0].keys)
        if rows > _MAX_ROWS:
            raise ConfigError(
                f"a graph takes up to {_MAX_ROWS} sequences, and the cache has {rows}"
            )
        self._token = torch.zeros((rows, 1), dtype=torch.int64, device=model.device)
        self._kept = [length.clone() for length in self._lengths]
        self._side = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._marks = [_new_mark(self._side) for _ in range(_AHEAD)]
        # Each layer's results, which a graph that is issued again leaves as they are.
        self._places: list[torch.Tensor] = []
        with self._beside(), torch.no_grad():
            self._capture(cache, rows)

    def __call__(self, token: torch.Tensor) -> torch.Tensor:
        """Return the logits that follow a token of each sequence.

        Parameters
        ----------
        token : Tensor of int, shape [num_sequences, 1]

        Returns
        -------
        Tensor, shape [num_sequences, 1, vocabulary]
            The graph's own: the next call writes others there.

        Raises
        ------
        MoeCacheError
            If the model's cache is closed.
        StoreError
            If an expert cannot be read; nothing is lost: call again.
        CapacityError
            If a step asks for more experts at once than there are slots.
        """
        if self._model.moecache.closed:
            raise MoeCacheError("the model's cache is closed; load the model again")
        if token.shape != self._token.shape:
            raise ConfigError(
                f"token {list(token.shape)} is not {list(self._token.shape)}: one of each sequence"
            )
        with self._beside(), torch.no_grad():
            self._token.copy_(token)
            torch._foreach_copy_(self._kept, self._lengths)
            try:
                missed: int | None = self._experts.begin_token()
                start = 0
                while missed is not None:
                    self._issue(start)
                    missed = self._experts.end_token()
                    start = 0 if missed is None else self._graphs.start_of(missed)
            except BaseException:
                torch._foreach_copy_(self._lengths, self._kept)
                raise
        return self._logits

    def _issue(self, start: int) -> None:
        """Issue the graphs from one on, until a step is known to have missed experts."""
        # They write to the same places again.
        added = self._graphs.lengths_from(start)
        if added:
            torch._foreach_copy_(
                [self._lengths[index] for index in added], [self._kept[index] for index in added]
            )
        for number in range(start, len(self._graphs)):
            mark = self._marks[number % _AHEAD]
            if number > start and self._stalls(mark if number >= start + _AHEAD else None):
                break
            self._graphs.issue(number)
            if mark is not None:
                mark.record()

    def _stalls(self, mark: Any) -> bool:
        """Wait for a graph issued before; return whether a step is known to have missed."""
        while not self._experts.has_stalled:
            if mark is None or mark.query():
                return False
            time.sleep(0)
        return True

    def _capture(self, cache: Any, rows: int) -> None:
        def run() -> torch.Tensor:
            masks = masks_of(self._model, cache, self._token)
            logits: torch.Tensor = self._model(self._token, past_key_values=cache, **masks).logits
            return logits

        try:
            run()  # outside once: it allocates
            torch._foreach_copy_(self._lengths, self._kept)
            for kernel in self._kernels:
                kernel.place = kernel.new_place(rows, self._token.device)
                self._places.append(kernel.place)
            self._graphs = SpanGraphs(_new_capture(self._model), self._lengths, self._contents)
            self._experts.begin_token()
            try:
                with self._graphs.capturing(self._kernels):
                    self._logits = run()
            finally:
                self._experts.end_token()
        finally:
            for kernel in self._kernels:
                kernel.place = None
            torch._foreach_copy_(self._lengths, self._kept)

    @contextlib.contextmanager
    def _beside(self) -> Any:
        """Return a context in which work goes to the graph's stream, between the caller's."""
        if self._side is None:
            yield
            return
        before = torch.cuda.current_stream(self._side.device)
        self._side.wait_stream(before)
        with torch.cuda.stream(self._side):
            try:
                yield
            finally:
                before.wait_stream(self._side)


def _new_mark(side: Any) -> Any:
    """Return an event of a GPU; `None` on a device made for tests, which is done at once."""
    return None if side is None else torch.cuda.Event()


def _new_capture(model: Any) -> Capture:
    """Return what captures a model's work; tests on a device made for them replace it."""
    return Capture(model.device)


def kernels_of(model: Any) -> list[DeviceKernel]:
    """Return the kernels of all layers of experts; raise ConfigError if some have none."""
    offload = getattr(model, "moecache", None)
    if offload is None or offload.closed:
        raise MoeCacheError("the model has no cache, or one that is closed: load it with load")
    layers: list[SlotLayer] = [model.get_submodule(path).__dict__[LAYER] for path in offload.paths]
    kernels = [layer.kernel for layer in layers if isinstance(layer.kernel, DeviceKernel)]
    if len(kernels) < len(layers):
        raise ConfigError(
            f"torch computes {len(layers) - len(kernels)} of {len(layers)} layers of experts, and "
            'waits for the host; load the model with device="cuda" and compute="fast"'
        )
    return kernels


def _experts_of(kernels: list[DeviceKernel]) -> CudaExperts:
    found = {id(kernel.experts): kernel.experts for kernel in kernels}
    if len(found) != 1:
        raise ConfigError(f"experts of {len(found)} kinds cannot be in one graph, only of one")
    return next(iter(found.values()))
