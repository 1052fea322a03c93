"""GGUF files to be packed: each expert's matrices side by side, in types and names of GGUF.

Two parts of a split file: metadata and trunk, and the experts, with the
names that files had before experts were stacked ("blk.3.ffn_gate.7.weight"). In compute form, these
are tensors of bytes, and the metadata say of what.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moecache.errors import ConfigError
from moecache.layout import ExpertLayout
from moecache.packing._plan import ALIGNMENT, ZEROS, Extent, FilePlan, Unit
from moecache.packing._recipe import Tile
from moecache.packing._source import Origin
from moecache.stores.gguf import GgufStore
from moecache.stores.gguf._experts import is_expert, single_name, stack_name
from moecache.stores.gguf._form import BYTES_TYPE, PREFIX, FormOf, encode_forms
from moecache.stores.gguf._header import DEFAULT_ALIGNMENT, GgufEntry
from moecache.stores.gguf._parts import part_name

_VERSION = 3
_HASH_CHUNK_BYTES = 2**20
_TRUNK_UNIT_BYTES = 2**28
_UINT16, _INT32 = 2, 5


class GgufSource(Origin, GgufStore):
    """A checkpoint in GGUF to be packed.

    Raises
    ------
    ConfigError
        If it has no experts.
    StoreError
        If it cannot be read; FormatError if it is damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.begin()

    @property
    def tensors(self) -> Mapping[str, tuple[int, GgufEntry]]:
        """Every tensor by its name: the number of its file, and its entry there."""
        return self._tensors

    def hash_header(self, number: int) -> str:
        """Return a checksum of all that stands before a file's first tensor."""
        file, digest = self.files[number], hashlib.blake2b(digest_size=16)
        offsets = [entry.offset for part, entry in self._tensors.values() if part == number]
        end = min(offsets, default=file.nbytes)
        for start in range(0, end, _HASH_CHUNK_BYTES):
            chunk = bytearray(min(_HASH_CHUNK_BYTES, end - start))
            file.read(start, [memoryview(chunk)], "the header")
            digest.update(chunk)
        return digest.hexdigest()


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a packed file: its name, shape and type, where its bytes are from.

    `boundary` divides its place in the file; `unit`, if it is not "", begins with it; `form` says
    of what it is the compute form.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    extent: Extent
    boundary: int
    unit: str = ""
    form: FormOf | None = None


def plan_gguf(source: GgufSource, *, compute_form: bool = False) -> tuple[FilePlan, FilePlan]:
    """Return the files of experts, each at a 4 KiB boundary, layer by layer, and of the trunk."""
    alignment = source.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    experts = list(_experts(source, alignment, compute_form=compute_form))
    trunk = list(_trunk(source, alignment))
    stem = part_name(source.files[0].path)
    said = [
        (key, source.metadata.encoded(key))
        for key in source.metadata
        if not key.startswith(("split.", PREFIX))
    ]
    aligned = [(key, value) for key, value in said if key == "general.alignment"]
    said += encode_forms({stack_name(t.name): t.form for t in experts if t.form})
    total = len(experts) + len(trunk)
    first = _file(f"{stem}-00001-of-00002.gguf", 0, total, said, trunk, alignment)
    second = _file(f"{stem}-00002-of-00002.gguf", 1, total, aligned, experts, alignment)
    return second, first


def tiled(layout: ExpertLayout) -> ExpertLayout:
    """Return a layout whose matrices are in compute form, as far as their formats have one."""
    layers = [
        [replace(role, is_tiled=role.form_bytes > 0) for role in roles] for roles in layout.layers
    ]
    return replace(layout, layers=layers)


def form_extents(source: GgufSource, layer: int, expert: int) -> list[Extent]:
    """Return the bytes of an expert in compute form, each matrix's as one extent."""
    return [tensor.extent for tensor in _expert(source, 1, layer, expert, compute_form=True)]


def _experts(source: GgufSource, alignment: int, *, compute_form: bool) -> Iterator[_Tensor]:
    for layer, layer_name in enumerate(source.layout.layer_names):
        unit = f"layer {layer} ({layer_name})"
        for expert in range(source.layout.num_experts):
            tensors = _expert(source, alignment, layer, expert, compute_form=compute_form)
            for number, tensor in enumerate(tensors):
                yield tensor if expert or number else replace(tensor, unit=unit)


