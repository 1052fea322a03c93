"""GgufStore: experts straight from a GGUF file."""

import math
import os
from collections.abc import Collection
from typing import Any

import numpy as np

from moecache.errors import ConfigError, FormatError
from moecache.kernels import values_in
from moecache.layout import Role
from moecache.stores._file import ReadOnlyFile
from moecache.stores._matrices import Matrix, UnsupportedQuantizationError
from moecache.stores._mtp import enclosing
from moecache.stores._paths import find_path
from moecache.stores._tensors import CheckpointStore
from moecache.stores.gguf._experts import find_experts, is_expert, matrix_of, stack_name
from moecache.stores.gguf._form import with_forms
from moecache.stores.gguf._header import GgufEntry, Metadata, read_header
from moecache.stores.gguf._parts import find_parts, merge_parts
from moecache.stores.gguf._types import FILE_TYPES, GUESSED

# Names of a KV cache's sizes in config.json, and in the metadata after the architecture's name.
_CONFIG = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    # Of states: those of the delta rule are as large as a state space's of one head.
    "ssm_state_size": "ssm.state_size",
    "mamba_head_dim": "ssm.inner_size",
    "n_groups": "ssm.group_count",
    "conv_kernel": "ssm.conv_kernel",
    "conv_L_cache": "shortconv.l_cache",
}

# Tensors of layers that hold states instead.
_STATES = ("ssm_a", "shortconv.conv.weight")
_MOST_LAYERS = 10_000  # more than any model has


