"""Matrices of `compressed-tensors`: integers by groups, FP8, MXFP4 and NVFP4."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from moecache.errors import FormatError
from moecache.formats import MXFP4, NVFP4, Format, find_format, scaled_name
from moecache.stores._header import shown
from moecache.stores._matrices import (
    Matrix,
    Read,
    Said,
    Stored,
    UnsupportedQuantizationError,
    fp8_matrix,
    fp8_weight,
    need,
    scale_name,
    sizes,
    squeezed,
)

# compressed-tensors' names for the ways to store weights that are read here.
_FORMATS = (
    *("pack-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mixed-precision"),
)


def match_compressed(said: Said, tensors: Mapping[str, Stored], read: Read) -> Matrix:
    """Return the matrix that tensors of `compressed-tensors` are."""
    _check(said)
    if "_packed" not in tensors:
        weight, suffix = fp8_weight(tensors, ("_scale",))
        block = _block_of(said, "float", 8, weight, tensors[suffix])
        return fp8_matrix(weight, tensors[suffix], block, suffix)
    packed, scale = tensors["_packed"], need(tensors, "_scale")
    for key in ("_zero_point", "_g_idx"):
        if key in tensors:
            raise UnsupportedQuantizationError(
                f"tensor {shown(tensors[key].name)}: zero points and g_idx are supported for AWQ "
                "and GPTQ only"
            )
    if packed.dtype == np.uint8 and len(packed.shape) == 2:
        suffixes: tuple[str, ...] = ("_packed", "_scale")
        known: Format = MXFP4
        if "_global_scale" in tensors or scale.dtype.name == "float8_e4m3fn":
            need(tensors, "_global_scale")
            suffixes, known = (*suffixes, "_global_scale"), NVFP4
        return Matrix(known, packed.shape[0], packed.shape[1] * 2, suffixes)
    rows, columns = _shape_of(packed, read)
    words = packed.shape[-1] if packed.shape else 0
    bits, rest = divmod(words * 32, columns)
    if rest or not 2 <= bits <= 8 or packed.dtype != np.int32 or packed.shape[0] != rows:
        raise FormatError(
            f"tensor {shown(packed.name)}, {packed.dtype} {list(packed.shape)}, does not have "
            f"integers of 2 to 8 bits for [{rows}, {columns}]"
        )
    weight = Stored(packed.name, packed.dtype, (rows, columns))
    block = _block_of(said, "int", bits, weight, scale)
    name = scaled_name(f"int{bits}", block, scale_name(scale))
    return Matrix(find_format(name), rows, columns, ("_packed", "_scale"))


def _check(said: Said) -> None:
    """Raise UnsupportedQuantizationError if the configuration says what no tensor shows."""
    for key in ("transform_config", "sparsity_config"):
        settings = said.get(key)
        if settings and not (isinstance(settings, dict) and settings.get("format") == "dense"):
            raise UnsupportedQuantizationError(f"{key} in config.json is not supported")
    groups = said.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    for level in (said, *groups):
        form = level.get("format") if isinstance(level, dict) else None
        if form is not None and form not in _FORMATS:
            raise UnsupportedQuantizationError(
                f"compressed-tensors' format {shown(form)} is not supported; supported are "
                f"{', '.join(_FORMATS)}"
            )


def _groups(said: Said) -> list[Mapping[str, Any]]:
    """Return what each of the configuration's groups says about its weights."""
    groups = said.get("config_groups")
    found = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in found if isinstance(group, dict)]
    return [group for group in weights if isinstance(group, dict)]


def _block_of(said: Said, kind: str, bits: int, weight: Stored, scale: Stored) -> tuple[int, int]:
    """Return the first block that a group of the configuration has, and a scale's shape."""
    blocks: list[tuple[int, int]] = []
    fitting: set[tuple[int, int]] = set()
    for group in _groups(said):
        if (group.get("type"), group.get("num_bits")) != (kind, bits):
            continue
        if kind == "int" and (group.get("symmetric") is False or group.get("actorder") == "group"):
            raise UnsupportedQuantizationError(
                "integers that are not symmetric, or whose columns have an order of their own "
                "(actorder), are supported for AWQ and GPTQ only"
            )
        strategy = group.get("strategy")
        block = {"tensor": (0, 0), "channel": (1, 0)}.get(str(strategy))
        if strategy == "group":
            block = sizes([1, group.get("group_size")], "[1, group_size]")
        elif strategy == "block":
            block = sizes(group.get("block_structure"), "block_structure")
        if block is None:
            raise UnsupportedQuantizationError(
                f"strategy {shown(strategy)} in config.json is not supported"
            )
        blocks.append(block)
        counts = [
            -(-size // (step or size or 1)) for size, step in zip(weight.shape, block, strict=True)
        ]
        if squeezed(tuple(counts)) == squeezed(scale.shape):
            fitting.add(block)
    if len(fitting) == 1:
        return fitting.pop()
    if fitting:
        raise UnsupportedQuantizationError(
            f"tensor {shown(weight.name)} may be of several of config.json's groups, in blocks of "
            f"{', '.join(str(list(block)) for block in sorted(fitting))}; that is not supported"
        )
    listed = ", ".join(str(list(block)) for block in blocks)
    raise FormatError(
        f"tensor {shown(scale.name)} of shape {list(scale.shape)} is no scale of "
        f"{list(weight.shape)} {kind}{bits}; config.json has "
        + (f"blocks of {listed} (0: all)" if blocks else f"no {kind} of {bits} bits")
    )


def _shape_of(packed: Stored, read: Read) -> tuple[int, int]:
    """Return what the tensor beside a packed one says that its shape is."""
    name = packed.name.removesuffix("_packed") + "_shape"
    try:
        said = read(name)
    except LookupError:
        raise FormatError(
            f"tensor {shown(packed.name)} has no {shown(name)} beside it; download the "
            "checkpoint again"
        ) from None
    found = said.reshape(-1).tolist()
    if len(found) != 2 or said.dtype.kind not in "iu" or not all(0 < n < 2**31 for n in found):
        raise FormatError(f"tensor {shown(name)} is {shown(found)}, no shape of a matrix")
    return found[0], found[1]