def _expert(
    source: GgufSource, alignment: int, layer: int, expert: int, *, compute_form: bool
) -> Iterator[_Tensor]:
    roles = {role.name: role for role in source.layout.layers[layer]}
    pieces = source.pieces(layer)
    for number, piece in enumerate(pieces):
        name = piece.sources[0 if piece.stacked else expert]
        entry = source.tensors[name][1]
        # A stack is of matrices, or of vectors.
        shape = entry.shape[1:] if len(entry.shape) > len(piece.shape) else entry.shape
        place = int(piece.files[expert]), int(piece.offsets[expert])
        role, kind = roles[piece.role], entry.type.number
        extent, form = Extent(0, piece.nbytes, *place), None
        is_formed = entry.type.is_quantized and role.format
        if is_formed and (role.is_tiled or (compute_form and role.form_bytes)):
            rows = role.shape[0] // sum(other.role == piece.role for other in pieces)
            kind, form = BYTES_TYPE, FormOf(entry.type, rows, role.shape[1])
            if not role.is_tiled:
                places = ((*place, piece.nbytes),)
                what = f"{name} [{expert}]" if piece.stacked else name
                recipe = Tile(what, places, entry.type.format, rows, role.shape[1])
                extent = Extent(0, recipe.nbytes, ZEROS, 0, recipe)
            shape = (extent.nbytes,)
        # A role that is read straight into its slot begins a block, as it does there.
        is_aligned = piece.start == 0 if form else number == 0
        boundary = max(ALIGNMENT, alignment) if is_aligned else alignment
        yield _Tensor(single_name(name, expert), shape, kind, extent, boundary, form=form)


def _trunk(source: GgufSource, alignment: int) -> Iterator[_Tensor]:
    done, number = _TRUNK_UNIT_BYTES, 0
    for name, (file, entry) in sorted(
        source.tensors.items(), key=lambda item: (item[1][0], item[1][1].offset)
    ):
        if is_expert(name):
            continue
        unit = ""
        if done >= _TRUNK_UNIT_BYTES:
            unit, done, number = f"part {number}", 0, number + 1
        done += entry.nbytes
        extent = Extent(0, entry.nbytes, file, entry.offset)
        yield _Tensor(name, entry.shape, entry.type.number, extent, alignment, unit)


def _file(
    name: str,
    number: int,
    total: int,
    metadata: Iterable[tuple[str, bytes]],
    tensors: Sequence[_Tensor],
    alignment: int,
) -> FilePlan:
    """Return a part of a split file; offsets of tensors count from the end of its header."""
    said = [
        *metadata,
        ("split.no", struct.pack("<IH", _UINT16, number)),
        ("split.count", struct.pack("<IH", _UINT16, 2)),
        ("split.tensors.count", struct.pack("<Ii", _INT32, total)),
    ]
    head = b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(said))
    head += b"".join(_string(key) + value for key, value in said)
    length = len(head) + sum(8 + len(t.name.encode()) + 16 + 8 * len(t.shape) for t in tensors)
    # Everything before the first tensor is the header's unit.
    start = end = -(-length // alignment) * alignment
    table, padding = [head], 0
    units: list[tuple[str, int, list[Extent]]] = []
    for tensor in tensors:
        if tensor.unit:
            units.append((tensor.unit, end, []))
        extents = units[-1][2]
        gap = -end % tensor.boundary
        if gap:
            extents.append(Extent(end, gap, ZEROS, 0))
        end, padding = end + gap, padding + gap
        extents.append(tensor.extent._replace(offset=end))
        reverse = tuple(reversed(tensor.shape))
        sizes = struct.pack(f"<I{len(reverse)}Q", len(reverse), *reverse)
        table.append(_string(tensor.name) + sizes + struct.pack("<IQ", tensor.type, end - start))
        end += tensor.extent.nbytes
    # A direct read of the last tensor needs whole blocks, too.
    gap = -end % ALIGNMENT
    if gap and units:
        units[-1][2].append(Extent(end, gap, ZEROS, 0))
        end, padding = end + gap, padding + gap
    ends = [*(begin for _, begin, _ in units), end][1:]
    header = b"".join(table).ljust(start, b"\0")
    return FilePlan(
        name,
        nbytes=end,
        tensor_bytes=sum(tensor.extent.nbytes for tensor in tensors),
        padding_bytes=padding,
        units=[
            Unit(name, "header", 0, start, header=header),
            *(
                Unit(name, unit, begin, stop - begin, parts)
                for (unit, begin, parts), stop in zip(units, ends, strict=True)
            ),
        ],
        tensor_names=[tensor.name for tensor in tensors],
    )


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def check_target(target: str) -> None:
    """Raise ConfigError if a GGUF should be packed in a format: it keeps its types."""
    if target:
        raise ConfigError(
            f"a GGUF keeps its types, so that it cannot be packed in {target}; leave --format out, "
            "or give --compute-form for the same values in the order that kernels read"
        )
