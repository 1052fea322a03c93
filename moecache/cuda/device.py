"""Device: a GPU as slots and kernels use it."""

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from moecache.errors import ConfigError

_DLPACK_CPU = 1
_T = TypeVar("_T")


@dataclass
class Memory:
    """Memory of a device.

    Parameters
    ----------
    address : int
        On the device.
    nbytes : int
    owner : object
         A reference to it keeps the memory; None once the memory was given back.
    """

    address: int
    nbytes: int
    owner: object


@dataclass(frozen=True)
class Stream:
    """An order of work on a device.

    Parameters
    ----------
    pointer : int
        cudaStream_t.
    owner : object
        A reference to it keeps the stream.
    """

    pointer: int
    owner: object = None


@dataclass(frozen=True)
class Graph:
    """Work captured from a stream, which one call issues again.

    Parameters
    ----------
    owner : object
        A reference to it keeps the graph.
    """

    owner: object


@dataclass(slots=True)  # frozen ones take four times as long to make
class DeviceArray:
    """The address of an array on its device; always C-contiguous.

    Parameters
    ----------
    address : int
    shape : tuple of int
    dtype : numpy.dtype
    owner : object
        A reference to it keeps the memory.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    owner: object


class Product(NamedTuple):
    """A matrix product to compute, by addresses on the device.

    Parameters
    ----------
    rows, matrix, out : int
        Addresses of arrays [n, k], [m, k] and [n, m].
    n, m, k : int
    """

    rows: int
    matrix: int
    out: int
    n: int
    m: int
    k: int


class Device(Protocol):
    """A GPU as the package uses it.

    Events are integers (cudaEvent_t). Work that a call issues is done later, in the order of its
    stream; only `synchronize`, `wait_for` and `to_host` wait for it. An error of the device is a
    `MoeCacheError`, a lack of its memory a `MemoryError`.
    """

    # Returns the stream (cudaStream_t) that the calling thread computes in; None: CuPy's.
    stream_source: Callable[[], int] | None
    # Called where memory is short, before it is asked for once more: makes another library give
    # back what it only keeps. None: nobody is asked.
    on_out_of_memory: Callable[[], object] | None
    # Allocations are rounded up to a multiple of it.
    allocation_bytes: int
    # Those that blocks of threads are spread over.
    num_multiprocessors: int

    @property
    def name(self) -> str:
        """Such as "cuda:0"."""

    @property
    def description(self) -> str:
        """The name and what the maker calls it."""

    def free_bytes(self) -> int:
        """Return the bytes that are not allocated."""

    def allocate(self, num_bytes: int) -> Memory:
        """Return memory filled with zeros."""

    def free(self, memory: Memory) -> None:
        """Give back memory that nothing uses any more; arrays over it keep it."""

    def allocate_shared(self, num_bytes: int) -> Memory:
        """Return pinned memory of the host, zeros, that kernels reach at the same address."""

    def free_shared(self, memory: Memory) -> None:
        """Give back memory of `allocate_shared` that nothing uses any more."""

    def trim(self) -> None:
        """Release to others the memory that was given back and is only kept for later."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Lock pages of the host so that copies from them need no detour."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def create_stream(self) -> Stream:
        """Return a stream that waits for no other."""

    def destroy_stream(self, stream: Stream) -> None:
        """End a stream once its work is done."""

    def current_stream(self) -> Stream:
        """Return the stream that the calling thread computes in."""

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which the calling thread computes in a stream."""

    def create_event(self, *, timing: bool = False) -> int:
        """Return an event."""

    def destroy_event(self, event: int) -> None:
        """Give an event back."""

    def record(self, event: int, stream: Stream) -> None:
        """Let an event stand for all work that the stream was given so far."""

    def wait_event(self, stream: Stream, event: int) -> None:
        """Make the stream's later work wait for an event as it was last recorded."""

    def is_done(self, event: int) -> bool:
        """Return whether all that an event stands for is done."""

    def wait_for(self, event: int) -> None:
        """Wait until all that an event stands for is done."""

    def elapsed_ns(self, start: int, end: int) -> int:
        """Return the time between two events that are done, made with `timing`."""

    def synchronize(self, stream: Stream) -> None:
        """Wait until all of a stream's work is done."""

    def copy_in(self, destination: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Copy from the host; pinned memory must stay as it is until the copy is done."""

    def array(
        self, memory: Memory, offset: int, shape: Sequence[int], dtype: np.dtype, stride: int = 0
    ) -> Any:
        """Return an array of the device over its memory, without a copy.

        `stride` is that of the first axis, in bytes; 0: that of contiguous items. Types that the
        device's arrays do not know (bfloat16) come as unsigned integers of their size.
        """

    def empty(self, shape: Sequence[int], dtype: np.dtype, stream: Stream) -> Any:
        """Return an uninitialised array, for work in a stream."""

    def locate(self, array: Any) -> DeviceArray:
        """Locate an array of any library (CuPy, torch, DLPack).

        Raises
        ------
        ConfigError
            If it is on another device, or not C-contiguous.
        """

    def to_device(self, array: np.ndarray, stream: Stream) -> Any:
        """Return a copy on the device; the host's array may change at once. May wait."""

    def is_on_host(self, array: Any) -> bool:
        """Return whether an array's values are in host memory, where NumPy can read them."""

    def to_host(self, array: Any) -> np.ndarray:
        """Return a copy in host memory, once all work of the current stream is done."""

    def is_capturing(self, stream: Stream) -> bool:
        """Return whether a graph captures the stream's work; then nothing may be waited for."""

    def begin_capture(self, stream: Stream) -> None:
        """Capture the stream's work from now on instead of doing it."""

    def end_capture(self, stream: Stream) -> Graph:
        """Return the work captured since `begin_capture`; the memory that it uses must stay."""

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Issue all of a graph's work in a stream."""

    def launch(
        self,
        kernel: str,
        num_blocks: int,
        argument: "ctypes.Array[ctypes.c_char]",
        stream: Stream,
        *,
        cooperative: bool = False,
    ) -> None:
        """Start a kernel, by its name, with 256 threads a block.

        Its only argument is a struct, whose bytes may change once this has returned.
        """

    def prepare(self, kernels: Sequence[str]) -> None:
        """Compile kernels before they are needed."""

    def products(self, products: Sequence[Product], dtype: np.dtype, stream: Stream) -> None:
        """Compute out[n, m] = rows[n, k] @ matrix[m, k].T, one after the other, sums in float32."""


def with_memory(device: Device, allocate: Callable[[], _T]) -> _T:
    """Return what an allocation does, tried again after `on_out_of_memory` if it fails."""
    try:
        return allocate()
    except MemoryError:
        if device.on_out_of_memory is None:
            raise
        device.on_out_of_memory()
        return allocate()


def dtype_of(array: Any) -> np.dtype:
    """Return the dtype of an array of CuPy or torch.

    Raises
    ------
    ConfigError
        If NumPy has no dtype of that name.
    """
    dtype = array.dtype
    return dtype if isinstance(dtype, np.dtype) else _dtype(dtype)


def is_in_host_memory(array: Any) -> bool:
    """Return whether an array of any library lies where NumPy can read it."""
    if isinstance(array, np.ndarray):
        return True
    if hasattr(array, "data_ptr"):
        return bool(array.device.type == "cpu")
    return hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] == _DLPACK_CPU


@functools.cache
def _dtype(dtype: Any) -> np.dtype:
    # Cached by the dtype itself: to write one as text takes longer than all else of a look-up.
    import ml_dtypes  # noqa: F401 - with it NumPy knows bfloat16 by name

    name = str(dtype).removeprefix("torch.")
    try:
        return np.dtype(name)
    except TypeError as error:
        raise ConfigError(f"an array of {name} is of no type that NumPy knows") from error


def parse_device(name: object) -> int | None:
    """Return the number of a CUDA device, or None for "cpu".

    Raises
    ------
    ConfigError
        If it is neither "cpu" nor "cuda" nor "cuda:N".
    """
    if name == "cpu":
        return None
    match = re.fullmatch(r"cuda(?::([0-9]{1,3}))?", name) if isinstance(name, str) else None
    if match is None:
        raise ConfigError(f'device {name!r} is neither "cpu" nor "cuda" nor "cuda:N"')
    return int(match[1] or 0)
