"""A GPU for tests: streams and events that go on when they are told to, and memory that runs out.

Its memory is the host's, its kernels are those of the package, run by the emulator. Work is begun
in the order of its stream, but streams overtake each other as chance has it; a copy takes two
moves, and what it copies to is rubbish in between. So whatever is not ordered by an event goes
wrong sooner or later, in a way that a test sees.
"""

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by name
import numpy as np

from moecache.cuda import DeviceArray, Graph, Memory, Product, Stream
from moecache.cuda._sources import source_of
from moecache.cuda._structs import STRUCTS
from moecache.cuda.device import dtype_of, with_memory
from moecache.errors import ConfigError, MoeCacheError
from tests.helpers.cuda_emulator import EmulatedKernels

RUBBISH = 0xA5
EMULATED = EmulatedKernels()


class FakeArray(np.ndarray):
    """An array of the device."""


class DeadlockError(AssertionError):
    """A wait for what can never come."""


class FakeDevice:
    """See the module; everything a `Device` does, and what tests ask of it.

    Parameters
    ----------
    total_bytes : int
        Of memory.
    eager : bool, default True
        Work is done as soon as it can be. Else it is done when the host waits for it, or by `run`.
    seed : int, default 0
        Of the order in which streams go on.
    max_pinned_bytes : int, optional
        What the system allows to be pinned.
    """

    allocation_bytes = 4096
    num_multiprocessors = 1
    name = "cuda:0"
    description = "cuda:0 (fake)"

    def __init__(
        self,
        total_bytes: int = 2**30,
        *,
        eager: bool = True,
        seed: int = 0,
        max_pinned_bytes: int | None = None,
    ) -> None:
        self.total_bytes = total_bytes
        self.eager = eager
        self.max_pinned_bytes = max_pinned_bytes
        self.stream_source: Callable[[], int] | None = None
        self.on_out_of_memory: Callable[[], object] | None = None
        self.fail_at = -1  # which of the calls to come fails, 0 the next
        self.num_calls = 0
        self.num_waits = 0  # of the host
        self.num_launches: dict[str, int] = {}
        self.copies: list[tuple[int, int, int]] = []  # (stream, destination, bytes)
        self.prepared: list[str] = []
        self.lost = False
        self.clock_ns = 0
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._used_bytes = 0
        self._live: dict[int, np.ndarray] = {}
        self._queues: dict[int, deque[tuple[Callable[[], bool], Callable[[], None]]]] = {}
        self._next = 1
        self._recorded: dict[int, int] = {}
        # Whether each recording is over: one that is made later may be over earlier.
        self._completed: dict[int, set[int]] = {}
        self._times: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        self._shared: dict[int, np.ndarray] = {}
        # As with CuPy's pool, what is freed is not handed out again before its stream is so far.
        self._kept: list[np.ndarray] = []
        self._capture: list[Callable[[], None]] | None = None
        self._captured = (0, 0)  # by which thread, and in which stream
        self._current = threading.local()
        self._default = self._new_stream()

    # What tests ask.

    @property
    def num_events(self) -> int:
        """Events that were not given back."""
        return len(self._recorded)

    @property
    def num_streams(self) -> int:
        """Streams beside the default one."""
        return len(self._queues) - 1

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now."""
        return sum(self._pinned.values())

    @property
    def used_bytes(self) -> int:
        """Bytes allocated now."""
        return self._used_bytes

    @property
    def num_queued(self) -> int:
        """Moves that were not made."""
        return sum(map(len, self._queues.values()))

    def run(self, num_moves: int = 10**9) -> int:
        """Make moves as long as one can be made; return how many were."""
        with self._lock:
            made = 0
            while made < num_moves and self._move():
                made += 1
            return made

    def work(self, function: Callable[[], None], stream: Stream | None = None) -> None:
        """Give a stream something to do, as a kernel would be."""
        self._enqueue(stream or self.current_stream(), function)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Compute in a stream."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    @contextmanager
    def capturing(self) -> Iterator[list[Callable[[], None]]]:
        """Note what this stream is given instead of doing it; this thread may wait for nothing."""
        self.begin_capture(self.current_stream())
        assert self._capture is not None
        try:
            yield self._capture
        finally:
            self.end_capture(self.current_stream())

    # What a Device does.

    def free_bytes(self) -> int:
        """Return the bytes that are not allocated."""
        return self.total_bytes - self._used_bytes

    def allocate(self, num_bytes: int) -> Memory:
        """Return memory filled with zeros."""
        self._no_capture("allocate")
        return with_memory(self, lambda: self._allocated(num_bytes))

    def _allocated(self, num_bytes: int) -> Memory:
        self._call()
        taken = -(-num_bytes // self.allocation_bytes) * self.allocation_bytes
        if self._used_bytes + taken > self.total_bytes:
            raise MemoryError(f"{self.description} is out of memory")
        raw = np.zeros(num_bytes + 256, np.uint8)
        raw = raw[-raw.ctypes.data % 256 :][:num_bytes]
        self._used_bytes += taken
        self._live[raw.ctypes.data] = raw
        return Memory(raw.ctypes.data, num_bytes, raw)

    def free(self, memory: Memory) -> None:
        """Give memory back; to use it later is an error of the test's."""
        assert memory.address in self._live, "freed twice"
        # Arrays over it keep it, but what is in it is undefined.
        self._live.pop(memory.address)[:] = RUBBISH
        memory.owner = None
        self._used_bytes -= -(-memory.nbytes // self.allocation_bytes) * self.allocation_bytes

    def allocate_shared(self, num_bytes: int) -> Memory:
        """Return memory of the host that counts as pinned."""
        self._call()
        self._no_capture("allocate")
        raw = np.zeros(num_bytes + 256, np.uint8)
        raw = raw[-raw.ctypes.data % 256 :][:num_bytes]
        self._pinned[raw.ctypes.data] = num_bytes
        self._shared[raw.ctypes.data] = raw
        return Memory(raw.ctypes.data, num_bytes, raw)

    def free_shared(self, memory: Memory) -> None:
        """Give it back; to use it later is an error of the test's."""
        del self._pinned[memory.address]
        self._shared.pop(memory.address)[:] = RUBBISH
        memory.owner = None

    def trim(self) -> None:
        """Do nothing: nothing is kept."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin pages."""
        self._call()
        assert address not in self._pinned, "pinned twice"
        most = self.max_pinned_bytes
        if most is not None and self.pinned_bytes + num_bytes > most:
            raise MoeCacheError(f"{self.description}: no more than {most} bytes can be pinned")
        self._pinned[address] = num_bytes

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        del self._pinned[address]

    def create_stream(self) -> Stream:
        """Return a stream."""
        self._call()
        return self._new_stream()

    def destroy_stream(self, stream: Stream) -> None:
        """End a stream."""
        with self._lock:
            assert self.lost or not self._queues[stream.pointer], "destroyed while it works"
            del self._queues[stream.pointer]

    def current_stream(self) -> Stream:
        """Return the thread's stream."""
        if self.stream_source is not None:
            return Stream(self.stream_source())
        return getattr(self._current, "stream", self._default)

    def create_event(self, *, timing: bool = False) -> int:
        """Return an event."""
        self._call()
        with self._lock:
            self._next += 1
            self._recorded[self._next] = 0
            self._completed[self._next] = {0}
            return self._next

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        with self._lock:
            over = self._recorded[event] in self._completed[event]
            assert self.lost or over, "destroyed too early"
            del self._recorded[event], self._completed[event]

    def record(self, event: int, stream: Stream) -> None:
        """Record an event."""
        self._call()
        with self._lock:
            self._recorded[event] += 1
            version = self._recorded[event]

            def complete() -> None:
                if event in self._completed:
                    self._completed[event].add(version)
                    self._times[event] = self.clock_ns

            self._enqueue(stream, complete)

    def wait_event(self, stream: Stream, event: int) -> None:
        """Let a stream wait."""
        self._call()
        with self._lock:
            version = self._recorded[event]
            self._enqueue(
                stream, _nothing, lambda: version in self._completed.get(event, {version})
            )

    def is_done(self, event: int) -> bool:
        """Return whether an event is complete; the device may go on meanwhile."""
        self._call()
        self._no_capture("query an event")
        with self._lock:
            if not self.eager:
                self.run(self._random.randrange(3))
            return self._recorded[event] in self._completed[event]

    def wait_for(self, event: int) -> None:
        """Wait for an event."""
        self._call()
        self._wait(lambda: self._recorded[event] in self._completed[event])

    def elapsed_ns(self, start: int, end: int) -> int:
        """Return the time between two events."""
        return self._times[end] - self._times[start]

    def synchronize(self, stream: Stream) -> None:
        """Wait for a stream."""
        self._call()
        self._wait(lambda: not self._queues[stream.pointer])

    def copy_in(self, destination: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Copy from the host, in two moves; from pageable memory with what is there now."""
        self._call()
        self.copies.append((stream.pointer, destination, num_bytes))
        keep: Any = None
        # Another thread may pin meanwhile.
        pinned = list(self._pinned.items())
        if not any(at <= source and source + num_bytes <= at + n for at, n in pinned):
            keep = ctypes.create_string_buffer(ctypes.string_at(source, num_bytes), num_bytes)
            source = ctypes.addressof(keep)

        check = self._alive([destination] if keep else [destination, source])

        def finish(keep: Any = keep) -> None:
            check()
            ctypes.memmove(destination, source, num_bytes)
            self.clock_ns += num_bytes

        self._enqueue(stream, lambda: check() or _spoil(destination, num_bytes))
        self._enqueue(stream, finish)

    def array(
        self, memory: Memory, offset: int, shape: Sequence[int], dtype: np.dtype, stride: int = 0
    ) -> np.ndarray:
        """Return a view."""
        inner = np.empty(tuple(shape)[1:], dtype).strides if 0 not in shape else ()
        strides = (stride, *inner) if stride else None
        raw: Any = memory.owner
        return np.ndarray(tuple(shape), dtype, raw, offset, strides).view(FakeArray)

    def empty(self, shape: Sequence[int], dtype: np.dtype, stream: Stream) -> np.ndarray:
        """Return an array of rubbish."""
        self._no_capture("allocate")
        raw = np.full(int(np.prod(shape)) * dtype.itemsize, RUBBISH, np.uint8)
        self._kept.append(raw)
        return raw.view(dtype).reshape(tuple(shape)).view(FakeArray)

    def locate(self, array: Any) -> DeviceArray:
        """Return where an array is: one of the device, or a tensor of torch."""
        if isinstance(array, DeviceArray):
            return array
        if hasattr(array, "data_ptr"):
            return DeviceArray(array.data_ptr(), tuple(array.shape), dtype_of(array), array)
        if not isinstance(array, FakeArray):
            raise ConfigError(f"a {type(array).__name__} is in host memory, not on {self.name}")
        if not array.flags.c_contiguous:
            raise ConfigError(f"an array of shape {array.shape} is not contiguous; copy it")
        return DeviceArray(array.ctypes.data, array.shape, array.dtype, array)

    def to_device(self, array: np.ndarray, stream: Stream) -> np.ndarray:
        """Return a copy, filled when the stream comes to it."""
        self._call()
        made, taken = self.empty(array.shape, array.dtype, stream), array.copy()
        self._enqueue(stream, lambda: np.copyto(made, taken))
        return made

    def is_on_host(self, array: Any) -> bool:
        """Return whether an array is NumPy's."""
        return type(array) is np.ndarray

    def to_host(self, array: Any) -> np.ndarray:
        """Return a copy, after the current stream's work."""
        stream = self.current_stream()
        self._wait(lambda: not self._queues[stream.pointer])
        if isinstance(array, DeviceArray):
            return _at(array.address, array.shape, array.dtype).copy()
        return np.array(array)

    def is_capturing(self, stream: Stream) -> bool:
        """Return whether a graph is being noted in a stream."""
        return self._capture is not None and self._captured[1] == stream.pointer

    def begin_capture(self, stream: Stream) -> None:
        """Note what the stream is given instead of doing it."""
        assert self._capture is None, "captured twice"
        with self._lock:
            self._captured = (threading.get_ident(), stream.pointer)
            self._capture = []

    def end_capture(self, stream: Stream) -> Graph:
        """Return what was noted."""
        graph, self._capture = self._capture, None
        assert graph is not None, "nothing is being captured"
        return Graph(graph)

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Give a stream what was noted."""
        self._call()
        works: Any = graph.owner
        for work in works:
            self._enqueue(stream, work)

    def launch(
        self,
        kernel: str,
        num_blocks: int,
        argument: "ctypes.Array[ctypes.c_char]",
        stream: Stream,
        *,
        cooperative: bool = False,
    ) -> None:
        """Queue a kernel, to be emulated."""
        self._call()
        is_plain = {*kernel.split("|")[1:3]} <= {"f32", "f16", "bf16"}
        fit = 3 if is_plain else 2  # BLOCKS of the formats
        assert not cooperative or num_blocks <= fit * self.num_multiprocessors
        assert kernel in self.prepared, f"{kernel} would be compiled now"
        self.num_launches[kernel] = self.num_launches.get(kernel, 0) + 1
        # Copied when the kernel is queued.
        value = np.frombuffer(bytes(argument), STRUCTS[source_of(kernel).entry].dtype)
        check = self._alive(_pointers(value))
        self._enqueue(
            stream,
            lambda: (
                check()
                or EMULATED.launch(kernel, num_blocks, 256, [value], cooperative=cooperative)
            ),
        )

    def prepare(self, kernels: Sequence[str]) -> None:
        """Note what is compiled."""
        self._call()
        self.prepared = [*self.prepared, *kernels]

    def products(self, products: Sequence[Product], dtype: np.dtype, stream: Stream) -> None:
        """Queue products."""
        self._call()

        def multiply(rows: int, matrix: int, out: int, n: int, m: int, k: int) -> None:
            left = _at(rows, (n, k), dtype).astype(np.float32)
            right = _at(matrix, (m, k), dtype).astype(np.float32)
            _at(out, (n, m), dtype)[...] = (left @ right.T).astype(dtype)

        for product in products:
            check = self._alive([product.rows, product.matrix, product.out])
            self._enqueue(
                stream, lambda check=check, product=product: check() or multiply(*product)
            )

    def _new_stream(self) -> Stream:
        with self._lock:
            self._next += 1
            self._queues[self._next] = deque()
            return Stream(self._next, self)

    def _call(self) -> None:
        with self._lock:
            self.num_calls += 1
            if self.lost:
                raise MoeCacheError(f"{self.description}: the context is lost")
            if self.fail_at == 0:
                self.fail_at = -1
                raise MemoryError(f"{self.description} is out of memory, the test says")
            self.fail_at -= self.fail_at > 0

    def _alive(self, addresses: Sequence[int]) -> Callable[[], None]:
        """Return a check that memory in which addresses lie now was not given back since."""
        with self._lock:
            held = [
                (start, raw)
                for start, raw in [*self._live.items(), *self._shared.items()]
                if any(start <= address < start + raw.nbytes for address in addresses)
            ]

        def check() -> None:
            for start, raw in held:
                alive = self._live.get(start) is raw or self._shared.get(start) is raw
                assert alive, "work uses memory that was given back"

        return check

    def _no_capture(self, what: str) -> None:
        # As in CUDA's mode "thread_local": other threads may.
        mine = self._captured[0] == threading.get_ident()
        assert self._capture is None or not mine, f"cannot {what} in a graph"

    def _enqueue(
        self, stream: Stream, work: Callable[[], None], ready: Callable[[], bool] | None = None
    ) -> None:
        with self._lock:
            if self._capture is not None and self._captured[1] == stream.pointer:
                mine = self._captured[0] == threading.get_ident()
                assert mine, "another thread's work becomes part of a graph"
                self._capture.append(work)
                return
            self._queues[stream.pointer].append((ready or _always, work))
            if self.eager:
                self.run()

    def _move(self) -> bool:
        able = [queue for queue in list(self._queues.values()) if queue and queue[0][0]()]
        if not able:
            return False
        self.clock_ns += 1
        self._random.choice(able).popleft()[1]()
        return True

    def _wait(self, done: Callable[[], bool]) -> None:
        self._no_capture("wait")
        with self._lock:
            self.num_waits += 1
            while not done():
                if not self._move():
                    raise DeadlockError("nothing can go on")


def _pointers(argument: np.ndarray) -> list[int]:
    """Return the addresses in an argument of a kernel."""
    names = argument.dtype.names or ()
    return [int(argument[name][0]) for name in names if argument.dtype[name] == np.uint64]


def _at(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)


def _spoil(address: int, num_bytes: int) -> None:
    ctypes.memset(address, RUBBISH, num_bytes)


def _nothing() -> None:
    """Do nothing."""


def _always() -> bool:
    return True
