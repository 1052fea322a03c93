"""ExpertStore: the interface of a source of experts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from moecache.layout import ExpertLayout
from moecache.stores._file import ReadOnlyFile

Parts = Mapping[str, np.ndarray]
# (file number, offset, ((role, start, stop), ...)): one contiguous range of a file, which holds
# those bytes of the roles, one after the other.
Run = tuple[int, int, tuple[tuple[str, int, int], ...]]


@runtime_checkable
class ExpertStore(Protocol):
    """A source of experts. Every method may be called from any thread."""

    @property
    def layout(self) -> ExpertLayout:
        """The layout of the experts."""

    def read_into(self, layer: int, expert: int, out: Parts | np.ndarray) -> None:
        """Read one expert; blocks for the disk without holding the GIL.

        Parameters
        ----------
        layer, expert : int
        out : dict of role to ndarray, or one uint8 ndarray
            Written in place. Arrays have the role's stored dtype (or are uint8)
            and its bytes, C-contiguous; the single buffer takes the roles one
            after the other in the layout's order. After an error its contents
            are undefined.

        Raises
        ------
        StoreError
            If the bytes cannot be read.
        ValueError
            If there is no such expert or `out` does not fit.
        """

    def view(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        """Return one expert without copying, read-only; arrays may be misaligned.

        Valid until `close`: what a view shows afterwards is the store's own matter.
        """

    def regions(
        self, layers: Iterable[int] | None = None, *, held: np.ndarray | None = None
    ) -> Sequence[tuple[int, int]]:
        """Return (address, nbytes) of the layers' experts in memory, by layer in file order.

        With `held`, bool [num_layers, num_experts], only of these experts.
        """

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Hint that experts will be read soon; never fails because of the hint."""

    def close(self) -> None:
        """Give back files and mappings; a second call does nothing.

        Afterwards `read_into`, `view`, `regions` and `files` raise StoreError, and `prefetch` may;
        `layout` and `runs` do not.
        """


@runtime_checkable
class FileStore(ExpertStore, Protocol):
    """A store of files that hold experts as slots want them: a reader reads many at once."""

    @property
    def files(self) -> Sequence[ReadOnlyFile]:
        """The open files, by number."""

    def runs(self, layer: int, expert: int) -> tuple[Run, ...]:
        """Return where an expert's bytes lie."""


def split_buffer(layout: ExpertLayout, layer: int, buffer: np.ndarray) -> dict[str, np.ndarray]:
    """Return uint8 views of one buffer, one per role, in the layout's order."""
    expected = layout.expert_bytes(layer)
    if buffer.dtype != np.uint8 or buffer.nbytes != expected:
        raise ValueError(
            f"an expert of layer {layer} needs a uint8 buffer of {expected} bytes, "
            f"got {buffer.nbytes} of {buffer.dtype}"
        )
    if not buffer.flags.c_contiguous or not buffer.flags.writeable:
        raise ValueError("the buffer for an expert must be contiguous and writable")
    flat = buffer.reshape(-1)
    parts, start = {}, 0
    for role in layout.layers[layer]:
        parts[role.name] = flat[start : start + role.nbytes]
        start += role.nbytes
    return parts


def destination_bytes(layout: ExpertLayout, layer: int, out: Parts | np.ndarray) -> Parts:
    """Return what `read_into` was given as flat uint8 arrays per role, checked."""
    layout.check(layer)
    if isinstance(out, np.ndarray):
        return split_buffer(layout, layer, out)
    flat = {}
    for role in layout.layers[layer]:
        array = out.get(role.name)
        if array is None:
            raise ValueError(f"out lacks role {role.name!r} of layer {layer}")
        if array.dtype not in (role.dtype, np.uint8) or array.nbytes != role.nbytes:
            raise ValueError(
                f"role {role.name!r} of layer {layer} is {role.nbytes} bytes of {role.dtype}, "
                f"got {array.nbytes} of {array.dtype}"
            )
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError(f"the array for role {role.name!r} must be contiguous and writable")
        flat[role.name] = array.reshape(-1).view(np.uint8)
    return flat
