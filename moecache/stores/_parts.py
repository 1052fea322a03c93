"""Roles of a layer's experts, and which parts of which tensors make them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moecache.errors import ConfigError, FormatError
from moecache.formats import format_of, stacked_name
from moecache.layout import Role
from moecache.stores._header import shown
from moecache.stores._matrices import Matrix, UnsupportedQuantizationError
from moecache.stores.base import Run

_ROLES = ("gate_up", "down")
PIECE_NAMES = {("gate_up", 0): "gate", ("gate_up", 1): "up", ("down", 0): "down"}


@dataclass(frozen=True)
class TensorPart:
    """A part of a role that lies in one tensor: where it is for every expert.

    `files` int32 [num_experts] and `offsets` int64 [num_experts] say where,
    `start` is its first byte within the role. `sources` names the tensor of
    each expert, or the one tensor that all are stacked in. `weight` is the name that
    expert 0's matrix has where it is not quantized; "" for a matrix's second and further parts.
    """

    name: str
    role: str
    start: int
    nbytes: int
    shape: tuple[int, ...]
    files: np.ndarray
    offsets: np.ndarray
    sources: tuple[str, ...]
    stacked: bool
    weight: str = ""


def runs_of(parts: Sequence[TensorPart], expert: int) -> tuple[Run, ...]:
    """Return where the bytes of one of a layer's experts lie, those that adjoin as one run."""
    extents = sorted(
        (
            int(part.files[expert]),
            int(part.offsets[expert]),
            part.role,
            part.start,
            part.start + part.nbytes,
        )
        for part in parts
        if part.nbytes
    )
    runs: list[tuple[int, int, list[tuple[str, int, int]]]] = []
    for file, offset, role, start, stop in extents:
        if runs:
            last_file, last_offset, spans = runs[-1]
            length = sum(end - begin for _, begin, end in spans)
            if file == last_file and offset == last_offset + length:
                last_role, last_start, last_stop = spans[-1]
                if last_role == role and last_stop == start:
                    spans[-1] = (role, last_start, stop)
                else:
                    spans.append((role, start, stop))
                continue
        runs.append((file, offset, [(role, start, stop)]))
    return tuple((file, offset, tuple(spans)) for file, offset, spans in runs)


def extents_of(
    parts: Sequence[TensorPart], wanted: np.ndarray | None = None
) -> list[tuple[int, int, int]]:
    """Return (file, offset, nbytes) of a layer's experts, in file order, those that adjoin as one.

    With `wanted`, bool [num_experts], only of these experts.
    """
    extents = sorted(
        (int(file), int(offset), part.nbytes)
        for part in parts
        for expert, (file, offset) in enumerate(zip(part.files, part.offsets, strict=True))
        if wanted is None or wanted[expert]
    )
    merged: list[tuple[int, int, int]] = []
    for file, offset, nbytes in extents:
        if merged and merged[-1][0] == file and sum(merged[-1][1:]) == offset:
            merged[-1] = (file, merged[-1][1], merged[-1][2] + nbytes)
        else:
            merged.append((file, offset, nbytes))
    return merged


@dataclass
class Found:
    """A tensor of each expert, or the stack of all: dtype and shape of one, and the places."""

    dtype: np.dtype
    shape: tuple[int, ...]
    # expert -> (file, offset, name), or the one entry -1 for a stack
    places: dict[int, tuple[int, int, str]] = field(default_factory=dict)
    num_stacked: int = 0
    example: str = ""
    # The matrix that codes belong to, and all its parts, the codes first.
    matrix: Matrix | None = None
    parts: list["Found"] = field(default_factory=list)


