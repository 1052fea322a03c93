"""Launches: the kernels' arguments, and what the parts of a step share."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from moecache.cuda._arguments import ids_kind
from moecache.cuda._kinds import ExpertKind
from moecache.cuda._scratch import Scratch
from moecache.cuda._token_memory import TokenMemory
from moecache.cuda.device import Device, DeviceArray, Product, Stream
from moecache.errors import ConfigError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu", "clamped_silu")
_SWIGLU = ACTIVATIONS.index("swiglu")
_STREAMED = ("decode", "gate_up", "down", "combine_rows")
_MULTIPLIED = ("gather", "activate", "combine")
_GROUPED = ("multiply_gate_up", "multiply_down", "combine")
# Pairs of a tile, and rows that a block takes of gate_up's halves and of down: as in products.cu.
_TILE_PAIRS, _TILE_PARTS = 64, {"gate_up": 64, "down": 128}
_WARPS = 256 // 32
# Blocks for each multiprocessor, of kernels that take any number.
_MOST_BLOCKS = 12


# Fields of `DecodeArguments` in decode.cu, in their order.
DECODE_ARGUMENTS = np.dtype(
    [
        *((name, np.uint64) for name in ("x", "ids", "slot_table", "weights", "first_slot")),
        *((name, np.int64) for name in ("slot_stride", "gate_up_offset", "down_offset")),
        *((name, np.int64) for name in ("gate_up_bias_offset", "down_bias_offset")),
        *((name, np.uint64) for name in ("h", "out", "barrier", "step_gate")),
        *((name, np.int32) for name in ("ids_kind", "weights_kind", "bias_kind")),
        *((name, np.int32) for name in ("is_interleaved", "num_tokens", "top_k", "num_experts")),
        *((name, np.int32) for name in ("num_slots", "hidden", "width", "activation")),
        *((name, np.float32) for name in ("alpha", "limit")),
    ],
    align=True,
)
# As bytes: NumPy takes 20 us to say where an array with fields lies, and CuPy asks it each time.
_DECODE_BYTES = np.dtype((np.void, DECODE_ARGUMENTS.itemsize))


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
    """A kernel, the blocks to start, and its argument: `DECODE_ARGUMENTS`, as bytes."""

    kernel: str
    num_blocks: int
    arguments: tuple[np.ndarray]


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
        kind: ExpertKind,
        scratch: Scratch,
    ) -> None:
        self.layer = layer
        self.x = x
        self.out = out
        self.num_tokens = num_tokens
        self.top_k = top_k
        self.num_pairs = num_tokens * top_k
        self.kind = kind
        self.size = kind.size
        self.width = kind.width
        self.dtype = kind.dtype
        self.scratch = scratch
        self.stream = scratch.stream
        of_hidden = weights.dtype != np.float32
        self.weights = (np.uint64(weights.address), np.int32(of_hidden))
        self._weights = weights

    def part(self, first: int, last: int) -> "Step":
        """Return the step of the tokens from one to before another."""
        x, weights, out = (_rows(array, first, last) for array in (self.x, self._weights, self.out))
        return Step(self.layer, x, weights, out, last - first, self.top_k, self.kind, self.scratch)


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
        self._activation = np.int32(ACTIVATIONS.index(activation))
        self._limits = (np.float32(alpha), np.float32(limit))
        self._is_interleaved = np.int32(is_interleaved)

    @staticmethod
    def is_grouped(kind: ExpertKind) -> bool:
        """Return whether tensor cores multiply many tokens by a wave's experts in one launch."""
        return kind.dtype.itemsize == 2

    def is_multiplied(self, kind: ExpertKind) -> bool:
        """Return whether cuBLAS can multiply many tokens by these experts, one after the other."""
        is_usual = not self._is_interleaved and self._activation < _SWIGLU
        return bool(kind.is_plain and is_usual)

    def kernels(self, kind: ExpertKind) -> list[str]:
        """Return the names of the kernels that such experts need."""
        many = _MULTIPLIED if self.is_multiplied(kind) else ()
        entries = _STREAMED + (_GROUPED if self.is_grouped(kind) else many)
        return [kind.kernel(entry) for entry in entries]

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
        pool, bias_kind = self._pool, step.kind.bias_kind
        biases = ("gate_up_bias", "down_bias")
        fields = (
            *(step.x.address, ids.address, table, step.weights[0], pool.address, pool.slot_stride),
            *(pool.offset("gate_up"), pool.offset("down")),
            *(pool.offset(role) if bias_kind else 0 for role in biases),
            *(h, step.out.address, barrier, 0 if memory is None else memory.gate(step.layer)),
            *(ids_kind(ids.dtype), step.weights[1], bias_kind, self._is_interleaved),
            *(step.num_tokens, step.top_k, num_ids, pool.num_slots, step.size, step.width),
            *(self._activation, *self._limits),
        )
        arguments = np.array([fields], DECODE_ARGUMENTS).view(_DECODE_BYTES)
        resident = step.kind.blocks_per_multiprocessor * self._device.num_multiprocessors
        blocks = min(resident, -(-work // _WARPS))
        launch = PreparedLaunch(step.kind.kernel("decode"), blocks, (arguments,))
        self.start(launch, step.stream)
        return launch

    def start(self, launch: PreparedLaunch, stream: Stream) -> None:
        """Start `decode` as it was prepared."""
        self._device.launch(*launch, stream, cooperative=True)

    def gate_up(self, step: Step, pair_slots: int, pairs: int, count: int, h: int) -> None:
        """Compute h of some pairs, whose slots are at an address."""
        self._launch(
            "gate_up",
            step,
            self._blocks(count * step.width),
            np.uint64(step.x.address),
            np.uint64(pair_slots),
            np.uint64(pairs),
            np.int32(count),
            *self._slots("gate_up"),
            *self._biases(step, "gate_up_bias"),
            self._is_interleaved,
            np.int32(step.top_k),
            np.int32(step.size),
            np.int32(step.width),
            self._activation,
            *self._limits,
            np.uint64(h),
        )

    def down(self, step: Step, pair_slots: int, pairs: int, count: int, h: int, rows: int) -> None:
        """Compute the rows of some pairs from their h."""
        self._launch(
            "down",
            step,
            self._blocks(count * step.size),
            np.uint64(pair_slots),
            np.uint64(pairs),
            np.int32(count),
            *self._slots("down"),
            *self._biases(step, "down_bias"),
            np.int32(step.size),
            np.int32(step.width),
            np.uint64(h),
            np.uint64(rows),
        )

    def combine_rows(self, step: Step, rows: int) -> None:
        """Sum the weighted rows of each token; row p is pair p's, in float32."""
        self._launch(
            "combine_rows",
            step,
            self._blocks(step.num_tokens, 1),
            np.uint64(rows),
            *step.weights,
            np.int32(step.num_tokens),
            np.int32(step.top_k),
            np.int32(step.size),
            np.uint64(step.out.address),
        )

    def multiply_gate_up(self, step: Step, tiles: "Tiles", h: int) -> None:
        """Compute h of a wave's pairs, in their order, in the type of hidden states."""
        self._launch(
            "multiply_gate_up",
            step,
            self._blocks(tiles.num_tiles * -(-step.width // _TILE_PARTS["gate_up"]), 1),
            np.uint64(step.x.address),
            np.uint64(tiles.address),
            np.int32(tiles.num_tiles),
            np.uint64(tiles.pairs),
            *self._slots("gate_up"),
            *self._biases(step, "gate_up_bias"),
            self._is_interleaved,
            np.int32(step.top_k),
            np.int32(step.size),
            np.int32(step.width),
            self._activation,
            *self._limits,
            np.uint64(h),
        )

    def multiply_down(self, step: Step, tiles: "Tiles", h: int, rows: int) -> None:
        """Compute the rows of a wave's pairs, row p that of pair p, from their h."""
        self._launch(
            "multiply_down",
            step,
            self._blocks(tiles.num_tiles * -(-step.size // _TILE_PARTS["down"]), 1),
            np.uint64(h),
            np.uint64(tiles.address),
            np.int32(tiles.num_tiles),
            np.uint64(tiles.pairs),
            *self._slots("down"),
            *self._biases(step, "down_bias"),
            np.int32(step.size),
            np.int32(step.width),
            np.uint64(rows),
        )

    def gather(self, step: Step, pairs: int, count: int, gathered: int) -> None:
        """Copy the hidden states of some pairs one behind the other."""
        self._launch(
            "gather",
            step,
            self._blocks(count, 1),
            np.uint64(step.x.address),
            np.uint64(pairs),
            np.int32(count),
            np.int32(step.top_k),
            np.int32(step.size),
            np.uint64(gathered),
        )

    def activate(self, step: Step, both: int, count: int, h: int) -> None:
        """Compute activation(gate) * up of rows."""
        self._launch(
            "activate",
            step,
            self._blocks(count, 1),
            np.uint64(both),
            np.int64(count),
            np.int32(step.width),
            self._activation,
            np.uint64(h),
        )

    def combine(self, step: Step, rows: int, place: int) -> None:
        """Sum the weighted rows of each token; `place` has where each pair's is, 0: row p."""
        self._launch(
            "combine",
            step,
            self._blocks(step.num_tokens, 1),
            np.uint64(rows),
            np.uint64(place),
            *step.weights,
            np.int32(step.num_tokens),
            np.int32(step.top_k),
            np.int32(step.size),
            np.uint64(step.out.address),
        )

    def multiply(self, step: Step, role: str, wave: Any, rows: int, out: int) -> None:
        """Compute a product with a role of each of a wave's experts."""
        n, k = (2 * step.width, step.size) if role == "gate_up" else (step.size, step.width)
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

    def _launch(
        self,
        name: str,
        step: Step,
        num_blocks: int,
        *arguments: np.generic,
    ) -> None:
        self._device.launch(step.kind.kernel(name), num_blocks, arguments, step.stream)

    def _biases(self, step: Step, *roles: str) -> tuple[np.generic, ...]:
        kind = step.kind.bias_kind
        offsets = (np.int64(self._pool.offset(role) if kind else 0) for role in roles)
        return (*offsets, np.int32(kind))

    def _slots(self, *roles: str) -> tuple[np.generic, ...]:
        pool = self._pool
        offsets = (np.int64(pool.offset(role)) for role in roles)
        return (np.uint64(pool.address), np.int64(pool.slot_stride), *offsets)

    def _address(self, slot: int, role: str) -> int:
        return self._pool.address + slot * self._pool.slot_stride + self._pool.offset(role)

    def _blocks(self, work: int, per_block: int = _WARPS) -> int:
        """Return how many blocks to start; the kernels take any number."""
        return min(-(-work // per_block), _MOST_BLOCKS * self._device.num_multiprocessors)
