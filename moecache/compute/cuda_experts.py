"""CudaExperts: the routed feed-forward on a GPU."""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from moecache.compute._prepared import PreparedLaunches
from moecache.compute._residency import residency_of
from moecache.compute._steps import TokenSteps
from moecache.compute._waves import MAX_STREAMED_TOKENS, Waves
from moecache.cuda._arguments import check, check_ids, host_ids, same_type
from moecache.cuda._kinds import kind_of, named
from moecache.cuda._launches import Launches, Pool, PreparedLaunch, Step
from moecache.cuda._ring import CopyRing
from moecache.cuda._scratch import Scratch
from moecache.cuda.device import Device, DeviceArray, Stream
from moecache.errors import ConfigError, MoeCacheError
from moecache.runtime.runtime import ExpertRuntime

_CLOSE_TIMEOUT_S = 2.0


class CudaExperts:
    """Computes down(activation(gate(x)) * up(x)) of each token's experts, and their weighted sum.

    Experts without a gate are down(activation(up(x))). Experts may have biases, and be quantised:
    weights are dequantised in registers.
    Sums are in float32. The result depends on the number of tokens, and on nothing else: not on
    what was in the cache, nor on the order in which experts arrived. Up to 4 tokens are computed
    by kernels that stream the weights: in one launch where every expert of the model is resident,
    with nothing that the host waits for, so that a CUDA graph can hold it; else by the same
    arithmetic, wave by wave. More tokens, in bfloat16 or float16, are two launches for all experts
    of a wave, or of as many tokens as have room at a time. In float32 they are grouped by expert
    and multiplied by cuBLAS, where the experts are plain numbers without biases; else they are
    computed as few are.

    Work is issued in the current stream of the calling thread; any number of threads may call.
    A captured graph uses this object's memory for intermediate results: run one at a time, and none
    after `close`.

    Parameters
    ----------
    runtime : ExpertRuntime
        Its slots are on a GPU; this is closed with it.
    activation : str, default "silu"
        "silu", "gelu", "gelu_tanh", "relu", "relu2" (ReLU squared), or one that takes a gate:
        "swiglu" is gpt-oss's, both limited, gate * sigmoid(alpha * gate) * (up + 1);
        "clamped_silu" is DeepSeek-V4's, both limited, silu(gate) * up.
    is_interleaved : bool, default False
        Whether rows of gate and up alternate; else gate's are above up's.
    alpha, limit : float
        Parameters of "swiglu"; "clamped_silu" has the limit alone.
    dtype : {"bfloat16", "float16", "float32"}, optional
        Type of hidden states and results of quantised experts: "bfloat16" by default.
        Others take their own.

    Raises
    ------
    ConfigError
        If the slots are in RAM, or the experts are no feed-forward of one gate at most, or no
        kernel reads their type or format.
    """

    def __init__(
        self,
        runtime: ExpertRuntime,
        activation: str = "silu",
        *,
        is_interleaved: bool = False,
        alpha: float = 1.702,
        limit: float = 7.0,
        dtype: str | None = None,
    ) -> None:
        pool: Any = runtime.pool
        if getattr(pool, "device", None) is None:
            raise ConfigError('the slots are in RAM; open with device="cuda"')
        self._runtime = weakref.ref(runtime)
        self._residency = residency_of(runtime)
        self._pool: Pool = pool
        self._device: Device = pool.device
        self._layout = runtime.layout
        self._launches = Launches(
            self._pool, activation, is_interleaved=is_interleaved, alpha=alpha, limit=limit
        )
        wanted = None if dtype is None else named(dtype)
        self._kinds = [
            kind_of(self._layout, layer, wanted) for layer in range(self._layout.num_layers)
        ]
        if is_interleaved and any(kind.halves == 2 for kind in self._kinds):
            raise ConfigError("rows of gate and up alternate in one matrix, and these are two")
        # Scratch that no call uses now, by stream; each call that is under way has one of its own.
        self._free: dict[int, list[Scratch]] = {}
        self._inside = 0  # calls
        self._left = threading.Condition()
        self._closed = False
        self._is_freed = False  # what tokens have, or it will be by the last call
        self._frees_late = False
        self._table: DeviceArray | None = None  # the slot of each expert of the model
        self._plans = [self._launches.plan(kind) for kind in self._kinds]
        # Here rather than in the first token: compiling takes seconds, the first time on a machine.
        names = [kernel for plan in self._plans for kernel, _, _ in plan.entries.values()]
        self._device.prepare(list(dict.fromkeys(names)))
        self._ring = CopyRing(self._device)
        self._waves = Waves(self._pool, self._launches, self._ring)
        self._tokens: TokenSteps | None = None
        self._prepared = PreparedLaunches()
        runtime.closing(self.close)

    def __call__(self, layer: int, hidden: Any, ids: Any, weights: Any, *, out: Any = None) -> Any:
        """Return the output of a layer's routed experts.

        Parameters
        ----------
        layer : int
        hidden : array on the device, shape [num_tokens, hidden_size]
            Hidden states in the experts' dtype; bfloat16 may come as uint16.
        ids : array of int32 or int64, shape [num_tokens, top_k]
            On the device or in host memory. If they are on the device and every expert is
            resident, the host does not see them: a wrong id makes its token's row NaN.
        weights : array on the device, shape [num_tokens, top_k]
            The router's, of float32 or hidden's dtype.
        out : array like hidden, optional
            An array for the result. A graph needs it.

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
            If a graph is being captured outside of `begin_token` and `end_token`, but not every
            expert is resident, or nothing was computed in this stream before.
        """
        if out is not None and self._starts_again(layer, (hidden, ids, weights, out)):
            return out
        runtime, device = self._alive(), self._device
        self._layout.check(layer)
        plan = self._plans[layer]
        size, dtype = plan.kind.size, plan.kind.dtype
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
            step = Step(layer, x, w, target, num_tokens, top_k, plan, scratch)
            if self._tokens is not None and self._tokens.is_open:
                launch = self._take_step(runtime, self._tokens, step, ids, chosen)
                if launch is not None and not capturing:
                    self._prepared.keep(launch, layer, (x, device.locate(ids), w, target))
                return out
            is_small = num_tokens <= MAX_STREAMED_TOKENS
            if is_small and self._residency.begin_step(runtime, look=not capturing):
                self._launch_resident(runtime, step, chosen)
            elif capturing:
                raise MoeCacheError(
                    "a graph of this step would hold what happened to be resident: capture steps "
                    f"of up to {MAX_STREAMED_TOKENS} tokens, once every expert is in its slot and "
                    "one was computed outside, or between begin_token and end_token"
                )
            else:
                self._residency.give_up_left(runtime)
                self._waves.compute(runtime, step, self._on_host(ids, chosen))
        finally:
            self._leave(scratch)
        return out

    def begin_token(self) -> int:
        """Let the device take the steps that follow by itself, until `end_token`; return 0.

        For a loop that goes through the layers for up to 4 tokens at a time: a step whose experts
        are in their slots costs the host a launch, or nothing in a CUDA graph, and none waits for
        the host. Nothing is evicted before `end_token`. One token of one thread at a time, in the
        thread's current stream. A token of this thread that is open is given up.

        Raises
        ------
        MoeCacheError
            If another thread's token is open, a graph of steps ran outside of a token, or a graph
            is being captured.
        MemoryError
            If the device has no memory for it.
        """
        with self._calling() as runtime:
            if self._tokens is None:
                max_pairs = MAX_STREAMED_TOKENS * self._layout.top_k
                h_bytes = 4 * max_pairs * max(kind.width for kind in self._kinds)
                self._tokens = TokenSteps(
                    self._device, self._layout, self._residency, max_pairs, h_bytes
                )
            self._tokens.begin(runtime)
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
        with self._calling() as runtime:
            if self._tokens is None:
                raise MoeCacheError("no token is open: call begin_token first")
            return self._tokens.end(runtime)

    @property
    def has_stalled(self) -> bool:
        """Whether a step of the open token is known to have missed an expert; never waits.

        A loop that issues much between two steps may look, and go to `end_token` at once.
        """
        tokens = self._tokens
        if tokens is None or not tokens.is_open:
            return False
        with self._left:  # `close` frees the page that is read
            return not self._closed and tokens.has_stalled

    def close(self) -> None:
        """Free the memory of intermediate results; a second call does nothing.

        Waits for calls of other threads, two seconds at most.
        """
        with self._left:
            self._closed = True
            self._left.wait_for(lambda: not self._inside, _CLOSE_TIMEOUT_S)
            free, self._free = self._free, {}
            tokens = None if self._is_freed else self._tokens
            if tokens is not None:
                # The last call frees what it works with: it alone, or this one.
                self._is_freed, self._frees_late = True, self._inside > 0
        with contextlib.ExitStack() as stack:
            stack.callback(self._ring.close)
            for scratch in itertools.chain.from_iterable(free.values()):
                stack.callback(scratch.close)
            if tokens is not None:
                if self._frees_late:
                    tokens.stop()
                else:
                    stack.callback(tokens.close, self._runtime())
        self._table = None

    def _alive(self) -> ExpertRuntime:
        runtime = self._runtime()
        if runtime is None:
            raise MoeCacheError("the runtime is gone; keep a reference to it")
        return runtime

    @contextlib.contextmanager
    def _calling(self) -> Iterator[ExpertRuntime]:
        """Return a context that `close` waits for."""
        runtime = self._alive()
        with self._left:
            self._begin_call()
        try:
            yield runtime
        finally:
            self._end_call()

    def _check_open(self) -> None:
        if self._closed:
            raise MoeCacheError("the runtime is closed")

    def _begin_call(self) -> None:
        self._check_open()
        self._inside += 1

    def _end_call(self) -> None:
        with self._left:
            self._inside -= 1
            is_last = self._frees_late and not self._inside
            self._left.notify_all()
        if is_last and self._tokens is not None:
            self._tokens.close(self._runtime())

    def _take_step(
        self,
        runtime: ExpertRuntime,
        tokens: TokenSteps,
        step: Step,
        ids: Any,
        chosen: "np.ndarray | DeviceArray",
    ) -> PreparedLaunch | None:
        """Issue a step of the open token; return its launch, if the same arrays give it again."""
        capturing = not step.scratch.grows
        if not tokens.takes(runtime, step, capturing=capturing):
            if tokens.wait_before_waves(runtime, step.layer):
                self._waves.stream(runtime, step, self._on_host(ids, chosen))
            return None
        found = self._on_device(chosen, step, capturing=capturing)
        memory = tokens.memory
        launch = self._launches.decode(
            step, found, memory.row(step.layer), self._layout.num_experts, memory=memory
        )
        return None if isinstance(chosen, np.ndarray) else launch

    def _starts_again(self, layer: int, given: tuple[Any, ...]) -> bool:
        """Issue a step of the open token that had the same arrays before; False if none did."""
        tokens = self._tokens
        if tokens is None:
            return False
        device = self._device
        stream = device.current_stream()
        if not tokens.is_plain(layer, stream):
            return False
        if isinstance(given[1], (list, tuple)) or device.is_on_host(given[1]):
            return False
        launch = self._prepared.find(layer, *map(device.locate, given))
        if launch is None:
            return False
        with self._left:
            self._check_open()
            self._launches.start(launch, stream)
        return True

    def _on_device(
        self, ids: "np.ndarray | DeviceArray", step: Step, *, capturing: bool
    ) -> DeviceArray:
        if not isinstance(ids, np.ndarray):
            return ids
        # Ids on the host can be checked: a wrong one is an error.
        check_ids(ids, self._layout.num_experts)
        if capturing:
            raise ConfigError("in a graph the ids must be on the device")
        return self._device.locate(self._ring.to_device(ids, step.stream))

    def _on_host(self, ids: Any, chosen: "np.ndarray | DeviceArray") -> np.ndarray:
        return chosen if isinstance(chosen, np.ndarray) else self._pool.to_host(ids)

    def _enter(self, stream: Stream, *, capturing: bool) -> "Scratch":
        with self._left:
            self._begin_call()
            free = self._free.get(stream.pointer)
            scratch = free.pop() if free else Scratch(self._device, stream)
        scratch.grows = not capturing
        return scratch

    def _leave(self, scratch: "Scratch") -> None:
        with self._left:
            is_kept = not self._closed
            if is_kept:
                self._free.setdefault(scratch.stream.pointer, []).append(scratch)
        try:
            if not is_kept:
                scratch.close()
        finally:
            self._end_call()

    def _launch_resident(
        self, runtime: ExpertRuntime, step: Step, ids: "np.ndarray | DeviceArray"
    ) -> None:
        """Compute a step in one launch; ids are resolved on the device."""
        num_experts = self._layout.num_experts
        capturing = not step.scratch.grows
        found = self._on_device(ids, step, capturing=capturing)
        if self._table is None:
            if capturing:
                raise MoeCacheError("compute one step before capturing a graph")
            self._table = self._waves.copied(runtime.cache.slot_table, step.stream)
        row = self._table.address + 4 * step.layer * num_experts
        self._launches.decode(step, found, row, num_experts)
