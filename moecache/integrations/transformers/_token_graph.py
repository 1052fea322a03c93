"""TokenGraph: a whole token of a model as one CUDA graph, with experts that may be missing."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import transformers

from moecache.compute import CudaExperts
from moecache.errors import ConfigError, MoeCacheError
from moecache.integrations.transformers._experts import NotCopied
from moecache.integrations.transformers._on_device import DeviceKernel
from moecache.integrations.transformers._slots import LAYER, SlotLayer

# Layers of a cache that write a token to the same place when they are computed again.
_REPEATABLE = ("StaticLayer",)
_MAX_ROWS = 4


class TokenGraph(NotCopied):
    """Computes single tokens by one CUDA graph, captured once for any experts in slots.

    A step whose experts are in their slots costs the host nothing. Where one misses some, the
    steps behind it return at once; the experts are brought in, and the graph is issued again: the
    steps that are done keep their results. The logits are those of eager, bit for bit.

    One token at a time, of one thread. Reading ahead sees only steps that missed. Making a graph
    computes token 0 once, in eager; that counts as any token does.

    Parameters
    ----------
    model : PreTrainedModel
        With its experts in slots on a GPU, and `compute="fast"`.
    cache : StaticCache
        Holds the prompt, of up to 4 sequences; each call adds a token of each.

    Raises
    ------
    ConfigError
        If torch computes some experts, the cache has layers that are not simply static, or
        attention is "eager".
    CapacityError
        If the cache has fewer slots than a token has experts in a layer.
    MoeCacheError
        If the model's cache is closed.
    """

    def __init__(self, model: transformers.PreTrainedModel, cache: Any) -> None:
        self._model: Any = model
        self._kernels = _kernels_of(model)
        self._experts = _experts_of(self._kernels)
        _check_attention(model)
        self._lengths = _lengths_of(cache)
        rows = len(cache.layers[0].keys)
        if rows > _MAX_ROWS:
            raise ConfigError(
                f"a graph takes up to {_MAX_ROWS} sequences, and the cache has {rows}"
            )
        self._token = torch.zeros((rows, 1), dtype=torch.int64, device=model.device)
        self._kept = [length.clone() for length in self._lengths]
        self._side = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
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
                while missed is not None:
                    # A graph writes to the same places again.
                    torch._foreach_copy_(self._lengths, self._kept)
                    self._replay()
                    missed = self._experts.end_token()
            except BaseException:
                torch._foreach_copy_(self._lengths, self._kept)
                raise
        return self._logits

    def _capture(self, cache: Any, rows: int) -> None:
        def run() -> torch.Tensor:
            logits: torch.Tensor = self._model(self._token, past_key_values=cache).logits
            return logits

        try:
            run()  # outside once: it allocates
            torch._foreach_copy_(self._lengths, self._kept)
            for kernel in self._kernels:
                kernel.place = kernel.new_place(rows, self._token.device)
                self._places.append(kernel.place)
            self._experts.begin_token()
            try:
                self._replay, self._logits = _captured(run, self._side)
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


def _captured(
    run: Callable[[], torch.Tensor], side: Any
) -> tuple[Callable[[], object], torch.Tensor]:
    """Return what issues the work of a function again, and where its result is then."""
    graph = torch.cuda.CUDAGraph()
    # Threads that read experts query events meanwhile.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        out = run()
    return graph.replay, out


def _kernels_of(model: Any) -> list[DeviceKernel]:
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


def _check_attention(model: Any) -> None:
    # The mask of "eager" is made from a number of the host, which torch refuses in a capture
    # (masking_utils.eager_mask of transformers 5.17).
    if model.config.get_text_config()._attn_implementation == "eager":
        raise ConfigError(
            'attention is "eager", whose mask copies from the host, and no graph can hold that; '
            'call model.set_attn_implementation("sdpa")'
        )


def _lengths_of(cache: Any) -> list[torch.Tensor]:
    """Return what a cache's layers have beside keys and values: how many there are."""
    layers = getattr(cache, "layers", ())
    kinds = sorted({type(layer).__name__ for layer in layers} - set(_REPEATABLE))
    if kinds or not layers or not all(layer.is_initialized for layer in layers):
        raise ConfigError(
            "a graph needs a StaticCache that holds a prompt, without sliding windows or states; "
            f"this {type(cache).__name__} has {', '.join(kinds) or 'nothing yet'}"
        )
    return [
        value
        for layer in layers
        for name, value in vars(layer).items()
        if isinstance(value, torch.Tensor) and name not in ("keys", "values")
    ]
