"""Launches: the kernels' arguments, and what the parts of a step share."""

import ctypes
from typing import Any, NamedTuple, Protocol

import numpy as np

from moecache.cuda._arguments import ids_kind
from moecache.cuda._kinds import ExpertKind
from moecache.cuda._scratch import Scratch
from moecache.cuda._structs import STRUCTS, KernelStruct
from moecache.cuda._token_memory import TokenMemory
from moecache.cuda.device import Device, DeviceArray, Product, Stream
from moecache.errors import ConfigError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu", "clamped_silu")
_SWIGLU = ACTIVATIONS.index("swiglu")
_STREAMED = ("decode", "gate_up", "down", "combine_rows")
_MULTIPLIED = ("gather", "activate", "combine")
_GROUPED = ("multiply_gate_up", "multiply_down", "combine")
# Pairs of a tile, and rows of a matrix that a block takes: as in products.cu.
_TILE_PAIRS, _TILE_ROWS = 64, 128
_WARPS = 256 // 32
# Blocks for each multiprocessor, of kernels that take any number.
_MOST_BLOCKS = 12


class Pool(Protocol):
    """The slots as kernels need them."""

    device: Device
    slot_stride: int
    num_slots: int

    @property
    def address(self) -> int:
        """The address of the first slot."""

    def offset(self, role: str) -> int:
        """Return where a role begins in a slot."""

    def to_host(self, array: Any) -> np.ndarray:
        """Return a copy in host memory."""


class PreparedLaunch(NamedTuple):
    """A kernel, the blocks to start, and its argument."""

    kernel: str
    num_blocks: int
    argument: "ctypes.Array[ctypes.c_char]"


class Plan(NamedTuple):
    """What all launches over a layer's experts have alike.

    Parameters
    ----------
    kind : ExpertKind
    decode_blocks : int
        Blocks of `decode` that the device runs at once.
    entries : dict of str to (str, KernelStruct, bytes)
        By the kernels' entries: the name of the kernel, its argument, and the shared part of that.
    """

    kind: ExpertKind
    decode_blocks: int
    entries: dict[str, tuple[str, KernelStruct, bytes]]


class Step:
    """Facts that all parts of one call need."""

    def __init__(
        self,
        layer: int,
        x: DeviceArray,
        weights: DeviceArray,
        out: DeviceArray,
        num_tokens: int,
        top_k: int,
        plan: Plan,
        scratch: Scratch,
    ) -> None:
        kind = plan.kind
        self.layer = layer
        self.x = x
        self.weights = weights
        self.weights_kind = int(weights.dtype != np.float32)
        self.out = out
        self.num_tokens = num_tokens
        self.top_k = top_k
        self.num_pairs = num_tokens * top_k
        self.plan = plan
        self.kind = kind
        self.size = kind.size
        self.width = kind.width
        self.dtype = kind.dtype
        self.scratch = scratch
        self.stream = scratch.stream

    def part(self, first: int, last: int) -> "Step":
        """Return the step of the tokens from one to before another."""
        x, weights, out = (_rows(array, first, last) for array in (self.x, self.weights, self.out))
        return Step(self.layer, x, weights, out, last - first, self.top_k, self.plan, self.scratch)


class Tiles(NamedTuple):
    """A wave's pairs in tiles of one expert each, on the device.

    Parameters
    ----------
    address : int
        Array with slot, first pair and number of pairs of each tile.
    num_tiles : int
    pairs : int
        Address of the wave's pairs.
    """

    address: int
    num_tiles: int
    pairs: int


