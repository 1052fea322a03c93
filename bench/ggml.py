"""One layer's routed experts by ggml, the library that llama.cpp computes with; for benchmarks.

It comes with llama-cpp-python (extra `bench-llama`); its functions are called by ctypes, with the
graph that llama.cpp makes of such a layer: products of the chosen experts (`ggml_mul_mat_id`) for
gate and for up, SwiGLU, and for down. Weights may be repacked, as llama.cpp does where it can.
"""

import contextlib
import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from moecache.errors import ConfigError
from moecache.formats import BlockFormat, GroupedFormat, find_format, quantize

_TYPES = {"f32": 0, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_k": 10, "q3_k": 11}
_TYPES |= {"q4_k": 12, "q5_k": 13, "q6_k": 14, "iq4_nl": 20, "iq4_xs": 23, "bf16": 30}
_TYPES |= {"mxfp4_gguf": 39}
_I32 = 26
# Of struct ggml_tensor: `data`, then a name of 64 bytes, then `extra`, which repacking sets.
_DATA_AT, _EXTRA_AT = 248, 320
_HUGE_PAGE, _MADV_HUGEPAGE = 2 * 2**20, 14
_REPACKED = "_Z35ggml_backend_cpu_repack_buffer_typev"


class _Options(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class NotRepackedError(Exception):
    """ggml has no other order for these weights on this processor."""


def has_format(name: str) -> bool:
    """Return whether ggml is installed and multiplies weights as they are in this format."""
    return name in _TYPES and importlib.util.find_spec("llama_cpp") is not None


def parts_of(values: np.ndarray, name: str) -> dict[str, np.ndarray]:
    """Return a matrix in a format; any codes, of scales that fit, if moecache only reads it."""
    known = find_format(name)
    if not isinstance(known, GroupedFormat):
        with contextlib.suppress(ConfigError):
            return quantize(values, name)
        assert isinstance(known, BlockFormat)
        return _random_blocks(known, values.shape, values.std())
    raw = np.random.default_rng(0).integers(0, 256, known.nbytes(*values.shape), np.uint8)
    parts = known.split(raw, *values.shape)
    parts["scales"][...] = values.std() / 8
    return parts


def _random_blocks(
    known: BlockFormat, shape: tuple[int, int], deviation: float
) -> dict[str, np.ndarray]:
    """Return blocks of any codes whose values are about zero, and of a standard deviation."""
    raw = np.random.default_rng(0).integers(0, 256, known.nbytes(*shape), np.uint8)
    parts = known.split(raw, *shape)
    numbers = {at: (slice(None), slice(None), slice(at, at + 2)) for at in known.numbers_at}
    # An offset is half of the largest code.
    largest = {"q2_k": 3, "q5_k": 31, "q5_1": 31}.get(known.name, 15)
    sizes = dict(zip(known.numbers_at, (1, largest / 2), strict=False))
    for at, place in numbers.items():
        parts["blocks"][place] = np.array([sizes[at]], np.float16).view(np.uint8)
    scale = deviation / known.dequantize(parts).std()
    for at, place in numbers.items():
        parts["blocks"][place] = np.array([sizes[at] * scale], np.float16).view(np.uint8)
    return parts


class GgmlLayer:
    """Experts of a layer, and the step that computes some of them for one token.

    Parameters
    ----------
    name : str
        Such as "bf16" or "q4_k".
    parts : mapping of str to ndarray
        One expert's "gate", "up" and "down" as the file has them, C-contiguous; each expert gets
        these.
    hidden_size, width, num_experts, top_k : int
    threads : int, default 1
    repacked : bool, default False

    Raises
    ------
    NotRepackedError
        If that was asked for, and there is nothing of the kind.
    """

    def __init__(
        self,
        name: str,
        parts: Mapping[str, np.ndarray],
        hidden_size: int,
        width: int,
        num_experts: int,
        top_k: int,
        *,
        threads: int = 1,
        repacked: bool = False,
    ) -> None:
        self._ggml = ggml = _library()
        self._stack = contextlib.ExitStack()
        shapes = {"gate": (hidden_size, width), "up": (hidden_size, width)}
        shapes["down"] = (width, hidden_size)
        weights = self._context(2**20, no_alloc=True)
        tensors = {
            role: ggml.ggml_new_tensor_3d(weights, _TYPES[name], *shape, num_experts)
            for role, shape in shapes.items()
        }
        kind = getattr(ggml, _REPACKED)() if repacked else ggml.ggml_backend_cpu_buffer_type()
        buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(weights, kind)
        self._stack.callback(ggml.ggml_backend_buffer_free, buffer)
        for role, tensor in tensors.items():
            if repacked and not _pointer(tensor, _EXTRA_AT):
                self.close()
                raise NotRepackedError(f"ggml does not repack {name}")
            self._fill(tensor, parts[role], num_experts)
        context = self._context(64 * 2**20, no_alloc=False)
        given = ggml.ggml_new_tensor_3d(context, _TYPES["f32"], hidden_size, 1, 1)
        chosen = ggml.ggml_new_tensor_2d(context, _I32, top_k, 1)
        gate = ggml.ggml_mul_mat_id(context, tensors["gate"], given, chosen)
        up = ggml.ggml_mul_mat_id(context, tensors["up"], given, chosen)
        act = ggml.ggml_swiglu_split(context, gate, up)
        rows = ggml.ggml_mul_mat_id(context, tensors["down"], act, chosen)
        self._graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(self._graph, rows)
        self.inputs = _array(ggml.ggml_get_data(given), np.float32, hidden_size)
        self.experts = _array(ggml.ggml_get_data(chosen), np.int32, top_k)
        self.rows = _array(ggml.ggml_get_data(rows), np.float32, top_k * hidden_size)
        self._backend = ggml.ggml_backend_cpu_init()
        self._stack.callback(ggml.ggml_backend_free, self._backend)
        ggml.ggml_backend_cpu_set_n_threads(self._backend, threads)

    def compute(self) -> None:
        """Write `rows` [top_k, hidden_size] of `inputs`, by the experts in `experts`."""
        if self._ggml.ggml_backend_graph_compute(self._backend, self._graph):
            raise RuntimeError("ggml could not compute the graph")

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        self._stack.close()

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _context(self, nbytes: int, *, no_alloc: bool) -> int:
        context: int = self._ggml.ggml_init(_Options(nbytes, None, no_alloc))
        self._stack.callback(self._ggml.ggml_free, context)
        return context

    def _fill(self, tensor: int, part: np.ndarray, num_experts: int) -> None:
        """Let every expert have the same weights, in huge pages as ours are."""
        whole = np.tile(part.reshape(-1).view(np.uint8), num_experts)
        assert _pointer(tensor, _DATA_AT) == self._ggml.ggml_get_data(tensor)
        assert self._ggml.ggml_nbytes(tensor) == whole.nbytes
        start = -(-self._ggml.ggml_get_data(tensor) // _HUGE_PAGE) * _HUGE_PAGE
        room = whole.nbytes // _HUGE_PAGE * _HUGE_PAGE - _HUGE_PAGE
        if room > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), room, _MADV_HUGEPAGE)
        self._ggml.ggml_backend_tensor_set(tensor, whole.ctypes.data, 0, whole.nbytes)


def quantized(values: np.ndarray, number: int) -> np.ndarray:
    """Return the blocks of a matrix in a type of ggml, uint8 [rows, bytes], by its quantizer.

    Parameters
    ----------
    values : ndarray, shape [rows, columns]
    number : int
        Of the type, such as 12 of Q4_K.
    """
    ggml, wide = _library(), np.ascontiguousarray(values, np.float32)
    rows, columns = wide.shape
    out = np.empty((rows, ggml.ggml_row_size(number, columns)), np.uint8)
    ggml.ggml_quantize_chunk(number, wide.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    return out


def _pointer(address: int, offset: int) -> int:
    return ctypes.c_uint64.from_address(address + offset).value


def _array(address: int, kind: Any, size: int) -> np.ndarray:
    raw = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(raw, (size * 4,)).view(kind)


def _library() -> Any:
    """Return ggml's functions, those of all of its libraries."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise ImportError("ggml comes with the extra bench-llama")
    folder = Path(found.origin).parent / "lib"
    libraries = [
        ctypes.CDLL(str(folder / f"libggml{part}.so"), mode=ctypes.RTLD_GLOBAL)
        for part in ("-base", "", "-cpu")
    ]
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    long = ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_init": (pointer, [_Options]),
        "ggml_free": (None, [pointer]),
        "ggml_new_tensor_2d": (pointer, [pointer, integer, long, long]),
        "ggml_new_tensor_3d": (pointer, [pointer, integer, long, long, long]),
        "ggml_mul_mat_id": (pointer, [pointer, pointer, pointer, pointer]),
        "ggml_swiglu_split": (pointer, [pointer, pointer, pointer]),
        "ggml_new_graph": (pointer, [pointer]),
        "ggml_build_forward_expand": (None, [pointer, pointer]),
        "ggml_get_data": (pointer, [pointer]),
        "ggml_nbytes": (size, [pointer]),
        "ggml_row_size": (size, [integer, long]),
        "ggml_quantize_chunk": (size, [integer, pointer, pointer, long, long, long, pointer]),
        "ggml_backend_tensor_set": (None, [pointer, pointer, size, size]),
        "ggml_backend_alloc_ctx_tensors_from_buft": (pointer, [pointer, pointer]),
        "ggml_backend_buffer_free": (None, [pointer]),
        "ggml_backend_cpu_buffer_type": (pointer, []),
        "ggml_backend_cpu_init": (pointer, []),
        "ggml_backend_free": (None, [pointer]),
        "ggml_backend_cpu_set_n_threads": (None, [pointer, integer]),
        "ggml_backend_graph_compute": (integer, [pointer, pointer]),
        _REPACKED: (pointer, []),
    }

    class Functions:
        """What is called, by its name in C."""

    for name, (result, arguments) in signatures.items():
        function = next(getattr(library, name) for library in libraries if hasattr(library, name))
        function.restype, function.argtypes = result, arguments
        setattr(Functions, name, function)
    return Functions