class GgufStore(CheckpointStore):
    """Read experts from a GGUF file, or the parts of a split one, in place.

    Nothing is converted or copied beforehand: `read_into` reads an expert's bytes from the file,
    one range for each of gate, up and down. Tensors and layers have GGUF's own names; gate and up
    become one role "gate_up", gate first.

    Parameters
    ----------
    path : str or Path
        A .gguf file, any part of a split one, or the directory of one model.
    top_k : int, optional
        Experts per token. By default from the metadata; 0 if these do not say.
    mapped : bool, default False
        Copy from the mapped files in `read_into`, instead of reading: the kernel
        pages experts in and out, and a file that is cut short during a copy kills the process.
    layers : collection of str, optional
        Names of the layers to serve, such as "blk.3"; by default all.

    Attributes
    ----------
    metadata : mapping of str to number, str or list
        The file's metadata about the model. Lists, such as the vocabulary, are made when they are
        asked for.
    architecture : str
        Such as "qwen3moe"; "" if the file does not say.
    file_type : str
        The name of its quantization, such as "Q4_K_M"; "" if the file does not say.

    Raises
    ------
    ConfigError
        If no file can have such a name, a directory has several models, or experts are in a format
        that is not supported.
    FormatError
        If a file is damaged, a part is missing or another model's, the experts are incomplete, or
        there are more than 4096 layers of them.
    StoreError
        If a file cannot be read.
    """

    _tensors: dict[str, tuple[int, GgufEntry]]
    format = ""
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
        files = [ReadOnlyFile(file) for file in find_parts(found)]
        headers = [read_header(file) for file in files]
        self.metadata: Metadata = headers[0].metadata
        tensors = merge_parts(files, headers)
        try:
            tensors = with_forms(self.metadata, tensors)
        except FormatError as error:
            raise FormatError(f"{found}: {error}") from error
        super().__init__(found, files, tensors, mapped=mapped)
        self.architecture = self.metadata.text("general.architecture")
        number = self.metadata.get("general.file_type")
        self.file_type = FILE_TYPES.get(number % GUESSED, "") if type(number) is int else ""
        self.config = self._find_config()
        configured = self._number("expert_used_count") if top_k is None else top_k
        try:
            self._layout, self._pieces = find_experts(self._tensors, configured, layers)
        except UnsupportedQuantizationError as error:
            raise ConfigError(f"{found}: {error}") from error
        except ConfigError as error:
            if top_k is not None or layers is not None:
                raise
            raise FormatError(f"{found}: {error}") from error
        except FormatError as error:
            raise FormatError(f"{found}: {error}") from error
        said, num_experts = self._number("expert_count"), self._layout.num_experts
        if said != num_experts and said and num_experts:
            raise FormatError(
                f"{found}: {self.architecture}.expert_count is {said}, but layers have "
                f"{num_experts} experts; download it again"
            )

    @property
    def trunk_bytes(self) -> int:
        """Bytes of all tensors but the experts', as they are stored and `load` keeps them."""
        left_out = self.mtp_layers
        return sum(
            entry.nbytes
            for name, (_, entry) in self._tensors.items()
            if not (is_expert(name) or enclosing(name, left_out))
        )

    @property
    def quantization(self) -> str:
        """The name of the weights' quantization, such as "Q4_K_M" or "gguf"; "" if none are."""
        if not any(entry.type.is_quantized for _, entry in self._tensors.values()):
            return ""
        return self.file_type or "gguf"

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, rows before columns, by its name; experts are always stacks."""
        shapes = {}
        for name, (_, entry) in self._tensors.items():
            stack = stack_name(name)
            alone = (self._layout.num_experts, *entry.shape) if stack else entry.shape
            shapes[stack or name] = alone
        return shapes

    @property
    def is_f32(self) -> bool:
        """Whether all of it is float32; else it is a model of bfloat16."""
        return set(self.tensor_types.values()) <= {"F32"}

    @property
    def tensor_types(self) -> dict[str, str]:
        """The name of each tensor's type, as ggml gives it, by the tensor's name."""
        return {name: entry.type.name for name, (_, entry) in self._tensors.items()}

    def read_tensor(self, name: str) -> np.ndarray:
        """Return a copy of any tensor, in its stored dtype; a quantized one as float32 values.

        The shape has rows before columns: GGUF's own sizes the other way round.
        """
        self.tensor_entry(name)
        entry = self._tensors[name][1]
        try:
            matrix = matrix_of(name, entry)
        except UnsupportedQuantizationError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        if matrix is None:
            return super().read_tensor(name)
        rows = math.prod(entry.shape[:-1])
        role = Role(
            name,
            (rows, matrix.columns),
            format=matrix.format.name,
            is_tiled=matrix.is_tiled,
            matrices=rows // matrix.rows,
        )
        return values_in(self._read_bytes(name), role, stored=True).reshape(entry.shape)

    def _find_matrices(self) -> dict[str, tuple[Matrix, list[str]]]:
        found = {}
        for name, (_, entry) in self._tensors.items():
            if len(entry.shape) == 2 and not is_expert(name):
                matrix = matrix_of(name, entry)
                if matrix is not None:
                    found[name] = matrix, [name]
        return found

    def _find_config(self) -> dict[str, Any]:
        numbers = {name: self._number(key) for name, key in _CONFIG.items()}
        known = {name: number for name, number in numbers.items() if number}
        return {"model_type": self.architecture, "dtype": "bfloat16", **known, **self._kinds()}

    def _kinds(self) -> dict[str, Any]:
        """Return the kinds of layers, and the most heads of keys, if some layers have none."""
        heads = self.metadata.get(f"{self.architecture}.attention.head_count_kv")
        found: dict[str, Any] = {}
        if isinstance(heads, list) and heads and all(type(number) is int for number in heads):
            found["num_key_value_heads"] = max(heads)
        layers = range(min(self._number("block_count"), _MOST_LAYERS))
        kinds = ["full_attention"] * len(layers)
        for layer in layers:
            has_states = any(f"blk.{layer}.{name}" in self._tensors for name in _STATES)
            has_keys = f"blk.{layer}.attn_output.weight" in self._tensors
            if has_states:
                kinds[layer] = "hybrid" if has_keys else "linear_attention"
            elif not has_keys:
                kinds[layer] = "moe"
        if set(kinds) != {"full_attention"}:
            found |= {"layer_types": kinds, "mamba_num_heads": 1}
        return found

    def _number(self, key: str) -> int:
        """Return a number that the metadata have of the architecture; 0 if there is none."""
        return self.metadata.number(f"{self.architecture}.{key}")