def tiles_of(wave: Any) -> np.ndarray:
    """Return slot, first pair and number of pairs of each tile, int32 [num_tiles, 3]."""
    counts = np.diff(wave.offsets)
    per_expert = -(-counts // _TILE_PAIRS)
    expert = np.repeat(np.arange(len(counts)), per_expert)
    number = np.arange(len(expert)) - np.repeat(np.cumsum(per_expert) - per_expert, per_expert)
    first = wave.offsets[:-1][expert] + number * _TILE_PAIRS
    last = np.minimum(first + _TILE_PAIRS, wave.offsets[1:][expert])
    return np.stack([wave.slots[expert], first, last - first], 1).astype(np.int32)


def _rows(array: DeviceArray, first: int, last: int) -> DeviceArray:
    num_columns = array.shape[1]
    address = array.address + first * num_columns * array.dtype.itemsize
    return DeviceArray(address, (last - first, num_columns), array.dtype, array.owner)


class Launches:
    """Starts kernels over the slots of a pool.

    Parameters
    ----------
    pool : Pool
    activation : str
        One of `ACTIVATIONS`.
    is_interleaved : bool
        Whether rows of gate and up alternate.
    alpha, limit : float
        Parameters of "swiglu".

    Raises
    ------
    ConfigError
        If there is no such activation.
    """

    def __init__(
        self, pool: Pool, activation: str, *, is_interleaved: bool, alpha: float, limit: float
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        self._pool = pool
        self._device = pool.device
        self._activation = ACTIVATIONS.index(activation)
        self._limits = (float(np.float32(alpha)), float(np.float32(limit)))
        self._is_interleaved = bool(is_interleaved)

    @staticmethod
    def is_grouped(kind: ExpertKind) -> bool:
        """Return whether tensor cores multiply many tokens by a wave's experts in one launch."""
        return kind.dtype.itemsize == 2

    def is_multiplied(self, kind: ExpertKind) -> bool:
        """Return whether cuBLAS can multiply many tokens by these experts, one after the other."""
        is_usual = not self._is_interleaved and self._activation < _SWIGLU
        return kind.is_plain and is_usual

    def plan(self, kind: ExpertKind) -> Plan:
        """Return what the launches over such experts have alike, and which kernels these need.

        Raises
        ------
        ConfigError
            If there is no gate, but rows of one alternate or the activation takes one.
        """
        if not kind.is_gated and self._is_interleaved:
            raise ConfigError("rows of gate and up alternate, and these experts have no gate")
        if not kind.is_gated and self._activation >= _SWIGLU:
            raise ConfigError(
                f"activation {ACTIVATIONS[self._activation]!r} takes gate and up, and these "
                "experts have no gate"
            )
        many = _MULTIPLIED if self.is_multiplied(kind) else ()
        entries = _STREAMED + (_GROUPED if self.is_grouped(kind) else many)
        gate = (
            *self._place(kind, kind.wide),
            *(self._is_interleaved, kind.size, kind.width, self._activation, *self._limits),
        )
        down = (*self._place(kind, "down"), kind.size, kind.width)
        parts: dict[str, tuple[float, ...]] = {
            "decode": gate + down,
            **dict.fromkeys(("gate_up", "multiply_gate_up"), gate),
            **dict.fromkeys(("down", "multiply_down"), down),
        }
        return Plan(
            kind,
            kind.blocks_per_multiprocessor * self._device.num_multiprocessors,
            {
                entry: (
                    kind.kernel(entry),
                    STRUCTS[entry],
                    STRUCTS[entry].share(*parts.get(entry, ())),
                )
                for entry in entries
            },
        )

    def decode(
        self,
        step: Step,
        ids: DeviceArray,
        table: int,
        num_ids: int,
        *,
        memory: TokenMemory | None = None,
    ) -> PreparedLaunch:
        """Compute a step in one launch; `table` has the slot of each id.

        With `memory` it is a token's: it runs if its gate is open.
        """
        scratch = step.scratch if memory is None else memory
        h = scratch.room("h", step.num_pairs * step.width * 4)
        barrier = scratch.room("barrier", 8)
        work = max(step.num_pairs * step.width, step.num_tokens * step.size)
        kernel, fields, shared = step.plan.entries["decode"]
        argument = fields.pack(
            shared,
            *(step.x.address, ids.address, table, step.weights.address, self._pool.address),
            *(h, step.out.address, barrier, 0 if memory is None else memory.gate(step.layer)),
            *(ids_kind(ids.dtype), step.weights_kind, step.num_tokens, step.top_k, num_ids),
            self._pool.num_slots,
        )
        blocks = min(step.plan.decode_blocks, -(-work // _WARPS))
        launch = PreparedLaunch(kernel, blocks, argument)
        self.start(launch, step.stream)
        return launch

    def start(self, launch: PreparedLaunch, stream: Stream) -> None:
        """Start `decode` as it was prepared."""
        self._device.launch(*launch, stream, cooperative=True)

    def gate_up(self, step: Step, pair_slots: int, pairs: int, count: int, h: int) -> None:
        """Compute h of some pairs, whose slots are at an address."""
        blocks = self._blocks(count * step.width)
        addresses = (step.x.address, pair_slots, pairs, self._pool.address, h)
        self._launch("gate_up", step, blocks, *addresses, count, step.top_k)

    def down(self, step: Step, pair_slots: int, pairs: int, count: int, h: int, rows: int) -> None:
        """Compute the rows of some pairs from their h."""
        blocks = self._blocks(count * step.size)
        addresses = (pair_slots, pairs, self._pool.address, h, rows)
        self._launch("down", step, blocks, *addresses, count)

    def combine_rows(self, step: Step, rows: int) -> None:
        """Sum the weighted rows of each token; row p is pair p's, in float32."""
        self._combine("combine_rows", step, rows, 0)

    def multiply_gate_up(self, step: Step, tiles: "Tiles", h: int) -> None:
        """Compute h of a wave's pairs, in their order, in the type of hidden states."""
        blocks = self._blocks(tiles.num_tiles * -(-step.kind.wide_rows // _TILE_ROWS), 1)
        addresses = (step.x.address, tiles.address, tiles.pairs, self._pool.address, h)
        self._launch("multiply_gate_up", step, blocks, *addresses, tiles.num_tiles, step.top_k)

    def multiply_down(self, step: Step, tiles: "Tiles", h: int, rows: int) -> None:
        """Compute the rows of a wave's pairs, row p that of pair p, from their h."""
        blocks = self._blocks(tiles.num_tiles * -(-step.size // _TILE_ROWS), 1)
        addresses = (h, tiles.address, tiles.pairs, self._pool.address, rows)
        self._launch("multiply_down", step, blocks, *addresses, tiles.num_tiles)

    def gather(self, step: Step, pairs: int, count: int, gathered: int) -> None:
        """Copy the hidden states of some pairs one behind the other."""
        numbers = (count, step.top_k, step.size)
        self._launch(
            "gather", step, self._blocks(count, 1), step.x.address, pairs, gathered, *numbers
        )

    def activate(self, step: Step, both: int, count: int, h: int) -> None:
        """Compute activation(gate) * up of rows, or activation(up) where there is no gate."""
        numbers = (count, step.width, step.kind.is_gated, self._activation)
        self._launch("activate", step, self._blocks(count, 1), both, h, *numbers)

    def combine(self, step: Step, rows: int, place: int) -> None:
        """Sum the weighted rows of each token; `place` has where each pair's is, 0: row p."""
        self._combine("combine", step, rows, place)

    def multiply(self, step: Step, role: str, wave: Any, rows: int, out: int) -> None:
        """Compute a product with a role of each of a wave's experts."""
        kind = step.kind
        n, k = (kind.size, kind.width) if role == "down" else (kind.wide_rows, kind.size)
        item, bounds = step.dtype.itemsize, wave.offsets.tolist()
        products = [
            Product(
                rows + start * k * item,
                self._address(slot, role),
                out + start * n * item,
                stop - start,
                n,
                k,
            )
            for slot, start, stop in zip(wave.slots.tolist(), bounds, bounds[1:], strict=False)
        ]
        self._device.products(products, step.dtype, step.stream)

    def _combine(self, entry: str, step: Step, rows: int, place: int) -> None:
        blocks = self._blocks(step.num_tokens, 1)
        addresses = (rows, place, step.weights.address, step.out.address)
        numbers = (step.weights_kind, step.num_tokens, step.top_k, step.size)
        self._launch(entry, step, blocks, *addresses, *numbers)

    def _launch(self, entry: str, step: Step, num_blocks: int, *values: int) -> None:
        kernel, fields, shared = step.plan.entries[entry]
        self._device.launch(kernel, num_blocks, fields.pack(shared, *values), step.stream)

    def _place(self, kind: ExpertKind, role: str) -> tuple[int, ...]:
        """Return from where to where slots are, where a matrix and its biases are in each."""
        pool, bias_kind = self._pool, kind.bias_kind
        bias = pool.offset(f"{role}_bias") if bias_kind else 0
        return (pool.slot_stride, pool.offset(role), bias, bias_kind)

    def _address(self, slot: int, role: str) -> int:
        return self._pool.address + slot * self._pool.slot_stride + self._pool.offset(role)

    def _blocks(self, work: int, per_block: int = _WARPS) -> int:
        """Return how many blocks to start; the kernels take any number."""
        return min(-(-work // per_block), _MOST_BLOCKS * self._device.num_multiprocessors)
