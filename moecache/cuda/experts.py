"""CudaExperts: the routed feed-forward on a GPU."""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Generator
from typing import Any, Protocol

import numpy as np

from moecache.cuda._arguments import (
    SUFFIXES,
    check,
    check_ids,
    host_ids,
    ids_kind,
    same_type,
    shape_of,
)
from moecache.cuda._ring import CopyRing
from moecache.cuda._scratch import Scratch
from moecache.cuda._steps import TokenSteps
from moecache.cuda._token_memory import TokenMemory
from moecache.cuda.device import Device, DeviceArray, Product, Stream
from moecache.errors import CapacityError, ConfigError, MoeCacheError
from moecache.layout import ExpertLayout

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
# A step of this many tokens or fewer reads weights for about one row each: kernels that stream
# the weights are enough. With more tokens, cuBLAS multiplies several rows at once.
MAX_STREAMED_TOKENS = 4
_KERNELS = ("decode", "gate_up", "down", "combine_rows", "gather", "activate", "combine")
_WARPS = 256 // 32
_CLOSE_TIMEOUT_S = 2.0
# Of the slots, one in this many at most is kept free for a token's misses.
_RESERVED_SHARE = 8


class _Pool(Protocol):
    device: Device
    slot_stride: int
    num_slots: int

    @property
    def address(self) -> int: ...
    def offset(self, role: str) -> int: ...
    def to_host(self, array: Any) -> np.ndarray: ...


class _Runtime(Protocol):
    @property
    def layout(self) -> ExpertLayout: ...
    @property
    def pool(self) -> Any: ...
    @property
    def cache(self) -> Any: ...
    def waves(self, layer: int, ids: np.ndarray) -> Generator[Any, None, None]: ...
    def begin_resident_step(self, *, look: bool = True) -> bool: ...
    def freeze(self, num_free: int = 0) -> None: ...
    def thaw(self) -> None: ...
    def count_hits(self, first: int, ids: np.ndarray) -> None: ...
    def lease(self, layer: int, ids: np.ndarray, *, ignore_out_of_range: bool = False) -> Any: ...


