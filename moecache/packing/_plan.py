"""Which byte of a packed directory comes from where: all of it, before anything is written.

A file is a header and units. A unit is what is written, flushed to disk,
checksummed and noted in the journal at once: a layer's experts, or a part of
the trunk. The plan of a checkpoint is always the same, and so is what is packed.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moecache.errors import FormatError
from moecache.layout import Role
from moecache.packing._recipe import Dequantize, Quantize, Recipe
from moecache.packing._source import PADDING_PREFIX, Source
from moecache.packing._target import MATRICES, PLAIN
from moecache.stores._header import FORMAT_KEY, MAX_HEADER_BYTES
from moecache.stores._index import split_name
from moecache.stores._parts import TensorPart

EXPERTS_NAME = "experts.safetensors"
TRUNK_NAME = "trunk.safetensors"
# Direct reads need it: the largest block of a disk, and a page of memory.
ALIGNMENT = 4096
# PyTorch refuses a view of its dtype at another multiple; wide enough for SIMD too.
_TRUNK_ALIGNMENT = 64
_TRUNK_UNIT_BYTES = 2**28
ZEROS = -1


class Extent(NamedTuple):
    """Bytes `[offset, offset + nbytes)` of a packed file, from a file of the source.

    File `ZEROS` stands for padding. With a recipe, they are those that it makes from
    `source_offset` on.
    """

    offset: int
    nbytes: int
    file: int
    source_offset: int
    recipe: Recipe | None = None


def _extent_of(recipe: Recipe) -> Extent:
    return Extent(0, recipe.nbytes, ZEROS, 0, recipe)


@dataclass(frozen=True)
class Unit:
    """A part of a packed file that is finished, or not: extents without gaps, or a header."""

    file: str
    name: str
    offset: int
    nbytes: int
    extents: Sequence[Extent] = ()
    header: bytes = b""

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class FilePlan:
    """A packed file: its units, from the first byte to the last, and the tensors in it."""

    name: str
    nbytes: int
    tensor_bytes: int
    padding_bytes: int
    units: Sequence[Unit]
    tensor_names: Sequence[str]


def plan_experts(source: Source, target: str = "") -> FilePlan:
    """Return the file of experts: layer by layer, by number, each role at a 4 KiB boundary.

    Parameters
    ----------
    source : Source
    target : str, default ""
        Full name of the format that matrices become; by default they stay as they are.
    """
    layout = source.layout
    draft = _Draft(EXPERTS_NAME, "" if target == PLAIN else target or source.format)
    for layer, layer_name in enumerate(layout.layer_names):
        draft.start_unit(f"layer {layer} ({layer_name})")
        for expert in range(layout.num_experts):
            if target == PLAIN:
                _add_plain(draft, source, layer, expert)
            else:
                _add_expert(draft, source, layer, expert, target)
        # A direct read of the last role needs whole blocks too.
        draft.align(ALIGNMENT)
    return draft.finish()


def _add_expert(draft: "_Draft", source: Source, layer: int, expert: int, target: str) -> None:
    """Append the tensors of an expert, quantized if there is a target."""
    roles = {role.name: role for role in source.layout.layers[layer]}
    for piece in source.pieces(layer):
        name = original = piece.sources[0 if piece.stacked else expert]
        _, entry = source.tensors[name]
        shape = entry.shape
        if piece.stacked:
            name, shape = split_name(name, expert), entry.shape[1:]
            original = f"{original} [{expert}]"
        if piece.start == 0:
            draft.align(ALIGNMENT)
        role, place = roles[piece.role], (int(piece.files[expert]), int(piece.offsets[expert]))
        if not target or role.name not in MATRICES:
            draft.add(name, entry.dtype_name, shape, Extent(0, piece.nbytes, *place))
            continue
        matrices = 2 if role.name == "gate_up" and piece.nbytes == role.nbytes else 1
        rows, columns = reversed(shape) if role.is_transposed else shape
        recipe = Quantize(
            original,
            ((*place, piece.nbytes),),
            target,
            rows,
            columns,
            role.dtype,
            matrices,
            role.is_transposed,
        )
        draft.add(name, "U8", recipe.shape, _extent_of(recipe))


def _add_plain(draft: "_Draft", source: Source, layer: int, expert: int) -> None:
    """Append an expert's tensors as they are where nothing is quantized; stacks with the first."""
    roles = {role.name: role for role in source.layout.layers[layer]}
    for parts in source.matrices(layer):
        piece, role = parts[0], roles[parts[0].role]
        if piece.stacked and expert:
            continue
        if piece.start == 0:
            draft.align(ALIGNMENT)
        name = piece.sources[0 if piece.stacked else expert]
        file, entry = source.tensors[name]
        if not role.format:
            extent = Extent(0, entry.nbytes, file, entry.offset)
            draft.add(name, entry.dtype_name, entry.shape, extent)
            continue
        weight = piece.weight if piece.stacked else source.weight_of(piece, expert)
        experts = range(source.layout.num_experts) if piece.stacked else (expert,)
        made = [_plain(source, weight, parts, role, e) for e in experts]
        stack = (len(made),) if piece.stacked else ()
        draft.add(weight, "BF16", (*stack, *made[0].shape), *map(_extent_of, made))


def _plain(
    source: Source, weight: str, parts: Sequence[TensorPart], role: Role, expert: int
) -> Dequantize:
    what = f"{weight} [{expert}]" if parts[0].stacked else weight
    places = tuple(
        (int(part.files[expert]), int(part.offsets[expert]), part.nbytes) for part in parts
    )
    return Dequantize(what, places, role.format, *role.matrix_shape, source.is_transposed)


