"""CheckpointStore: experts straight from a checkpoint's files of any form."""

import itertools
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from moecache._prefault import address_of
from moecache.errors import ConfigError, ExpertNotFoundError, FormatError
from moecache.kernels import values_in
from moecache.layout import ExpertLayout, Role
from moecache.prefault.regions import Region
from moecache.stores._file import ReadOnlyFile
from moecache.stores._header import TensorEntry
from moecache.stores._matrices import Matrix, UnsupportedQuantizationError
from moecache.stores._mtp import enclosing, mtp_layers
from moecache.stores._open_files import OpenFiles
from moecache.stores._parts import TensorPart, extents_of, runs_of
from moecache.stores.base import Parts, Run, destination_bytes


class CheckpointStore(ABC):
    """Read experts from the files of a checkpoint, in place.

    A `FileStore` that has the other tensors, too. The kind of files is the matter of its
    subclasses, which set `_layout` and `_pieces`.

    Parameters
    ----------
    path : Path
    files : list of ReadOnlyFile
        Opened once: one that is replaced meanwhile is not mixed with its successor.
    tensors : mapping of tensor name to (file number, entry)
    mapped : bool
        Copy from the mapped files in `read_into`.

    Attributes
    ----------
    path : Path
    mapped : bool
    config : dict
        The model's config.json, or an equivalent.
    format : str
        The format that all experts were packed in, or "".
    """

    config: Mapping[str, Any]
    format: str
    # Whether a name is that of an expert's tensor.
    _is_expert: Callable[[str], bool]
    _layout: ExpertLayout
    _pieces: list[list[TensorPart]]

    def __init__(
        self,
        path: Path,
        files: list[ReadOnlyFile],
        tensors: Mapping[str, tuple[int, TensorEntry]],
        *,
        mapped: bool,
    ) -> None:
        self.path = path
        self._tensors = tensors
        self.mapped = mapped
        ends = [0] * len(files)
        for number, entry in tensors.values():
            ends[number] = max(ends[number], entry.offset + entry.nbytes)
        self._opened = OpenFiles(path, files, ends)
        self._runs: dict[tuple[int, int], tuple[Run, ...]] = {}

    @property
    def layout(self) -> ExpertLayout:
        """The layout of the experts."""
        return self._layout

    @property
    def files(self) -> list[ReadOnlyFile]:
        """The open files, by number."""
        return self._opened.files

    def keep_layers(self, names: Collection[str]) -> None:
        """Serve these layers alone from now on, numbered anew, in their order.

        For a host that runs no others, before it asks for anything.

        Raises
        ------
        ConfigError
            If there is none of that name.
        """
        if isinstance(names, str):
            raise ConfigError(f"layers are names in a list, such as [{names!r}]")
        known = self._layout.layer_names
        for name in names:
            if name not in known:
                raise ConfigError(f"{self.path}: there is no layer {name!r} with experts")
        kept = [layer for layer, name in enumerate(known) if name in names]
        self._layout = replace(
            self._layout,
            layers=[self._layout.layers[layer] for layer in kept],
            layer_names=[known[layer] for layer in kept],
        )
        self._pieces = [self._pieces[layer] for layer in kept]
        self._runs = {}

    def transpose_roles(self, names: Collection[str]) -> None:
        """Say that these roles' matrices are stored as [in, out]: slots take them as [out, in].

        For a host that knows it of its model, before it opens a runtime: one that is open goes on
        as before. What is read is as before; kernels compute what is in slots.

        Parameters
        ----------
        names : collection of str
            Such as ["gate_up", "down"]; layers without one are let alone.

        Raises
        ------
        ConfigError
            If there is no such role, or it is no matrix of numbers.
        """
        if isinstance(names, str):
            raise ConfigError(f"roles are names in a list, such as [{names!r}]")
        self._layout = self._layout.with_transposed(names)

    def leave_mtp_out(self) -> dict[str, int]:
        """Serve only the layers that the model runs; return the others, see `mtp_layers`.

        A file that has nothing else, such as a draft model's, keeps them, and {} is returned.
        """
        found, names = self.mtp_layers, self._layout.layer_names
        kept = [name for name in names if enclosing(name, found) is None]
        if not found or (names and not kept):
            return {}
        self.keep_layers(kept)
        return found

    def check_current(self) -> None:
        """Compare the open files with what is at their paths now.

        Raises
        ------
        StoreError
            If one was replaced, written to or removed: a reader by its path has another.
        """
        for file in self.files:
            file.check_current()

    @property
    @abstractmethod
    def trunk_bytes(self) -> int:
        """Bytes of all tensors but the experts', as `load` keeps them by default."""

    @property
    @abstractmethod
    def quantization(self) -> str:
        """How the checkpoint says that weights are quantized, such as "fp8" or "Q4_K_M", or ""."""

    @property
    def mtp_layers(self) -> dict[str, int]:
        """Bytes of each layer that guesses further tokens, by what its tensors' names begin with.

        Such as {"model.layers.61": 23622320128}: its experts are among `layout`'s, and `load`
        leaves them out.
        """
        return mtp_layers({name: entry.nbytes for name, (_, entry) in self._tensors.items()})

    def sources(self, layer: int) -> dict[tuple[str, int], str]:
        """Return a tensor that holds each matrix of a layer's experts, by (role, first byte).

        If each tensor holds one expert, it is the tensor of expert 0. A quantized one has the
        name that it has where it is not.
        """
        self._opened.check_open()
        self._layout.check(layer)
        return {(p.role, p.start): p.weight for p in self._pieces[layer] if p.weight}

    @cached_property
    def trunk_matrices(self) -> dict[str, tuple[Matrix, list[str]]]:
        """The quantized matrices that are no experts', and their tensors, by the weight's name.

        Raises
        ------
        FormatError
            If the parts of one do not fit.
        ConfigError
            If one is in a format that is not supported.
        """
        try:
            return self._find_matrices()
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from error
        except UnsupportedQuantizationError as error:
            raise ConfigError(f"{self.path}: {error}") from error

    @abstractmethod
    def _find_matrices(self) -> dict[str, tuple[Matrix, list[str]]]:
        """Return `trunk_matrices`."""

    def read_matrix(self, name: str, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        """Return the values of one of `trunk_matrices`."""
        raw = self.read_parts(name)
        matrix, _ = self.trunk_matrices[name]
        role = Role(name, (matrix.rows, matrix.columns), format=matrix.format.name)
        return values_in(raw, role, stored=True, dtype=dtype)

    def read_parts(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """Return the bytes of one of `trunk_matrices`, its parts one after the other.

        Parameters
        ----------
        name : str
        out : ndarray of uint8, optional
            Contiguous memory for them, of their size.

        Raises
        ------
        FormatError
            If they cannot be: scales that are infinite or NaN, say.
        """
        if name not in self.trunk_matrices:
            raise ExpertNotFoundError(f"{self.path}: there is no quantized matrix {name!r}")
        matrix, tensors = self.trunk_matrices[name]
        sizes = [self.tensor_entry(part).nbytes for part in tensors]
        joined = np.empty(sum(sizes), np.uint8) if out is None else out
        for part, of_it in zip(tensors, np.split(joined, np.cumsum(sizes)[:-1]), strict=True):
            self._read_bytes(part, of_it)
        try:
            matrix.format.check(matrix.format.split(joined, matrix.rows, matrix.columns))
        except FormatError as error:
            raise FormatError(f"{self.path}: {name}: {error}") from error
        return joined

    @property
    def tensor_names(self) -> list[str]:
        """Every tensor of the checkpoint, experts included."""
        return list(self._tensors)

    @cached_property
    def trunk_names(self) -> list[str]:
        """Every tensor that is no expert's."""
        return [name for name in self._tensors if not self._is_expert(name)]

    def tensor_entry(self, name: str) -> TensorEntry:
        """Return shape, dtype, size and place of any tensor."""
        self._opened.check_open()
        if name not in self._tensors:
            raise ExpertNotFoundError(f"{self.path}: there is no tensor {name!r}")
        return self._tensors[name][1]

    def read_tensor(self, name: str) -> np.ndarray:
        """Return a copy of any tensor, such as one of the trunk, in its stored dtype."""
        entry = self.tensor_entry(name)
        if entry.dtype is None:
            raise FormatError(f"tensor {name!r} has dtype {entry.dtype_name}, not supported")
        return self._read_bytes(name).view(entry.dtype).reshape(entry.shape)

    def read_into(self, layer: int, expert: int, out: Parts | np.ndarray) -> None:
        """Read one expert from the file; see `ExpertStore.read_into`."""
        self._opened.check_open()
        runs = self.runs(layer, expert)
        target = destination_bytes(self._layout, layer, out)
        what = f"expert {expert} of layer {layer}"
        if self.mapped:
            self._opened.copy_mapped(runs, target, what)
        else:
            self._opened.read(runs, target, what)

    def runs(self, layer: int, expert: int) -> tuple[Run, ...]:
        """Return where an expert's bytes lie: (file number, offset, ((role, start, stop), ...))."""
        runs = self._runs.get((layer, expert))
        if runs is None:
            self._layout.check(layer, expert)
            runs = self._runs[layer, expert] = runs_of(self._pieces[layer], expert)
        return runs

    def view(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        """Return one expert as read-only views of the mapped file.

        A role whose pieces do not adjoin in the file is returned as its pieces
        ("gate" and "up"). Views may be misaligned for their dtype. Touching one
        after the file was truncated kills the process (SIGBUS); `read_into`
        does not.
        """
        self._opened.check_open()
        self._layout.check(layer, expert)
        roles = {role.name: role for role in self._layout.layers[layer]}
        by_role: dict[str, list[tuple[str, int, int, int, tuple[int, ...]]]] = {}
        for piece in self._pieces[layer]:
            by_role.setdefault(piece.role, []).append(
                (
                    piece.name,
                    int(piece.files[expert]),
                    int(piece.offsets[expert]),
                    piece.nbytes,
                    piece.shape,
                )
            )
        views = {}
        for name, pieces in by_role.items():
            first = pieces[0]
            adjoin = all(
                one[1] == two[1] and one[2] + one[3] == two[2]
                for one, two in itertools.pairwise(pieces)
            )
            if adjoin:
                pieces = [(name, first[1], first[2], roles[name].nbytes, roles[name].array_shape)]
            for piece_name, file, offset, nbytes, shape in pieces:
                raw = np.frombuffer(self._opened.mapping(file), np.uint8, nbytes, offset)
                if not roles[name].format:
                    raw = raw.view(roles[name].dtype).reshape(shape)
                views[piece_name] = raw
        return views

    def regions(
        self, layers: Iterable[int] | None = None, *, held: np.ndarray | None = None
    ) -> list[Region]:
        """Return (address, nbytes) of the experts in the mapped files.

        By layer, within a layer in file order, adjoining experts as one region.
        Valid as long as a region is referred to: it keeps its file mapped. With `held`, bool
        [num_layers, num_experts], only of these experts.
        """
        self._opened.check_open()
        regions: list[Region] = []
        for layer in range(self._layout.num_layers) if layers is None else layers:
            self._layout.check(layer)
            wanted = None if held is None else held[layer]
            merged = extents_of(self._pieces[layer], wanted)
            for file, offset, nbytes in merged:
                mapping = self._opened.mapping(file)
                regions.append(Region(address_of(mapping)[0] + offset, nbytes, mapping))
        return regions

    def trunk_regions(self) -> list[Region]:
        """Return (address, nbytes) of what `load` reads but experts, in the mapped files.

        Files are mapped as long as a region is referred to.
        """
        left_out = self.mtp_layers
        maps: dict[int, mmap.mmap] = {}
        regions = []
        for name, (file, entry) in self._tensors.items():
            if not (self._is_expert(name) or enclosing(name, left_out)):
                if file not in maps:
                    maps[file] = self._opened.map_anew(file)
                address = address_of(maps[file])[0] + entry.offset
                regions.append(Region(address, entry.nbytes, maps[file]))
        return regions

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Ask the kernel to read experts ahead into the page cache."""
        self._opened.check_open()
        for expert in experts:
            for file, offset, spans in self.runs(layer, int(expert)):
                length = sum(stop - start for _, start, stop in spans)
                self._opened.file(file).will_need(offset, length)

    def close(self) -> None:
        """Close the files; a second call does nothing. Existing views stay valid."""
        self._opened.close()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()

    def _read_bytes(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """Return the bytes of a tensor, a copy."""
        entry = self.tensor_entry(name)
        raw = np.empty(entry.nbytes, np.uint8) if out is None else out
        if entry.nbytes:
            self._opened.file(self._tensors[name][0]).read(
                entry.offset, [raw.data], f"tensor {name!r}"
            )
        return raw
