"""A stack of MoE layers on a GPU that decodes from recorded routing, in several ways.

Every way gets a token's hidden state, ids and routing weights by the same small copy into a place
of its own, computes all layers in one stream, and leaves each layer's output in another place.
Token decoders need no slot for every expert: the device takes a token's steps by itself (see
`CudaExperts.begin_token`), and a layer that misses an expert is computed again when it is there.
"""

import hashlib
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np

from bench.hit_rates import TRACES
from bench.traces import routing_trace
from moecache import ExpertCache, ExpertRuntime
from moecache.compute import on_device
from moecache.cuda import Device, DeviceArray, Memory, Stream
from moecache.formats import find_format
from moecache.layout import ExpertLayout
from moecache.prefault.regions import Region
from moecache.reader.disk import open_reader
from moecache.sizing import num_staging_slots
from moecache.slots import CudaSlots
from moecache.slots._memory import aligned_rows
from moecache.stores import ExpertStore, FileStore, MemoryStore
from moecache.study import Trace

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_ALIGNMENT = 256
# Beside the checkout or, where it was copied with what it needs, in it.
PLACES = (TRACES, Path(__file__).parents[1] / "shared" / "traces")
TRACE = next((place for place in PLACES if place.is_dir()), TRACES) / "bigmoe-qwen.npz"


