"""The matrices of a packed checkpoint: tiles of a format, or bfloat16 again."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moecache.errors import ConfigError
from moecache.formats import BF16, TILE_ROWS, GroupedFormat, StackedFormat, find_format
from moecache.formats.form import BLOCK_COLUMNS
from moecache.kernels import has_form
from moecache.layout import ExpertLayout, Role
from moecache.packing._source import Source

# Packing in this format dequantizes; every other one quantizes.
PLAIN = "bf16"
_METHOD = "moecache"
# Short names of the formats that models are published in, and the usual ones.
NAMES = {
    "q8_0": "q8_0",
    "q4_0": "q4_0",
    "mxfp4": "mxfp4",
    "fp8": "fp8[128x128,f32]",
    "int4": "int4[1x32,bf16]",
    PLAIN: PLAIN,
}
MATRICES = ("gate_up", "up", "down")
_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
_CONFIG_LEVELS = ("text_config", "language_config")


def find_target(name: str | None) -> str:
    """Return the full name of the format to pack in; "" for none: weights stay as they are.

    Raises
    ------
    ConfigError
        If nothing can be packed in it.
    """
    if name is None:
        return ""
    full = NAMES.get(name, name) if isinstance(name, str) else ""
    is_made = has_form(full) and not isinstance(find_format(full), GroupedFormat | StackedFormat)
    if full != PLAIN and not is_made:
        raise ConfigError(
            f"format {name!r} cannot be packed; {', '.join(NAMES)} can, and others that have a "
            "compute form by their full names, such as 'fp8[64x64,f32]'"
        )
    return full


def packed_layout(source: Source, target: str) -> ExpertLayout:
    """Return what the experts look like when they are packed.

    Raises
    ------
    ConfigError
        If they cannot be: the message says which matrix cannot, and why.
    """
    if not target:
        return source.layout
    make = _dequantized if target == PLAIN else _quantized
    try:
        layers = list(make(source, target))
    except ConfigError as error:
        raise ConfigError(f"{source.path}: {error}") from error
    return replace(source.layout, layers=layers)


def packed_config(config: Mapping[str, Any], target: str) -> bytes:
    """Return the text of config.json, which says how the packed weights are quantized.

    Raises
    ------
    ConfigError
        If its levels are too many.
    """
    document = {
        key: _without(level) if key in _CONFIG_LEVELS else level
        for key, level in _without(config).items()
    }
    if target != PLAIN:
        document["quantization_config"] = {"quant_method": _METHOD, "format": target}
        # transformers skips a method that it does not know, but not an implementation.
        document["experts_implementation"] = _METHOD
    try:
        return json.dumps(document, indent=2).encode() + b"\n"
    except RecursionError as error:
        raise ConfigError("config.json has too many levels to be written anew") from error


def _without(level: Any) -> Any:
    """Return a level of the configuration without what it says of quantization."""
    if not isinstance(level, Mapping):
        return level
    return {key: value for key, value in level.items() if key not in _CONFIG_KEYS}


def _dequantized(source: Source, _: str) -> Iterator[tuple[Role, ...]]:
    if source.format:
        raise ConfigError(f"the experts were packed in {source.format}; use the original")
    if not source.is_quantized:
        raise ConfigError("no weight is quantized, so there is nothing to dequantize to bf16")
    for roles in source.layout.layers:
        yield tuple(
            Role(role.name, role.shape[:: -1 if source.is_transposed else 1], BF16.dtype)
            if role.format
            else role
            for role in roles
        )


def _quantized(source: Source, target: str) -> Iterator[tuple[Role, ...]]:
    if source.format:
        raise ConfigError(f"the experts are in {source.format} already; pack the original")
    if source.is_quantized:
        formats = {role.format for roles in source.layout.layers for role in roles} - {""}
        raise ConfigError(
            f"weights are in {', '.join(sorted(formats)) or source.quantization} already; pack "
            "the original, or --format bf16 first"
        )
    source.transpose_roles(source.layout.find_transposed())
    for name, roles in zip(source.layout.layer_names, source.layout.layers, strict=True):
        for matrix, shape in _matrices(roles).items():
            _check_matrix(f"{matrix} of {name}", shape, target)
        yield tuple(_in_tiles(role, target) for role in roles)


def _matrices(roles: Sequence[Role]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each matrix of an expert, by what messages call it."""
    known = {role.name: role for role in roles}
    wide, down = known.get("gate_up") or known.get("up"), known.get("down")
    if wide is None or down is None or len(wide.shape) != 2 or len(down.shape) != 2:
        raise ConfigError(f"experts of {', '.join(known)} have no gate_up (or up) and down")
    width = wide.shape[0] // (2 if wide.name == "gate_up" else 1)
    if down.shape != (wide.shape[1], width):
        raise ConfigError(
            f"{wide.name} {list(wide.shape)} and down {list(down.shape)} are not "
            "[rows, columns] of one feed-forward"
        )
    name = "gate or up" if wide.name == "gate_up" else "up"
    return {name: (width, wide.shape[1]), "down": down.shape}


def _check_matrix(what: str, shape: tuple[int, ...], target: str) -> None:
    multiple = math.lcm(find_format(target).block[1] or 1, BLOCK_COLUMNS)
    if 0 in shape or shape[0] % TILE_ROWS or shape[1] % multiple:
        smaller = "; choose a format of smaller blocks" if shape[1] % BLOCK_COLUMNS == 0 else ""
        raise ConfigError(
            f"{what} is {list(shape)}; in {target} rows are a multiple of {TILE_ROWS} and columns "
            f"of {multiple}{smaller}"
        )


def _in_tiles(role: Role, target: str) -> Role:
    if role.name not in MATRICES:
        return role
    if "float" not in role.dtype.name or role.dtype.itemsize < 2:
        raise ConfigError(f"{role.name} is {role.dtype}; float16, bfloat16 and wider are quantized")
    return Role(role.name, role.shape, format=target, is_tiled=True)
