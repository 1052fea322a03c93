"""SlotForm: how the roles of an expert lie side by side in a slot."""

import bisect
from collections.abc import Mapping, Sequence

import numpy as np

from moecache.errors import ConfigError
from moecache.layout import ExpertLayout
from moecache.slots._memory import padded
from moecache.slots._uploads import Piece

# The best alignment for vectors and copies; also the least that CUDA gives an allocation.
ALIGNMENT = 256
# A role whose parts do not adjoin in a mapped file is viewed as these.
_PIECES = {"gate_up": ("gate", "up")}


class SlotForm:
    """Where each role begins in a slot that can take any layer's experts.

    Parameters
    ----------
    layout : ExpertLayout

    Attributes
    ----------
    offsets : dict of role to int
    stride : int
        Bytes of a slot.

    Raises
    ------
    ConfigError
        If the experts are in a compute form.
    """

    def __init__(self, layout: ExpertLayout) -> None:
        tiled = {role.format for roles in layout.layers for role in roles if role.is_tiled}
        if tiled:
            raise ConfigError(
                f"experts in the compute form of {', '.join(sorted(tiled))} are for the kernels of "
                'processors; open it with device="cpu", or on a GPU the checkpoint that it was '
                "packed from"
            )
        self._layout = layout
        widest = dict.fromkeys(layout.role_names, 0)
        for roles in layout.layers:
            for role in roles:
                widest[role.name] = max(widest[role.name], padded(role.nbytes, ALIGNMENT))
        self.offsets: dict[str, int] = {}
        self.stride = 0
        for name, size in widest.items():
            self.offsets[name] = self.stride
            self.stride += size

    def span(self, layer: int) -> int:
        """Return the bytes of a slot from its beginning to the end of a layer's last role."""
        return max(self.offsets[role.name] + role.nbytes for role in self._layout.layers[layer])

    def views(self, buffer: np.ndarray, layer: int) -> dict[str, np.ndarray]:
        """Return arrays per role over a buffer that is laid out as a slot is."""
        found = {}
        for role in self._layout.layers[layer]:
            raw = buffer[self.offsets[role.name] :][: role.nbytes]
            found[role.name] = raw.view(role.dtype).reshape(role.array_shape)
        return found

    def pieces(
        self, layer: int, parts: Mapping[str, np.ndarray], regions: Sequence[tuple[int, int]]
    ) -> list[Piece] | None:
        """Return what to copy from the sorted `regions`; None if some part is not in them."""
        pieces: list[Piece] = []
        for role in self._layout.layers[layer]:
            names = [role.name] if role.name in parts else _PIECES.get(role.name, ())
            offset = self.offsets[role.name]
            found = [parts[name] for name in names if name in parts]
            if sum(part.nbytes for part in found) != role.nbytes:
                return None
            for part in found:
                address = part.ctypes.data
                if part.dtype != role.dtype or not part.flags.c_contiguous:
                    return None
                place = bisect.bisect_right(regions, address, key=lambda region: region[0]) - 1
                if place < 0 or address + part.nbytes > sum(regions[place]):
                    return None
                pieces.append((offset, address, part.nbytes))
                offset += part.nbytes
        return _merged(pieces)


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Join pieces that follow each other in slot and file alike."""
    merged = pieces[:1]
    for offset, address, size in pieces[1:]:
        before, start, length = merged[-1]
        if before + length == offset and start + length == address:
            merged[-1] = (before, start, length + size)
        else:
            merged.append((offset, address, size))
    return merged
