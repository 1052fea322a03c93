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
from moecache.packing._recipe import Recipe, recipe_for
from moecache.packing._source import PADDING_PREFIX, Source
from moecache.stores._header import FORMAT_KEY, MAX_HEADER_BYTES
from moecache.stores._index import split_name

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

    File `ZEROS` stands for padding. With a recipe, the bytes are made of those there.
    """

    offset: int
    nbytes: int
    file: int
    source_offset: int
    recipe: Recipe | None = None


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


def plan_experts(source: Source, format: str = "") -> FilePlan:  # noqa: A002 - what it is
    """Return the file of experts: layer by layer, by number, each role at a 4 KiB boundary.

    Parameters
    ----------
    source : Source
    format : str, default ""
        What matrices are quantized to; by default they stay as they are.
    """
    layout, draft = source.layout, _Draft(EXPERTS_NAME, format or source.format)
    for layer, layer_name in enumerate(layout.layer_names):
        draft.start_unit(f"layer {layer} ({layer_name})")
        roles = {role.name: role for role in layout.layers[layer]}
        for expert in range(layout.num_experts):
            for piece in source.pieces(layer):
                name = piece.sources[0 if piece.stacked else expert]
                _, entry = source.tensors[name]
                shape = entry.shape
                if piece.stacked:
                    name, shape = split_name(name, expert), entry.shape[1:]
                if piece.start == 0:
                    draft.align(ALIGNMENT)
                place = int(piece.files[expert]), int(piece.offsets[expert])
                recipe = recipe_for(piece, roles[piece.role], format) if format else None
                if recipe is None:
                    draft.add(name, entry.dtype_name, shape, piece.nbytes, *place)
                else:
                    draft.add(name, "U8", recipe.shape, recipe.nbytes, *place, recipe)
        # A direct read of the last role needs whole blocks too.
        draft.align(ALIGNMENT)
    return draft.finish()


def plan_trunk(source: Source) -> FilePlan:
    """Return the file of every other tensor, in the order of the source's files."""
    of_experts = {
        name
        for layer in range(source.layout.num_layers)
        for piece in source.pieces(layer)
        for name in piece.sources
    }
    draft = _Draft(TRUNK_NAME)
    in_order = sorted(source.tensors.items(), key=lambda item: (item[1][0], item[1][1].offset))
    for name, (file, entry) in in_order:
        # The padding of a checkpoint that was packed before is not packed once more.
        if name not in of_experts and not name.startswith(PADDING_PREFIX):
            draft.align(_TRUNK_ALIGNMENT)
            draft.add(name, entry.dtype_name, entry.shape, entry.nbytes, file, entry.offset)
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
        # Text at once: the entries of 100,000 tensors take a tenth of what objects would.
        said = {"format": "pt"} | ({FORMAT_KEY: format} if format else {})
        self._entries = ['"__metadata__":' + json.dumps(said, separators=(",", ":"))]

    def add(
        self,
        name: str,
        dtype_name: str,
        shape: Sequence[int],
        nbytes: int,
        file: int,
        source_offset: int,
        recipe: Recipe | None = None,
    ) -> None:
        """Append a tensor."""
        self._names.append(name)
        self._append(name, dtype_name, shape, Extent(0, nbytes, file, source_offset, recipe))

    def align(self, boundary: int) -> None:
        """Fill up to a multiple of `boundary`: readers of safetensors refuse holes."""
        gap = -self._end % boundary
        if gap:
            name = f"{PADDING_PREFIX}{self._num_paddings}"
            self._num_paddings += 1
            self._padding_bytes += gap
            self._append(name, "U8", [gap], Extent(0, gap, ZEROS, 0))

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

    def _append(self, name: str, dtype_name: str, shape: Sequence[int], extent: Extent) -> None:
        sizes = ",".join(map(str, shape))
        end = self._end + extent.nbytes
        self._entries.append(
            f'{json.dumps(name)}:{{"dtype":"{dtype_name}","shape":[{sizes}],'
            f'"data_offsets":[{self._end},{end}]}}'
        )
        if extent.nbytes:
            self._extents.append(extent._replace(offset=self._end))
        self._end = end


def _cut(extent: Extent, end: int) -> tuple[Extent, Extent | None]:
    """Return the part of an extent before `end`, and what is left of it."""
    nbytes = end - extent.offset
    if nbytes >= extent.nbytes:
        return extent, None
    rest = Extent(end, extent.nbytes - nbytes, extent.file, extent.source_offset + nbytes)
    return extent._replace(nbytes=nbytes), rest
