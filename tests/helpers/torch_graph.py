"""What `torch.cuda.graph` does, on a CPU: torch's operators noted beside a fake device's work."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

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

    def spoil(self, kept: Sequence[Any] = ()) -> None:
        """Fill the graph's own memory with rubbish: what is made in it shares its places."""
        left = {tensor.untyped_storage().data_ptr() for tensor in kept}
        for tensor in self._made:
            if tensor.untyped_storage().data_ptr() not in left:
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


class FakeCapture:
    """What `SpanGraphs` captures with: graphs one after the other, in memory that they share.

    Before one is issued, memory that is not kept holds rubbish.
    """

    def __init__(self, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: Sequence[Any] = ()
        self._device, self._monkeypatch = device, monkeypatch
        self._stack = ExitStack()
        self._begin = 0
        self._seed = torch.zeros(1, dtype=torch.int64)

    def __enter__(self) -> Self:
        """Note what torch and the device are given."""
        with ExitStack() as stack:
            self._works = stack.enter_context(self._device.capturing())
            stack.enter_context(_refusing(self._monkeypatch))
            self._noting = stack.enter_context(_Noting(self._works))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Note no more."""
        self._stack.__exit__(None, None, None)

    def begin(self) -> None:
        """Begin a graph; torch fills the seed of its random numbers then, which it had before."""
        self._seed.fill_(1)
        self._begin = len(self._works)

    def end(self) -> Callable[[], None]:
        """Return what does the work since then again."""
        works = slice(self._begin, len(self._works))

        def replay() -> None:
            with torch.no_grad():
                self._noting.spoil(self.kept)
                for work in self._works[works]:
                    work()

        return replay

    def keep(self, tensors: Sequence[Any]) -> None:
        """Let no rubbish into the memory of some tensors."""
        self.kept = tensors


@contextmanager
def capturing(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Note what torch and the device are given; yield what does it all again, in order."""

    def replay() -> None:
        with torch.no_grad():
            noting.spoil()
            for work in works:
                work()

    with device.capturing() as works, _refusing(monkeypatch):
        noting = _Noting(works)
        with noting:
            yield replay


@contextmanager
def _refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse to read a tensor on the host."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a tensor goes to the host, which a graph cannot wait for")

    with monkeypatch.context() as patched:
        for name in ("cpu", "numpy", "tolist", "item"):
            patched.setattr(torch.Tensor, name, refuse)
        yield
