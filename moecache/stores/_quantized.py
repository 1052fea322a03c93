"""Which tensors of a quantized checkpoint are a matrix, and in which format.

The `quantization_config` of config.json is compared with the tensors that are there; an error
says where these disagree.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moecache.errors import ConfigError, FormatError
from moecache.formats import (
    MXFP4,
    NVFP4_MODELOPT,
    find_format,
    grouped_name,
)
from moecache.stores._compressed import match_compressed
from moecache.stores._header import TensorEntry, shown
from moecache.stores._matrices import (
    Matrix,
    Read,
    Said,
    Stored,
    UnsupportedQuantizationError,
    check_parts,
    fp8_matrix,
    fp8_weight,
    need,
    scale_name,
    sizes,
)

# Tensors about activations, and those that repeat the shapes.
BESIDE = {
    *("_shape", "_input_scale", "_activation_scale", "_input_global_scale", "_output_scale"),
    *("_input_zero_point", "_output_zero_point", "_k_scale", "_v_scale"),
}
# The method that `moecache pack --format` writes.
_PACKED = "moecache"


def _match_fp8(said: Said, tensors: Mapping[str, Stored], _: Read) -> Matrix:
    weight, suffix = fp8_weight(tensors, ("_scale_inv", "_scale", "_qscale_weight"))
    size = said.get("weight_block_size")
    block = (0, 0) if size is None else sizes(size, "weight_block_size")
    return fp8_matrix(weight, tensors[suffix], block, suffix)


def _match_mxfp4(_: Said, tensors: Mapping[str, Stored], __: Read) -> Matrix:
    blocks = need(tensors, "_blocks")
    need(tensors, "_scales")
    if len(blocks.shape) != 3 or blocks.shape[2] != 16:
        raise FormatError(
            f"tensor {shown(blocks.name)} of shape {list(blocks.shape)} is not "
            "[rows, columns / 32, 16] for each expert, as mxfp4 has it"
        )
    rows, count = blocks.shape[:2]
    return Matrix(MXFP4, rows, count * 32, ("_blocks", "_scales"))


def _match_modelopt(said: Said, tensors: Mapping[str, Stored], __: Read) -> Matrix:
    kind = said.get("quant_algo")
    if kind not in ("NVFP4", "FP8", "MIXED_PRECISION", None):
        raise UnsupportedQuantizationError(
            f"modelopt's {shown(kind)} is not supported; supported are NVFP4 and FP8"
        )
    weight = need(tensors, "")
    if weight.dtype != np.uint8:
        weight, suffix = fp8_weight(tensors, ("_scale",))
        return fp8_matrix(weight, tensors[suffix], (0, 0), suffix)
    for suffix in ("_scale", "_scale_2"):
        need(tensors, suffix)
    if len(weight.shape) != 2:
        raise FormatError(f"tensor {shown(weight.name)} of shape {list(weight.shape)} is no matrix")
    rows, half = weight.shape
    return Matrix(NVFP4_MODELOPT, rows, 2 * half, ("", "_scale", "_scale_2"))


def _match_grouped(said: Said, tensors: Mapping[str, Stored], _: Read) -> Matrix:
    """Return the matrix that tensors of GPTQ or AWQ are."""
    codes = need(tensors, "_qweight")
    need(tensors, "_qzeros")
    scales = need(tensors, "_scales")
    method, bits, group = (said.get(key) for key in ("quant_method", "bits", "group_size"))
    version = said.get("version" if method == "awq" else "checkpoint_format")
    usual = {"awq": "gemm", "gptq": "gptq"}[str(method)]
    version = str(version or usual).lower()
    if version not in ({"gemm"} if method == "awq" else {"gptq", "gptq_v2"}):
        raise UnsupportedQuantizationError(
            f"{method} of version {shown(version)} in config.json is not supported"
        )
    if bits not in ((4,) if method == "awq" else (2, 4, 8)) or type(bits) is not int:
        raise UnsupportedQuantizationError(
            f"{method} of {shown(bits)} bits in config.json is not supported; "
            f"{'4' if method == 'awq' else '2, 4 and 8'} are"
        )
    if said.get("dynamic"):
        raise UnsupportedQuantizationError(
            'settings of single modules ("dynamic" in config.json) are not supported'
        )
    group = 0 if group == -1 else sizes([1, group], "[1, group_size]")[1]
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise FormatError(f"tensor {shown(codes.name)} of shape {list(codes.shape)} is no matrix")
    each = 32 // bits
    columns, rows = codes.shape
    rows, columns = (rows * each, columns) if method == "awq" else (rows, columns * each)
    order = tensors.get("_g_idx")
    if said.get("desc_act"):
        need(tensors, "_g_idx")
    name = grouped_name(
        str(method) if method == "awq" else version,
        bits,
        group,
        scale_name(scales),
        order="" if order is None else "g_idx" if said.get("desc_act") else "in order",
    )
    suffixes = "_qweight", "_qzeros", "_scales", *(() if order is None else ("_g_idx",))
    return Matrix(find_format(name), rows, columns, suffixes)


_Matcher = Callable[[Said, Mapping[str, Stored], Read], Matrix]
_MATCHERS: Mapping[str, _Matcher] = {
    "fp8": _match_fp8,
    "mxfp4": _match_mxfp4,
    "compressed-tensors": match_compressed,
    "modelopt": _match_modelopt,
    "gptq": _match_grouped,
    "awq": _match_grouped,
}


class Quantization:
    """How the matrices of a checkpoint are quantized.

    Parameters
    ----------
    config : dict
        The content of config.json; "quantization_config" is looked for, one level down, too.

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
        said = _find(config)
        self._said: Said = said or {}
        named = self._said.get("quant_method", "")
        self.method = named if isinstance(named, str) else ""
        if said is not None and self.method not in (*_MATCHERS, _PACKED):
            method = shown(named) if named else "a method without a name, as MLX does"
            raise ConfigError(
                f"quantized with {method}: not supported; supported are {', '.join(_MATCHERS)}"
            )

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
        rest = {key: tensor for key, tensor in tensors.items() if key not in {"_bias", *BESIDE}}
        # `moecache pack` writes tiles, and the file names their format.
        if self.method in ("", _PACKED) or not rest:
            return None
        if set(rest) == {""} and rest[""].dtype.itemsize > 1:
            return None
        found = _MATCHERS[self.method](self._said, rest, read)
        left = [tensor.name for key, tensor in rest.items() if key not in found.suffixes]
        if left:
            raise FormatError(
                f"tensor {shown(left[0])} has no meaning in {found.format.name}, which "
                f"{self.method} has here"
            )
        check_parts(found, rest)
        return found


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
        if entry.dtype is not None:
            modules.setdefault(module, {})[suffix] = Stored(name, entry.dtype, entry.shape or (1,))
    found = {}
    for module, stored in modules.items():
        codes = next((stored[key] for key in ("_packed", "_qweight", "") if key in stored), None)
        if codes is None:
            for tensor in stored.values():
                if tensor.name.rpartition(".")[2].startswith("weight_scale"):
                    need(stored, "")
        # A weight of usual numbers, or of bytes without a scale, is not quantized.
        elif codes.dtype.itemsize == 1 or codes.dtype.kind in "iu":
            matrix = None
            if len(stored) > 1 or codes.dtype.kind == "V":
                matrix = quantization.match(stored, read)
            if matrix is not None:
                names = [stored[suffix].name for suffix in matrix.suffixes]
                found[f"{module}.weight"] = matrix, names
    return found
