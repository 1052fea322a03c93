"""Routing traces in the forms that other programs write.

| format | what it is |
|-|-|
| `npz` | this package's own, see `moecache.traces.trace` |
| `token-pairs` | JSON lines, a token each: [[layer, expert], ...] (nvmoe) |
| `llama-topk` | JSON lines, a layer of an evaluation each: ffn_moe_topk of llama.cpp |
| `route-csv` | BigMoeOnEdge's --route-trace |
| `routed-experts` | what vLLM and SGLang return: .npy, .npz, or responses as JSON lines |
"""

import codecs
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError, FormatError, StoreError
from moecache.files import find_examples
from moecache.study._lines import (
    Progress,
    load_llama_topk,
    load_route_csv,
    load_token_pairs,
)
from moecache.study._responses import as_ids, load_routed_experts, without_unrouted
from moecache.traces.files import ZIP_ERRORS
from moecache.traces.trace import DECODE, PREFILL, Trace

__all__ = [
    "FORMATS",
    "detect_format",
    "example_trace",
    "from_routed_experts",
    "from_router_logits",
    "load_any",
    "load_llama_topk",
    "load_npz",
    "load_route_csv",
    "load_routed_experts",
    "load_token_pairs",
]

_HEAD_BYTES = 4096


def example_trace() -> Trace:
    """Return the routing of the tiny model that comes with moecache: 568 tokens, 8 layers x 32.

    Raises
    ------
    ConfigError
        If the package was installed without its examples.
    """
    return load_any(find_examples() / "traces" / "tiny_moe.npz")


def load_npz(
    path: str | os.PathLike[str],
    *,
    num_experts: int | None = None,
    progress: Progress | None = None,  # noqa: ARG001 - as the other loaders have it
    **metadata: Any,
) -> Trace:
    """Read this package's own form; see `Trace.load`. See `load_any` for the rest."""
    trace = Trace.load(path)
    if num_experts is None and not metadata:
        return trace
    return Trace(
        trace.experts,
        num_experts=num_experts or trace.num_experts,
        phase=trace.phase,
        sequence=trace.sequence,
        step=trace.step,
        bulk=trace.bulk,
        layers=trace.layers,
        **{**trace.metadata, **metadata},
    )


_LOADERS: dict[str, Callable[..., Trace]] = {
    "npz": load_npz,
    "token-pairs": load_token_pairs,
    "llama-topk": load_llama_topk,
    "route-csv": load_route_csv,
    "routed-experts": load_routed_experts,
}
FORMATS = tuple(_LOADERS)


def load_any(
    path: str | os.PathLike[str],
    *,
    format: str = "auto",  # noqa: A002 - the word for it
    num_experts: int | None = None,
    progress: Progress | None = None,
    **metadata: Any,
) -> Trace:
    """Read a trace of any known form, told apart by what is in the file.

    Text is read line by line. Ids are kept in 4 bytes each.

    Parameters
    ----------
    path : str or Path
    format : str, default "auto"
        One of `FORMATS`, if the content misleads.
    num_experts : int, optional
        Experts per layer, where the file does not say. Without it the highest id
        says it, and `num_experts_inferred` stands in the metadata.
    progress : callable (done_bytes, total_bytes), optional
        Called every few thousand lines of a text file.
    **metadata
        Added to what the file says: model, license, source, ...

    Raises
    ------
    FormatError
        If the file is damaged or of no known form; it names the line.
    StoreError
        If it cannot be read.
    """
    if format not in {"auto", *FORMATS}:
        raise ConfigError(f"format {format!r} is not one of auto, {', '.join(FORMATS)}")
    found = detect_format(path) if format == "auto" else format
    return _LOADERS[found](path, num_experts=num_experts, progress=progress, **metadata)


