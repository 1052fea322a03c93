"""CupyDevice: a GPU through CuPy, in the only module that imports CuPy."""

import contextlib
import ctypes
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from moecache.cuda._sources import OPTIONS, source_of
from moecache.cuda.device import (
    DeviceArray,
    Graph,
    Memory,
    Product,
    Stream,
    dtype_of,
    is_in_host_memory,
    with_memory,
)
from moecache.errors import ConfigError, MissingDependencyError, MoeCacheError

try:
    import cupy
    from cupy.cuda import compiler, driver, function, runtime
except ImportError as _error:
    raise MissingDependencyError(
        f"slots on a GPU need CuPy ({_error}); install it with: pip install 'moecache[cuda13]', "
        "or 'moecache[cuda12]' for a driver of CUDA 12"
    ) from _error

_BLOCK = 256

_NON_BLOCKING_STREAM = 1
_EVENT_DISABLE_TIMING = 2
_HOST_ALLOC_PORTABLE, _HOST_ALLOC_MAPPED = 1, 2
_HOST_REGISTER_PORTABLE = 1
_TO_DEVICE, _TO_HOST = 1, 2
_OUT_OF_MEMORY = 2
# Not ready; or the event cannot be queried while a graph is captured, and counts as not done.
_NOT_DONE = frozenset((600, *range(900, 909)))
# After these errors every call of the process fails.
_LOST = {214, *range(700, 720), 999} - {704, 705, 708, 712, 713}
_LEGACY_STREAMS = (0, 1)
_PER_THREAD_STREAM = 2
_TRANSPOSED, _AS_IT_IS = 1, 0
_COMPUTE_32F = 68
_DEFAULT_ALGORITHM = -1
# Of the calls of CUDA, of its libraries and of CuPy itself.
_ERRORS = (
    *(runtime.CUDARuntimeError, driver.CUDADriverError, compiler.CompileException),
    *(RuntimeError, OSError),
)
_DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}


