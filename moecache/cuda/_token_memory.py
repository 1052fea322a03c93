"""TokenMemory: the memory of a token's steps that the host and the device share."""

import contextlib
import ctypes

import numpy as np

from moecache.cuda.device import Device, Stream
from moecache.errors import ConfigError
from moecache.layout import ExpertLayout

HEAD = 3  # words of a record before its ids: token, number of tokens, top_k
UNKNOWN = -2  # no slot: the value of a table's row before it is copied

# As in steps.cuh.
_OPEN, _OUTSIDE = 0, 2
_WORDS = np.dtype(np.int32)
_GATE = np.dtype(
    [("control", "u8"), ("notice", "u8"), ("record", "u8"), ("layer", "i4"), ("num_ids", "i4")]
)
_ALIGNMENT = 256


class TokenMemory:
    """Memory of the device that steps read, and memory of the host that they write.

    Parameters
    ----------
    device : Device
    layout : ExpertLayout
    max_pairs : int
        Ids that a step may have.
    h_bytes : int
        Intermediate results of a step.

    Attributes
    ----------
    notice : ndarray of int32, shape [3]
        The token that stalled, the layer in which it did, and whether a step came outside of one.
    records : ndarray of int32, shape [num_layers, 3 + max_pairs]
        The notes of each layer's step: the token, its shape, and the ids.
    table : ndarray of int32, shape [num_layers, num_experts]
        The device's table of slots, as it was last copied.

    Raises
    ------
    MemoryError
        If the device, or the host, has too little memory. Nothing is kept then.
    """

    def __init__(self, device: Device, layout: ExpertLayout, max_pairs: int, h_bytes: int) -> None:
        num_layers, num_experts = layout.num_layers, layout.num_experts
        self._device = device
        self._row_bytes = _WORDS.itemsize * num_experts
        self._h_bytes = h_bytes
        there = _Places()
        self._control = there.take(3 * _WORDS.itemsize)
        self._gates = there.take(_GATE.itemsize * num_layers)
        self._rows = there.take(self._row_bytes * num_layers)
        self._barrier = there.take(8)
        self._h = there.take(h_bytes)
        here = _Places()
        places = [here.take(3 * _WORDS.itemsize) for _ in range(3)]
        gates = here.take(_GATE.itemsize * num_layers)
        table = here.take(self._row_bytes * num_layers)
        records = here.take(_WORDS.itemsize * (HEAD + max_pairs) * num_layers)
        self._memory = device.allocate(there.num_bytes)
        try:
            self._shared = device.allocate_shared(here.num_bytes)
        except BaseException:
            device.free(self._memory)
            raise
        self.notice, self._opened, self._closed = (self._words(place, (3,)) for place in places)
        self._closed[0] = _OUTSIDE
        self.table = self._words(table, (num_layers, num_experts))
        self.table[...] = UNKNOWN
        self.records = self._words(records, (num_layers, HEAD + max_pairs))
        self._made_gates = self._view(gates, num_layers, _GATE)
        self._made_gates["control"] = self._memory.address + self._control
        self._made_gates["notice"] = self.notice.ctypes.data
        self._made_gates["record"] = [record.ctypes.data for record in self.records]
        self._made_gates["layer"] = np.arange(num_layers)
        self._made_gates["num_ids"] = max_pairs

    def gate(self, layer: int) -> int:
        """Return where a layer's gate is, on the device."""
        return self._memory.address + self._gates + _GATE.itemsize * layer

    def row(self, layer: int) -> int:
        """Return where a layer's row of the table is, on the device."""
        return self._memory.address + self._rows + self._row_bytes * layer

    def room(self, name: str, num_bytes: int) -> int:
        """Return where a step's intermediate results go, as `Scratch.room` does."""
        if name == "barrier":
            return self._memory.address + self._barrier
        if num_bytes > self._h_bytes:
            raise ConfigError(f"a step needs {num_bytes} bytes, a token's steps {self._h_bytes}")
        return self._memory.address + self._h

    def fill(self, stream: Stream) -> None:
        """Bring gates, all closed, to the device and wait for it."""
        self._copy(self._gates, self._made_gates, stream)
        self.close_gate(stream)
        self._device.synchronize(stream)

    def open_gate(self, first_layer: int, token: int, stream: Stream) -> None:
        """Let steps from a layer on run; those before it return at once."""
        self._opened[:] = _OPEN, first_layer, token
        self._copy(self._control, self._opened, stream)

    def close_gate(self, stream: Stream) -> None:
        """Let no step run: no token is open."""
        self._copy(self._control, self._closed, stream)

    def copy_row(self, layer: int, stream: Stream) -> None:
        """Bring a row of the table to the device."""
        self._copy(self._rows + self._row_bytes * layer, self.table[layer], stream)

    def free(self) -> None:
        """Give all of it back; the device must be done with it."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._device.free_shared, self._shared)
            stack.callback(self._device.free, self._memory)

    def _copy(self, offset: int, source: np.ndarray, stream: Stream) -> None:
        # The source is pinned and stays: it is written again after the device came so far.
        self._device.copy_in(
            self._memory.address + offset, source.ctypes.data, source.nbytes, stream
        )

    def _view(self, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        # Valid until the memory is freed.
        raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(
            self._shared.address + offset
        )
        return np.ndarray(count, dtype, memoryview(raw))

    def _words(self, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        return self._view(offset, int(np.prod(shape)), _WORDS).reshape(shape)


class _Places:
    """Parts of one allocation."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def take(self, num_bytes: int) -> int:
        """Return where the next part begins."""
        start = self.num_bytes
        self.num_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return start