class CudaExperts:
    """Computes down(activation(gate(x)) * up(x)) of each token's experts, and their weighted sum.

    Sums are in float32. The result depends on the number of tokens, and on nothing else: not on
    what was in the cache, nor on the order in which experts arrived. Up to 4 tokens are computed
    by kernels that stream the weights: in one launch where every expert of the model is resident,
    with nothing that the host waits for, so that a CUDA graph can hold it; else by the same
    arithmetic, wave by wave. More tokens are grouped by expert and multiplied by cuBLAS.

    Work is issued in the current stream of the calling thread; any number of threads may call.
    A captured graph uses this object's memory for intermediate results: run one at a time, and none
    after `close`.

    Parameters
    ----------
    runtime : ExpertRuntime
        Its slots are on a GPU.
    activation : {"silu", "gelu", "gelu_tanh", "relu"}, default "silu"

    Raises
    ------
    ConfigError
        If the slots are in RAM, or the experts are not gated feed-forward alone, or their type is
        not float32, float16 or bfloat16.
    """

    def __init__(self, runtime: _Runtime, activation: str = "silu") -> None:
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if getattr(runtime.pool, "device", None) is None:
            raise ConfigError('the slots are in RAM; open with device="cuda"')
        self._runtime = weakref.ref(runtime)
        self._pool: _Pool = runtime.pool
        self._device: Device = runtime.pool.device
        self._layout = runtime.layout
        self._activation = np.int32(ACTIVATIONS.index(activation))
        self._shapes = [shape_of(self._layout, layer) for layer in range(self._layout.num_layers)]
        # Scratch that no call uses now, by stream; each call that is under way has one of its own.
        self._free: dict[int, list[Scratch]] = {}
        self._inside = 0  # calls
        self._left = threading.Condition()
        self._closed = False
        self._table: DeviceArray | None = None  # the slot of each expert of the model
        self._slot_numbers: DeviceArray | None = None  # 0, 1, 2, ...
        suffixes = {SUFFIXES[dtype.name] for _, _, dtype in self._shapes}
        # Here rather than in the first token: compiling takes seconds, the first time on a machine.
        self._device.prepare([f"{name}_{suffix}" for name in _KERNELS for suffix in suffixes])
        self._ring = CopyRing(self._device)
        self._tokens: TokenSteps | None = None

    def __call__(self, layer: int, hidden: Any, ids: Any, weights: Any, *, out: Any = None) -> Any:
        """Return the output of a layer's routed experts.

        Parameters
        ----------
        layer : int
        hidden : array on the device, shape [num_tokens, hidden_size]
            Of the experts' dtype; bfloat16 may come as uint16.
        ids : array of int32 or int64, shape [num_tokens, top_k]
            On the device or in host memory. If they are on the device and every expert is
            resident, the host does not see them: a wrong id makes its token's row NaN.
        weights : array on the device, shape [num_tokens, top_k]
            The router's, of float32 or hidden's dtype.
        out : array like hidden, optional
            Where the result goes. A graph needs it.

        Returns
        -------
        array on the device, shape [num_tokens, hidden_size], of hidden's dtype
            `out`, or a new array of CuPy.

        Raises
        ------
        ConfigError
            If an array is elsewhere, or its shape or dtype does not fit.
        ValueError
            If the layer or an id is out of range.
        MoeCacheError
            If a graph is being captured, but not every expert is resident, or nothing was computed
            in this stream before.
        """
        runtime, device = self._alive(), self._device
        self._layout.check(layer)
        size, width, dtype = self._shapes[layer]
        x, w = device.locate(hidden), device.locate(weights)
        on_host = isinstance(ids, (list, tuple)) or device.is_on_host(ids)
        chosen = host_ids(ids) if on_host else device.locate(ids)
        num_tokens, top_k = check(x, w, chosen, size, dtype)
        stream = device.current_stream()
        capturing = device.is_capturing(stream)
        if out is None:
            if capturing:
                raise ConfigError("in a graph the result needs a place that stays: give out=")
            out = device.empty((num_tokens, size), dtype, stream)
        target = device.locate(out)
        if target.shape != (num_tokens, size) or not same_type(target.dtype, dtype):
            raise ConfigError(
                f"out is {target.dtype} {list(target.shape)}, "
                f"the result {dtype} {[num_tokens, size]}"
            )
        if num_tokens == 0:
            return out
        scratch = self._enter(stream, capturing=capturing)
        try:
            step = _Step(layer, x, w, target, num_tokens, top_k, size, width, dtype, scratch)
            if self._tokens is not None and self._tokens.is_open():
                self._take_step(runtime, self._tokens, step, ids, chosen)
                return out
            streamed = num_tokens <= MAX_STREAMED_TOKENS
            if streamed and runtime.begin_resident_step(look=not capturing):
                self._launch_resident(runtime, step, chosen)
            elif capturing:
                raise MoeCacheError(
                    "a graph of this step would hold what happened to be resident: capture steps "
                    f"of up to {MAX_STREAMED_TOKENS} tokens, once every expert is in its slot and "
                    "one was computed outside"
                )
            elif streamed:
                self._stream_waves(runtime, step, self._on_host(ids, chosen))
            else:
                self._multiply_waves(runtime, step, self._on_host(ids, chosen))
        finally:
            self._leave(scratch)
        return out

    def begin_token(self) -> int:
        """Let the device take the steps that follow by itself, until `end_token`; return 0.

        For a loop that goes through the layers for up to 4 tokens at a time: a step whose experts
        are in their slots costs the host a launch, or nothing in a CUDA graph, and no step waits
        for the host. Nothing is evicted before `end_token`. One token of one thread at a time, in
        the thread's current stream. A token that is open is given up.

        Raises
        ------
        MoeCacheError
            If another thread's token is open, a graph of steps ran outside of a token, or a graph
            is being captured.
        MemoryError
            If the device has no memory for it.
        """
        runtime = self._alive()
        with self._left:
            self._check_open()
            self._inside += 1
        try:
            if self._tokens is None:
                self._tokens = self._make_tokens()
            capacity, total = runtime.cache.capacity, self._layout.total_experts
            few = min(self._layout.top_k, capacity // _RESERVED_SHARE)
            self._tokens.begin(runtime, 0 if capacity >= total else few)
        finally:
            self._leave()
        return 0

    def end_token(self) -> int | None:
        """Wait for the steps since `begin_token`, and tell the policy of them.

        Returns
        -------
        int or None
            `None` if all are done. Else the layer of the first step that missed an expert; those
            behind it did nothing. Its experts are in their slots now: call the steps from that
            layer on again, with the same hidden states, and then this.

        Raises
        ------
        StoreError
            If an expert cannot be read. The token is over then, as after any error.
        CapacityError
            If a graph asks for more experts at once than the cache has slots for.
        MoeCacheError
            If no token of this thread is open, or the device fails.
        """
        runtime = self._alive()
        with self._left:
            self._check_open()
            self._inside += 1
        try:
            if self._tokens is None:
                raise MoeCacheError("no token is open: call begin_token first")
            return self._tokens.end(runtime)
        finally:
            self._leave()

    @property
    def has_stalled(self) -> bool:
        """Whether a step of the open token is known to have missed an expert; never waits.

        A loop that issues much between two steps may look, and go to `end_token` at once.
        """
        return self._tokens is not None and self._tokens.is_open() and self._tokens.has_stalled()

    def close(self) -> None:
        """Free the memory of intermediate results; a second call does nothing.

        Waits for calls of other threads, two seconds at most.
        """
        with self._left:
            self._closed = True
            self._left.wait_for(lambda: not self._inside, _CLOSE_TIMEOUT_S)
            free, self._free = self._free, {}
        with contextlib.ExitStack() as stack:
            stack.callback(self._ring.close)
            for scratch in itertools.chain.from_iterable(free.values()):
                stack.callback(scratch.close)
            if self._tokens is not None:
                stack.callback(self._tokens.close, self._runtime())
        self._table = self._slot_numbers = None

    def _alive(self) -> _Runtime:
        runtime = self._runtime()
        if runtime is None:
            raise MoeCacheError("the runtime is gone; keep a reference to it")
        return runtime

    def _check_open(self) -> None:
        if self._closed:
            raise MoeCacheError("the runtime is closed")

    def _make_tokens(self) -> TokenSteps:
        max_pairs = MAX_STREAMED_TOKENS * self._layout.top_k
        h_bytes = 4 * max_pairs * max(width for _, width, _ in self._shapes)
        return TokenSteps(self._device, self._layout, max_pairs, h_bytes)

    def _take_step(
        self,
        runtime: _Runtime,
        tokens: TokenSteps,
        step: "_Step",
        ids: Any,
        chosen: "np.ndarray | DeviceArray",
    ) -> None:
        """Issue a step of the open token."""
        if step.num_tokens > MAX_STREAMED_TOKENS or step.num_tokens * step.top_k > tokens.max_pairs:
            raise ConfigError(
                f"a step of {step.num_tokens} x {step.top_k} ids is too large for a token: up to "
                f"{MAX_STREAMED_TOKENS} x {self._layout.top_k}; compute prompts before begin_token"
            )
        capturing = not step.scratch.grows
        if not capturing and tokens.stream != step.stream:
            raise ConfigError("a token's steps belong in the stream in which it began")
        if step.top_k > runtime.cache.capacity or tokens.goes_through_waves(step.layer):
            if capturing:
                raise CapacityError(
                    f"a graph needs slots for all experts of a step: {step.top_k}, and the cache "
                    f"has {runtime.cache.capacity}; raise the memory"
                )
            if tokens.wait_before_waves(runtime, step.layer):
                self._stream_waves(runtime, step, self._on_host(ids, chosen))
            return
        if isinstance(chosen, np.ndarray):
            check_ids(chosen, self._layout.num_experts)
            if capturing:
                raise ConfigError("in a graph the ids must be on the device")
            chosen = self._device.locate(self._ring.to_device(chosen, step.stream))
        self._decode(
            step,
            chosen,
            tokens.memory.row(step.layer),
            self._layout.num_experts,
            memory=tokens.memory,
        )

    def _on_host(self, ids: Any, chosen: "np.ndarray | DeviceArray") -> np.ndarray:
        return chosen if isinstance(chosen, np.ndarray) else self._pool.to_host(ids)

    def _enter(self, stream: Stream, *, capturing: bool) -> "Scratch":
        with self._left:
            self._check_open()
            self._inside += 1
            free = self._free.get(stream.pointer)
            scratch = free.pop() if free else Scratch(self._device, stream)
        scratch.grows = not capturing
        return scratch

    def _leave(self, scratch: "Scratch | None" = None) -> None:
        with self._left:
            self._inside -= 1
            if scratch is not None and not self._closed:
                self._free.setdefault(scratch.stream.pointer, []).append(scratch)
            self._left.notify_all()
        if self._closed and scratch is not None:
            scratch.close()

    def _launch_resident(
        self, runtime: _Runtime, step: "_Step", ids: "np.ndarray | DeviceArray"
    ) -> None:
        """Compute a step in one launch; ids are resolved on the device."""
        device, num_experts = self._device, self._layout.num_experts
        capturing = not step.scratch.grows
        if isinstance(ids, np.ndarray):
            # Ids on the host can be checked: a wrong one is an error.
            check_ids(ids, num_experts)
            if capturing:
                raise ConfigError("in a graph the ids must be on the device")
            ids = device.locate(self._ring.to_device(ids, step.stream))
        if self._table is None:
            if capturing:
                raise MoeCacheError("compute one step before capturing a graph")
            self._table = self._copied(runtime.cache.slot_table, step.stream)
        row = self._table.address + 4 * step.layer * num_experts
        self._decode(step, ids, row, num_experts)

    def _launch_wave(self, step: "_Step", wave: Any) -> None:
        """Compute a step whose experts are all leased, in one launch."""
        device = self._device
        if self._slot_numbers is None:
            numbers = np.arange(self._pool.num_slots, dtype=np.int32)
            self._slot_numbers = self._copied(numbers, step.stream)
        slots = np.empty(step.num_tokens * step.top_k, np.int32)
        slots[wave.pairs] = np.repeat(wave.slots, np.diff(wave.offsets))
        ids = self._ring.to_device(slots, step.stream)
        self._decode(step, device.locate(ids), self._slot_numbers.address, self._pool.num_slots)

    def _decode(
        self,
        step: "_Step",
        ids: DeviceArray,
        table: int,
        num_ids: int,
        *,
        memory: TokenMemory | None = None,
    ) -> None:
        device, num_pairs = self._device, step.num_tokens * step.top_k
        scratch = step.scratch if memory is None else memory
        h = scratch.room("h", num_pairs * step.width * 4)
        barrier = scratch.room("barrier", 8)
        work = max(num_pairs * step.width, step.num_tokens * step.size)
        self._launch(
            "decode",
            step,
            min(device.max_resident_blocks, -(-work // _WARPS)),
            np.uint64(step.x.address),
            np.uint64(ids.address),
            np.int32(ids_kind(ids.dtype)),
            np.uint64(table),
            *step.weights,
            *self._slots("gate_up", "down"),
            *(np.int64(0), np.int64(0), np.int32(0), np.int32(0)),  # biases, rows in turns
            np.int32(step.num_tokens),
            np.int32(step.top_k),
            np.int32(num_ids),
            np.int32(self._pool.num_slots),
            np.int32(step.size),
            np.int32(step.width),
            self._activation,
            *(np.float32(0), np.float32(0)),  # alpha and limit
            np.uint64(h),
            np.uint64(step.out.address),
            np.uint64(barrier),
            np.uint64(0 if memory is None else memory.gate(step.layer)),
            cooperative=True,
        )

    def _copied(self, array: np.ndarray, stream: Stream) -> DeviceArray:
        """Return a copy on the device that any stream may use."""
        copy = self._ring.to_device(np.ascontiguousarray(array, np.int32), stream)
        self._device.synchronize(stream)
        return self._device.locate(copy)

    def _stream_waves(self, runtime: _Runtime, step: "_Step", ids: np.ndarray) -> None:
        """Compute a step of few tokens wave by wave, equal to one launch bit for bit."""
        num_pairs = step.num_tokens * step.top_k
        h = step.scratch.room("h", num_pairs * step.width * 4)
        rows = step.scratch.room("rows", num_pairs * step.size * 4)
        step.scratch.room("barrier", 8)  # all of it at once: later steps take no more memory
        waves = runtime.waves(step.layer, ids)
        try:
            for wave in waves:
                count = len(wave.pairs)
                if count == num_pairs:
                    self._launch_wave(step, wave)
                    return
                slots = np.repeat(wave.slots, np.diff(wave.offsets))
                both = np.stack([slots, wave.pairs]).astype(np.int32)
                lists = self._ring.to_device(both, step.stream)
                at = self._device.locate(lists).address
                pair_slots, pairs = np.uint64(at), np.uint64(at + 4 * count)
                self._launch(
                    "gate_up",
                    step,
                    self._blocks(count * step.width),
                    *(np.uint64(step.x.address), pair_slots, pairs, np.int32(count)),
                    *self._slots("gate_up"),
                    *(np.int64(0), np.int32(0), np.int32(0)),
                    *(np.int32(step.top_k), np.int32(step.size), np.int32(step.width)),
                    *(self._activation, np.float32(0), np.float32(0), np.uint64(h)),
                )
                self._launch(
                    "down",
                    step,
                    self._blocks(count * step.size),
                    *(pair_slots, pairs, np.int32(count)),
                    *self._slots("down"),
                    *(np.int64(0), np.int32(0)),
                    *(np.int32(step.size), np.int32(step.width), np.uint64(h), np.uint64(rows)),
                )
        finally:
            waves.close()
        self._launch(
            "combine_rows",
            step,
            self._blocks(step.num_tokens, 1),
            np.uint64(rows),
            *step.weights,
            *(np.int32(step.num_tokens), np.int32(step.top_k), np.int32(step.size)),
            np.uint64(step.out.address),
        )

    def _multiply_waves(self, runtime: _Runtime, step: "_Step", ids: np.ndarray) -> None:
        """Compute a step of many tokens wave by wave: the products of one expert after another."""
        device, item = self._device, step.dtype.itemsize
        num_pairs = step.num_tokens * step.top_k
        rows = step.scratch.room("rows", num_pairs * step.size * item)
        gathered = step.scratch.room("gathered", num_pairs * step.size * item)
        both = step.scratch.room("both", num_pairs * 2 * step.width * item)
        h = step.scratch.room("h", num_pairs * step.width * item)
        place = np.full(num_pairs, -1, np.int32)
        done = 0
        waves = runtime.waves(step.layer, ids)
        try:
            for wave in waves:
                count = len(wave.pairs)
                lists = self._ring.to_device(wave.pairs.astype(np.int32), step.stream)
                self._launch(
                    "gather",
                    step,
                    self._blocks(count, 1),
                    *(np.uint64(step.x.address), np.uint64(device.locate(lists).address)),
                    *(np.int32(count), np.int32(step.top_k), np.int32(step.size)),
                    np.uint64(gathered),
                )
                bounds = wave.offsets.tolist()
                parts = list(zip(wave.slots.tolist(), bounds, bounds[1:], strict=False))
                ups = [
                    Product(
                        gathered + start * step.size * item,
                        self._address(slot, "gate_up"),
                        both + start * 2 * step.width * item,
                        *(stop - start, 2 * step.width, step.size),
                    )
                    for slot, start, stop in parts
                ]
                device.products(ups, step.dtype, step.stream)
                self._launch(
                    "activate",
                    step,
                    self._blocks(count, 1),
                    *(np.uint64(both), np.int64(count), np.int32(step.width)),
                    *(self._activation, np.uint64(h)),
                )
                downs = [
                    Product(
                        h + start * step.width * item,
                        self._address(slot, "down"),
                        rows + (done + start) * step.size * item,
                        *(stop - start, step.size, step.width),
                    )
                    for slot, start, stop in parts
                ]
                device.products(downs, step.dtype, step.stream)
                place[wave.pairs] = np.arange(done, done + count, dtype=np.int32)
                done += count
        finally:
            waves.close()
        where = self._ring.to_device(place, step.stream)
        self._launch(
            "combine",
            step,
            self._blocks(step.num_tokens, 1),
            *(np.uint64(rows), np.uint64(device.locate(where).address), *step.weights),
            *(np.int32(step.num_tokens), np.int32(step.top_k), np.int32(step.size)),
            np.uint64(step.out.address),
        )

    def _launch(
        self,
        name: str,
        step: "_Step",
        num_blocks: int,
        *arguments: np.generic,
        cooperative: bool = False,
    ) -> None:
        kernel = f"{name}_{SUFFIXES[step.dtype.name]}"
        self._device.launch(kernel, num_blocks, arguments, step.stream, cooperative=cooperative)

    def _slots(self, *roles: str) -> tuple[np.generic, ...]:
        pool = self._pool
        offsets = (np.int64(pool.offset(role)) for role in roles)
        return (np.uint64(pool.address), np.int64(pool.slot_stride), *offsets)

    def _address(self, slot: int, role: str) -> int:
        return self._pool.address + slot * self._pool.slot_stride + self._pool.offset(role)

    def _blocks(self, work: int, per_block: int = _WARPS) -> int:
        """Return how many blocks to start; the kernels take any number."""
        return min(-(-work // per_block), 4 * self._device.max_resident_blocks)


class _Step:
    """What the parts of one call need to know."""

    def __init__(
        self,
        layer: int,
        x: DeviceArray,
        weights: DeviceArray,
        out: DeviceArray,
        num_tokens: int,
        top_k: int,
        size: int,
        width: int,
        dtype: np.dtype,
        scratch: Scratch,
    ) -> None:
        self.layer = layer
        self.x = x
        self.out = out
        self.num_tokens = num_tokens
        self.top_k = top_k
        self.size = size
        self.width = width
        self.dtype = dtype
        self.scratch = scratch
        self.stream = scratch.stream
        kind = 0 if weights.dtype == np.float32 else 1
        self.weights = (np.uint64(weights.address), np.int32(kind))