def detect_format(path: str | os.PathLike[str]) -> str:
    """Return which of `FORMATS` a file is of, by its first bytes.

    Raises
    ------
    FormatError
        If it is of none.
    StoreError
        If it cannot be read.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise StoreError(f"{path}: is not a regular file; save what comes from a pipe first")
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from error
    if head.startswith(b"PK"):
        # The names of the members stand in the directory at the end.
        return "npz" if _has_member(path, "experts.npy") else "routed-experts"
    if head.startswith(b"\x93NUMPY"):
        return "routed-experts"
    text = head.lstrip()
    if text.startswith(b"["):
        return "token-pairs"
    if text.startswith(b"{"):
        # A response may be long: its field may be past the head.
        names = (b'"l"', b'"layer"', b'"layer_id"', b'"il"')
        first = text.split(b"\n", 1)[0]
        routed = b"routed_experts" in first or not any(name in first for name in names)
        return "routed-experts" if routed else "llama-topk"
    for line in text.splitlines():
        if not line.startswith(b"#"):
            if b"layer" in line and b"expert" in line and b"," in line:
                return "route-csv"
            break
    else:
        if text.startswith(b"# route_trace"):
            return "route-csv"
    raise FormatError(f"{path}: is no trace of a known form ({', '.join(FORMATS)})")


def from_routed_experts(
    routed_experts: npt.ArrayLike,
    *,
    num_experts: int,
    prompt_tokens: int = 0,
    **metadata: Any,
) -> Trace:
    """Return what vLLM or SGLang routed for one request as a trace.

    Both give an array [tokens, layers, top_k] over prompt and output, of all layers
    (the last token is never computed, so there is one row less than tokens). Layers
    without experts, and tokens that were not captured, have the same id (0) in all
    choices: they become padding, and layers that are nothing else are left out.

    Parameters
    ----------
    routed_experts : array of integers, shape [tokens, layers, top_k]
    num_experts : int
    prompt_tokens : int, default 0
        Number of rows of the prompt: phase prefill, one step.
    **metadata
        As for `Trace`.

    Raises
    ------
    ConfigError
        If the array or an argument cannot be used.
    """
    array = np.asarray(routed_experts)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise ConfigError(
            "routed_experts must be integers [tokens, layers, top_k], "
            f"got {array.dtype} {list(array.shape)}"
        )
    if not 0 <= prompt_tokens <= len(array):
        raise ConfigError(f"prompt_tokens {prompt_tokens} is not in [0, {len(array)}]")
    try:
        experts, layers = without_unrouted(as_ids("routed_experts", array))
    except FormatError as error:
        raise ConfigError(str(error)) from error
    rows = np.arange(len(experts), dtype=np.int32)
    experts.flags.writeable = False
    return Trace(
        experts,
        num_experts=num_experts,
        phase=np.where(rows < prompt_tokens, np.uint8(PREFILL), np.uint8(DECODE)),
        step=np.maximum(rows - max(prompt_tokens - 1, 0), 0),
        layers=layers,
        **metadata,
    )


def from_router_logits(
    logits: Sequence[Any],
    top_k: int,
    *,
    batch_size: int = 1,
    **metadata: Any,
) -> Trace:
    """Return what transformers' `output_router_logits` implies as a trace.

    The `top_k` largest of each row, equal ones by the lower id. This is what routers
    do that choose by their logits, not those with a bias or groups (DeepSeek-V3).

    Parameters
    ----------
    logits : sequence of arrays [tokens, num_experts], one per layer
        Arrays or tensors (moved to the host). Or a list of such sequences, one per
        forward call, as `generate` gives them.
    top_k : int
    batch_size : int, default 1
        Sequences in the batch; rows are those of the first, then of the second, ...
    **metadata
        As for `Trace`.

    Raises
    ------
    ConfigError
        If shapes disagree, a logit is NaN, or an argument cannot be used.
    """
    calls = [logits] if len(logits) and _is_array(logits[0]) else list(logits)
    if not calls or not all(len(call) for call in calls):
        raise ConfigError("there are no router logits: a model gives them if asked to")
    parts, num_experts, phases, sequences, steps = [], 0, [], [], []
    for number, call in enumerate(calls):
        arrays = [_host_array(layer) for layer in call]
        shapes = {array.shape for array in arrays}
        shape = arrays[0].shape
        if len(shapes) > 1 or len(shape) != 2 or len(call) != len(calls[0]):
            raise ConfigError(
                f"call {number}: router logits must be [tokens, experts], alike in all of "
                f"{len(calls[0])} layers, got {len(call)} of {sorted(shapes)}"
            )
        num_tokens, num_experts = shape[0], num_experts or shape[1]
        if shape[1] != num_experts or not 1 <= top_k <= num_experts:
            raise ConfigError(f"top-{top_k} of {shape[1]} experts (and of {num_experts} before)")
        if batch_size < 1 or num_tokens % batch_size:
            raise ConfigError(f"{num_tokens} rows are not those of {batch_size} sequences")
        parts.append(np.stack([_top(array, top_k, number) for array in arrays], axis=1))
        length = num_tokens // batch_size
        phases.append(np.full(num_tokens, PREFILL if length > 1 else DECODE))
        sequences.append(np.repeat(np.arange(batch_size), length))
        steps.append(np.full(num_tokens, number))
    return Trace(
        np.concatenate(parts),
        num_experts=num_experts,
        phase=np.concatenate(phases),
        sequence=np.concatenate(sequences),
        step=np.concatenate(steps),
        **metadata,
    )


def _top(logits: np.ndarray, top_k: int, call: int) -> np.ndarray:
    if np.isnan(logits).any():
        raise ConfigError(f"call {call}: there are NaN among the router logits")
    return np.argsort(-logits, axis=1, kind="stable")[:, :top_k].astype(np.int32)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _host_array(value: Any) -> np.ndarray:
    """Return an array or tensor as floats NumPy knows; torch itself is not needed for it."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if "bfloat16" in str(value.dtype):
            value = value.float()
        value = value.numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise ConfigError(f"router logits must be numbers, got {array.dtype}")
    return array if array.dtype.kind == "f" else array.astype(np.float64)


def _has_member(path: Path, name: str) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return name in archive.namelist()
    except (OSError, *ZIP_ERRORS):
        return True  # its own reader says what is wrong
