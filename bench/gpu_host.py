"""Host time of a token's layers, against a device that does nothing: no GPU is needed.

All experts are in their slots. What is measured is this library's own work: from arrays
to the arguments of a launch, and what a token costs at its beginning and its end. What CuPy and
CUDA take for a launch comes on top. "echo", the default policy, learns of every layer, and "lru"
next to nothing: the difference is what learning takes. Processor time of the calling thread, the
median of many tokens.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.gpu import bound
from moecache import ExpertCache, ExpertRuntime
from moecache.compute import CudaExperts, on_device
from moecache.cuda import DeviceArray, Graph, Memory, Stream
from moecache.cuda.device import dtype_of
from moecache.slots import CudaSlots
from moecache.stores import MemoryStore

# A small expert, so that the host alone takes time.
TOP_K, HIDDEN, WIDTH = 8, 32, 16
# Microseconds of the host per layer, all hits.
EAGER_BOUND_US, GRAPH_BOUND_US = 10.0, 1.0


class NoDevice:
    """A device that does nothing at once; its memory is the host's."""

    name = description = "no device"
    allocation_bytes = 4096
    num_multiprocessors = 132
    stream_source: Callable[[], int] | None = None
    on_out_of_memory: Callable[[], object] | None = None

    def __init__(self) -> None:
        self._stream = Stream(1)
        self._memory: dict[int, np.ndarray] = {}

    def allocate(self, num_bytes: int) -> Memory:
        """Return zeros."""
        raw = np.zeros(num_bytes + 256, np.uint8)
        address = raw.ctypes.data + -raw.ctypes.data % 256
        self._memory[address] = raw
        return Memory(address, num_bytes, raw)

    allocate_shared = allocate

    def free(self, memory: Memory) -> None:
        """Forget it."""
        del self._memory[memory.address]

    free_shared = free

    def current_stream(self) -> Stream:
        """Return the only one."""
        return self._stream

    def create_stream(self) -> Stream:
        """Return the only one."""
        return self._stream

    def create_event(self, *, timing: bool = False) -> int:
        """Return any number."""
        del timing
        return 1

    def is_done(self, event: int) -> bool:
        """Return that it is."""
        del event
        return True

    def is_capturing(self, stream: Stream) -> bool:
        """Return that none is."""
        del stream
        return False

    def elapsed_ns(self, start: int, end: int) -> int:
        """Return a nanosecond."""
        del start, end
        return 1

    def is_on_host(self, array: Any) -> bool:
        """Return whether an array is NumPy's; tensors stand for arrays of the device."""
        return isinstance(array, np.ndarray)

    def to_host(self, array: Any) -> np.ndarray:
        """Return an array of NumPy."""
        return np.asarray(array)

    def to_device(self, array: np.ndarray, stream: Stream) -> Any:
        """Return a tensor."""
        del stream
        return _torch().from_numpy(array.copy())

    def empty(self, shape: Sequence[int], dtype: np.dtype, stream: Stream) -> Any:
        """Return a tensor."""
        del stream
        return _torch().from_numpy(np.empty(tuple(shape), dtype))

    def locate(self, array: Any) -> DeviceArray:
        """Locate a tensor, with the checks of a real device."""
        if isinstance(array, DeviceArray):
            return array
        if array.device.type != "cpu" or not array.is_contiguous():
            raise ValueError("a tensor is elsewhere")
        return DeviceArray(array.data_ptr(), tuple(array.shape), dtype_of(array), array)

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Do nothing."""

    def launch(self, *arguments: object, cooperative: bool = False) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return what does nothing: waits, copies, pinning."""
        if name.startswith("_"):
            raise AttributeError(name)
        return _nothing


def _torch() -> Any:
    import torch  # beside the library: tests that need no GPU go without

    return torch


def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""


class Loop:
    """The layers of a token, whose experts are all in their slots.

    Parameters
    ----------
    num_layers, num_experts : int
    policy : str
    """

    def __init__(self, num_layers: int, num_experts: int, policy: str) -> None:
        shape = (num_layers, num_experts)
        store = MemoryStore(
            {
                "gate_up": np.broadcast_to(np.float32(1), (*shape, 2 * WIDTH, HIDDEN)),
                "down": np.broadcast_to(np.float32(1), (*shape, HIDDEN, WIDTH)),
            },
            top_k=TOP_K,
        )
        device: Any = NoDevice()
        capacity = num_layers * num_experts
        self.runtime = ExpertRuntime(
            store,
            CudaSlots(store.layout, capacity, 0, device),
            ExpertCache(*shape, capacity, policy=policy),
        )
        self.runtime.usage.fill().wait()
        self.compute: CudaExperts = on_device(self.runtime)
        self.num_layers = num_layers
        torch = _torch()
        self.x = torch.zeros((1, HIDDEN))
        self.out = torch.zeros((1, HIDDEN))
        self.ids = torch.arange(TOP_K).reshape(1, TOP_K)
        self.weights = torch.ones((1, TOP_K))
        self._device = device
        self.compute.begin_token()
        self.compute.end_token()

    def note(self) -> None:
        """Leave what the device would: the next token's records."""
        tokens = self.compute._tokens  # noqa: SLF001 - what the device writes
        assert tokens is not None
        records = tokens.memory.records
        records[:, :3] = tokens.number + 1, 1, TOP_K
        records[:, 3 : 3 + TOP_K] = np.arange(TOP_K)

    def eager(self) -> None:
        """Take a token whose layers are issued one by one."""
        compute, x, ids, weights, out = self.compute, self.x, self.ids, self.weights, self.out
        compute.begin_token()
        for layer in range(self.num_layers):
            compute(layer, x, ids, weights, out=out)
        assert compute.end_token() is None

    def graph(self) -> None:
        """Take a token whose layers are a graph."""
        self.compute.begin_token()
        self._device.replay(Graph(None), self._device.current_stream())
        assert self.compute.end_token() is None

    def resident(self) -> None:
        """Take a token outside of `begin_token`: everything is resident for good."""
        compute, x, ids, weights, out = self.compute, self.x, self.ids, self.weights, self.out
        for layer in range(self.num_layers):
            compute(layer, x, ids, weights, out=out)


def measure(loop: Loop, runs: int) -> dict[str, Any]:
    """Return microseconds per layer of each way."""
    found: dict[str, Any] = {}
    for way in ("eager", "graph", "resident"):
        token = getattr(loop, way)
        times = []
        for _ in range(runs + 3):
            loop.note()
            started = time.thread_time_ns()
            token()
            times.append((time.thread_time_ns() - started) / 1e3 / loop.num_layers)
        found[f"{way}_us_per_layer"] = round(statistics.median(times[3:]), 3)
    assert loop.runtime.profiler.hit_rate == 1, "these were to be hits"
    return found


def measure_host(device: object, arguments: Namespace) -> dict[str, Any]:
    """Take tokens against a device that does nothing; return figures and bounds."""
    del device  # each loop has one
    figures: dict[str, Any] = {
        "layers": arguments.layers,
        "experts": arguments.experts,
        "top_k": TOP_K,
    }
    for policy in ("echo", "lru"):
        loop = Loop(arguments.layers, arguments.experts, policy)
        with loop.runtime:
            figures[policy] = measure(loop, arguments.runs)
    figures["bounds"] = [
        bound(f"{way}, us per layer, {policy}", "<=", limit, figures[policy][f"{way}_us_per_layer"])
        for policy in ("echo", "lru")
        for way, limit in (("eager", EAGER_BOUND_US), ("graph", GRAPH_BOUND_US))
    ]
    return figures
