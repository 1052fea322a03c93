"""SequenceHook: which forward of a model is the first of a sequence."""

from typing import Any

import torch
from torch import nn

from moecache.integrations.transformers._cache_layers import growth
from moecache.integrations.transformers._experts import NotCopied
from moecache.integrations.transformers._on_device import is_captured
from moecache.integrations.transformers._operators import number, numbered, operator
from moecache.runtime.runtime import ExpertRuntime

# The arguments that carry a model's tokens; without either, its first argument does.
TOKENS = ("input_ids", "inputs_embeds")


class SequenceHook(NotCopied):
    """Tells the runtime of the first forward of a sequence, and what keys and values will take.

    Parameters
    ----------
    runtime : ExpertRuntime
    bytes_per_token : int
        Of keys and values, in all layers.
    """

    def __init__(self, runtime: ExpertRuntime, bytes_per_token: int) -> None:
        self._runtime = runtime
        self._bytes_per_token = bytes_per_token
        self._number = number(self)

    def __call__(
        self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Look whether there is anything in the KV cache."""
        past = named.get("past_key_values")
        length = getattr(past, "get_seq_length", None)
        held: Any = past is not None if length is None else length()
        name = next((name for name in TOKENS if named.get(name) is not None), None)
        tokens: Any = named[name] if name is not None else given[0] if given else None
        if not torch.compiler.is_compiling():
            self.follow(held, tokens)
            return None
        # Static caches have their length in a tensor, whose value no graph knows.
        in_tensor = isinstance(held, torch.Tensor)
        if not in_tensor and held:
            return None
        if not isinstance(tokens, torch.Tensor):
            return None
        if torch.is_grad_enabled() and tokens.requires_grad:
            _outside(self, held, tokens)
            return None
        # The model takes the operator's result, so the operator is called before all else.
        tokens = torch.ops.moecache.begin_sequence(
            tokens, held if in_tensor else None, self._number
        )
        return ((tokens, *given[1:]), named) if name is None else (given, {**named, name: tokens})

    def follow(self, held: Any, tokens: Any) -> None:
        """Begin a sequence for each row of the batch if no token of them is held."""
        if isinstance(held, torch.Tensor) and is_captured(self._runtime):
            return  # Its value would be waited for; graphs are of tokens that others precede.
        if self._runtime.closed:
            return
        batched = isinstance(tokens, torch.Tensor) and tokens.ndim > 1
        if not held:
            self._runtime.begin_sequence(max(1, len(tokens)) if batched else 1)
        if batched and isinstance(held, int) and (more := growth(held, tokens.shape[1])):
            self._runtime.borrowed.make_room(len(tokens) * more * self._bytes_per_token)


_outside = torch.compiler.disable(SequenceHook.follow)


@operator(
    "begin_sequence(Tensor tokens, Tensor? held, int hook) -> Tensor",
    lambda tokens, *_: torch.empty_like(tokens),
)
def _begin_sequence(tokens: torch.Tensor, held: torch.Tensor | None, hook: int) -> torch.Tensor:
    found: SequenceHook | None = numbered(hook)
    if found is not None:
        found.follow(held, tokens)
    return tokens.clone()
