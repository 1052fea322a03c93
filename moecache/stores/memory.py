"""MemoryStore: experts that are in memory already; for tests and small models."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from moecache.errors import ConfigError, StoreError
from moecache.layout import ExpertLayout, Role
from moecache.prefault.regions import Region
from moecache.stores.base import Parts, destination_bytes


class MemoryStore:
    """Serve experts from stacked arrays.

    Parameters
    ----------
    arrays : mapping of role to ndarray, shape [num_layers, num_experts, ...]
        Not copied.
        A role with a format has the bytes of its parts: uint8 [num_layers, num_experts, ...].
    top_k : int, default 0
        Experts per token; 0 if not known.
    formats : mapping of role to (str, (int, int)), optional
        Name of the role's format, and its rows and columns.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        *,
        top_k: int = 0,
        formats: Mapping[str, tuple[str, tuple[int, int]]] | None = None,
    ) -> None:
        shapes = {array.shape[:2] for array in arrays.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise ConfigError(
                "every array must start with the same [num_layers, num_experts], "
                f"got {sorted(array.shape for array in arrays.values())}"
            )
        for name in (formats or {}).keys() - arrays.keys():
            raise ConfigError(f"formats has {name!r}, the roles are {', '.join(arrays)}")
        num_layers, num_experts = next(iter(shapes))
        self._arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        roles = []
        for name, array in arrays.items():
            if name not in (formats or {}):
                roles.append(Role(name, array.shape[2:], array.dtype))
                continue
            known, shape = (formats or {})[name]
            role = Role(name, shape, array.dtype, known)
            if array[:1, :1].size != role.nbytes:
                raise ConfigError(
                    f"role {name!r} in {known} of shape {list(shape)} takes {role.nbytes} bytes, "
                    f"got an array {list(array.shape)}"
                )
            roles.append(role)
            self._arrays[name] = self._arrays[name].reshape(num_layers, num_experts, -1)
        self._layout = ExpertLayout(num_experts, top_k, [roles] * num_layers)
        self._closed = False

    @property
    def layout(self) -> ExpertLayout:
        """The layout of the experts."""
        return self._layout

    def read_into(self, layer: int, expert: int, out: Parts | np.ndarray) -> None:
        """Copy one expert into `out`; see `ExpertStore.read_into`."""
        source = self.view(layer, expert)
        target = destination_bytes(self._layout, layer, out)
        for name, array in source.items():
            target[name][:] = array.reshape(-1).view(np.uint8)

    def view(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        """Return one expert without copying, read-only."""
        if self._closed:
            raise StoreError("the store is closed")
        self._layout.check(layer, expert)
        views = {}
        for name, array in self._arrays.items():
            views[name] = array[layer, expert, ...]
            views[name].flags.writeable = False
        return views

    def regions(
        self, layers: Iterable[int] | None = None, *, held: np.ndarray | None = None
    ) -> list[Region]:
        """Return (address, nbytes) of each layer's stack of each role, or of the experts held."""
        if self._closed:
            raise StoreError("the store is closed")
        chosen = list(range(self._layout.num_layers) if layers is None else layers)
        for layer in chosen:
            self._layout.check(layer)
        whole = [(layer, array[layer]) for layer in chosen for array in self._arrays.values()]
        if held is None:
            return [Region(stack.ctypes.data, stack.nbytes, stack) for _, stack in whole]
        return [
            Region(stack[expert].ctypes.data, stack[expert].nbytes, stack)
            for layer, stack in whole
            for expert in np.flatnonzero(held[layer]).tolist()
        ]

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Check the ids; everything is in memory already."""
        for expert in experts:
            self._layout.check(layer, expert)

    def close(self) -> None:
        """Refuse further reads; a second call does nothing."""
        self._closed = True

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()
