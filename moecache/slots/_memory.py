"""Shared by all pools of slots: aligned memory of the host, and checks of roles."""

import contextlib
import mmap
from collections.abc import Mapping

import numpy as np

from moecache.errors import ConfigError
from moecache.layout import ExpertLayout

# A cache line, and the widest vector register.
ALIGNMENT = 64
# The largest alignment of a disk's blocks: direct reads go straight into roles that begin there.
BLOCK_BYTES = 4096
# Smaller roles are copied into place: a block for each would be a waste.
_BLOCK_ALIGNED_FROM = 64 * 1024
_HUGE_PAGE = 2 * 2**20


def padded(num_bytes: int, unit: int) -> int:
    """Return the bytes that a role takes in a slot: whole units, or whole blocks if it is large."""
    unit = unit if num_bytes < _BLOCK_ALIGNED_FROM else BLOCK_BYTES
    return -(-num_bytes // unit) * unit


def aligned_rows(rows: int, stride: int) -> np.ndarray:
    """Return rows of zeros, aligned as their stride is, in a mapping of their own."""
    # Zeros, not empty: an unused slot must never bring a NaN into a product. A mapping takes no
    # memory before it is written, and none, even if locked, once the last reference is gone.
    nbytes = rows * stride
    huge = nbytes >= _HUGE_PAGE
    try:
        # Private: shared memory would have no huge pages by default.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = mmap.mmap(-1, max(1, nbytes) + (_HUGE_PAGE if huge else 0), flags)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(str(error)) from error
    raw = np.frombuffer(mapping, np.uint8)
    start = 0
    if huge:
        # A direct read into 4 KiB pages was measured to take up to three times as long.
        start = -raw.ctypes.data % _HUGE_PAGE
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
    return raw[start : start + nbytes].reshape(rows, stride)


def shared_form(layout: ExpertLayout, role: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and dtype that a role has in every layer, for a slab of all slots.

    Raises
    ------
    ConfigError
        If there is no such role, or layers differ in it.
    """
    named = (one for roles in layout.layers for one in roles if one.name == role)
    variants = {(one.device_shape, one.dtype) for one in named}
    if len(variants) != 1:
        problem = "layers differ in it" if variants else "there is no such role"
        raise ConfigError(f"no slab for role {role!r}: {problem}")
    return variants.pop()


def check_parts(
    layout: ExpertLayout,
    layer: int,
    parts: Mapping[str, np.ndarray],
    held: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Raise ValueError unless `parts` has every role of a layer with its shape and dtype.

    The dtype is the file's or, for a slot that converts, that of the role in `held`.
    """
    for role in layout.layers[layer]:
        part = parts.get(role.name)
        if part is None or part.shape != role.array_shape:
            found = "nothing" if part is None else f"an array of shape {part.shape}"
            raise ValueError(f"role {role.name!r} has shape {role.array_shape}, got {found}")
        if part.dtype != role.dtype and (held is None or part.dtype != held[role.name].dtype):
            raise ValueError(f"role {role.name!r} is {role.dtype}, got {part.dtype}")