def plan_trunk(source: Source, target: str = "") -> FilePlan:
    """Return the file of every other tensor, in the order of the source's files."""
    done = {
        name
        for layer in range(source.layout.num_layers)
        for piece in source.pieces(layer)
        for name in piece.sources
    }
    matrices = {}
    if target == PLAIN:
        done |= source.beside()
        matrices = {
            name: (weight, matrix, names)
            for weight, (matrix, names) in source.trunk_matrices.items()
            for name in names
        }
    draft = _Draft(TRUNK_NAME)
    in_order = sorted(source.tensors.items(), key=lambda item: (item[1][0], item[1][1].offset))
    for name, (file, entry) in in_order:
        # The padding of a checkpoint that was packed before is not packed once more.
        if name in done or name.startswith(PADDING_PREFIX):
            continue
        draft.align(_TRUNK_ALIGNMENT)
        if name not in matrices:
            extent = Extent(0, entry.nbytes, file, entry.offset)
            draft.add(name, entry.dtype_name, entry.shape, extent)
            continue
        weight, matrix, names = matrices[name]
        done.update(names)
        found = [source.tensors[part] for part in names]
        places = tuple((number, part.offset, part.nbytes) for number, part in found)
        shape = matrix.rows, matrix.columns
        recipe = Dequantize(weight, places, matrix.format.name, *shape, is_transposed=False)
        draft.add(weight, "BF16", recipe.shape, _extent_of(recipe))
    draft.start_units_every(_TRUNK_UNIT_BYTES)
    return draft.finish()


class _Draft:
    """A safetensors file as it grows; offsets count from the end of its header."""

    def __init__(self, name: str, format: str = "") -> None:  # noqa: A002 - what it is
        self._name = name
        self._end = 0
        self._padding_bytes = 0
        self._num_paddings = 0
        self._extents: list[Extent] = []
        self._starts: list[tuple[int, str]] = []
        self._names: list[str] = []
        # Entries are text at once: for 100,000 tensors that takes a tenth of the memory of objects.
        said = {"format": "pt"} | ({FORMAT_KEY: format} if format else {})
        self._entries = ['"__metadata__":' + json.dumps(said, separators=(",", ":"))]

    def add(self, name: str, dtype_name: str, shape: Sequence[int], *extents: Extent) -> None:
        """Append a tensor, whose bytes are those of the extents, one after the other."""
        self._names.append(name)
        self._append(name, dtype_name, shape, extents)

    def align(self, boundary: int) -> None:
        """Fill up to a multiple of `boundary`: readers of safetensors refuse holes."""
        gap = -self._end % boundary
        if gap:
            name = f"{PADDING_PREFIX}{self._num_paddings}"
            self._num_paddings += 1
            self._padding_bytes += gap
            self._append(name, "U8", [gap], [Extent(0, gap, ZEROS, 0)])

    def start_unit(self, name: str) -> None:
        """Let what follows be a unit of its own."""
        self._starts.append((self._end, name))

    def start_units_every(self, nbytes: int) -> None:
        """Cut what was appended so far into units of one size, within tensors too."""
        for number, start in enumerate(range(0, self._end, nbytes)):
            self._starts.append((start, f"part {number}"))

    def finish(self) -> FilePlan:
        """Return the plan, with the header that makes it a safetensors file."""
        text = ("{" + ",".join(self._entries) + "}").encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        if len(text) > MAX_HEADER_BYTES:
            raise FormatError(
                f"the header of {self._name} would have {len(text)} bytes, over the "
                f"{MAX_HEADER_BYTES} that readers accept: {len(self._entries)} tensors are too many"
            )
        header = struct.pack("<Q", len(text)) + text
        base = len(header)
        units = [Unit(self._name, "header", 0, base, header=header)]
        ends = [*(start for start, _ in self._starts), self._end][1:]
        extents = iter(self._extents)
        left = next(extents, None)
        for (start, name), end in zip(self._starts, ends, strict=True):
            taken: list[Extent] = []
            while left is not None and left.offset < end:
                part, left = _cut(left, end)
                taken.append(part._replace(offset=base + part.offset))
                left = left or next(extents, None)
            units.append(Unit(self._name, name, base + start, end - start, taken))
        return FilePlan(
            self._name,
            nbytes=base + self._end,
            tensor_bytes=self._end - self._padding_bytes,
            padding_bytes=self._padding_bytes,
            units=units,
            tensor_names=self._names,
        )

    def _append(
        self, name: str, dtype_name: str, shape: Sequence[int], extents: Sequence[Extent]
    ) -> None:
        sizes = ",".join(map(str, shape))
        end = self._end + sum(extent.nbytes for extent in extents)
        self._entries.append(
            f'{json.dumps(name)}:{{"dtype":"{dtype_name}","shape":[{sizes}],'
            f'"data_offsets":[{self._end},{end}]}}'
        )
        for extent in extents:
            if extent.nbytes:
                self._extents.append(extent._replace(offset=self._end))
            self._end += extent.nbytes


def _cut(extent: Extent, end: int) -> tuple[Extent, Extent | None]:
    """Return the part of an extent before `end`, and what is left of it."""
    nbytes = end - extent.offset
    if nbytes >= extent.nbytes:
        return extent, None
    rest = extent._replace(
        offset=end, nbytes=extent.nbytes - nbytes, source_offset=extent.source_offset + nbytes
    )
    return extent._replace(nbytes=nbytes), rest
