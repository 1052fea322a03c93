"""Find the experts among the tensors of a GGUF file."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from moecache.errors import ConfigError, FormatError
from moecache.formats import find_format
from moecache.layout import ExpertLayout
from moecache.stores._header import TensorEntry, shown
from moecache.stores._index import TensorPart, index_experts
from moecache.stores._matrices import Matrix, Stored, UnsupportedQuantizationError
from moecache.stores.gguf._header import GgufEntry

# Stacks of all experts; before these, files had each expert's tensors ("blk.0.ffn_up.7.weight").
_EXPERTS = re.compile(
    r"(?P<layer>blk\.(?:0|[1-9]\d{0,5}))\.ffn_(?P<piece>gate_up|gate|up|down)"
    r"(?:_exps|\.(?P<expert>0|[1-9]\d{0,6}))\.(?P<kind>weight|bias)",
    re.ASCII,
)
_RANKS = {"weight": 2, "bias": 1}


def is_expert(name: str) -> bool:
    """Return whether a tensor of this name is an expert's."""
    return _EXPERTS.fullmatch(name) is not None


def single_name(name: str, expert: int) -> str:
    """Return the name of one expert's tensor, given that of its stack, or its own.

    Examples
    --------
    >>> single_name("blk.3.ffn_gate_exps.weight", 7)
    'blk.3.ffn_gate.7.weight'
    """
    match = _EXPERTS.fullmatch(name)
    assert match is not None
    return f"{match['layer']}.ffn_{match['piece']}.{expert}.{match['kind']}"


def find_experts(
    tensors: Mapping[str, tuple[int, GgufEntry]], top_k: int, chosen: Collection[str] | None
) -> tuple[ExpertLayout, list[list[TensorPart]]]:
    """Return the layout of the experts and, per layer, where they are; see `index_experts`.

    Raises
    ------
    FormatError
        If experts are missing, or do not fit together.
    ConfigError
        If a type is not supported as the format of a matrix, or a chosen layer is not there.
    """

    def find_matrix(stored: Mapping[str, Stored]) -> Matrix | None:
        weight = stored.get("")
        return None if weight is None else matrix_of(weight.name, tensors[weight.name][1])

    rows = {
        name: (file, _in_bytes(name, entry))
        for name, (file, entry) in tensors.items()
        if is_expert(name)
    }
    return index_experts(rows, top_k, chosen, find_matrix, _match_name)


def matrix_of(name: str, entry: GgufEntry) -> Matrix | None:
    """Return the matrix that a tensor is, of a stack each; None if it is not quantized."""
    if not entry.type.is_quantized:
        return None
    try:
        known = find_format(entry.type.format)
    except ConfigError as error:
        raise UnsupportedQuantizationError(f"tensor {shown(name)}: {error}") from error
    rows = entry.shape[-2] if len(entry.shape) > 1 else 1
    return Matrix(known, rows, entry.shape[-1], ("",))


def _match_name(name: str) -> tuple[str, str, str | None, str] | None:
    match = _EXPERTS.fullmatch(name)
    if match is None:
        return None
    return match["layer"], f"{match['piece']}_proj", match["expert"], match["kind"]


def _in_bytes(name: str, entry: GgufEntry) -> TensorEntry:
    """Return a tensor of experts with rows of bytes, if it is quantized, instead of values."""
    match = _EXPERTS.fullmatch(name)
    assert match is not None
    rank = _RANKS.get(match["kind"])
    if rank is None or (rank == 1 and entry.type.is_quantized):
        raise FormatError(
            f"tensor {shown(name)}, {entry.dtype_name} {list(entry.shape)}, has no meaning here"
        )
    # ggml leaves out sizes of 1 at the end of its own order.
    wanted = rank + (match["expert"] is None)
    shape = (1,) * (wanted - len(entry.shape)) + entry.shape
    if len(shape) != wanted:
        raise FormatError(f"tensor {shown(name)} of shape {list(shape)} is no {match['kind']}")
    if not entry.type.is_quantized:
        return replace(entry, shape=shape)
    nbytes = shape[-1] // entry.type.columns * entry.type.nbytes
    return replace(entry, dtype=np.dtype(np.uint8), shape=(*shape[:-1], nbytes))