class CupyDevice:
    """A GPU through CuPy; see `Device`.

    Memory comes from CuPy's current allocator. Kernels are compiled at first use, and CuPy keeps
    them on disk.

    Parameters
    ----------
    number : int
        As CUDA counts the visible devices.

    Attributes
    ----------
    stream_source : callable () -> int, optional
        Returns the stream (cudaStream_t) that the calling thread computes in, where that is not
        CuPy's current one: `lambda: torch.cuda.current_stream(device).cuda_stream`.
    on_out_of_memory : callable (), optional
        Makes another library give back memory that it only keeps (`torch.cuda.empty_cache`), where
        CuPy finds none; then it is asked once more.

    Raises
    ------
    ConfigError
        If there is no such GPU.
    MoeCacheError
        If there is no driver, or it is too old.
    """

    # cudaMalloc takes whole pages of the GPU.
    allocation_bytes = 2 * 2**20

    def __init__(self, number: int) -> None:
        self._number = number
        self.stream_source: Callable[[], int] | None = None
        self.on_out_of_memory: Callable[[], object] | None = None
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise MoeCacheError(
                f"no GPU can be used: {error}; `nvidia-smi` must list one, and its driver must be "
                "as new as the CUDA of this CuPy"
            ) from error
        if not 0 <= number < count:
            have = ", ".join(f"cuda:{index}" for index in range(count)) or "none"
            raise ConfigError(
                f"there is no device cuda:{number}; CUDA sees {have} (CUDA_VISIBLE_DEVICES)"
            )
        # With several GPUs each thread has a current one; with one there is nothing to set.
        self._current: contextlib.AbstractContextManager[Any] = (
            cupy.cuda.Device(number) if count > 1 else contextlib.nullcontext()
        )
        self._unknown: set[np.dtype] = set()
        self._capturing: dict[int, Any] = {}  # CuPy's streams by their pointers
        with self._guarded():
            properties = runtime.getDeviceProperties(number)
        self._maker = properties["name"].decode()
        self.num_multiprocessors = int(properties["multiProcessorCount"])
        self._one = np.ones(1, np.float32)
        self._zero = np.zeros(1, np.float32)

    @property
    def name(self) -> str:
        """Such as "cuda:0"."""
        return f"cuda:{self._number}"

    @property
    def description(self) -> str:
        """The name and what the maker calls it."""
        return f"{self.name} ({self._maker})"

    def free_bytes(self) -> int:
        """Return the free bytes, after CuPy gave back the memory that it only keeps."""
        self.trim()
        with self._guarded():
            free, _ = runtime.memGetInfo()
        return int(free)

    def allocate(self, num_bytes: int) -> Memory:
        """Return memory filled with zeros."""
        with self._guarded():
            pointer = with_memory(self, lambda: cupy.cuda.alloc(num_bytes))
            stream = cupy.cuda.get_current_stream()
            runtime.memsetAsync(pointer.ptr, 0, num_bytes, stream.ptr)
            stream.synchronize()
        return Memory(pointer.ptr, num_bytes, pointer)

    def free(self, memory: Memory) -> None:
        """Give memory back to CuPy; arrays over it keep it until the last is gone."""
        memory.owner = None

    def allocate_shared(self, num_bytes: int) -> Memory:
        """Return pinned memory of the host, zeros, that kernels reach at the same address."""
        with self._guarded():
            # With unified addressing, which every 64-bit system has, there is one address.
            address = runtime.hostAlloc(num_bytes, _HOST_ALLOC_PORTABLE | _HOST_ALLOC_MAPPED)
        ctypes.memset(address, 0, num_bytes)
        return Memory(address, num_bytes, self)

    def free_shared(self, memory: Memory) -> None:
        """Give the memory back."""
        with self._guarded():
            runtime.freeHost(memory.address)
        memory.owner = None

    def trim(self) -> None:
        """Make CuPy give back the memory that it only keeps."""
        with self._guarded():
            cupy.get_default_memory_pool().free_all_blocks()

    def pin(self, address: int, num_bytes: int) -> None:
        """Lock pages of the host, for every device."""
        with self._guarded():
            runtime.hostRegister(address, num_bytes, _HOST_REGISTER_PORTABLE)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        with self._guarded():
            runtime.hostUnregister(address)

    def create_stream(self) -> Stream:
        """Return a stream that waits for no other, not even the legacy default stream."""
        with self._guarded():
            return Stream(runtime.streamCreateWithFlags(_NON_BLOCKING_STREAM))

    def destroy_stream(self, stream: Stream) -> None:
        """End a stream once its work is done."""
        with self._guarded():
            runtime.streamDestroy(stream.pointer)

    def current_stream(self) -> Stream:
        """Return the stream that the calling thread computes in."""
        if self.stream_source is not None:
            return Stream(self.stream_source())
        stream = cupy.cuda.get_current_stream(self._number)
        if stream.ptr == _PER_THREAD_STREAM:
            raise ConfigError(
                "CuPy computes in each thread's own default stream "
                "(CUPY_CUDA_PER_THREAD_DEFAULT_STREAM), by which threads cannot wait for each "
                "other; unset it, or compute in a cupy.cuda.Stream(non_blocking=True)"
            )
        return Stream(stream.ptr, stream)

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one, for CuPy and for code that asks CuPy for it."""
        with self._current, self._in(stream):
            yield

    def create_event(self, *, timing: bool = False) -> int:
        """Return an event."""
        with self._guarded():
            return int(runtime.eventCreateWithFlags(0 if timing else _EVENT_DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        with self._guarded():
            runtime.eventDestroy(event)

    def record(self, event: int, stream: Stream) -> None:
        """Let an event stand for all work that the stream was given so far."""
        try:
            with self._current:
                runtime.eventRecord(event, stream.pointer)
        except runtime.CUDARuntimeError as error:
            self._fail(error)

    def wait_event(self, stream: Stream, event: int) -> None:
        """Make the stream's later work wait for an event as it was last recorded."""
        try:
            with self._current:
                runtime.streamWaitEvent(stream.pointer, event)
        except runtime.CUDARuntimeError as error:
            self._fail(error)

    def is_done(self, event: int) -> bool:
        """Return whether all that an event stands for is done."""
        status = runtime.eventQuery(event)
        if not status:
            return True
        try:
            # It also clears the runtime's last error, which the next one who asks for it (torch
            # does, after each launch) would take for an error of its own.
            runtime.check_status(status)
        except runtime.CUDARuntimeError as error:
            if status not in _NOT_DONE:
                self._fail(error)
        return False

    def wait_for(self, event: int) -> None:
        """Wait until all that an event stands for is done."""
        try:
            runtime.eventSynchronize(event)
        except runtime.CUDARuntimeError as error:
            self._fail(error)

    def elapsed_ns(self, start: int, end: int) -> int:
        """Return the time between two events that are done, made with `timing`."""
        try:
            return int(runtime.eventElapsedTime(start, end) * 1e6)
        except runtime.CUDARuntimeError as error:
            self._fail(error)

    def synchronize(self, stream: Stream) -> None:
        """Wait until all of a stream's work is done."""
        try:
            with self._current:
                runtime.streamSynchronize(stream.pointer)
        except runtime.CUDARuntimeError as error:
            self._fail(error)

    def copy_in(self, destination: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Copy from the host; pinned memory must stay as it is until the copy is done."""
        try:
            with self._current:
                runtime.memcpyAsync(destination, source, num_bytes, _TO_DEVICE, stream.pointer)
        except runtime.CUDARuntimeError as error:
            self._fail(error)

    def array(
        self, memory: Memory, offset: int, shape: Sequence[int], dtype: np.dtype, stride: int = 0
    ) -> Any:
        """Return a CuPy array over memory; types unknown to CuPy come as unsigned integers."""
        if dtype in self._unknown:
            dtype = np.dtype(f"u{dtype.itemsize}")
        strides = None
        if stride:
            inner = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=dtype.itemsize)
            strides = (stride, *reversed(list(inner)[: len(shape) - 1]))
        pointer = memory.owner + offset  # type: ignore[operator]
        try:
            return cupy.ndarray(tuple(shape), dtype, pointer, strides)
        except (TypeError, ValueError, KeyError):
            if dtype.kind in "fiub" or dtype in self._unknown:
                raise
        self._unknown.add(dtype)
        return self.array(memory, offset, shape, dtype, stride)

    def empty(self, shape: Sequence[int], dtype: np.dtype, stream: Stream) -> Any:
        """Return an uninitialised array, for work in a stream."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._guarded(), self._in(stream):
            pointer = with_memory(self, lambda: cupy.cuda.alloc(max(1, num_bytes)))
            return self.array(Memory(pointer.ptr, num_bytes, pointer), 0, shape, dtype)

    def locate(self, array: Any) -> DeviceArray:
        """Locate an array of CuPy, of torch, or of any library with DLPack."""
        if isinstance(array, DeviceArray):
            return array
        torch = hasattr(array, "data_ptr")
        if torch:
            # Not through DLPack: it would wait for torch's stream, and cannot be used in a graph.
            number = array.device.index if array.device.type == "cuda" else None
            contiguous = array.is_contiguous()
        elif hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
            if not isinstance(array, cupy.ndarray):
                array = cupy.from_dlpack(array)
            number, contiguous = array.device.id, array.flags.c_contiguous
        else:
            number = None
        if number != self._number:
            where = "in host memory" if number is None else f"on cuda:{number}"
            raise ConfigError(
                f"a {type(array).__name__} is {where}, the slots are on {self.name}; "
                "copy it there first"
            )
        if not contiguous:
            raise ConfigError(f"an array of shape {tuple(array.shape)} is not contiguous; copy it")
        address = array.data_ptr() if torch else array.data.ptr
        dtype = dtype_of(array)
        return DeviceArray(address, tuple(array.shape), dtype, array)

    def to_device(self, array: np.ndarray, stream: Stream) -> Any:
        """Return a copy on the device, once it is there."""
        array = np.ascontiguousarray(array)
        made = self.empty(array.shape, array.dtype, stream)
        self.copy_in(made.data.ptr, array.ctypes.data, array.nbytes, stream)
        # The copy may read pageable memory, as this is, after the call.
        self.synchronize(stream)
        return made

    def is_on_host(self, array: Any) -> bool:
        """Return whether an array's values are in host memory: NumPy's, or a tensor of torch's."""
        return is_in_host_memory(array)

    def to_host(self, array: Any) -> np.ndarray:
        """Return a copy in host memory, once all work of the current stream is done."""
        there, stream = self.locate(array), self.current_stream()
        here = np.empty(there.shape, there.dtype)
        with self._guarded():
            runtime.memcpyAsync(
                here.ctypes.data, there.address, here.nbytes, _TO_HOST, stream.pointer
            )
            runtime.streamSynchronize(stream.pointer)
        return here

    def is_capturing(self, stream: Stream) -> bool:
        """Return whether a graph captures the stream's work."""
        if stream.pointer in _LEGACY_STREAMS:
            # These never capture, and asking them fails while another stream does.
            return False
        try:
            with self._current:
                return bool(runtime.streamIsCapturing(stream.pointer))
        except runtime.CUDARuntimeError as error:
            self._fail(error)

    def begin_capture(self, stream: Stream) -> None:
        """Capture the stream's work from now on; not for the legacy default stream."""
        with self._guarded():
            made = cupy.cuda.Stream.from_external(_Foreign(stream.pointer))
            made.begin_capture()
        # CuPy needs this very object to end the capture.
        self._capturing[stream.pointer] = made

    def end_capture(self, stream: Stream) -> Graph:
        """Return the work captured since `begin_capture`; the memory that it uses must stay."""
        made = self._capturing.pop(stream.pointer)
        with self._guarded():
            return Graph(made.end_capture())

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Issue all of a graph's work in a stream."""
        owner: Any = graph.owner
        with self._guarded(), self._in(stream):
            owner.launch()

    def launch(
        self,
        kernel: str,
        num_blocks: int,
        argument: "ctypes.Array[ctypes.c_char]",
        stream: Stream,
        *,
        cooperative: bool = False,
    ) -> None:
        """Start a kernel, by its name, with 256 threads a block."""
        # Spelled out: a step is several launches, and this is what each costs the host.
        try:
            with self._current, self._in(stream):
                start = _kernel(kernel, self._number, cooperative)
                start((num_blocks,), (_BLOCK,), (_by_value(argument),))
        except _ERRORS as error:
            self._fail_by(error)

    def prepare(self, kernels: Sequence[str]) -> None:
        """Compile kernels, if they are not on disk."""
        with self._guarded():
            for name in kernels:
                _kernel(name, self._number, name.startswith("decode"))

    def products(self, products: Sequence[Product], dtype: np.dtype, stream: Stream) -> None:
        """Compute out[n, m] = rows[n, k] @ matrix[m, k].T by cuBLAS, sums in float32."""
        # Imported here, not with the module: cuBLAS is a large library of its own.
        from cupy.cuda import cublas, device

        kind = _DATA_TYPES[dtype.name]
        one, zero = self._one.ctypes.data, self._zero.ctypes.data
        with self._guarded(), self._in(stream):
            handle = device.get_cublas_handle()
            for rows, matrix, out, n, m, k in products:
                # cuBLAS stores matrices by columns, so it sees the transposes of all three.
                cublas.gemmEx(
                    handle,
                    _TRANSPOSED,
                    _AS_IT_IS,
                    m,
                    n,
                    k,
                    one,
                    matrix,
                    kind,
                    k,
                    rows,
                    kind,
                    k,
                    zero,
                    out,
                    kind,
                    m,
                    _COMPUTE_32F,
                    _DEFAULT_ALGORITHM,
                )

    def _in(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which CuPy works in a stream."""
        if stream.pointer == cupy.cuda.get_current_stream(self._number).ptr:
            return contextlib.nullcontext()
        return cupy.cuda.Stream.from_external(_Foreign(stream.pointer))

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Make the device the current one, and turn CUDA's errors into this library's."""
        try:
            with self._current:
                yield
        except _ERRORS as error:
            self._fail_by(error)

    def _fail_by(self, error: Exception) -> NoReturn:
        """Raise this library's error for one of `_ERRORS`."""
        if isinstance(error, (runtime.CUDARuntimeError, driver.CUDADriverError)):
            self._fail(error)
        # Errors of cuBLAS, of NVRTC, or of the directory in which CuPy keeps kernels.
        raise MoeCacheError(f"{self.description}: {error}") from error

    def _fail(self, error: Any) -> NoReturn:
        if error.status == _OUT_OF_MEMORY:
            raise MemoryError(f"{self.description} is out of memory: {error}") from error
        remedy = ""
        if error.status in _LOST:
            remedy = "; the GPU's context is lost: end the process and start it again"
        raise MoeCacheError(f"{self.description}: {error}{remedy}") from error


class _Foreign:
    """A stream made elsewhere, in the form in which CuPy takes one."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the stream."""
        return 0, self._pointer


def _by_value(argument: "ctypes.Array[ctypes.c_char]") -> Any:
    """Return a struct as CuPy passes it by value."""
    # Of an array of NumPy CuPy asks where it lies, which takes 20 times as long.
    return function.CPointer(ctypes.addressof(argument))


@functools.lru_cache(maxsize=256)
def _kernel(name: str, number: int, cooperative: bool) -> Any:
    del number  # modules are a device's own
    entry, text = source_of(name)
    return _module(text, cooperative).get_function(entry)


@functools.lru_cache(maxsize=64)
def _module(text: str, cooperative: bool) -> Any:
    return cupy.RawModule(code=text, options=OPTIONS, enable_cooperative_groups=cooperative)
