"""Routed experts as vLLM and SGLang return them: arrays, and responses with arrays in them."""

import base64
import binascii
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from moecache.errors import FormatError, StoreError
from moecache.study._lines import Progress, json_lines
from moecache.traces.files import (
    ALWAYS_ALLOWED_BYTES,
    allowed_bytes,
    check_32_bits,
    read_arrays,
    read_npy,
)
from moecache.traces.trace import DECODE, PREFILL, Trace

_FIELD, _PROMPT_FIELD = "routed_experts", "prompt_routed_experts"
_PIECE_IDS = 1 << 18
# Arrays that follow each other, and how many of their rows are the prompt.
_Part = tuple[list[np.ndarray], int]


def load_routed_experts(
    path: str | os.PathLike[str],
    *,
    num_experts: int | None = None,
    progress: Progress | None = None,
    **metadata: Any,
) -> Trace:
    """Read routed experts [tokens, layers, top_k]: a .npy, an .npz, or JSON lines.

    A line is a response, and a sequence of the trace: `routed_experts` stands in it,
    in its `meta_info` or in each of its `choices`, as nested lists or in base64, of a
    .npy file (vLLM) or of int32 (SGLang; then `num_layers` and `top_k` must be known:
    give them). `prompt_routed_experts`, or else `prompt_tokens`, says what the prompt
    is. See `from_routed_experts` for what counts as padding, `load_any` for the rest.
    """
    path = Path(path)
    known = (metadata.pop("num_layers", None), metadata.get("top_k"))
    parts: list[_Part] = []
    try:
        with path.open("rb") as file:
            magic = file.read(6)
            if magic == b"\x93NUMPY":
                file.seek(0)
                size = path.stat().st_size
                parts.append(([read_npy(file, str(path), size, allowed_bytes(size))], 0))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from error
    if magic.startswith(b"PK"):
        arrays = read_arrays(path, (_FIELD, _PROMPT_FIELD))
        if _FIELD not in arrays:
            raise FormatError(f"{path}: has no array 'experts' nor {_FIELD!r}; it is no trace")
        parts.append(_part(str(path), arrays.pop(_PROMPT_FIELD, None), arrays.pop(_FIELD), 0))
    elif not parts:
        for where, value in json_lines(path, progress):
            parts += _response(where, value, known)
    if not parts:
        raise FormatError(f"{path}: has no routing in it")
    return _trace(path, parts, num_experts, metadata)


