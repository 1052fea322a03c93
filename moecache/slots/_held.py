"""Held: how a role lies in a slot of the host, which may not be as it lies in the file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moecache.formats import find_format
from moecache.kernels import has_form, tiler
from moecache.kernels._tiler import Tiler
from moecache.kernels.forms import Repacker, StackedTiler, transposer
from moecache.layout import ExpertLayout, Role
from moecache.slots._memory import ALIGNMENT, padded


@dataclass(frozen=True, slots=True)
class Held:
    """A role in a slot: as in the file, as other numbers, transposed, or in its compute form.

    Parameters
    ----------
    role : Role
    shape : tuple of int
    dtype : numpy.dtype
    tiler : Tiler, optional
        The tiler that makes the compute form, or transposes, as a slot is filled.
    has_to_be_checked : bool, default False
        Whether `check` finds what no tiler does.
    """

    role: Role
    shape: tuple[int, ...]
    dtype: np.dtype
    tiler: Tiler | Repacker | StackedTiler | None = None
    has_to_be_checked: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the slot."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_converted(self) -> bool:
        """Whether a slot has other bytes than the file."""
        role = self.role
        return self.tiler is not None or self.dtype != role.dtype or role.is_transposed

    @property
    def pieces(self) -> tuple[tuple[Tiler | Repacker | None, int, int, int], ...]:
        """What makes the matrices' compute forms, see `StackedTiler`."""
        if isinstance(self.tiler, StackedTiler):
            return self.tiler.pieces
        return ((self.tiler, 0, 0, self.nbytes),)

    def view(self, raw: np.ndarray) -> np.ndarray:
        """Return a slot's bytes as the role's array."""
        return raw[: self.nbytes].view(self.dtype).reshape(self.shape)

    def stored_view(self, raw: np.ndarray) -> np.ndarray:
        """Return a buffer's bytes as the role's array in the file."""
        role = self.role
        return raw[: role.nbytes].view(role.dtype).reshape(role.array_shape)

    def fill(self, target: np.ndarray, part: np.ndarray) -> None:
        """Write the bytes that were read; those read in place stay.

        Raises
        ------
        FormatError
            If the parts of a format cannot be, such as scales that are no numbers.
        """
        if self.tiler is not None:
            if self.role.is_transposed:
                part = np.ascontiguousarray(part)
            # The tiler finds scales that are no numbers.
            if self.tiler.tile(part, target) or self.has_to_be_checked:
                self.check(part)
            return
        if self.has_to_be_checked:
            self.check(part)
        # The array that `buffers` returned may be the slot itself.
        if target.ctypes.data != part.ctypes.data:
            target[...] = part.T if self.role.is_transposed else part

    def check(self, part: np.ndarray) -> None:
        """Raise FormatError if the parts of a format cannot be."""
        if not self.role.format or self.role.is_tiled:
            return
        known = find_format(self.role.format)
        for raw in part.reshape(self.role.matrices, -1):
            known.check(known.split(raw, *self.role.matrix_shape))


def hold(role: Role, dtype: np.dtype | None = None) -> Held:
    """Return how a role lies in a slot whose floating-point roles become `dtype`."""
    if role.format:
        if not role.is_tiled and has_form(role.format):
            making = tiler(role.format, *role.matrix_shape)
            more = find_format(role.format).has_more_to_check
            return Held(role, (role.form_bytes,), role.dtype, making, has_to_be_checked=more)
        checked = not role.is_tiled
        return Held(role, (role.nbytes,), role.dtype, has_to_be_checked=checked)
    # ml_dtypes' types have kind "V", NumPy's own floats "f". Integers (packed
    # weights, scales as bytes) stay as they are.
    kept = dtype is None or role.dtype.kind not in "fV"
    given = role.dtype if kept or dtype is None else dtype
    is_turned = role.is_transposed and given == role.dtype and given.itemsize in (2, 4)
    return Held(role, role.shape, given, transposer(given, *role.shape) if is_turned else None)


def hold_all(layout: ExpertLayout, dtype: np.dtype | None = None) -> list[dict[str, Held]]:
    """Return how each layer's roles lie in a slot; layers alike share what says so."""
    variants = {roles: {role.name: hold(role, dtype) for role in roles} for roles in layout.layers}
    return [variants[roles] for roles in layout.layers]


def strides_of(layers: Sequence[Mapping[str, Held]], *, stored: bool = False) -> dict[str, int]:
    """Return the bytes of each role in its widest layer: in a slot or, `stored`, as read."""
    strides: dict[str, int] = {}
    for roles in layers:
        for name, held in roles.items():
            nbytes = padded(held.role.nbytes if stored else held.nbytes, ALIGNMENT)
            strides[name] = max(strides.get(name, 0), nbytes)
    return strides
