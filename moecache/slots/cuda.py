"""CudaSlots: slots in the memory of a GPU."""

import contextlib
import dataclasses
import math
import os
import weakref
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from moecache.cuda import Device, Memory, open_device
from moecache.errors import ConfigError, MoeCacheError
from moecache.interrupts import uninterrupted
from moecache.layout import ExpertLayout
from moecache.slots._form import SlotForm
from moecache.slots._held import hold
from moecache.slots._memory import aligned_rows, check_parts, shared_form
from moecache.slots._pinned import PinnedBuffers
from moecache.slots._uploads import Uploads
from moecache.slots.base import UploadCounts
from moecache.units import format_bytes

# Enough for the copies of a token's misses to follow each other, and for the next reads.
MAX_PINNED_BYTES = 256 * 2**20
_MAX_BUFFERS = 64
# Pairs of a step from which on looking for what comes twice is worth it: a prompt's.
_FEW_PAIRS = 64
_MIN_BUFFERS = 4


class CudaSlots:
    """Slots in GPU memory: one allocation, in which every slot has its roles side by side.

    So an expert is one copy, from a buffer that is laid out as the slot is. It is read into a
    pinned buffer and copied in a stream of this pool's own. The host does not wait for the copy:
    the stream that computes waits for the copy's event (`before_compute`), and a copy into a slot
    waits for the events of the computations that used it (`release_after_compute`).

    Uploads and `before_compute` may be called from any thread; so may `release_after_compute`, by
    one at a time. The latter takes no lock and never waits: the garbage collector may call it in
    the middle of anything.

    Parameters
    ----------
    layout : ExpertLayout
    num_slots : int
        At least 1.
    staging_slots : int, default 0
        Slots beside them, for experts that get none in the cache.
    device : str or Device, default "cuda:0"
    max_pinned_bytes : int, default 256 MiB
        Host memory pinned for experts on their way; four buffers at least.

    Raises
    ------
    ConfigError
        If `num_slots` is below 1, the layout has no experts, or there is no such GPU.
    MissingDependencyError
        If CuPy is not installed.
    MemoryError
        If the GPU has too little memory.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        num_slots: int,
        staging_slots: int = 0,
        device: str | Device = "cuda:0",
        *,
        max_pinned_bytes: int = MAX_PINNED_BYTES,
    ) -> None:
        if num_slots < 1 or staging_slots < 0:
            raise ConfigError(f"need at least 1 slot, got {num_slots} and {staging_slots}")
        if layout.total_experts == 0:
            raise ConfigError("the layout has no experts; is it a mixture-of-experts model?")
        self._layout = layout
        self._num_slots = num_slots + staging_slots
        self._process = os.getpid()
        self._closed = True  # until everything is there
        self._form = SlotForm(layout)
        self.slot_stride = self._form.stride
        if not self.slot_stride:
            raise ConfigError("the experts have no weights: every role is of size 0")
        self.device: Device = open_device(device) if isinstance(device, str) else device
        wanted = self._num_slots * self.slot_stride
        try:
            self._memory = self.device.allocate(wanted)
        except MemoryError as error:
            raise MemoryError(
                f"{self.device.description} has no memory for {self._num_slots} slots "
                f"({format_bytes(wanted)}): {format_bytes(self.device.free_bytes())} are free; "
                "lower memory="
            ) from error
        most = min(max(_MIN_BUFFERS, max_pinned_bytes // self.slot_stride), _MAX_BUFFERS)
        self._buffers = PinnedBuffers(self.device, self.slot_stride, most)
        try:
            self._uploads = Uploads(
                self.device, self._memory.address, self._num_slots, self.slot_stride
            )
        except BaseException:
            self.device.free(self._memory)
            self.device.trim()
            raise
        # Pages of a pool dropped without `close` would stay pinned, and be put to other uses later.
        self._end = weakref.finalize(
            self,
            _end,
            self.device,
            self._memory,
            self._buffers,
            self._uploads,
            self._process,
        )
        # The end of the process frees everything, in its own order.
        self._end.atexit = False
        self._closed = False
        # Of each layer, the roles that a file has transposed.
        self._turned = [
            {role.name: hold(role) for role in roles if role.is_transposed}
            for roles in layout.layers
        ]
        # By slot: the buffer that an expert is read into, its layer, and the buffer's arrays.
        self._lent: dict[int, tuple[np.ndarray, int, dict[str, np.ndarray]]] = {}

    @staticmethod
    def bytes_per_slot(layout: ExpertLayout) -> int:
        """Return the bytes that one slot takes: all roles, aligned."""
        return SlotForm(layout).stride

    @property
    def layout(self) -> ExpertLayout:
        """The layout of the experts in the file."""
        return self._layout

    @property
    def num_slots(self) -> int:
        """Number of slots, staging slots among them."""
        return self._num_slots

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, on the device."""
        return self._memory.nbytes

    @property
    def converts(self) -> bool:
        """False: the device has the bytes of the file, if some in another order."""
        return False

    @property
    def max_buffers(self) -> int:
        """Most experts in buffers at once, of those that a step waits for."""
        return self._buffers.max_buffers - self.max_buffers_ahead

    @property
    def max_buffers_ahead(self) -> int:
        """Half of the buffers, for experts that no step waits for: the others are for demands."""
        return self._buffers.max_buffers // 2

    @property
    def uploads(self) -> UploadCounts:
        """The copies so far."""
        pinned_bytes = self._buffers.pinned_bytes
        try:
            if not self._closed:
                self._settle()
        except (MoeCacheError, MemoryError):
            # Steps report a device that is lost. What it was copying will never arrive.
            return dataclasses.replace(self._uploads.counts(pinned_bytes), in_flight_bytes=0)
        return self._uploads.counts(pinned_bytes)

    def regions(self) -> list[tuple[int, int]]:
        """Return nothing: slots take no memory of the host."""
        return []

    def offset(self, role: str) -> int:
        """Return where a role begins in each slot, in bytes."""
        return self._form.offsets[role]

    @property
    def address(self) -> int:
        """Return where the first slot begins, on the device."""
        self._check_open()
        return self._memory.address

    def slab(self, role: str) -> Any:
        """Return all slots of a role, a CuPy array [num_slots, *shape]; its first axis is strided.

        bfloat16 comes as uint16 where CuPy does not know it.

        Raises
        ------
        ConfigError
            If there is no such role, or layers differ in its shape or dtype: use `expert` there.
        """
        self._check_open()
        shape, dtype = shared_form(self._layout, role)
        return self.device.array(
            self._memory,
            self._form.offsets[role],
            (self._num_slots, *shape),
            dtype,
            stride=self.slot_stride,
        )

    def expert(self, slot: int, layer: int) -> dict[str, Any]:
        """Return one slot as CuPy arrays per role, in the shapes of `layer`."""
        self._check(slot, layer)
        return {
            role.name: self.device.array(
                self._memory,
                slot * self.slot_stride + self._form.offsets[role.name],
                role.device_shape,
                role.dtype,
            )
            for role in self._layout.layers[layer]
        }

    def raw_expert(self, slot: int, layer: int) -> dict[str, Any]:
        """Return one slot as uint8 arrays, the last axis longer by the dtype's size.

        For DLPack, which other libraries take for any type:
        `torch.from_dlpack(part).view(torch.bfloat16)` has the role's shape.
        """
        self._check(slot, layer)
        return {
            role.name: self.device.array(
                self._memory,
                slot * self.slot_stride + self._form.offsets[role.name],
                (*role.device_shape[:-1], role.nbytes // math.prod(role.device_shape[:-1])),
                np.dtype(np.uint8),
            )
            for role in self._layout.layers[layer]
        }

    def pin_ahead(self) -> None:
        """Pin the buffers in the background, rather than each when it is first needed."""
        self._check_open()
        self._buffers.pin_ahead()

    def buffers(self, slot: int, layer: int) -> dict[str, np.ndarray]:
        """Return a pinned buffer as arrays per role; waits for a copy if all are in use."""
        self._check(slot, layer)
        lent = self._lent.get(slot)
        if lent is not None and lent[1] == layer:
            return lent[2]
        buffer = self._take_buffer() if lent is None else lent[0]
        parts = self._form.views(buffer, layer)
        self._lent[slot] = (buffer, layer, parts)
        return parts

    def reclaim(self, slot: int) -> None:
        """Take back the buffer of a slot that will not be filled from it."""
        lent = self._lent.pop(slot, None)
        if lent is not None:
            self._buffers.give_back(lent[0])

    def upload(
        self, slot: int, layer: int, parts: Mapping[str, np.ndarray], *, behind: bool = False
    ) -> None:
        """Begin to copy an expert into a slot; the copy waits for work that still uses the slot.

        Parameters
        ----------
        slot, layer : int
        parts : dict of role to ndarray
            The arrays of `buffers`, filled; or any others, which are copied there first.
        behind : bool, default False
            Copy in the stream of experts that no step waits for.

        Raises
        ------
        ValueError
            If `parts` lacks a role or has it in another shape or dtype; the slot is as it was.
        MoeCacheError
            If the device fails.
        """
        self._check(slot, layer)
        num_bytes = self._layout.expert_bytes(layer)
        lent = self._lent.get(slot)
        if lent is None or parts is not lent[2] or layer != lent[1]:
            check_parts(self._layout, layer, parts)
            for name, array in self.buffers(slot, layer).items():
                if array.ctypes.data != parts[name].ctypes.data:
                    array[...] = parts[name]
        buffer, _, _ = self._lent.pop(slot)
        span = self._form.span(layer)
        try:
            if self._turned[layer]:
                buffer = self._with_rows(buffer, layer)
            self._uploads.begin(slot, buffer, span, num_bytes, behind=behind)
        except BaseException:
            self._buffers.give_back(buffer)
            raise

    def before_compute(self, slots: np.ndarray) -> None:
        """Let the calling thread's stream wait until these slots are filled; the host does not.

        Work issued in that stream from now on, until the slots are released, may use them.
        """
        self._check_open()
        self._settle()
        self._uploads.order(self.device.current_stream(), _slots_of(slots))

    def release_after_compute(self, slots: np.ndarray) -> None:
        """Let refills of these slots wait for all that was issued so far in the streams in use."""
        released = _slots_of(slots)
        if released and not self._closed and os.getpid() == self._process:
            self._uploads.release(released)

    def to_host(self, array: Any) -> np.ndarray:
        """Return an array of the device, such as ids, in host memory; waits for it."""
        if isinstance(array, (list, tuple, int)) or self.device.is_on_host(array):
            return np.asarray(array)
        return self.device.to_host(array)

    def close(self) -> None:
        """Wait for copies and computations, and free the memory; a second call does nothing.

        Arrays handed out stay valid: the memory is freed with the last of them.
        """
        if self._closed:
            return
        self._closed = True
        self._lent = {}
        self._end()

    def __enter__(self) -> Self:
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    def _with_rows(self, buffer: np.ndarray, layer: int) -> np.ndarray:
        """Return a buffer in the place of one whose matrices are as a file has them."""
        other = self._take_buffer()
        try:
            given, made = (self._form.views(one, layer) for one in (buffer, other))
            for name, part in given.items():
                held = self._turned[layer].get(name)
                if held is None:
                    made[name][...] = part
                else:
                    held.fill(made[name].reshape(held.shape), part)
        except BaseException:
            self._buffers.give_back(other)
            raise
        self._buffers.give_back(buffer)
        return other

    def _take_buffer(self) -> np.ndarray:
        while True:
            try:
                buffer = self._buffers.take()
            except MemoryError:
                # A buffer that is in use now will do once it is free.
                if not self._uploads.wait_for_one():
                    raise
                buffer = None
            if buffer is not None:
                return buffer
            if not self._settle() and not self._uploads.wait_for_one():
                # All are lent to reads that may wait for this very one.
                return aligned_rows(1, self.slot_stride)[0]

    def _settle(self) -> bool:
        if self._uploads.is_idle:
            return False
        with uninterrupted():
            buffers = self._uploads.settle()
            for buffer in buffers:
                self._buffers.give_back(buffer)
        return bool(buffers)

    def _check(self, slot: int, layer: int) -> None:
        self._check_open()
        self._layout.check(layer)
        if not 0 <= slot < self._num_slots:
            raise ValueError(f"slot {slot} is not in [0, {self._num_slots})")

    def _check_open(self) -> None:
        if self._closed:
            raise MoeCacheError("the slots are closed")


def _slots_of(pairs: np.ndarray) -> list[int]:
    """Return the slots of pairs, -1 for those that have none; of many pairs each slot once."""
    pairs = pairs.reshape(-1)
    if pairs.size <= _FEW_PAIRS:
        return [slot for slot in pairs.tolist() if slot >= 0]
    found: list[int] = np.flatnonzero(np.bincount(pairs[pairs >= 0])).tolist()
    return found


def _end(
    device: Device,
    memory: Memory,
    buffers: PinnedBuffers,
    uploads: Uploads,
    process: int,
) -> None:
    """Give everything back; in a forked child nothing, as the GPU is the parent's."""
    if os.getpid() != process:
        return
    # In reverse: an error of the device leaves none of it out.
    with contextlib.ExitStack() as stack:
        stack.callback(device.trim)
        stack.callback(device.free, memory)
        stack.callback(buffers.close)
        stack.callback(uploads.close)
