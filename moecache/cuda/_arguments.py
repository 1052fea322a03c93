"""Checks that experts and arrays suit the kernels."""

from typing import Any

import numpy as np

from moecache.cuda.device import DeviceArray
from moecache.errors import ConfigError


def check(
    x: DeviceArray,
    weights: DeviceArray,
    ids: np.ndarray | DeviceArray,
    size: int,
    dtype: np.dtype,
) -> tuple[int, int]:
    """Return the number of tokens and of choices per token."""
    shape = tuple(ids.shape)
    if isinstance(ids, DeviceArray):
        ids_kind(ids.dtype)
    if len(x.shape) != 2 or x.shape[1] != size or not same_type(x.dtype, dtype):
        raise ConfigError(
            f"hidden is {x.dtype} {list(x.shape)}; the experts take {dtype} [num_tokens, {size}]"
        )
    if len(shape) != 2 or shape[0] != x.shape[0] or weights.shape != shape:
        raise ConfigError(
            f"ids {list(shape)} and weights {list(weights.shape)} must both be "
            f"[{x.shape[0]}, top_k]"
        )
    if weights.dtype != np.float32 and not same_type(weights.dtype, dtype):
        raise ConfigError(f"weights are {weights.dtype}, not float32 or {dtype}")
    if not shape[1]:
        raise ConfigError(f"ids {list(shape)} choose no expert")
    return shape[0], shape[1]


def host_ids(ids: Any) -> np.ndarray:
    """Return ids of any integer dtype as a kernel takes them."""
    array = np.asarray(ids)
    if array.dtype.kind not in "iu":
        raise ConfigError(f"ids are {array.dtype}, not integers")
    return np.ascontiguousarray(array, np.int64)


def same_type(found: np.dtype, wanted: np.dtype) -> bool:
    # CuPy may know bfloat16 only as uint16.
    return found == wanted or (wanted.kind == "V" and found == np.dtype(f"u{wanted.itemsize}"))


def check_ids(ids: np.ndarray, num_experts: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < num_experts:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"expert {wrong} is not in [0, {num_experts})")


def ids_kind(dtype: np.dtype) -> int:
    if dtype == np.int32:
        return 0
    if dtype == np.int64:
        return 1
    raise ConfigError(f"ids are {dtype}, not int32 or int64")
