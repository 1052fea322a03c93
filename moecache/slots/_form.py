"""SlotForm: how the roles of an expert lie side by side in a slot."""

import numpy as np

from moecache.errors import ConfigError
from moecache.layout import ExpertLayout
from moecache.slots._memory import padded

# The best alignment for vectors and copies; also the least that CUDA gives an allocation.
ALIGNMENT = 256


class SlotForm:
    """Offsets of the roles in a slot that can take any layer's experts.

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
