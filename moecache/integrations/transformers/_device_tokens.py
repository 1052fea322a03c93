"""DeviceTokens: texts of a model on a GPU, whose tokens are graphs where the model allows it."""

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from moecache.errors import CapacityError, ConfigError, MoeCacheError
from moecache.integrations.transformers._experts import NotCopied
from moecache.integrations.transformers._static_cache import token_cache, why_not_static
from moecache.integrations.transformers._token_graph import TokenGraph, kernels_of

logger = logging.getLogger(__name__)

# A cache holds this many tokens at least; it is cleared for the next text.
LEAST_TOKENS = 1024
# Room behind a prompt, so that short answers do not move to a larger cache.
_ROOM = 256
# Tokens that all caches hold together; older ones go. The plan of memory has reserved these.
_MOST_TOKENS = 4096
# Graphs take as long to capture as some tokens: texts of fewer do without, unless there are some.
_FEW_TOKENS = 8


class DeviceTokens(NotCopied):
    """Computes texts of a model on a GPU, one after the other.

    A prompt is read as by `generate`. The tokens behind it have a static cache, whose size follows
    from the prompt and the number of tokens alone, and are graphs where that is possible: with or
    without one, a token has the same bits.

    Parameters
    ----------
    model : PreTrainedModel

    Attributes
    ----------
    num_graphs, num_eager : int
        Tokens that graphs have computed, and those that went through the model's modules.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._lock = threading.Lock()
        self._made: OrderedDict[int, _Made] = OrderedDict()
        self._failed = self._left_out = ""
        self._state: tuple[Any, ...] = ()
        self.num_graphs = self.num_eager = 0

    @property
    def reason(self) -> str:
        """Why no token is a graph; empty if they are."""
        return self.why_not_static() or self._failed or _left_out(self._model())

    def why_not_static(self) -> str:
        """Return why the model's texts have no static cache; empty if they have."""
        model = self._model()
        if model is None:
            return "the model is gone"
        try:
            kernels = kernels_of(model)
        except MoeCacheError as error:
            return str(error)
        slots, top_k = model.moecache.runtime.cache.capacity, model.moecache.runtime.layout.top_k
        if slots < top_k:
            return f"a token asks for {top_k} experts of a layer, and there are {slots} slots"
        if len({id(kernel.experts) for kernel in kernels}) > 1:
            return "its layers have experts of several kinds"
        return why_not_static(model.config.get_text_config(decoder=True))

    def describe(self) -> str:
        """Return a line that says how tokens are computed."""
        reason = self.reason
        if reason:
            return f"tokens go through the model's modules: {reason}"
        eager = f", {self.num_eager} went through the model's modules" if self.num_eager else ""
        return f"tokens are CUDA graphs; {self.num_graphs} were{eager}"

    @torch.no_grad()
    def write(
        self,
        prompt: Sequence[int],
        take: Callable[[np.ndarray], int | None],
        max_new_tokens: int,
        context: int | None,
    ) -> None:
        """Compute the logits behind a prompt, and behind each token that comes of them.

        Another thread's text comes first, if there is one.

        Parameters
        ----------
        prompt : sequence of int
        take : callable (logits)
            Returns the next token, `None` if there is to be none. It is given float32
            [vocabulary].
        max_new_tokens : int
            Tokens that `take` returns at most.
        context : int or None
            Tokens that the model takes; `None` if there is no end.
        """
        with self._lock:
            model: Any = self._model()
            self._check_state(model)
            read = DynamicCache()
            ids = torch.tensor([list(prompt)], device=model.device)
            logits = model(input_ids=ids, past_key_values=read, use_cache=True, logits_to_keep=1)
            token = take(_numbers(logits.logits))
            if token is None:
                return
            length = len(prompt)
            made = self._of_size(model, _size(length + _ROOM, context))
            _move(read, made.cache, length)
            del read, logits
            while token is not None:
                if length >= made.size:
                    larger = self._of_size(model, _size(made.size + 1, context))
                    _move(made.cache, larger.cache, length)
                    made = larger
                max_new_tokens -= 1
                ids = torch.tensor([[token]], device=model.device)
                token = take(_numbers(self._logits(model, made, ids, max_new_tokens)))
                length += 1

    def close(self) -> None:
        """Give graphs and caches back."""
        self._made.clear()

    def _logits(self, model: Any, made: "_Made", token: torch.Tensor, num_left: int) -> Any:
        """Return the logits behind a token, which goes into a cache."""
        graph = self._graph(model, made, num_left)
        if graph is not None:
            try:
                logits = graph(token)
            except CapacityError:  # some tokens ask for fewer experts, and eager takes any
                pass
            else:
                self.num_graphs += 1
                return logits
        self.num_eager += 1
        return model(
            input_ids=token, past_key_values=made.cache, use_cache=True, logits_to_keep=1
        ).logits

    def _graph(self, model: Any, made: "_Made", num_left: int) -> TokenGraph | None:
        """Return a cache's graph, which is made for a text that is long enough."""
        if made.graph is not None or num_left < _FEW_TOKENS or self._failed or self._left_out:
            return made.graph
        try:
            made.graph = TokenGraph(model, made.cache)
        # torch's own errors are RuntimeErrors: a wait in a capture, too little memory.
        except (ConfigError, CapacityError, RuntimeError) as error:
            self._failed = " ".join(str(error).split())
            logger.warning(
                "transformers.no_graph model=%s: %s; tokens go through its modules",
                type(model).__name__,
                self._failed,
            )
        return made.graph

    def _of_size(self, model: Any, size: int) -> "_Made":
        """Return an empty cache of a size, with its graph if there is one."""
        made = self._made.pop(size, None) or _Made(token_cache(model, size), size)
        self._made[size] = made
        while len(self._made) > 1 and sum(self._made) > _MOST_TOKENS:
            self._made.popitem(last=False)
        return made

    def _check_state(self, model: Any) -> None:
        """Forget the graphs of a model that has changed: other weights, hooks or attention."""
        self._left_out = _left_out(model)
        state = (
            self._left_out,
            model.config.get_text_config()._attn_implementation,
            *(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())),
            *map(id, model.modules()),
        )
        if state != self._state:
            self._state, self._failed = state, ""
            self._made.clear()


