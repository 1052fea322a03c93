"""A model's forward that a decoder computes, where it can."""

import functools
import inspect
import weakref
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from moecache.integrations.transformers._asked import Asked, find
from moecache.integrations.transformers._decoding import Decoder
from moecache.integrations.transformers._prompting import read_in_pages


def install(model: Any, decoder: Decoder) -> None:
    """Have a decoder compute what it can of a model's forward."""
    own = type(model).forward
    signature = inspect.signature(own)
    names = list(signature.parameters)[1:]
    reference = weakref.ref(model)

    @functools.wraps(own)
    def forward(*given: Any, **named: Any) -> Any:
        model = reference()
        if torch.compiler.is_compiling():
            return own(model, *given, **named)
        called = {**dict(zip(names, given, strict=False)), **named}
        labels = called.pop("labels", None)
        asked = find(model, called)
        if asked is None or not (labels is None or _has_usual_loss(model, asked, labels)):
            return own(model, *given, **named)
        found = decoder.step(asked)
        if found is None:
            found = read_in_pages(model, asked)
        if found is None:
            return own(model, *given, **named)
        return found if labels is None else _with_loss(model, found, labels)

    shown: Any = forward
    shown.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    model.__dict__["forward"] = forward


def _has_usual_loss(model: Any, asked: Asked, labels: Any) -> bool:
    """Return whether labels are one for each token, of the loss that all causal models share."""
    return (
        isinstance(labels, torch.Tensor)
        and labels.shape == asked.ids.shape
        and labels.dtype == torch.int64
        and labels.device.type == "cpu"
        and asked.num_logits == asked.ids.shape[1]
        and type(model).__name__.endswith("ForCausalLM")
        and model.loss_function is ForCausalLMLoss
    )


def _with_loss(
    model: Any, found: MoeCausalLMOutputWithPast, labels: torch.Tensor
) -> MoeCausalLMOutputWithPast:
    logits: Any = found.logits
    loss = model.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
    # The order of its values is that of their names here.
    return MoeCausalLMOutputWithPast(
        loss=loss, logits=logits, past_key_values=found.past_key_values
    )


def uninstall(model: Any) -> None:
    """Give a model its own forward back."""
    model.__dict__.pop("forward", None)
