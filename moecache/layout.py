"""ExpertLayout: which weight matrices an expert has, in every layer of a model."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moecache.errors import ConfigError
from moecache.formats import find_format

_BYTES = np.dtype(np.uint8)


@dataclass(frozen=True)
class Role:
    """One weight matrix of an expert.

    Parameters
    ----------
    name : str
        "gate_up" (gate's rows above up's), "down", "up" where there is no gate,
        or one of these with a suffix such as "_bias".
    shape : tuple of int
        Without the expert axis; as stored or, of a role with a format or one that is stored
        transposed, [rows, columns].
    dtype : numpy.dtype
        As stored; bfloat16 and float8 by ml_dtypes. A role with a format has uint8.
    format : str, default ""
        Name of the format, such as "q4_0", or "": elements of `dtype`.
    is_tiled : bool, default False
        Whether the file has the format's compute form, which a slot takes as it is.
    matrices : int, default 1
        Matrices of as many rows, one above the other, which the format has each for itself: 2 for
        a "gate_up" of two tensors.
    is_transposed : bool, default False
        Whether the file has the matrix, of no format, as [columns, rows]. Slots take it as
        [rows, columns].

    Raises
    ------
    ConfigError
        If no such matrix can be stored in the format, or transposed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype = _BYTES
    format: str = ""
    is_tiled: bool = False
    matrices: int = 1
    is_transposed: bool = False

    def __post_init__(self) -> None:
        if self.is_transposed and (self.format or len(self.shape) != 2):
            raise ConfigError(
                f"role {self.name!r}: {self.format or self.dtype} {list(self.shape)} is no matrix "
                "of numbers that could be stored transposed"
            )
        if not self.format and not self.is_tiled and self.matrices == 1:
            return
        if len(self.shape) != 2 or self.dtype != np.uint8:
            raise ConfigError(
                f"role {self.name!r}: a format's matrix is [rows, columns], and its bytes are "
                f"uint8, got {self.dtype} of shape {list(self.shape)}"
            )
        known = find_format(self.format)
        if known.block == (1, 1):
            raise ConfigError(
                f"role {self.name!r}: {self.format} is the format of a dtype; give the dtype alone"
            )
        if not all(isinstance(size, int) and size >= 0 for size in self.shape):
            raise ConfigError(f"role {self.name!r} cannot have the shape {list(self.shape)}")
        if self.matrices < 1 or self.shape[0] % self.matrices:
            raise ConfigError(
                f"role {self.name!r}: {self.shape[0]} rows are not {self.matrices} times as many"
            )
        if self.is_tiled and not known.has_form:
            raise ConfigError(f"role {self.name!r}: {self.format} has no compute form")
        known.parts(*self.matrix_shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        if not self.format:
            return math.prod(self.shape) * self.dtype.itemsize
        return self.matrices * self._matrix_bytes(is_tiled=self.is_tiled)

    @cached_property
    def form_bytes(self) -> int:
        """Bytes of the compute form; 0 if the format has none."""
        return self.matrices * self._matrix_bytes(is_tiled=True) if self.format else 0

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of each matrix of a role with a format."""
        rows, columns = self.shape
        return rows // self.matrices, columns

    def _matrix_bytes(self, *, is_tiled: bool) -> int:
        known = find_format(self.format)
        return (known.form_bytes if is_tiled else known.nbytes)(*self.matrix_shape)

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Shape of the array that has a file's bytes; a role with a format has them in a row."""
        return self.shape[::-1] if self.is_transposed else self.device_shape

    @property
    def device_shape(self) -> tuple[int, ...]:
        """Shape of the array in a slot of a GPU, which has the file's bytes, but as rows."""
        return (self.nbytes,) if self.format else self.shape


@dataclass(frozen=True)
class ExpertLayout:
    """The experts of a model: their number, roles and sizes.

    MoE layers are numbered from 0 in the order they run; `layer_names` gives
    the model's own names. Layers without experts are not in it.

    Parameters
    ----------
    num_experts : int
        Routed experts of every layer.
    top_k : int
        Experts per token; 0 if not known.
    layers : sequence of sequence of Role
        The roles of each layer's experts.
    layer_names : sequence of str, optional
        Such as "model.layers.3.mlp".
    """

    num_experts: int
    top_k: int
    layers: Sequence[Sequence[Role]]
    layer_names: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(tuple(roles) for roles in self.layers))
        names = tuple(self.layer_names) or tuple(map(str, range(len(self.layers))))
        object.__setattr__(self, "layer_names", names)
        if len(names) != len(self.layers):
            raise ConfigError(f"{len(names)} layer names for {len(self.layers)} layers")
        if self.num_experts < 0 or self.top_k < 0 or self.top_k > self.num_experts:
            raise ConfigError(f"top-{self.top_k} of {self.num_experts} experts is impossible")

    @classmethod
    def uniform(
        cls, *, num_layers: int, num_experts: int, top_k: int, expert_bytes: int
    ) -> "ExpertLayout":
        """Return a layout of equal layers, each expert one role of bytes; for planning."""
        if min(num_layers, num_experts, top_k, expert_bytes) < 0:
            raise ConfigError("a layout cannot have negative sizes")
        role = Role("expert", (expert_bytes,), np.dtype(np.uint8))
        return cls(num_experts, top_k, [[role]] * num_layers)

    def find_transposed(self) -> frozenset[str]:
        """Return the roles that are stored as [in, out]: the shapes allow nothing else.

        Those of experts with gates, "gate_up" [hidden_size, 2 * width] and "down"
        [width, hidden_size] in every layer; without gates shapes do not tell.
        """
        for roles in self.layers:
            shapes = {role.name: role.shape for role in roles if not role.format}
            wide, down = shapes.get("gate_up", ()), shapes.get("down", ())
            if len(down) != 2 or not down[0] or wide != (down[1], 2 * down[0]):
                return frozenset()
        return frozenset({"gate_up", "down"} if self.layers else ())

    def with_transposed(self, names: Collection[str]) -> "ExpertLayout":
        """Return the layout of experts whose roles of these names are stored as [in, out].

        Raises
        ------
        ConfigError
            If there is no such role, or it is no matrix of numbers.
        """
        for name in names:
            if name not in self.role_names:
                raise ConfigError(f"no layer has a role {name!r}")

        def turned(role: Role) -> Role:
            if role.name not in names or role.is_transposed:
                return role
            return replace(role, shape=role.shape[::-1], is_transposed=True)

        return replace(self, layers=[[turned(role) for role in roles] for roles in self.layers])

    @property
    def num_layers(self) -> int:
        """Number of layers that have experts."""
        return len(self.layers)

    @property
    def total_experts(self) -> int:
        """Experts of all layers."""
        return self.num_layers * self.num_experts

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all experts of all layers, as stored."""
        return sum(self.num_experts * self.expert_bytes(layer) for layer in range(self.num_layers))

    def expert_bytes(self, layer: int) -> int:
        """Return the bytes of one expert of a layer, as stored."""
        return self._bytes_of_layers[layer]

    @cached_property
    def _bytes_of_layers(self) -> tuple[int, ...]:
        return tuple(sum(role.nbytes for role in roles) for roles in self.layers)

    @cached_property
    def role_names(self) -> tuple[str, ...]:
        """Every role that some layer has, in the order of the layers."""
        return tuple(dict.fromkeys(role.name for roles in self.layers for role in roles))

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot that can take any expert: the widest layer of each role, summed."""
        widest = dict.fromkeys(self.role_names, 0)
        for roles in self.layers:
            for role in roles:
                widest[role.name] = max(widest[role.name], role.nbytes)
        return sum(widest.values())

    def key(self, layer: int, expert: int) -> int:
        """Return layer * num_experts + expert."""
        self.check(layer, expert)
        return layer * self.num_experts + expert

    def check(self, layer: int, expert: int = 0) -> None:
        """Raise ValueError if there is no such layer or expert."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is not in [0, {self.num_layers})")
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"expert {expert} is not in [0, {self.num_experts})")
