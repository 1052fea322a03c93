"""Operators of torch: how graphs of `torch.compile` call what stays outside of them.

A graph has numbers and tensors, no modules: an operator finds its module by number, and one
that is gone is an error of the call. Outside of a graph functions are called directly, as the
dispatcher costs more than they do.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

# Attribute that has an object's number; it stays when a cache is closed, so that graphs do.
NUMBER = "_moecache_number"

_numbers = itertools.count(1)
_numbered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_library = torch.library.Library("moecache", "FRAGMENT")
# Like a draw of random numbers: a call is neither left out, nor made one with another, nor made
# when the graph is compiled.
_TAGS = [torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded]
# It waits for the host, which a CUDA graph cannot record.
_TAGS += [tag for name in ["cudagraph_unsafe"] if (tag := getattr(torch.Tag, name, None))]

_Function = TypeVar("_Function", bound=Callable[..., torch.Tensor])


def number(thing: Any) -> int:
    """Return the number by which operators find an object. This keeps no reference to it."""
    given: int | None = thing.__dict__.get(NUMBER)
    if given is None:
        given = thing.__dict__[NUMBER] = next(_numbers)
        _numbered[given] = thing
    return given


def number_of(thing: Any) -> int:
    """Return the number that an object has been given, 0 if it has none."""
    given: int = getattr(thing, NUMBER, 0)
    return given


def numbered(given: int) -> Any:
    """Return the object of a number, `None` if there is none any more."""
    return _numbered.get(given)


def operator(schema: str, like: Callable[..., torch.Tensor]) -> Callable[[_Function], _Function]:
    """Define an operator `moecache::` of a schema; the function is what it does.

    Parameters
    ----------
    schema : str
    like : callable
        Returns an empty tensor of the shape, type and strides of the result, from the same
        arguments.
    """

    def define(function: _Function) -> _Function:
        name = schema.partition("(")[0]
        _library.define(schema, tags=_TAGS)
        # Nothing that is differentiated comes here.
        _library.impl(name, torch.no_grad()(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"moecache::{name}", like, lib=_library)
        return function

    return define


def is_transformed() -> bool:
    """Return whether torch follows what is computed: by vmap, jit.trace, forward-mode gradients."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
    )
