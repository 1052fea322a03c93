"""Which tensors of a quantized checkpoint are a matrix, and in which format.

What `quantization_config` in config.json says is compared with the tensors that are there; where
these disagree, that is an error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moecache.errors import ConfigError, FormatError
from moecache.formats import MXFP4, Format, find_format, scaled_name
from moecache.stores._header import TensorEntry, shown

# Of activations, and what the shapes say already.
_BESIDE = {"_shape", "_input_scale", "_activation_scale", "_input_global_scale"}
_FP8_SCALES = ("_scale_inv", "_scale", "_qscale_weight")
_LARGEST_BLOCK = 2**20
_TRUNK_SUFFIXES = {
    *("", "_packed", "_scale_inv", "_scale", "_qscale_weight", "_zero_point", "_g_idx"),
    *("_global_scale", "_shape"),
}
_SUPPORTED = (
    "fp8 (FP8 by blocks, MXFP8), mxfp4, compressed-tensors (pack-quantized, float-quantized, "
    "mxfp4-pack-quantized)"
)


Read = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Stored:
    """A tensor, or tensors alike of several experts: name of one, dtype, shape without experts."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix in a format: its shape, and the suffix of the tensor that has each part."""

    format: Format
    rows: int
    columns: int
    suffixes: tuple[str, ...]

    def weight_name(self, codes: str) -> str:
        """Return the name that the weight has where it is not quantized."""
        return codes.removesuffix(self.suffixes[0])


