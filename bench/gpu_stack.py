"""What decodes: a stack of MoE layers in several ways, on a GPU.

Every way gets a token's hidden state, ids and routing weights by the same small copy into a place
of its own, computes all layers in one stream, and leaves each layer's output in another place.
Token decoders need no slot for every expert: the device takes a token's steps by itself (see
`CudaExperts.begin_token`), and a layer that misses an expert is computed again when it is there.
"""

import hashlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.checkpoint import BFLOAT16, SharedStore, StackSize
from bench.gpu_copies import Owner, Timer, open_runtime
from bench.hit_rates import TRACES
from bench.traces import routing_trace
from moecache import ExpertRuntime
from moecache.compute import on_device
from moecache.cuda import Device, DeviceArray, Memory, Stream
from moecache.slots._memory import aligned_rows
from moecache.study import Trace

_ALIGNMENT = 256
# Beside the checkout or, where it was copied with what it needs, in it.
PLACES = (TRACES, Path(__file__).parents[1] / "shared" / "traces")
TRACE = next((place for place in PLACES if place.is_dir()), TRACES) / "bigmoe-qwen.npz"


class Inputs(Owner):
    """What each token of a trace gives each layer, in pinned memory: a block per token.

    Parameters
    ----------
    device : Device
    size : StackSize
    trace : ndarray of int, shape [num_tokens, num_layers, top_k]
    seed : int, default 0
    """

    def __init__(self, device: Device, size: StackSize, trace: np.ndarray, seed: int = 0) -> None:
        self.num_tokens = len(trace)
        self.size = size
        rng = np.random.default_rng(seed)
        pairs = size.num_layers * size.top_k
        self.ids_at = 0
        self.weights_at = _aligned(4 * pairs)
        self.hidden_at = self.weights_at + _aligned(4 * pairs)
        self.block_bytes = self.hidden_at + _aligned(2 * size.hidden)
        self._blocks = aligned_rows(1, self.num_tokens * self.block_bytes)[0]
        for token, ids in enumerate(trace):
            block = self._blocks[token * self.block_bytes :]
            weights = rng.random((size.num_layers, size.top_k), np.float32)
            weights /= weights.sum(1, keepdims=True)
            hidden = rng.standard_normal(size.hidden, np.float32).astype(BFLOAT16)
            for offset, array in (
                (self.ids_at, ids.astype(np.int32)),
                (self.weights_at, weights),
                (self.hidden_at, hidden),
            ):
                block[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        device.pin(self._blocks.ctypes.data, self._blocks.nbytes)
        self._undo = ExitStack()
        self._undo.callback(device.unpin, self._blocks.ctypes.data)

    def address(self, token: int) -> int:
        """Return where a token's block is, on the host."""
        return self._blocks.ctypes.data + token * self.block_bytes


@dataclass(frozen=True)
class Place:
    """Where decoders work: on a device, in a stream, from the inputs of a trace."""

    device: Device
    stream: Stream
    inputs: Inputs


@contextmanager
def open_place(device: Device, size: StackSize, trace: np.ndarray) -> Iterator[Place]:
    """Yield inputs on a device and a stream, the calling thread's current one meanwhile."""
    with ExitStack() as stack:
        inputs = stack.enter_context(Inputs(device, size, trace))
        stream = device.create_stream()
        stack.callback(device.destroy_stream, stream)
        stack.enter_context(device.using(stream))
        yield Place(device, stream, inputs)


class Decoder(Owner):
    """Computes tokens through a runtime, which stays open longer than this decoder.

    Parameters
    ----------
    name : str
    place : Place
        Its stream is the calling thread's current one whenever this is used.
    runtime : ExpertRuntime
    """

    def __init__(self, name: str, place: Place, runtime: ExpertRuntime) -> None:
        device, inputs = place.device, place.inputs
        self.name = name
        self.runtime = runtime
        self.num_tokens = inputs.num_tokens
        self._device, self._inputs, self._stream = place.device, place.inputs, place.stream
        size = inputs.size
        with ExitStack() as undo:
            self._block = _allocated(undo, device, inputs.block_bytes)
            self._outs = _allocated(undo, device, 2 * size.num_layers * size.hidden)
            undo.callback(device.synchronize, place.stream)
            self._undo = undo.pop_all()
        bits = np.dtype(np.uint16)
        integers, floats = np.dtype(np.int32), np.dtype(np.float32)
        chosen = (1, size.top_k)
        row = 4 * size.top_k
        self._hidden = _at(self._block, inputs.hidden_at, (1, size.hidden), bits)
        self._layers = [
            (
                # An array of the device's own library: misses are looked up on the host.
                device.array(self._block, inputs.ids_at + layer * row, chosen, integers),
                _at(self._block, inputs.weights_at + layer * row, chosen, floats),
                _at(self._outs, 2 * layer * size.hidden, (1, size.hidden), bits),
            )
            for layer in range(size.num_layers)
        ]

    @property
    def num_stalls(self) -> int:
        """How often steps waited for experts."""
        return self.runtime.stats().num_stalls

    def step(self, token: int) -> None:
        """Compute a token; may return before it is done."""
        self.bring_in(token)
        self.compute()

    def bring_in(self, token: int) -> None:
        """Copy a token's inputs to where they are used."""
        inputs = self._inputs
        self._device.copy_in(
            self._block.address, inputs.address(token), inputs.block_bytes, self._stream
        )

    def compute(self) -> None:
        """Compute all layers of the token whose inputs are on the device."""
        experts = on_device(self.runtime, **self._inputs.size.gate)
        for layer, (ids, weights, out) in enumerate(self._layers):
            experts(layer, self._hidden, ids, weights, out=out)

    def device_ns(self, token: int, timer: Timer) -> int:
        """Compute a token; return what its layers take on the device."""
        self.bring_in(token)
        self.finish()
        return timer.time_ns(self.compute, self._stream)

    def host_ns(self) -> int:
        """Compute as `compute` does; return what the host takes for it."""
        start = time.perf_counter_ns()
        self.compute()
        return time.perf_counter_ns() - start

    def finish(self) -> None:
        """Wait until all is computed."""
        self._device.synchronize(self._stream)

    def outputs(self) -> np.ndarray:
        """Return the last token's outputs as bits, [num_layers, hidden]."""
        shape = (self._inputs.size.num_layers, self._inputs.size.hidden)
        found = self._device.array(self._outs, 0, shape, np.dtype(np.uint16))
        return self._device.to_host(found).view(np.ndarray)


class GraphDecoder(Decoder):
    """A decoder whose layers are one graph that the host begins; see `Decoder`.

    Raises
    ------
    MoeCacheError
        If not every expert is resident: `TokenGraphDecoder` is for that.
    """

    def __init__(self, name: str, place: Place, runtime: ExpertRuntime) -> None:
        super().__init__(name, place, runtime)
        with ExitStack() as undo:
            undo.callback(self._undo.close)
            # A step before the capture makes whatever has to be made.
            self.bring_in(0)
            super().compute()
            self.finish()
            place.device.begin_capture(place.stream)
            try:
                super().compute()
            finally:
                self._graph = place.device.end_capture(place.stream)
            undo.pop_all()

    def compute(self) -> None:
        """Replay the graph."""
        self._device.replay(self._graph, self._stream)

    def device_ns(self, token: int, timer: Timer) -> int:
        """Compute a token; return what its layers take on the device."""
        self.bring_in(token)
        # The device is busy with this while the host issues what is timed: in an empty stream the
        # host's launch of a graph would be part of the device's time.
        self.compute()
        return timer.time_ns(self.compute, self._stream)


class TokenDecoder(Decoder):
    """A decoder that issues a token's layers one by one, and waits at its end; see `Decoder`."""

    def __init__(self, name: str, place: Place, runtime: ExpertRuntime) -> None:
        super().__init__(name, place, runtime)
        self._num_stalls = 0
        with ExitStack() as undo:
            undo.callback(self._undo.close)
            self._experts = on_device(runtime, **place.inputs.size.gate)
            undo.pop_all()

    @property
    def num_stalls(self) -> int:
        """How often a token had to go on from a layer that missed an expert."""
        return self._num_stalls

    def compute(self) -> None:
        """Compute all layers of the token whose inputs are on the device, and wait for them."""
        first: int | None = self._experts.begin_token()
        while first is not None:
            self._issue(first)
            first = self._experts.end_token()
            self._num_stalls += first is not None

    def host_ns(self) -> int:
        """Compute as `compute` does; return what the host takes beside waiting for the device."""
        waited = 0
        start = time.perf_counter_ns()
        first: int | None = self._experts.begin_token()
        while first is not None:
            self._issue(first)
            before = time.perf_counter_ns()
            self.finish()
            waited += time.perf_counter_ns() - before
            first = self._experts.end_token()
            self._num_stalls += first is not None
        return time.perf_counter_ns() - start - waited

    def _issue(self, first: int) -> None:
        """Issue the layers from one on, until one is known to miss an expert."""
        experts, hidden = self._experts, self._hidden
        for layer in range(first, len(self._layers)):
            ids, weights, out = self._layers[layer]
            experts(layer, hidden, ids, weights, out=out)
            if experts.has_stalled:
                break


class TokenGraphDecoder(TokenDecoder):
    """A token decoder whose layers are one graph, issued again after a miss; see `TokenDecoder`.

    Raises
    ------
    CapacityError
        If there are fewer slots than experts of a layer's step.
    """

    def __init__(self, name: str, place: Place, runtime: ExpertRuntime) -> None:
        super().__init__(name, place, runtime)
        with ExitStack() as undo:
            undo.callback(self._undo.close)
            self._experts.begin_token()
            undo.callback(self._experts.end_token)
            place.device.begin_capture(place.stream)
            try:
                super()._issue(0)
            finally:
                self._graph = place.device.end_capture(place.stream)
            undo.pop_all()
        self._experts.end_token()

    def _issue(self, first: int) -> None:
        """Replay the graph; layers before the first one return at once."""
        del first
        self._device.replay(self._graph, self._stream)


def open_stack(
    device: Device,
    size: StackSize,
    capacity: int,
    *,
    policy: str = "lru",
    prefetch: str = "off",
    loader_threads: int = 8,
) -> ExpertRuntime:
    """Return a runtime for a stack, with everything resident if there is a slot for each expert."""
    runtime = open_runtime(
        device,
        SharedStore(size),
        capacity,
        policy=policy,
        prefetch=prefetch,
        loader_threads=loader_threads,
        # Even with next to no slots a token's experts follow each other without a gap.
        staging=size.top_k,
    )
    if runtime.cache.capacity == size.num_layers * size.num_experts:
        runtime.usage.fill().wait()
        while runtime.pool.uploads.in_flight_bytes:
            time.sleep(0.001)
    return runtime


def digest(outputs: np.ndarray) -> str:
    """Return a digest of outputs.

    Raises
    ------
    ValueError
        If they are all zero, or not all finite: equal bits would say nothing.
    """
    values = (outputs.astype(np.uint32) << 16).view(np.float32)
    if not np.isfinite(values).all() or not values.any():
        raise ValueError("outputs are zero or not finite")
    return hashlib.blake2b(outputs.tobytes(), digest_size=16).hexdigest()


def check_bits(decoder: Decoder, token: int, expected: dict[int, str]) -> None:
    """Compare the outputs of the token just computed with those of another decoder.

    Raises
    ------
    SystemExit
        If a bit differs: its speed says nothing then.
    """
    try:
        found = digest(decoder.outputs())
    except ValueError as error:
        raise SystemExit(f"{decoder.name}, token {token}: {error}") from error
    if expected.setdefault(token, found) != found:
        raise SystemExit(f"{decoder.name}, token {token}: other bits than before")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _at(memory: Memory, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
    return DeviceArray(memory.address + offset, shape, dtype, memory.owner)


def _allocated(undo: ExitStack, device: Device, num_bytes: int) -> Memory:
    memory = device.allocate(num_bytes)
    undo.callback(device.free, memory)
    return memory


def read_trace(path: Path, size: StackSize, num_tokens: int) -> tuple[np.ndarray, str]:
    """Return routing [num_tokens, num_layers, top_k] and where it is from."""
    if path.is_file():
        trace = Trace.load(path).whole_tokens()
        if trace.num_experts == size.num_experts and trace.num_layers >= size.num_layers:
            return trace.experts[:, : size.num_layers], path.name
    drawn = routing_trace(
        num_tokens, num_layers=size.num_layers, num_experts=size.num_experts, top_k=size.top_k
    )
    return drawn, "synthetic: Zipf's law, four in ten kept"
