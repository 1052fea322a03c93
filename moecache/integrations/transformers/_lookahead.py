"""RouterLookAhead: the next layer's own router says what it will use."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from moecache.decoding.look_ahead import LookAhead
from moecache.integrations.transformers._binding import Binding
from moecache.integrations.transformers._operators import number, numbered, operator
from moecache.layout import ExpertLayout
from moecache.prefetch.predict import Predictor
from moecache.prefetch.prefetcher import MAX_ROWS

logger = logging.getLogger(__name__)


class RouterLookAhead(LookAhead):
    """A `LookAhead` that follows a model's routers by hooks.

    The first layer has no layer before it: `fallback` predicts that one.

    Parameters
    ----------
    routers : sequence of Module or None
        One for each layer of the store.
    fallback : Predictor, optional
    """

    def __init__(
        self, routers: Sequence[nn.Module | None], fallback: Predictor | None = None
    ) -> None:
        super().__init__(fallback)
        self._routers = list(routers)
        # Each router's arguments beside the hidden states, such as its layer's correction bias.
        self._others: list[tuple[Any, ...] | None] = [None] * len(self._routers)
        self._hooks = [
            router.register_forward_pre_hook(self._hook(layer))
            for layer, router in enumerate(self._routers)
            if router is not None
        ]

    def close(self) -> None:
        """Take the hooks from the routers; a second call does nothing."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def _apply(self, hidden: torch.Tensor, layer: int, n: int) -> np.ndarray | None:
        """Return what a layer's router makes of hidden states; `None` if that is not known."""
        router, others = self._routers[layer], self._others[layer]
        if router is None or others is None:
            return None
        with torch.no_grad():
            # Not router(...): hooks that record outputs would take this for the layer's own.
            return _likeliest(router.forward(hidden, *others), n)

    def _hook(self, layer: int) -> Any:
        given, outside = number(self), torch.compiler.disable(self._note)

        def note(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not torch.compiler.is_compiling():
                self._note(layer, arguments)
                return None
            if not arguments or not all(isinstance(a, torch.Tensor) for a in arguments):
                return None
            hidden, *others = arguments
            if torch.is_grad_enabled() and hidden.requires_grad:
                outside(layer, arguments)
                return None
            # The router takes the operator's result, so the operator is called before it.
            return torch.ops.moecache.note(hidden, others, layer, given), *others

        return note

    def _note(self, layer: int, arguments: Sequence[Any]) -> None:
        self.follow(layer, None)
        if not arguments:
            return
        hidden = arguments[0]
        self._others[layer] = tuple(arguments[1:])
        # Nothing is predicted after a step of many tokens, so its input is not kept.
        if hidden.numel() <= MAX_ROWS * hidden.shape[-1]:
            self.follow(layer, functools.partial(self._apply, hidden.detach()))


@operator(
    "note(Tensor hidden, Tensor[] others, int layer, int look_ahead) -> Tensor",
    lambda hidden, *_: torch.empty_like(hidden),
)
def _noted(
    hidden: torch.Tensor, others: list[torch.Tensor], layer: int, look_ahead: int
) -> torch.Tensor:
    found: RouterLookAhead | None = numbered(look_ahead)
    if found is not None:
        # The graph writes other values where its own tensors were.
        found._note(layer, [tensor.clone() for tensor in (hidden, *others)])
    return hidden.clone()


def find_routers(model: Any, paths: Sequence[str]) -> list[nn.Module | None]:
    """Return the router beside each experts module, `None` where none is known."""
    recorders: list[Any] = []
    for module in model.modules():
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if recorder is not None:
            recorders += recorder if isinstance(recorder, list) else [recorder]
    kinds = tuple(
        kind
        for kind in (getattr(recorder, "target_class", recorder) for recorder in recorders)
        if isinstance(kind, type)
    )
    found: list[nn.Module | None] = []
    for path in paths:
        block: nn.Module = model.get_submodule(path.rpartition(".")[0])
        beside = [child for child in block.children() if isinstance(child, kinds)]
        found.append(beside[0] if beside else None)
    if None in found:
        logger.info("transformers.no_router layers=%d", found.count(None))
    return found


def _likeliest(output: Any, n: int) -> np.ndarray:
    """Return up to n experts of a router's result, the chosen first."""
    parts = output if isinstance(output, tuple) else (output,)
    chosen = [part for part in parts if not part.is_floating_point()]
    # The logits or probabilities of all experts, rather than those of the chosen ones.
    scores = max((part for part in parts if part.is_floating_point()), key=lambda p: p.shape[-1])
    scores = scores.reshape(-1, scores.shape[-1]).float()
    scores = scores[0] if len(scores) == 1 else torch.softmax(scores, dim=-1).sum(0)
    # NumPy from here on: for arrays this small it takes a third of torch's time.
    values = -scores.cpu().numpy()
    n = min(n, len(values))
    if chosen and chosen[0].numel() < n:
        ids = chosen[0].reshape(-1).cpu().numpy()
        # 64 apart, as float32 numbers of that size are.
        values[ids] = np.arange(-1e9 - 64 * len(ids), -1e9, 64)[: len(ids)]
    likeliest = np.argpartition(values, n - 1)[:n]
    return likeliest[np.argsort(values[likeliest])].astype(np.int32)


def routers_by_layer(
    model: Any, bindings: Sequence[Binding], layout: ExpertLayout
) -> list[nn.Module | None]:
    """Return the routers to look ahead with, by layer of a runtime; none if no module is one."""
    routers: list[nn.Module | None] = [None] * layout.num_layers
    found = find_routers(model, [binding.path for binding in bindings])
    for binding, router in zip(bindings, found, strict=True):
        routers[binding.layer] = router
    if not any(found):
        logger.warning("transformers.no_routers model=%s", type(model).__name__)
        return []
    if len(bindings) < len(routers):
        logger.warning(
            "transformers.layers_that_do_not_run runtime=%d model=%d open the runtime with "
            "layers=, or the first layer is not foreseen",
            len(routers),
            len(bindings),
        )
    return routers
