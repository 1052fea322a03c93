"""Which module of a model gives other bits for the same inputs, where its tokens do.

A few tokens behind the same prompt go through the model's modules, again and again. Every module
inside a decoder layer notes the tensors that it is given and what it returns; the first time that
one has the same inputs as before and another output, it is named. A module that holds others is
named only if none of these was: what is left is its own arithmetic, such as attention's.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Of a tensor that is compared: a token's has some thousands, and a prompt's would take the memory.
MOST_NUMBERS = 2**16
# (module's path, tensors that it is given, tensors that it returns), in the order of the ends.
Record = list[tuple[str, list[Any], list[Any]]]


def culprits(model: Any, decode: Callable[[], object], turns: int) -> dict[str, Any]:
    """Run something several times; return which modules gave other bits, and how often.

    Parameters
    ----------
    model : PreTrainedModel
    decode : callable
        Does the same from the same state whenever it is called.
    turns : int
        Runs, of which the first is compared with each other one.

    Returns
    -------
    dict
        "turns" that differ from the first, and the "modules" that did so first in them, by the
        last parts of their paths, with the first path of each kind.
    """
    import torch

    with torch.no_grad(), _noting(model) as notes:
        runs = []
        for _ in range(turns):
            notes.clear()
            decode()
            runs.append(list(notes))
    found: Counter[str] = Counter()
    paths: dict[str, str] = {}
    for run in runs[1:]:
        path = _first_that_differs(runs[0], run)
        if path is not None:
            kind = ".".join(part for part in path.split(".")[-2:] if not part.isdigit())
            found[kind] += 1
            paths.setdefault(kind, path)
    return {"turns": sum(found.values()), "modules": dict(found), "first": paths}


@contextmanager
def _noting(model: Any) -> Iterator[Record]:
    """Yield a list to which each module of a decoder layer adds what it is given and returns."""
    notes: Record = []
    handles = []
    for path, module in model.named_modules():
        if ".layers." not in path or path.rpartition(".")[2].isdigit():
            continue

        def note(_: Any, given: Any, named: Any, out: Any, path: str = path) -> None:
            notes.append((path, _tensors((given, named)), _tensors(out)))

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        yield notes
    finally:
        for handle in handles:
            handle.remove()


def _tensors(tree: Any) -> list[Any]:
    """Return copies of the tensors in arguments or results, but for a prompt's."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor.clone() for tensor in tensors if tensor.numel() <= MOST_NUMBERS]


def _first_that_differs(one: Record, other: Record) -> str | None:
    """Return the first module with the same inputs and another output."""
    for (path, given, out), (_, given_again, out_again) in zip(one, other, strict=True):
        if not _are_equal(out, out_again) and _are_equal(given, given_again):
            return path
    return None


def _are_equal(one: list[Any], other: list[Any]) -> bool:
    import torch

    return len(one) == len(other) and all(map(torch.equal, one, other))