class _Made:
    """A cache of a number of tokens, and the graph that was captured with it."""

    def __init__(self, cache: Any, size: int) -> None:
        self.cache = cache
        self.size = size
        self.graph: TokenGraph | None = None


def _left_out(model: Any) -> str:
    """Return what a graph of a model would leave out; empty if nothing."""
    if model.training:
        return "the model is in training mode"
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            # Those of this package stop a text, or tell of what the host sees anyway.
            if not str(getattr(hook, "__module__", "")).startswith("moecache."):
                return f"{type(module).__name__} has a hook, which a graph would leave out"
    return ""


def _size(num_tokens: int, context: int | None) -> int:
    """Return how many tokens the cache of a text holds: a third too many at most, or a thousand."""
    step = max(LEAST_TOKENS, (1 << (num_tokens - 1).bit_length()) // 4)
    size = -(-num_tokens // step) * step
    return size if context is None else min(size, context)


def _move(given: Any, cache: Any, length: int) -> None:
    """Have a cache hold the first keys and values of another, which gives its dynamic ones up."""
    cache.reset()
    for layer, old in zip(cache.layers, given.layers, strict=True):
        layer.update(old.keys[:, :, :length], old.values[:, :, :length])
        if isinstance(old, DynamicLayer):
            # Layer by layer: there may be no memory for both caches.
            old.keys = old.values = None


def _numbers(logits: torch.Tensor) -> np.ndarray:
    found: np.ndarray = logits[0, -1].float().cpu().numpy()
    return found
