"""A model's forward that a decoder computes, where it can."""

import functools
import inspect
import weakref
from typing import Any

import torch

from moecache.integrations.transformers._asked import find
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
        asked = find(model, called)
        if asked is None:
            return own(model, *given, **named)
        found = decoder.step(asked)
        if found is None:
            found = read_in_pages(model, asked)
        return own(model, *given, **named) if found is None else found

    shown: Any = forward
    shown.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    model.__dict__["forward"] = forward


def uninstall(model: Any) -> None:
    """Give a model its own forward back."""
    model.__dict__.pop("forward", None)
