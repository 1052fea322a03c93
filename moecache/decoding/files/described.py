"""Described: what files say of a model, whatever their format."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from moecache.decoding.families import Family
from moecache.decoding.files.known import Known
from moecache.layout import ExpertLayout
from moecache.stores._matrices import Matrix


class TensorStore(Protocol):
    """A model's tensors, by the names that GGUF files have."""

    @property
    def layout(self) -> ExpertLayout:
        """The layers with experts, "blk.3" by name."""

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, rows before columns."""

    @property
    def tensor_types(self) -> dict[str, str]:
        """The name of each tensor's type, such as "BF16"."""

    @property
    def trunk_matrices(self) -> dict[str, tuple[Matrix, list[str]]]:
        """The quantized matrices that are no experts', and their tensors."""

    @property
    def is_f32(self) -> bool:
        """Whether weights that are numbers are multiplied by float32, not by bfloat16."""

    def read_tensor(self, name: str) -> np.ndarray:
        """Return a tensor's numbers; of a quantized one, its values."""

    def read_parts(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """Return the bytes of a quantized matrix."""


class Described(NamedTuple):
    """What files say.

    Parameters
    ----------
    tensors : TensorStore
    settings : mapping
        As transformers' configuration has them.
    family : Family
    known : Known
    pairs : str
        What a rotation turns together, as `Rotation` says it.
    ends : frozenset of int
        Tokens with which the model ends its texts.
    drawn : mapping
        Fields of `Sampling`, as its texts are drawn by default.
    own_layers : list of str or None
        Of the store's layers with experts, those that the model runs; `None` for all.
    state_type : {"f32", "bf16"}
        Type of texts' states.
    transposed : collection of str
        Roles of experts that the store has as [in, out].
    """

    tensors: TensorStore
    settings: Mapping[str, Any]
    family: Family
    known: Known
    pairs: str
    ends: frozenset[int]
    drawn: Mapping[str, Any]
    own_layers: list[str] | None = None
    state_type: str = "f32"
    transposed: Collection[str] = ()
