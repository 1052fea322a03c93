"""SafetensorsStore: experts straight from a Hugging Face checkpoint directory."""

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from moecache.errors import ConfigError, FormatError
from moecache.layout import ExpertLayout
from moecache.stores._checkpoint import (
    find_files,
    find_group_size,
    find_num_zero,
    find_top_k,
    merge_headers,
    read_config,
    read_weight_map,
)
from moecache.stores._file import ReadOnlyFile
from moecache.stores._index import index_experts, is_expert
from moecache.stores._matrices import Matrix, UnsupportedQuantizationError, in_format
from moecache.stores._paths import find_path, is_directory
from moecache.stores._quantized import Quantization, trunk_matrices
from moecache.stores._tensors import CheckpointStore


class SafetensorsStore(CheckpointStore):
    """Read experts from the safetensors files of a checkpoint, in place.

    Nothing is converted or copied beforehand: `read_into` reads an expert's
    bytes from the file, tensors that adjoin in one call. Experts are found by
    the names of their tensors; `gate` and `up` become one role "gate_up", gate
    first.

    Parameters
    ----------
    path : str or Path
        A directory with one or more .safetensors files (and, if sharded,
        model.safetensors.index.json), or one such file.
    top_k : int, optional
        Experts per token. By default from config.json; 0 if it does not say.
    mapped : bool, default False
        Copy from the mapped files in `read_into`, instead of reading: the kernel
        pages experts in and out, and a file that is cut short during a copy kills the process.
    layers : collection of str, optional
        Names of the layers to serve, as in `layout.layer_names`; by default all. A
        checkpoint may have more than a model runs, such as for multi-token prediction.

    Raises
    ------
    ConfigError
        If no file can have such a name, or the checkpoint is quantized by a method that is not
        supported.
    FormatError
        If a file is damaged, the experts are incomplete, or there are more than 4096
        layers of them.
    StoreError
        If a file cannot be read.
    """

    _is_expert = staticmethod(is_expert)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        top_k: int | None = None,
        mapped: bool = False,
        layers: Collection[str] | None = None,
    ) -> None:
        found = find_path(path)
        self.directory = directory = found if is_directory(found) else found.parent
        self.config = read_config(directory / "config.json")
        weight_map = read_weight_map(found)
        files = [ReadOnlyFile(file) for file in find_files(found, weight_map)]
        tensors, formats = merge_headers(files, weight_map)
        super().__init__(found, files, tensors, mapped=mapped)
        configured = find_top_k(self.config) if top_k is None else top_k
        try:
            self._quantization = Quantization(self.config)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        try:
            self._layout, self._pieces = index_experts(
                self._tensors,
                configured,
                layers,
                partial(self._quantization.match, read=self.read_tensor),
                num_zero=find_num_zero(self.config),
                group_size=find_group_size(self.config),
            )
            self._layout, self.format = self._with_formats(formats)
        except UnsupportedQuantizationError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        except ConfigError as error:
            if top_k is not None or layers is not None:
                raise
            raise FormatError(f"{directory / 'config.json'}: {error}") from error
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from error

    @property
    def trunk_bytes(self) -> int:
        """Bytes of all tensors but the experts' in a model: quantized ones are bfloat16 there."""
        stored = sum(self._tensors[name][1].nbytes for name in self.trunk_names)
        quantized = sum(
            2 * matrix.rows * matrix.columns - matrix.format.nbytes(matrix.rows, matrix.columns)
            for matrix, _ in self.trunk_matrices.values()
        )
        return stored + quantized

    @property
    def quantization(self) -> str:
        """How config.json says that weights are quantized, such as "fp8", or ""."""
        return self._quantization.method

    def _find_matrices(self) -> dict[str, tuple[Matrix, list[str]]]:
        others = {name: self._tensors[name][1] for name in self.trunk_names}
        return trunk_matrices(others, self._quantization, self.read_tensor)

    def _with_formats(self, formats: Sequence[str]) -> tuple[ExpertLayout, str]:
        """Return the layout in the formats that the experts' files say, and its name."""
        layers, names = [], set()
        for roles, pieces in zip(self._layout.layers, self._pieces, strict=True):
            said = {formats[int(number)] for piece in pieces for number in np.unique(piece.files)}
            if len(said) > 1:
                raise FormatError(f"experts of a layer are in several formats: {sorted(said)}")
            name = said.pop() if said else ""
            layers.append(in_format(roles, name) if name else roles)
            names.add(name)
        if len(names) > 1:
            raise FormatError(
                f"layers of experts are in several formats: {sorted(names)}; pack them together"
            )
        return replace(self._layout, layers=layers), names.pop() if names else ""