class Quantization:
    """How the matrices of a checkpoint are quantized.

    Parameters
    ----------
    config : dict
        What config.json has; "quantization_config" is looked for, one level down, too.

    Attributes
    ----------
    method : str
        Such as "fp8"; "" if nothing says that anything is quantized.

    Raises
    ------
    ConfigError
        If the method is not supported.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._said = _find(config)
        self.method = str(self._said.get("quant_method", "")) if self._said else ""
        if self._said is None:
            return
        matchers = {
            "fp8": self._match_fp8,
            "mxfp4": self._match_mxfp4,
            "compressed-tensors": self._match_compressed,
        }
        if self.method not in matchers:
            named = shown(self.method) if self.method else "by a method without a name, as MLX does"
            raise ConfigError(f"quantized with {named}: not supported; supported are {_SUPPORTED}")
        self._match = matchers[self.method]

    def match(self, tensors: Mapping[str, Stored], read: Read) -> Matrix | None:
        """Return the matrix that some tensors are; None if it is not quantized.

        Parameters
        ----------
        tensors : mapping of str to Stored
            By suffix: "" for "weight", "_scale_inv" for "weight_scale_inv", "_blocks", ...
        read : callable (name) -> ndarray
            Reads a tensor; LookupError if there is none.

        Raises
        ------
        FormatError
            If a part is missing or of another shape or dtype, or tensors are not what the
            configuration says.
        """
        rest = {key: tensor for key, tensor in tensors.items() if key not in {"_bias", *_BESIDE}}
        if not self.method or not rest:
            return None
        if set(rest) == {""} and rest[""].dtype.itemsize > 1:
            return None
        found = self._match(rest, read)
        left = [tensor.name for key, tensor in rest.items() if key not in found.suffixes]
        if left:
            raise FormatError(
                f"tensor {shown(left[0])} has no meaning in {found.format.name}, which "
                f"{self.method} has here"
            )
        _check_parts(found, rest)
        return found

    def _match_fp8(self, tensors: Mapping[str, Stored], _: Read) -> Matrix:
        weight, suffix = _fp8_weight(tensors, _FP8_SCALES)
        size = self._said.get("weight_block_size") if self._said else None
        block = (0, 0) if size is None else _sizes(size, "weight_block_size")
        return _scaled("fp8", weight, tensors[suffix], block, suffix)

    def _match_mxfp4(self, tensors: Mapping[str, Stored], _: Read) -> Matrix:
        blocks = _need(tensors, "_blocks")
        _need(tensors, "_scales")
        if len(blocks.shape) != 3 or blocks.shape[2] != 16:
            raise FormatError(
                f"tensor {shown(blocks.name)} of shape {list(blocks.shape)} is not "
                "[rows, columns / 32, 16] for each expert, as mxfp4 has it"
            )
        rows, count = blocks.shape[:2]
        return Matrix(MXFP4, rows, count * 32, ("_blocks", "_scales"))

    def _match_compressed(self, tensors: Mapping[str, Stored], read: Read) -> Matrix:
        if "_packed" not in tensors:
            weight, suffix = _fp8_weight(tensors, ("_scale",))
            block = self._block_of("float", 8, weight, tensors[suffix])
            return _scaled("fp8", weight, tensors[suffix], block, suffix)
        packed, scale = tensors["_packed"], _need(tensors, "_scale")
        for key in ("_zero_point", "_g_idx", "_global_scale"):
            if key in tensors:
                raise FormatError(
                    f"tensor {shown(tensors[key].name)}: matrices with it are not supported yet; "
                    f"supported are {_SUPPORTED}"
                )
        if packed.dtype == np.uint8 and scale.dtype.itemsize == 1 and len(packed.shape) == 2:
            return Matrix(MXFP4, packed.shape[0], packed.shape[1] * 2, ("_packed", "_scale"))
        rows, columns = _shape_of(packed, read)
        words = packed.shape[-1] if packed.shape else 0
        bits, rest = divmod(words * 32, columns)
        if rest or not 2 <= bits <= 8 or packed.dtype != np.int32 or packed.shape[0] != rows:
            raise FormatError(
                f"tensor {shown(packed.name)}, {packed.dtype} {list(packed.shape)}, does not have "
                f"integers of 2 to 8 bits for [{rows}, {columns}]"
            )
        weight = Stored(packed.name, packed.dtype, (rows, columns))
        block = self._block_of("int", bits, weight, scale)
        name = scaled_name(f"int{bits}", block, _scale_name(scale))
        return Matrix(find_format(name), rows, columns, ("_packed", "_scale"))

    def _groups(self) -> list[Mapping[str, Any]]:
        """Return what each of the configuration's groups says about its weights."""
        groups = (self._said or {}).get("config_groups")
        found = groups.values() if isinstance(groups, dict) else ()
        weights = [group.get("weights") for group in found if isinstance(group, dict)]
        return [said for said in weights if isinstance(said, dict)]

    def _block_of(self, kind: str, bits: int, weight: Stored, scale: Stored) -> tuple[int, int]:
        """Return the first block that a group of the configuration has, and a scale's shape."""
        said = []
        for group in self._groups():
            if (group.get("type"), group.get("num_bits")) != (kind, bits):
                continue
            strategy = group.get("strategy")
            block = {"tensor": (0, 0), "channel": (1, 0)}.get(str(strategy))
            if strategy == "group":
                block = _sizes([1, group.get("group_size")], "[1, group_size]")
            elif strategy == "block":
                block = _sizes(group.get("block_structure"), "block_structure")
            if block is None:
                raise ConfigError(f"strategy {shown(strategy)} in config.json is not supported")
            said.append(block)
            counts = [
                -(-size // (step or size or 1))
                for size, step in zip(weight.shape, block, strict=True)
            ]
            if _squeezed(tuple(counts)) == _squeezed(scale.shape):
                return block
        blocks = ", ".join(str(list(block)) for block in said)
        raise FormatError(
            f"tensor {shown(scale.name)} of shape {list(scale.shape)} is no scale of "
            f"{list(weight.shape)} {kind}{bits}; config.json has "
            + (f"blocks of {blocks} (0: all)" if said else f"no {kind} of {bits} bits")
        )


def _find(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    levels = (config, config.get("text_config"), config.get("language_config"))
    for level in levels:
        for key in ("quantization_config", "compression_config", "quantization"):
            said = level.get(key) if isinstance(level, dict) else None
            if isinstance(said, dict) and said:
                return said
            if said:
                raise ConfigError(f"{key} in config.json is {shown(said)}, not an object")
    return None


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
    sizes = said.reshape(-1).tolist()
    if len(sizes) != 2 or said.dtype.kind not in "iu" or not all(0 < n < 2**31 for n in sizes):
        raise FormatError(f"tensor {shown(name)} is {shown(sizes)}, no shape of a matrix")
    return sizes[0], sizes[1]


def _sizes(said: object, key: str) -> tuple[int, int]:
    """Return rows and columns of a block, as the configuration has them."""
    sizes = said if isinstance(said, list) else []
    if len(sizes) != 2 or not all(type(n) is int and 0 < n <= _LARGEST_BLOCK for n in sizes):
        raise ConfigError(f"{key} in config.json is {shown(said)}, not [rows, columns]")
    return sizes[0], sizes[1]


def _need(tensors: Mapping[str, Stored], suffix: str) -> Stored:
    if suffix not in tensors:
        some = next(iter(tensors.values()))
        raise FormatError(
            f"tensor {shown(some.name)} has no {suffix.lstrip('_') or 'weight'} beside it; "
            "download the checkpoint again"
        )
    return tensors[suffix]


def _fp8_weight(tensors: Mapping[str, Stored], suffixes: Sequence[str]) -> tuple[Stored, str]:
    """Return the codes of FP8, and the suffix of their scales."""
    weight = _need(tensors, "")
    if weight.dtype.name != "float8_e4m3fn" or len(weight.shape) != 2:
        raise FormatError(
            f"tensor {shown(weight.name)} is {weight.dtype} {list(weight.shape)}; FP8 is a matrix "
            "of F8_E4M3"
        )
    for suffix in suffixes:
        if suffix in tensors:
            return weight, suffix
    raise FormatError(
        f"tensor {shown(weight.name)} has no scale beside it; download the checkpoint again"
    )


def _scaled(
    element: str, weight: Stored, scale: Stored, block: tuple[int, int], suffix: str
) -> Matrix:
    rows, columns = weight.shape
    # A block that is larger than the matrix is the matrix.
    name = scaled_name(element, block, _scale_name(scale))
    return Matrix(find_format(name), rows, columns, ("", suffix))


def _scale_name(scale: Stored) -> str:
    names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    names |= {"uint8": "e8m0", "float8_e8m0fnu": "e8m0"}
    if scale.dtype.name not in names:
        raise FormatError(f"tensor {shown(scale.name)} is {scale.dtype}, no type of a scale")
    return names[scale.dtype.name]


def _check_parts(found: Matrix, tensors: Mapping[str, Stored]) -> None:
    """Raise FormatError unless each part has as many bytes, in such a shape, as the format says."""
    try:
        wanted = found.format.parts(found.rows, found.columns).values()
    except ConfigError as error:
        some = tensors[found.suffixes[0]]
        raise FormatError(f"tensor {shown(some.name)}: {error}") from error
    for suffix, (dtype, shape) in zip(found.suffixes, wanted, strict=True):
        tensor = tensors[suffix]
        same = _squeezed(tensor.shape) == _squeezed(shape) or len(tensor.shape) > 2
        nbytes = math.prod(shape) * dtype.itemsize
        if not same or math.prod(tensor.shape) * tensor.dtype.itemsize != nbytes:
            raise FormatError(
                f"tensor {shown(tensor.name)} is {tensor.dtype} {list(tensor.shape)}; beside "
                f"[{found.rows}, {found.columns}] in {found.format.name} it would be {dtype} "
                f"{list(shape)}"
            )


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def trunk_matrices(
    tensors: Mapping[str, TensorEntry], quantization: Quantization, read: Read
) -> dict[str, tuple[Matrix, list[str]]]:
    """Return the quantized matrices among tensors, and each one's tensors, by the weight's name."""
    if not quantization.method:
        return {}
    modules: dict[str, dict[str, Stored]] = {}
    for name, entry in tensors.items():
        module, _, leaf = name.rpartition(".")
        suffix = leaf.removeprefix("weight") if leaf.startswith("weight") else f"_{leaf}"
        if entry.dtype is not None and suffix in _TRUNK_SUFFIXES:
            modules.setdefault(module, {})[suffix] = Stored(name, entry.dtype, entry.shape or (1,))
    found = {}
    for module, stored in modules.items():
        # What is alone, and of numbers of more than a byte, is not quantized.
        if stored.keys() & {"", "_packed"} and (
            len(stored) > 1 or next(iter(stored.values())).dtype.itemsize == 1
        ):
            matrix = quantization.match(stored, read)
            if matrix is not None:
                names = [stored[suffix].name for suffix in matrix.suffixes]
                found[f"{module}.weight"] = matrix, names
    return found
