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
from moecache.traces.files import allowed_bytes, read_arrays, read_npy
from moecache.traces.trace import DECODE, PREFILL, Trace

_FIELD, _PROMPT_FIELD = "routed_experts", "prompt_routed_experts"


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
    parts: list[tuple[np.ndarray, int]] = []
    try:
        with path.open("rb") as file:
            magic = file.read(6)
            if magic == b"\x93NUMPY":
                file.seek(0)
                size = path.stat().st_size
                parts.append((read_npy(file, str(path), size, allowed_bytes(size)), 0))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from error
    if magic.startswith(b"PK"):
        arrays = read_arrays(path, (_FIELD, _PROMPT_FIELD))
        if _FIELD not in arrays:
            raise FormatError(f"{path}: has no array 'experts' nor {_FIELD!r}; it is no trace")
        prompt = arrays.get(_PROMPT_FIELD)
        parts.append(_joined(str(path), prompt, arrays[_FIELD], 0))
    elif not parts:
        for where, value in json_lines(path, progress):
            parts += _response(where, value, known)
    if not parts:
        raise FormatError(f"{path}: has no routing in it")
    return _trace(path, parts, num_experts, metadata)


def without_unrouted(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return experts with padding for what was not routed, and the layers that were.

    A router never chooses one expert for all of its choices; a capture that was
    never written to has zeros there.
    """
    # Unsigned ids have no -1; what is out of range must stay so.
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(2**63 - 1))
    experts = array.astype(np.int64)
    if array.shape[2] > 1:
        experts[(array == array[:, :, :1]).all(axis=2)] = -1
    routed = np.flatnonzero((experts >= 0).any(axis=(0, 2)))
    if len(array) == 0 or len(routed) == 0:
        return experts, np.arange(array.shape[1])
    return experts[:, routed], routed


def _trace(
    path: Path,
    parts: list[tuple[np.ndarray, int]],
    num_experts: int | None,
    metadata: dict[str, Any],
) -> Trace:
    shape = parts[0][0].shape[1:]
    for number, (array, _) in enumerate(parts):
        if array.ndim != 3 or array.dtype.kind not in "iu" or array.shape[1:] != shape:
            raise FormatError(
                f"{path}: array {number} must be integers [tokens, {', '.join(map(str, shape))}],"
                f" got {array.dtype} {list(array.shape)}"
            )
    joined = np.concatenate([array for array, _ in parts])
    experts, layers = without_unrouted(joined)
    phases, sequences, steps, first = [], [], [], 0
    for number, (array, num_prompt) in enumerate(parts):
        rows = np.arange(len(array))
        phases.append(np.where(rows < num_prompt, PREFILL, DECODE))
        sequences.append(np.full(len(array), number))
        steps.append(first + np.maximum(rows - max(num_prompt - 1, 0), 0))
        first += len(array)
    if num_experts is None:
        num_experts = max(int(experts.max(initial=0)) + 1, shape[1] if len(shape) > 1 else 1)
        metadata = {"num_experts_inferred": True, **metadata}
    try:
        return Trace(
            experts,
            num_experts=num_experts,
            phase=np.concatenate(phases),
            sequence=np.concatenate(sequences),
            step=np.concatenate(steps),
            layers=layers,
            **metadata,
        )
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from error


def _response(
    where: str, value: Any, known: tuple[int | None, int | None]
) -> list[tuple[np.ndarray, int]]:
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
        _joined(where, prompt, _decoded(where, place[_FIELD], known), num_prompt)
        for place in places
        if isinstance(place, dict) and place.get(_FIELD) is not None
    ]
    if not found:
        raise FormatError(f"{where}: has no {_FIELD!r}; was the server asked to return them?")
    return found


def _joined(
    where: str, prompt: np.ndarray | None, routed: np.ndarray, num_prompt: int
) -> tuple[np.ndarray, int]:
    if prompt is None:
        return routed, min(num_prompt, len(routed)) if routed.ndim else 0
    if prompt.ndim != 3 or prompt.shape[1:] != routed.shape[1:]:
        raise FormatError(
            f"{where}: {_PROMPT_FIELD} is {list(prompt.shape)}, {_FIELD} {list(routed.shape)}"
        )
    return np.concatenate([prompt, routed]), len(prompt)


def _decoded(where: str, value: Any, known: tuple[int | None, int | None]) -> np.ndarray:
    if isinstance(value, list):
        try:
            array = np.array(value)
        except (ValueError, OverflowError) as error:
            raise FormatError(f"{where}: {_FIELD} is not [tokens, layers, top_k]") from error
        if array.dtype.kind not in "iu" or array.ndim != 3:
            raise FormatError(f"{where}: {_FIELD} must be whole numbers [tokens, layers, top_k]")
        return array
    if not isinstance(value, str):
        raise FormatError(f"{where}: {_FIELD} must be a list or base64, not {value!r}"[:200])
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"{where}: {_FIELD} is not base64: {error}") from error
    if data.startswith(b"\x93NUMPY"):
        return read_npy(io.BytesIO(data), f"{where}: {_FIELD}", len(data), len(data))
    num_layers, top_k = known
    if not num_layers or not top_k:
        raise FormatError(
            f"{where}: {_FIELD} are bare int32, whose shape is not known; say num_layers and top_k"
        )
    if len(data) % (4 * num_layers * top_k):
        raise FormatError(f"{where}: {len(data)} bytes are not int32 [_, {num_layers}, {top_k}]")
    return np.frombuffer(data, "<i4").reshape(-1, num_layers, top_k)
