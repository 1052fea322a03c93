"""What `torch.cuda.graph` does, on a CPU: torch's operators noted beside a fake device's work."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch  # noqa: TID253 - for tests with torch
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID253 - for tests with torch
from torch.utils._pytree import tree_leaves  # noqa: TID253 - for tests with torch

from tests.helpers.fake_device import FakeDevice

# What reads a tensor's values on the host, or has a result whose size depends on them.
_WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.masked_select.default,
    # `torch.tensor(0.0, device="cuda")`: a copy from memory that is not pinned.
    torch.ops.aten.lift_fresh.default,
}


class _Noting(TorchDispatchMode):
    """Notes each operator that computes, to do it again in the same memory."""

    def __init__(self, works: list[Callable[[], object]]) -> None:
        super().__init__()
        self._works = works
        self._made: list[Any] = []  # what is in the graph's own memory

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute, and note."""
        assert func not in _WAITS, f"{func} waits for the host, which a graph cannot"
        named = kwargs or {}
        out = func(*args, **named)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in _arguments(func))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, named))}
        made = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in given]
        self._made += made
        if writes or made:
            self._works.append(lambda: _again(func, args, named, out if made else None))
        return out

    def spoil(self) -> None:
        """Fill the graph's own memory with rubbish: what is made in it shares its places."""
        for tensor in self._made:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def _arguments(func: Any) -> Any:
    return func._schema.arguments


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _again(func: Any, args: Sequence[Any], named: Any, out: Any) -> None:
    found = func(*args, **named)
    if out is not None:
        for place, value in zip(_tensors(out), _tensors(found), strict=True):
            place.copy_(value)


@contextmanager
def capturing(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Note what torch and the device are given; yield what does it all again, in order."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a tensor goes to the host, which a graph cannot wait for")

    def replay() -> None:
        with torch.no_grad():
            noting.spoil()
            for work in works:
                work()

    with device.capturing() as works, monkeypatch.context() as patched:
        for name in ("cpu", "numpy", "tolist", "item"):
            patched.setattr(torch.Tensor, name, refuse)
        noting = _Noting(works)
        with noting:
            yield replay
