"""Find the experts among the tensors of a GGUF file."""

import re
from collections.abc import Collection, Mapping

import numpy as np

from moecache.errors import ConfigError, FormatError
from moecache.formats import find_format
from moecache.layout import ExpertLayout
from moecache.stores._header import TensorEntry, shown
from moecache.stores._index import index_experts
from moecache.stores._matrices import Matrix, Stored, UnsupportedQuantizationError
from moecache.stores._parts import TensorPart
from moecache.stores.gguf._header import GgufEntry

# Stacks of all experts; before these, files had each expert's tensors ("blk.0.ffn_up.7.weight").
_EXPERTS = re.compile(
    r"(?P<layer>blk\.(?:0|[1-9]\d{0,5}))\.ffn_(?P<piece>gate_up|gate|up|down)"
    r"(?:_exps|\.(?P<expert>0|[1-9]\d{0,6}))\.(?P<kind>weight|bias)",
    re.ASCII,
)


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


def stack_name(name: str) -> str:
    """Return the name of the stack that an expert's tensor would be in; "" if it is in none.

    Examples
    --------
    >>> stack_name("blk.3.ffn_gate.7.weight")
    'blk.3.ffn_gate_exps.weight'
    """
    match = _EXPERTS.fullmatch(name)
    if match is None or match["expert"] is None:
        return ""
    return f"{match['layer']}.ffn_{match['piece']}_exps.{match['kind']}"


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
    rows: dict[str, tuple[int, TensorEntry]] = {}
    found: dict[str, tuple[str, str, str | None, str]] = {}
    first: dict[tuple[str, ...], str] = {}
    for name, (file, entry) in tensors.items():
        match = _EXPERTS.fullmatch(name)
        if match is None:
            continue
        layer, piece, expert, kind = match.groups()
        found[name] = layer, f"{piece}_proj", expert, kind
        rows[name] = file, _in_bytes(name, entry, kind, is_stack=expert is None)
        # Blocks of two types may have as many bytes.
        other = first.setdefault((layer, piece, kind), name)
        if tensors[other][1].type is not entry.type:
            raise FormatError(
                f"tensor {shown(name)} is {entry.dtype_name}, but {shown(other)} is "
                f"{tensors[other][1].dtype_name}: experts of a layer are of one type"
            )

    def find_matrix(stored: Mapping[str, Stored]) -> Matrix | None:
        weight = stored.get("")
        return None if weight is None else matrix_of(weight.name, tensors[weight.name][1])

    return index_experts(rows, top_k, chosen, find_matrix, found.get)


def matrix_of(name: str, entry: GgufEntry) -> Matrix | None:
    """Return the matrix that a tensor is, of a stack each; None if it is not quantized."""
    if not entry.type.is_quantized:
        return None
    try:
        known = find_format(entry.type.format)
    except ConfigError as error:
        raise UnsupportedQuantizationError(f"tensor {shown(name)}: {error}") from error
    rows = entry.shape[-2] if len(entry.shape) > 1 else 1
    return Matrix(known, rows, entry.shape[-1], ("",), entry.is_tiled)


def _in_bytes(name: str, entry: GgufEntry, kind: str, *, is_stack: bool) -> TensorEntry:
    """Return a tensor of experts with rows of bytes, if it is quantized, instead of values."""
    rank = 2 if kind == "weight" else 1
    known, shape, dtype = entry.type, entry.shape, entry.dtype
    if entry.is_tiled:
        shape = (entry.nbytes,)
        return TensorEntry(known.name, np.dtype(np.uint8), shape, entry.offset, entry.nbytes)
    if rank == 1 and known.is_quantized:
        raise FormatError(f"tensor {shown(name)}, {known.name} {list(shape)}, has no meaning here")
    # ggml leaves out sizes of 1 at the end of its own order.
    wanted = rank + is_stack
    shape = (1,) * (wanted - len(shape)) + shape
    if len(shape) != wanted:
        raise FormatError(f"tensor {shown(name)} of shape {list(shape)} is no {kind}")
    if known.is_quantized:
        shape = (*shape[:-1], shape[-1] // known.columns * known.nbytes)
        dtype = np.dtype(np.uint8)
    return TensorEntry(known.name, dtype, shape, entry.offset, entry.nbytes)
