"""TokenSteps: the steps of a token, which a GPU takes without asking the host."""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from moecache.compute._residency import Residency
from moecache.cuda._launches import Step
from moecache.cuda._token_memory import HEAD, UNKNOWN, TokenMemory
from moecache.cuda.device import Device, Stream
from moecache.errors import CapacityError, ConfigError, MoeCacheError
from moecache.layout import ExpertLayout
from moecache.runtime.runtime import ExpertRuntime
from moecache.runtime.steps import Lease


class TokenSteps:
    """The tables by which the device takes a token's steps itself, and its notes for the host.

    The device has a table of slots of its own. Between `begin` and `end` nothing is evicted, so
    that the table holds; a step looks its experts up there and notes the ids in memory of the
    host. A step that misses one closes a gate behind which every later step returns at once.
    `end` sees that, brings the experts in and opens the gate again for the steps from there on.

    One token at a time, of one thread, in one stream; the next may be another's, in another.

    Parameters
    ----------
    device : Device
    layout : ExpertLayout
    residency : Residency
        Residency of the runtime whose steps these are.
    max_pairs : int
        Ids that a step may have.
    h_bytes : int
        Intermediate results of a step.

    Raises
    ------
    MemoryError
        If the device, or the host, has too little memory. Nothing is kept then.
    """

    def __init__(
        self,
        device: Device,
        layout: ExpertLayout,
        residency: Residency,
        max_pairs: int,
        h_bytes: int,
    ) -> None:
        self._residency = residency
        self._max_pairs = max_pairs
        self._device = device
        self._num_layers = layout.num_layers
        self._memory = memory = TokenMemory(device, layout, max_pairs, h_bytes)
        self._notice, self._records, self._table = memory.notice, memory.records, memory.table
        self._changes = -1  # of the cache's table, as far as the device has it
        self._token = 0
        self._counted = 0  # layers of this token that the policy knows of
        self._through_waves: set[int] = set()
        self._stream: Stream | None = None
        self._pointer = -1
        self._owner: int | None = None  # the thread whose token is open
        self._thread = threading.current_thread()  # that thread
        self._is_frozen = False
        self._lock = threading.Lock()
        self._closed = False
        try:
            # Behind all that was issued for a token, and behind the gate that closes after it.
            self._event = device.create_event()
        except BaseException:
            memory.free()
            raise
        # Memory dropped without `close` would stay pinned.
        self._end = weakref.finalize(self, _end, device, memory, self._event, os.getpid())
        self._end.atexit = False
        stream = device.current_stream()
        try:
            memory.fill(stream)
        except BaseException:
            _settle(device.synchronize, stream)
            self._end()
            raise
        residency.add(self)

    @property
    def number(self) -> int:
        """The number of the token that is open, or was last."""
        return self._token

    @property
    def is_open(self) -> bool:
        """Return whether the calling thread has begun a token."""
        # A thread that ends leaves its number to others.
        return self._owner == threading.get_ident() and self._thread is threading.current_thread()

    @property
    def memory(self) -> TokenMemory:
        """Addresses on the device."""
        return self._memory

    def is_plain(self, layer: int, stream: Stream) -> bool:
        """Return whether a step of a layer that was taken before is taken again, uncaptured."""
        return self.is_open and stream.pointer == self._pointer and layer not in self._through_waves

    def takes(self, runtime: ExpertRuntime, step: Step, *, capturing: bool) -> bool:
        """Return whether the device takes a step; else it goes through waves.

        Raises
        ------
        ConfigError
            If it is too large, or in another stream.
        CapacityError
            If it is captured, and there are too few slots.
        """
        if step.num_pairs > self._max_pairs:
            raise ConfigError(
                f"a step of {step.num_tokens} x {step.top_k} ids is too large for a token, whose "
                f"steps have up to {self._max_pairs}; compute prompts before begin_token"
            )
        if not capturing and step.stream.pointer != self._pointer:
            raise ConfigError("a token's steps belong in the stream in which it began")
        capacity = runtime.cache.capacity
        if step.top_k <= capacity and step.layer not in self._through_waves:
            return True
        if capturing:
            raise CapacityError(
                f"a graph needs slots for all experts of a step: {step.top_k}, and the cache has "
                f"{capacity}; raise the memory"
            )
        return False

    def begin(self, runtime: ExpertRuntime) -> None:
        """Freeze the cache, bring the device's table up to date and open the gate."""
        device, stream = self._device, self._device.current_stream()
        if device.is_capturing(stream):
            raise MoeCacheError("begin a token before its steps are captured, not in the graph")
        with self._lock:
            if self._closed:
                raise MoeCacheError("the runtime is closed")
            if self._owner is not None and not self.is_open and self._thread.is_alive():
                raise MoeCacheError(
                    "another thread's token is open; end it first, or give each thread a runtime"
                )
            if self._owner is not None:
                self._drop(runtime)
            self._check_notice()
            self._owner, self._stream = threading.get_ident(), stream
            self._thread, self._pointer = threading.current_thread(), stream.pointer
        try:
            # The gate behind the last token may not be closed yet, in that token's stream.
            device.wait_event(stream, self._event)
            self._freeze(runtime)
            self._token = self._token % (2**31 - 1) + 1
            self._counted = 0
            self._through_waves.clear()
            self._publish(runtime, stream)
            self._memory.open_gate(0, self._token, stream)
        except BaseException:
            self._drop(runtime)
            raise

    def end(self, runtime: ExpertRuntime) -> int | None:
        """Wait for the token; return `None`, or the layer to go on from: see `CudaExperts`."""
        stream = self._checked_stream()
        try:
            layer = self._wait(stream)
            self.count(runtime, self._num_layers if layer is None else layer)
            if layer is None:
                self._memory.close_gate(stream)
                self._device.record(self._event, stream)
                self._check_notice()
                self._finish(runtime)
            else:
                self._serve(runtime, layer, stream)
        except BaseException:
            self._drop(runtime)
            raise
        return layer

    @property
    def has_stalled(self) -> bool:
        """Return whether a step of the open token is known to miss experts; never waits."""
        return bool(self._notice[0] == self._token)

    def count(self, runtime: ExpertRuntime, until: int, *, served: bool = False) -> None:
        """Tell the policy of the steps before a layer that are not counted, in their order.

        With `served`, the layer's own step is counted elsewhere.
        """
        first, token = self._counted, self._token
        self._counted = max(first, until + served)
        records = self._records[first:until]
        heads = records[:, :HEAD].tolist()
        start = 0
        while start < len(heads):
            stop = start + 1
            while stop < len(heads) and heads[stop] == heads[start]:
                stop += 1
            whose, rows, top_k = heads[start]
            if whose == token:
                ids = records[start:stop, HEAD : HEAD + rows * top_k]
                runtime.steps.count_hits(first + start, ids.reshape(-1, rows, top_k))
            start = stop

    def wait_before_waves(self, runtime: ExpertRuntime, layer: int) -> bool:
        """Wait for the steps before a layer that is computed by waves; False if one stalled."""
        stream = self._checked_stream()
        self._device.synchronize(stream)
        if self.has_stalled:
            return False
        self.count(runtime, layer, served=True)
        return True

    def close(self, runtime: ExpertRuntime | None = None) -> None:
        """End a token that is open and free the memory; a second call does nothing.

        Not while another thread is in one of the methods; see `stop`.
        """
        self.stop()
        with contextlib.ExitStack() as stack:
            # In reverse: an error of the device leaves none of it out.
            stack.callback(self._end)
            if self._owner is not None:
                stack.callback(self._drop, runtime)

    def give_up_left(self, runtime: ExpertRuntime) -> bool:
        """End the token of a thread that has ended; return whether there was one."""
        with self._lock:
            is_left = self._owner is not None and not self._thread.is_alive()
            if is_left and not self._closed:
                self._drop(runtime)
            return is_left

    def stop(self) -> None:
        """Have calls that are under way, and all others, end with an error."""
        with self._lock:
            self._closed = True

    def _check_notice(self) -> None:
        if self._notice[2]:
            self._notice[2] = 0
            raise MoeCacheError(
                "a graph of a token's steps ran outside of begin_token and end_token: it "
                "computed nothing, and what it left is of no use; begin again"
            )

    def _checked_stream(self) -> Stream:
        if not self.is_open or self._stream is None:
            raise MoeCacheError("no token of this thread is open: call begin_token first")
        if self._closed:
            raise MoeCacheError("the runtime is closed")
        stream = self._device.current_stream()
        if stream.pointer != self._stream.pointer:
            raise ConfigError("a token ends in the stream in which it began; make that current")
        if self._device.is_capturing(stream):
            raise MoeCacheError("end a token after its steps were captured, not in the graph")
        return self._stream

    def _wait(self, stream: Stream) -> int | None:
        """Wait until the device is done, or has stalled; return the layer in which it has."""
        device = self._device
        device.record(self._event, stream)
        while not device.is_done(self._event) and not self.has_stalled:
            if self._closed:
                raise MoeCacheError("the runtime is closed")
            time.sleep(0)
        # Its release waits for the look at the notice, and the next acquisition for the release, on
        # processors of weak order (AArch64), too: what is read then was written before the notice.
        with self._lock:
            pass
        with self._lock:
            return int(self._notice[1]) if self.has_stalled else None

    def _serve(self, runtime: ExpertRuntime, layer: int, stream: Stream) -> None:
        """Bring the experts of a layer's step in and open the gate for it."""
        _, rows, top_k = self._records[layer, :HEAD].tolist()
        ids = self._records[layer, HEAD : HEAD + rows * top_k].reshape(rows, top_k).copy()
        lease = self._lease(runtime, layer, ids)
        try:
            self._publish(runtime, stream)
            self._notice[0] = 0
            self._memory.open_gate(layer, self._token, stream)
        finally:
            if lease is not None:
                lease.close()

    def _lease(self, runtime: ExpertRuntime, layer: int, ids: np.ndarray) -> Lease | None:
        """Return a lease on the experts of a step, or `None` if there are not enough slots."""
        if layer in self._through_waves:
            # Only a graph stalls again: it asks for slots, not for waves.
            raise CapacityError(
                f"layer {layer} asks for {np.unique(ids).size} experts at once, and the cache of "
                f"{runtime.cache.capacity} slots has no room for them; raise the memory, or call "
                "the steps again from that layer without a graph"
            )
        # No step reads a slot now: those before this one are done, those behind it do nothing.
        self._thaw(runtime)
        try:
            lease = runtime.lease(layer, ids, ignore_out_of_range=True)
        except CapacityError as error:
            if self._residency.is_frozen:
                raise CapacityError(
                    f"layer {layer} misses experts, and nothing can be evicted: another token of "
                    "this runtime is open, or `freeze` was called; end that first"
                ) from error
            self._through_waves.add(layer)
            return None
        finally:
            self._freeze(runtime)
        self._counted = layer + 1
        return lease

    def _publish(self, runtime: ExpertRuntime, stream: Stream) -> None:
        """Copy rows of the cache's table that changed, behind the copies into their slots."""
        cache = runtime.cache
        changes = cache.num_changes
        if changes == self._changes:
            return
        rows = np.flatnonzero((cache.slot_table != self._table).any(1))
        now = cache.slot_table[rows]
        fresh = now[(now != self._table[rows]) & (now >= 0)]
        runtime.pool.before_compute(fresh)
        self._changes = -1
        for row, slots in zip(rows.tolist(), now, strict=True):
            self._table[row] = slots
            try:
                self._memory.copy_row(row, stream)
            except BaseException:
                self._table[row] = UNKNOWN
                raise
        self._changes = changes

    def _finish(self, runtime: ExpertRuntime | None) -> None:
        self._owner = None
        if runtime is not None:
            self._thaw(runtime)

    def _freeze(self, runtime: ExpertRuntime) -> None:
        self._residency.freeze(runtime)
        self._is_frozen = True

    def _thaw(self, runtime: ExpertRuntime) -> None:
        if self._is_frozen:
            self._is_frozen = False
            self._residency.thaw(runtime)

    def _drop(self, runtime: ExpertRuntime | None) -> None:
        """End a token that does not go on; nothing that was issued for it runs afterwards."""
        stream = self._stream
        try:
            if stream is not None:
                for _ in range(2):  # memory may be short for a moment
                    with contextlib.suppress(MoeCacheError, MemoryError):
                        self._memory.close_gate(stream)
                        break
                _settle(self._device.synchronize, stream)
        finally:
            self._finish(runtime)


def _end(device: Device, memory: TokenMemory, event: int, process: int) -> None:
    """Give everything back, once it is not in use; in a forked child nothing."""
    if os.getpid() != process:
        return
    with contextlib.ExitStack() as stack:
        stack.callback(memory.free)
        stack.callback(device.destroy_event, event)
        stack.callback(_settle, device.wait_for, event)


def _settle(wait: Callable[[Any], None], what: Any) -> None:
    """Wait for the device; one that is lost does nothing any more."""
    with contextlib.suppress(MoeCacheError):
        try:
            wait(what)
        except MemoryError:  # memory may be short for a moment
            wait(what)