@dataclass(frozen=True)
class StackSize:
    """What the stack looks like.

    Experts are in "bf16"; or in "mxfp4", with biases and the gate of gpt-oss, whose rows of gate
    and up are in turns.
    """

    num_layers: int = 48
    num_experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    width: int = 768
    format: str = "bf16"

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of an expert's matrices."""
        return {"gate_up": (2 * self.width, self.hidden), "down": (self.hidden, self.width)}

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        if self.format == "bf16":
            return 6 * self.hidden * self.width
        known = find_format(self.format)
        biases = 2 * sum(rows for rows, _ in self.shapes.values())
        return biases + sum(known.nbytes(*shape) for shape in self.shapes.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts."""
        return self.num_layers * self.num_experts * self.expert_bytes

    @property
    def gate(self) -> dict[str, Any]:
        """What `compute.on_device` takes."""
        if self.format == "bf16":
            return {}
        return {"activation": "swiglu", "is_interleaved": True, "alpha": 1.702, "limit": 7.0}

    def describe(self) -> str:
        """Return it as text."""
        return (
            f"{self.num_layers} layers x {self.num_experts} experts, top-{self.top_k}, "
            f"hidden {self.hidden}, width {self.width}, {self.format}"
        )


class SharedStore(MemoryStore):
    """The experts of one layer, in memory, which stand for those of all layers.

    Expert e of layer l has the bytes of expert (e + 17 l) mod num_experts: no two layers have the
    same one at the same place. A store of all layers would take 48 times the memory.

    Parameters
    ----------
    size : StackSize
    seed : int, default 0
    """

    def __init__(self, size: StackSize, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        stack, formats = (1, size.num_experts), None
        if size.format == "bf16":
            arrays = {
                name: random_weights(rng, (*stack, *shape)) for name, shape in size.shapes.items()
            }
        else:
            formats = {name: (size.format, shape) for name, shape in size.shapes.items()}
            arrays = {}
            for name, shape in size.shapes.items():
                arrays[name] = random_mxfp4(rng, size.num_experts, *shape)
                arrays[f"{name}_bias"] = random_weights(rng, (*stack, shape[0]))
        super().__init__(arrays, top_k=size.top_k, formats=formats)
        (roles,) = self._layout.layers
        self._layout = ExpertLayout(size.num_experts, size.top_k, [roles] * size.num_layers)

    def view(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        """Return one expert without copying, read-only."""
        self._layout.check(layer, expert)
        return super().view(0, (expert + 17 * layer) % self._layout.num_experts)

    def regions(self, layers: Iterable[int] | None = None) -> list[Region]:
        """Return where all of them lie, whichever layers are asked for."""
        del layers
        return super().regions([0])


def random_weights(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return bfloat16 weights whose products with a hidden state are about as large as it is.

    Drawn as bits, at a gigabyte per second: any sign and mantissa, one exponent.
    """
    exponent = 127 - round(np.log2(1.5 * shape[-1] ** 0.5))
    num_bytes = 2 * int(np.prod(shape))
    # A mapping of its own: what is pinned shares no page with anything else.
    weights = aligned_rows(1, num_bytes)[0]
    weights[:] = np.frombuffer(rng.bytes(num_bytes), np.uint8)
    bits = weights.view(np.uint16)
    bits &= 0x807F
    bits |= exponent << 7
    return bits.view(BFLOAT16).reshape(shape)


def random_mxfp4(rng: np.random.Generator, num_experts: int, rows: int, columns: int) -> np.ndarray:
    """Return MXFP4 matrices [1, num_experts, bytes] as `random_weights` does: one scale for all."""
    num_bytes = find_format("mxfp4").nbytes(rows, columns)
    weights = aligned_rows(1, num_experts * num_bytes)[0].reshape(1, num_experts, num_bytes)
    # The values of random codes are 2.9 in the root of the mean square.
    scale = 127 - round(np.log2(2.9 * columns**0.5))
    codes = rows * columns // 2
    weights[..., :codes] = np.frombuffer(rng.bytes(num_experts * codes), np.uint8).reshape(
        1, num_experts, codes
    )
    weights[..., codes:] = scale
    return weights


class Inputs:
    """What each token of a trace gives each layer, in pinned memory: a block per token.

    A context manager.

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
        self._device = device
        device.pin(self._blocks.ctypes.data, self._blocks.nbytes)

    def address(self, token: int) -> int:
        """Return where a token's block is, on the host."""
        return self._blocks.ctypes.data + token * self.block_bytes

    def __enter__(self) -> Self:
        """Return the inputs."""
        return self

    def __exit__(self, *_: object) -> None:
        """Unpin them."""
        self._device.unpin(self._blocks.ctypes.data)


class Decoder:
    """Computes tokens through a runtime; a context manager that frees its inputs and outputs.

    Parameters
    ----------
    name : str
    device : Device
    inputs : Inputs
    stream : Stream
        The calling thread's current one whenever this is used.
    runtime : ExpertRuntime
        Stays open longer than this decoder.
    """

    def __init__(
        self, name: str, device: Device, inputs: Inputs, stream: Stream, runtime: ExpertRuntime
    ) -> None:
        self.name = name
        self.runtime = runtime
        self.num_tokens = inputs.num_tokens
        self._device = device
        self._inputs = inputs
        self._stream = stream
        size = inputs.size
        with ExitStack() as undo:
            self._block = _allocated(undo, device, inputs.block_bytes)
            self._outs = _allocated(undo, device, 2 * size.num_layers * size.hidden)
            undo.callback(device.synchronize, stream)
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

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free its memory once nothing uses it."""
        self._undo.close()


class GraphDecoder(Decoder):
    """A decoder whose layers are one graph that the host begins; see `Decoder`.

    Raises
    ------
    MoeCacheError
        If not every expert is resident: `bench.gpu_tokens` has the decoder for that.
    """

    def __init__(
        self, name: str, device: Device, inputs: Inputs, stream: Stream, runtime: ExpertRuntime
    ) -> None:
        super().__init__(name, device, inputs, stream, runtime)
        with ExitStack() as undo:
            undo.callback(self._undo.close)
            # A step before the capture makes whatever has to be made.
            self.bring_in(0)
            super().compute()
            self.finish()
            device.begin_capture(stream)
            try:
                super().compute()
            finally:
                self._graph = device.end_capture(stream)
            undo.pop_all()

    def compute(self) -> None:
        """Replay the graph."""
        self._device.replay(self._graph, self._stream)


class TokenDecoder(Decoder):
    """A decoder that issues a token's layers one by one, and waits at its end; see `Decoder`."""

    def __init__(
        self, name: str, device: Device, inputs: Inputs, stream: Stream, runtime: ExpertRuntime
    ) -> None:
        super().__init__(name, device, inputs, stream, runtime)
        self._num_stalls = 0
        with ExitStack() as undo:
            undo.callback(self._undo.close)
            self._experts = on_device(runtime, **inputs.size.gate)
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

    def __init__(
        self, name: str, device: Device, inputs: Inputs, stream: Stream, runtime: ExpertRuntime
    ) -> None:
        super().__init__(name, device, inputs, stream, runtime)
        with ExitStack() as undo:
            undo.callback(self._undo.close)
            self._experts.begin_token()
            undo.callback(self._experts.end_token)
            device.begin_capture(stream)
            try:
                super()._issue(0)
            finally:
                self._graph = device.end_capture(stream)
            undo.pop_all()
        self._experts.end_token()

    def _issue(self, first: int) -> None:
        """Replay the graph; layers before the first one return at once."""
        del first
        self._device.replay(self._graph, self._stream)


def open_runtime(
    device: Device,
    store: ExpertStore,
    capacity: int,
    *,
    policy: str = "lru",
    prefetch: str = "off",
    loader_threads: int = 8,
    staging: int | None = None,
) -> ExpertRuntime:
    """Return a runtime whose slots are on a device; it closes the store.

    As `moecache.open` makes it, but for any device and any store: files are read through the page
    cache; what is in memory is copied by threads, likewise.
    """
    layout = store.layout
    capacity = min(capacity, layout.total_experts)
    if capacity == layout.total_experts:
        staging = 0
    elif staging is None:
        staging = num_staging_slots(layout.top_k, capacity)
    with ExitStack() as undo:
        undo.callback(store.close)
        pool = CudaSlots(layout, capacity, staging, device)
        undo.callback(pool.close)
        reader = None
        if isinstance(store, FileStore):
            reader = open_reader(store, direct=False)
            undo.callback(reader.close)
        cache = ExpertCache(layout.num_layers, layout.num_experts, capacity, policy=policy)
        runtime = ExpertRuntime(
            store, pool, cache, loader_threads=loader_threads, reader=reader, prefetch=prefetch
        )
        undo.pop_all()
    return runtime


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
