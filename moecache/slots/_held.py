"""Held: how a role lies in a slot of the host, which may not be as it lies in the file."""

import math
from dataclasses import dataclass

import numpy as np

from moecache.formats import find_format
from moecache.kernels import has_form, tile
from moecache.layout import ExpertLayout, Role


@dataclass(frozen=True, slots=True)
class Held:
    """A role in a slot: as in the file, as numbers of another dtype, or in its compute form.

    Parameters
    ----------
    role : Role
    shape : tuple of int
    dtype : numpy.dtype
    is_made : bool
        Whether the compute form is made as a slot is filled.
    """

    role: Role
    shape: tuple[int, ...]
    dtype: np.dtype
    is_made: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the slot."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_converted(self) -> bool:
        """Whether a slot has other bytes than the file."""
        return self.is_made or self.dtype != self.role.dtype

    def view(self, raw: np.ndarray) -> np.ndarray:
        """Return a slot's bytes as the role's array."""
        return raw[: self.nbytes].view(self.dtype).reshape(self.shape)

    def fill(self, target: np.ndarray, part: np.ndarray) -> None:
        """Write what was read; what was read in place stays.

        Raises
        ------
        FormatError
            If the parts of a format cannot be, such as scales that are no numbers.
        """
        role, num = self.role, self.role.matrices
        if role.format and not role.is_tiled:
            known = find_format(role.format)
            for raw in part.reshape(num, -1):
                known.check(known.split(raw, *role.matrix_shape))
        # What `buffers` returned may be the slot itself.
        if target.ctypes.data == part.ctypes.data:
            return
        if not self.is_made:
            target[...] = part
            return
        for raw, form in zip(part.reshape(num, -1), target.reshape(num, -1), strict=True):
            tile(raw, role.format, *role.matrix_shape, form)


def hold(role: Role, dtype: np.dtype | None = None) -> Held:
    """Return how a role lies in a slot whose floating-point roles become `dtype`."""
    if role.format:
        is_made = not role.is_tiled and has_form(role.format)
        nbytes = role.form_bytes if is_made else role.nbytes
        return Held(role, (nbytes,), role.dtype, is_made)
    # ml_dtypes' types have kind "V", NumPy's own floats "f". Integers (packed
    # weights, scales as bytes) stay as they are.
    kept = dtype is None or role.dtype.kind not in "fV"
    return Held(role, role.shape, role.dtype if kept or dtype is None else dtype)


def hold_all(layout: ExpertLayout, dtype: np.dtype | None = None) -> list[dict[str, Held]]:
    """Return how each layer's roles lie in a slot; layers alike share what says so."""
    variants = {roles: {role.name: hold(role, dtype) for role in roles} for roles in layout.layers}
    return [variants[roles] for roles in layout.layers]