def assemble(
    layer: str, found: dict[tuple[str, int, str], Found], num_experts: int
) -> tuple[list[Role], list[TensorPart]]:
    """Return the roles of a layer, and their parts, from the tensors by role, place and suffix.

    Raises
    ------
    FormatError
        If gate and up do not fit together.
    """
    roles: list[Role] = []
    pieces: list[TensorPart] = []
    keys = sorted(found, key=lambda key: (key[2], _ROLES.index(key[0]), key[1]))
    for role, suffix in dict.fromkeys((role, suffix) for role, _, suffix in keys):
        places = [place for place in (0, 1) if (role, place, suffix) in found]
        # An up projection without a gate is a role of its own.
        name = ("up" if role == "gate_up" and places == [1] else role) + suffix
        groups = [found[role, place, suffix] for place in places]
        if any(group.matrix for group in groups):
            matrices = {place: found[role, place, suffix] for place in places}
            _add_matrices(layer, role, matrices, num_experts, roles, pieces)
            continue
        if len({(group.dtype, group.shape[1:]) for group in groups}) > 1:
            raise FormatError(
                f"gate and up of layer {shown(layer)} do not fit together: "
                + ", ".join(f"{shown(g.example)} is {g.dtype} {list(g.shape)}" for g in groups)
            )
        rows = sum(group.shape[0] for group in groups)
        roles.append(Role(name, (rows, *groups[0].shape[1:]), groups[0].dtype))
        start = 0
        for place, group in zip(places, groups, strict=True):
            nbytes = Role("", group.shape, group.dtype).nbytes
            files, offsets, sources = _places(group, num_experts, nbytes)
            piece = name if len(groups) == 1 else PIECE_NAMES[role, place] + suffix
            stacked = group.num_stacked > 0
            pieces.append(
                TensorPart(
                    name=piece,
                    role=name,
                    start=start,
                    nbytes=nbytes,
                    shape=group.shape,
                    files=files,
                    offsets=offsets,
                    sources=sources,
                    stacked=stacked,
                    weight=sources[0],
                )
            )
            start += nbytes
    return roles, pieces


def _add_matrices(
    layer: str,
    role: str,
    found: Mapping[int, Found],
    num_experts: int,
    roles: list[Role],
    pieces: list[TensorPart],
) -> None:
    """Append a role whose matrices, by their places, are in a format; each with all its parts."""
    matrices = {group.matrix for group in found.values()}
    matrix = next(one for one in matrices if one is not None)
    shapes = {
        group.shape if group.matrix is None else (group.matrix.rows, group.matrix.columns)
        for group in found.values()
    }
    mixed = _stacked_name(found) if len(matrices) > 1 == len(shapes) else ""
    if len(matrices) > 1 and not mixed:
        # A checkpoint whose matrices have one shape may be sound.
        kind = UnsupportedQuantizationError if len(shapes) == 1 else FormatError
        raise kind(
            f"gate and up of layer {shown(layer)} are not quantized alike, which is not supported: "
            + ", ".join(
                f"{shown(group.example)} is "
                + (
                    f"{group.dtype} {list(group.shape)}"
                    if group.matrix is None
                    else f"{group.matrix.format.name} [{group.matrix.rows}, {group.matrix.columns}]"
                )
                for group in found.values()
            )
        )
    name = "up" if role == "gate_up" and list(found) == [1] else role
    shape = matrix.rows * len(found), matrix.columns
    known, number = matrix.format, 1 if mixed else len(found)
    tiled = matrix.is_tiled
    roles.append(Role(name, shape, format=mixed or known.name, is_tiled=tiled, matrices=number))
    wanted = [""] if mixed else known.parts(matrix.rows, matrix.columns)
    start = 0
    for place, codes in found.items():
        piece = name if len(found) == 1 else PIECE_NAMES[role, place]
        for part, group in zip(wanted, codes.parts or [codes], strict=True):
            nbytes = Role("", group.shape, group.dtype).nbytes
            files, offsets, sources = _places(group, num_experts, nbytes)
            is_codes = group is codes
            pieces.append(
                TensorPart(
                    name=piece if is_codes else f"{piece}_{part}",
                    role=name,
                    start=start,
                    nbytes=nbytes,
                    shape=group.shape,
                    files=files,
                    offsets=offsets,
                    sources=sources,
                    stacked=group.num_stacked > 0,
                    weight=matrix.weight_name(sources[0]) if is_codes else "",
                )
            )
            start += nbytes


def _stacked_name(found: Mapping[int, Found]) -> str:
    """Return the format of matrices in formats of their own; "" if there is none."""
    if len({group.matrix.is_tiled for group in found.values() if group.matrix}) > 1:
        return ""
    try:
        return stacked_name(
            [
                format_of(group.dtype) if group.matrix is None else group.matrix.format
                for group in found.values()
            ]
        )
    except ConfigError:
        return ""


def _places(
    group: Found, num_experts: int, nbytes: int
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    if group.num_stacked:
        file, offset, name = group.places[-1]
        offsets = offset + np.arange(num_experts, dtype=np.int64) * nbytes
        return np.full(num_experts, file, np.int32), offsets, (name,)
    places = [group.places[expert] for expert in range(num_experts)]
    return (
        np.array([file for file, _, _ in places], np.int32),
        np.array([offset for _, offset, _ in places], np.int64),
        tuple(name for _, _, name in places),
    )