def without_unrouted(experts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return experts with padding for what was not routed, and the layers that were.

    A router never chooses one expert for all of its choices; a capture that was
    never written to has zeros there.

    Parameters
    ----------
    experts : ndarray of int16 or int32, shape [tokens, layers, top_k]
        In C order, owning its data, with no other reference to it: the same array is
        returned, changed in place.
    """
    num_tokens, num_layers, top_k = experts.shape
    rows = max(1, _PIECE_IDS // max(1, num_layers * top_k))
    pieces = range(0, num_tokens, rows)
    routed = np.zeros(num_layers, np.bool_)
    for start in pieces:
        part = experts[start : start + rows]
        if top_k > 1:
            part[(part == part[:, :, :1]).all(axis=2)] = -1
        routed |= (part >= 0).any(axis=(0, 2))
    layers = np.flatnonzero(routed)
    if len(layers) in (0, num_layers):
        return experts, np.arange(num_layers)
    # The part of a piece that is kept is no longer than the text read so far.
    places = experts.reshape(-1)
    width = len(layers) * top_k
    for start in pieces:
        kept = experts[start : start + rows][:, layers].reshape(-1)
        places[start * width : start * width + len(kept)] = kept
    del places, part
    experts.resize((num_tokens, len(layers), top_k), refcheck=False)
    return experts, layers


def as_ids(where: str, array: np.ndarray) -> np.ndarray:
    """Return a copy of integers as int16, or int32 if they need it, in C order.

    Raises
    ------
    FormatError
        If 32 bits do not hold them.
    """
    check_32_bits(where, array)
    narrow = not array.size or (array.min() >= -(2**15) and array.max() < 2**15)
    return array.astype(np.int16 if narrow else np.int32, order="C")


def _trace(
    path: Path, parts: list[_Part], num_experts: int | None, metadata: dict[str, Any]
) -> Trace:
    arrays = [array for part, _ in parts for array in part]
    shape = arrays[0].shape[1:]
    for number, array in enumerate(arrays):
        if array.ndim != 3 or array.dtype.kind != "i" or array.shape[1:] != shape:
            raise FormatError(
                f"{path}: array {number} must be integers [tokens, {', '.join(map(str, shape))}],"
                f" got {array.dtype} {list(array.shape)}"
            )
    lengths = [sum(map(len, part)) for part, _ in parts]
    prompts = [num_prompt for _, num_prompt in parts]
    parts.clear()
    experts, layers = without_unrouted(_joined(arrays))
    phase = np.full(len(experts), DECODE, np.uint8)
    step = np.arange(len(experts), dtype=np.int32)
    first = 0
    for length, num_prompt in zip(lengths, prompts, strict=True):
        phase[first : first + num_prompt] = PREFILL
        # The prompt's rows are one step, and the numbers go on after it.
        rest = step[first : first + length]
        rest -= max(num_prompt - 1, 0)
        rest[:num_prompt] = first
        first += length
    if num_experts is None:
        num_experts = max(int(experts.max(initial=0)) + 1, shape[1])
        metadata = {"num_experts_inferred": True, **metadata}
    sequence = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    for made in (experts, phase, sequence, step):
        made.flags.writeable = False
    try:
        return Trace(
            experts,
            num_experts=num_experts,
            phase=phase,
            sequence=sequence,
            step=step,
            layers=layers,
            **metadata,
        )
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from error


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the arrays as one, and take them out of the list: each is let go of."""
    dtype = np.result_type(*{array.dtype for array in arrays})
    end, total = len(arrays[0]), sum(map(len, arrays))
    arrays.reverse()
    joined = arrays.pop().astype(dtype, copy=False)
    if end < total:
        joined.resize((total, *joined.shape[1:]), refcheck=False)
    while arrays:
        array = arrays.pop()
        joined[end : end + len(array)] = array
        end += len(array)
    return joined


def _response(where: str, value: Any, known: tuple[int | None, int | None]) -> list[_Part]:
    if not isinstance(value, dict):
        raise FormatError(f"{where}: must be an object with {_FIELD!r}")
    places: list[Any] = [value]
    for name in ("meta_info", "choices"):
        inner = value.get(name)
        places += inner if isinstance(inner, list) else [inner]
    info = next(
        (place for name in ("usage", "meta_info") if isinstance(place := value.get(name), dict)), {}
    )
    num_prompt = info.get("prompt_tokens", 0)
    if not isinstance(num_prompt, int) or num_prompt < 0:
        raise FormatError(f"{where}: prompt_tokens must be a whole number, got {num_prompt!r}")
    prompt = value.get(_PROMPT_FIELD)
    prompt = None if prompt is None else _decoded(where, prompt, known)
    found = [
        _part(where, prompt, _decoded(where, place[_FIELD], known), num_prompt)
        for place in places
        if isinstance(place, dict) and place.get(_FIELD) is not None
    ]
    if not found:
        raise FormatError(f"{where}: has no {_FIELD!r}; was the server asked to return them?")
    return found


def _part(where: str, prompt: np.ndarray | None, routed: np.ndarray, num_prompt: int) -> _Part:
    if prompt is None:
        return [routed], min(num_prompt, len(routed)) if routed.ndim else 0
    if prompt.ndim != 3 or prompt.shape[1:] != routed.shape[1:]:
        raise FormatError(
            f"{where}: {_PROMPT_FIELD} is {list(prompt.shape)}, {_FIELD} {list(routed.shape)}"
        )
    return [prompt, routed], len(prompt)


def _decoded(where: str, value: Any, known: tuple[int | None, int | None]) -> np.ndarray:
    if isinstance(value, list):
        try:
            array = np.array(value)
        except (ValueError, OverflowError) as error:
            raise FormatError(f"{where}: {_FIELD} is not [tokens, layers, top_k]") from error
        if array.dtype.kind not in "iu" or array.ndim != 3:
            raise FormatError(f"{where}: {_FIELD} must be whole numbers [tokens, layers, top_k]")
        return as_ids(where, array)
    if not isinstance(value, str):
        raise FormatError(f"{where}: {_FIELD} must be a list or base64, not {value!r}"[:200])
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"{where}: {_FIELD} is not base64: {error}") from error
    if data.startswith(b"\x93NUMPY"):
        # Bytes become 16 bits; a few rows may have more to them than their ids.
        allowed = 2 * len(data) + ALWAYS_ALLOWED_BYTES
        return read_npy(io.BytesIO(data), f"{where}: {_FIELD}", len(data), allowed)
    num_layers, top_k = known
    if not num_layers or not top_k:
        raise FormatError(
            f"{where}: {_FIELD} are bare int32, whose shape is not known; say num_layers and top_k"
        )
    if len(data) % (4 * num_layers * top_k):
        raise FormatError(f"{where}: {len(data)} bytes are not int32 [_, {num_layers}, {top_k}]")
    return as_ids(where, np.frombuffer(data, "<i4").reshape(-1, num_layers, top_k))
