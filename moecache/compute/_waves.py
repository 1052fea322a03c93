"""Waves: a step on a GPU whose experts come one after the other."""

from collections.abc import Iterator

import numpy as np

from moecache.cuda._launches import Launches, Pool, Step, Tiles, tiles_of
from moecache.cuda._ring import CopyRing
from moecache.cuda.device import DeviceArray, Stream
from moecache.runtime.runtime import ExpertRuntime
from moecache.runtime.steps import Wave

# A step of this many tokens or fewer reads weights for about one row each: kernels that stream
# the weights are enough. With more tokens, tensor cores or cuBLAS multiply several rows at once.
MAX_STREAMED_TOKENS = 4
# Of h, and of rows: together half of what `reserve` keeps free by default.
MAX_SCRATCH_BYTES = 128 * 2**20


class Waves:
    """Computes steps from the slots that a runtime hands out, in as many waves as it takes.

    A step has the same bits with any experts resident. Any number of threads may call.

    Parameters
    ----------
    pool : Pool
    launches : Launches
    ring : CopyRing
        Which lists of slots and places are copied through.
    """

    def __init__(self, pool: Pool, launches: Launches, ring: CopyRing) -> None:
        self._pool = pool
        self._device = pool.device
        self._launches = launches
        self._ring = ring
        self._slot_numbers: DeviceArray | None = None  # 0, 1, 2, ...

    def compute(self, runtime: ExpertRuntime, step: Step, ids: np.ndarray) -> None:
        """Compute a step in the way that its number of tokens and its format ask for."""
        if step.num_tokens <= MAX_STREAMED_TOKENS:
            self.stream(runtime, step, ids)
        elif self._launches.is_grouped(step.kind):
            self._group(runtime, step, ids)
        elif self._launches.is_multiplied(step.kind):
            self._multiply(runtime, step, ids)
        else:
            self.stream(runtime, step, ids)

    def stream(self, runtime: ExpertRuntime, step: Step, ids: np.ndarray) -> None:
        """Compute a step of few tokens wave by wave, equal to one launch bit for bit."""
        num_pairs = step.num_pairs
        h = step.scratch.room("h", num_pairs * step.width * 4)
        rows = step.scratch.room("rows", num_pairs * step.size * 4)
        step.scratch.room("barrier", 8)  # all of it at once: later steps take no more memory
        waves = runtime.waves(step.layer, ids)
        try:
            for wave in waves:
                count = len(wave.pairs)
                if not count:
                    continue
                if count == num_pairs and step.num_tokens <= MAX_STREAMED_TOKENS:
                    self._launch(step, wave)
                    return
                slots = np.repeat(wave.slots, np.diff(wave.offsets))
                both = np.stack([slots, wave.pairs]).astype(np.int32)
                lists = self._ring.to_device(both, step.stream)
                at = self._device.locate(lists).address
                self._launches.gate_up(step, at, at + 4 * count, count, h)
                self._launches.down(step, at, at + 4 * count, count, h, rows)
        finally:
            waves.close()
        self._launches.combine_rows(step, rows)

    def copied(self, array: np.ndarray, stream: Stream) -> DeviceArray:
        """Return a copy on the device that any stream may use."""
        copy = self._ring.to_device(np.ascontiguousarray(array, np.int32), stream)
        self._device.synchronize(stream)
        return self._device.locate(copy)

    def _launch(self, step: Step, wave: Wave) -> None:
        """Compute a step whose experts are all leased, in one launch."""
        device = self._device
        if self._slot_numbers is None:
            numbers = np.arange(self._pool.num_slots, dtype=np.int32)
            self._slot_numbers = self.copied(numbers, step.stream)
        slots = np.empty(step.num_tokens * step.top_k, np.int32)
        slots[wave.pairs] = np.repeat(wave.slots, np.diff(wave.offsets))
        ids = self._ring.to_device(slots, step.stream)
        self._launches.decode(
            step, device.locate(ids), self._slot_numbers.address, self._pool.num_slots
        )

    def _group(self, runtime: ExpertRuntime, step: Step, ids: np.ndarray) -> None:
        """Compute a step of many tokens wave by wave: all of a wave's experts in two launches."""
        rows = 0  # there is a wave
        waves = runtime.waves(step.layer, ids)
        try:
            for wave in waves:
                if len(wave.pairs) == step.num_pairs:
                    self._group_whole(step, wave)
                    return
                # A token's rows are summed in its order once the last has come.
                rows = step.scratch.room("rows", step.num_pairs * _row_bytes(step))
                self._multiply_wave(step, wave, rows)
        finally:
            waves.close()
        self._launches.combine(step, rows, 0)

    def _group_whole(self, step: Step, wave: Wave) -> None:
        """Compute a step whose experts are all leased, as many tokens at a time as have room."""
        for part, own in _parts(step, wave, MAX_SCRATCH_BYTES // _row_bytes(step)):
            num_bytes = part.num_pairs * _row_bytes(step)
            rows = step.scratch.room("rows", num_bytes, MAX_SCRATCH_BYTES)
            self._multiply_wave(part, own, rows)
            self._launches.combine(part, rows, 0)

    def _multiply_wave(self, step: Step, wave: Wave, rows: int) -> None:
        """Compute the rows of a wave's pairs, as many at a time as there is room for their h."""
        device, launches = self._device, self._launches
        pair_bytes = step.width * step.dtype.itemsize
        most = max(1, MAX_SCRATCH_BYTES // pair_bytes)
        num_bytes = min(most, step.num_pairs) * pair_bytes
        h = step.scratch.room("h", num_bytes, MAX_SCRATCH_BYTES)
        for start in range(0, len(wave.pairs), most):
            piece = _piece(wave, start, start + most)
            found = tiles_of(piece)
            lists = np.concatenate([found.ravel(), piece.pairs]).astype(np.int32)
            at = device.locate(self._ring.to_device(lists, step.stream)).address
            tiles = Tiles(at, len(found), at + found.nbytes)
            launches.multiply_gate_up(step, tiles, h)
            launches.multiply_down(step, tiles, h, rows)

    def _multiply(self, runtime: ExpertRuntime, step: Step, ids: np.ndarray) -> None:
        """Compute a step of many tokens wave by wave: the products of one expert after another."""
        device, launches, item = self._device, self._launches, step.dtype.itemsize
        num_pairs = step.num_pairs
        rows = step.scratch.room("rows", num_pairs * step.size * item)
        gathered = step.scratch.room("gathered", num_pairs * step.size * item)
        both = step.scratch.room("both", num_pairs * step.kind.wide_rows * item)
        h = step.scratch.room("h", num_pairs * step.width * item)
        place = np.full(num_pairs, -1, np.int32)
        done = 0
        waves = runtime.waves(step.layer, ids)
        try:
            for wave in waves:
                count = len(wave.pairs)
                lists = self._ring.to_device(wave.pairs.astype(np.int32), step.stream)
                launches.gather(step, device.locate(lists).address, count, gathered)
                launches.multiply(step, step.kind.wide, wave, gathered, both)
                launches.activate(step, both, count, h)
                launches.multiply(step, "down", wave, h, rows + done * step.size * item)
                place[wave.pairs] = np.arange(done, done + count, dtype=np.int32)
                done += count
        finally:
            waves.close()
        where = self._ring.to_device(place, step.stream)
        launches.combine(step, rows, device.locate(where).address)


def _row_bytes(step: Step) -> int:
    return step.size * step.dtype.itemsize


def _parts(step: Step, wave: Wave, max_pairs: int) -> Iterator[tuple[Step, Wave]]:
    """Yield the step of some tokens after the other, of so many pairs at most, and its wave."""
    most = max(1, max_pairs // step.top_k)
    num_parts = -(-step.num_tokens // most)
    if num_parts == 1:
        yield step, wave
        return
    size = -(-step.num_tokens // num_parts)
    for first in range(0, step.num_tokens, size):
        last = min(first + size, step.num_tokens)
        start, stop = first * step.top_k, last * step.top_k
        is_taken = (wave.pairs >= start) & (wave.pairs < stop)
        num_before = np.concatenate([[0], np.cumsum(is_taken)])
        pairs = wave.pairs[is_taken] - start
        yield step.part(first, last), Wave(wave.slots, pairs, num_before[wave.offsets], step.top_k)


def _piece(wave: Wave, start: int, stop: int) -> Wave:
    """Return some of a wave's pairs, and their experts."""
    offsets = np.clip(wave.offsets, start, stop) - start
    return Wave(wave.slots, wave.pairs[start:stop], offsets, wave.top_k)
