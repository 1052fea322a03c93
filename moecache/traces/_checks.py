"""Checks of a trace's arrays and metadata."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError, FormatError

_CHUNK_IDS = 1 << 18
# Names of a trace's own parameters.
_RESERVED = {"experts", "num_experts", "phase", "sequence", "step", "layers", "bulk"}


def check_ids(experts: np.ndarray, num_experts: int) -> None:
    """Raise a ConfigError if an id is out of range, or twice in a cell."""
    rows = max(1, _CHUNK_IDS // (experts.shape[1] * experts.shape[2]))
    for start in range(0, len(experts), rows):
        part = experts[start : start + rows]
        bad = (part < -1) | (part >= num_experts) if part.dtype.kind == "i" else part >= num_experts
        if bad.any():
            token, layer, _ = np.argwhere(bad)[0]
            raise ConfigError(
                f"token {start + token}, layer {layer}: expert {part[bad][0]} is not in "
                f"[0, {num_experts}), nor -1 for padding"
            )
        order = np.sort(part, axis=2)
        twice = (order[:, :, 1:] == order[:, :, :-1]) & (order[:, :, 1:] >= 0)
        if twice.any():
            token, layer, place = np.argwhere(twice)[0]
            raise ConfigError(
                f"token {start + token}, layer {layer}: expert {order[token, layer, place]} "
                "is there twice"
            )


def vector(
    name: str, values: npt.ArrayLike | None, default: np.ndarray, most: int = 2**31 - 1
) -> np.ndarray:
    """Return the values as an array of the trace's own, of the default's dtype, in [0, most]."""
    if values is None:
        return default
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(
            f"{name} must be one row of integers, got {array.dtype} of shape {list(array.shape)}"
        )
    if array.size and (array.min() < 0 or array.max() > most):
        raise ConfigError(f"{name} must be in [0, {most}], got {array.min()} to {array.max()}")
    return owned(array, default.dtype)


def owned(array: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    """Return an array in C order: itself if it cannot be changed, else a copy."""
    fixed = array.flags.owndata and not array.flags.writeable
    return array.astype(dtype, order="C", copy=not fixed)


def check_order(name: str, array: np.ndarray, least: int) -> None:
    """Raise a ConfigError unless each number exceeds the one before by at least `least`."""
    falls = np.flatnonzero(np.diff(array) < least)
    if len(falls):
        row = int(falls[0])
        what = "never decrease" if least == 0 else "increase"
        raise ConfigError(
            f"{name} must {what}, but {array[row]} is followed by {array[row + 1]} at {row + 1}"
        )


def several_rows(step: np.ndarray) -> np.ndarray:
    """Return 1 for each row whose step has other rows, which `waves` limits; uint8."""
    same = np.diff(step) == 0
    together = np.zeros(len(step), np.uint8)
    together[1:] |= same
    together[:-1] |= same
    return together


def check_bulk(bulk: np.ndarray, step: np.ndarray) -> None:
    """Raise a ConfigError unless `bulk` is the same for all rows of a step."""
    differs = np.flatnonzero((np.diff(bulk) != 0) & (np.diff(step) == 0))
    if len(differs):
        row = int(differs[0])
        raise ConfigError(
            f"bulk must be the same for all rows of a step, but is {bulk[row]} and "
            f"{bulk[row + 1]} in step {step[row]}, at {row + 1}"
        )


def clean_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a copy as JSON would give it back."""
    try:
        cleaned: dict[str, Any] = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"metadata must be what JSON can hold: {error}") from error
    taken = sorted(_RESERVED & cleaned.keys())
    if taken:
        raise ConfigError(f"metadata may not be called {taken[0]!r}: a trace has that itself")
    for name in ("top_k", "expert_bytes"):
        value = cleaned.get(name)
        if isinstance(value, (int, float)) and value < 0:
            raise ConfigError(f"{name} must not be negative, got {value}")
    return cleaned


def parse_meta(path: Path, array: np.ndarray) -> dict[str, Any]:
    """Return the JSON object of a file's `meta`, which says at least num_experts."""
    if array.ndim != 0 or array.dtype.kind not in "US":
        raise FormatError(f"{path}: meta must be one text, not {array.dtype} of {array.shape}")
    # Not item(): NumPy accepts code points that are no characters, and Python fails later.
    letters = f"utf-32-{sys.byteorder[0]}e" if array.dtype.kind == "U" else "utf-8"
    try:
        meta = json.loads(array.tobytes().decode(letters).rstrip("\0"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: meta is not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise FormatError(f"{path}: meta must be a JSON object, not {type(meta).__name__}")
    if not isinstance(meta.get("num_experts"), int):
        raise FormatError(f"{path}: meta does not say num_experts")
    return meta
