"""ExpertKind: the facts about a layer's experts that the kernels need."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moecache.cuda._formats import check_matrix, cuda_type
from moecache.cuda._sources import kernel_name
from moecache.errors import ConfigError
from moecache.layout import ExpertLayout, Role

# Suffixes of the kernels' names, by the type of hidden states.
SUFFIXES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_BIAS_KINDS = {"float32": 1, "float16": 2, "bfloat16": 3}
_ROLES = {"gate_up", "down"}
_BIASES = ("gate_up_bias", "down_bias")


@dataclass(frozen=True)
class ExpertKind:
    """How the experts of a layer are stored, and what they take.

    Parameters
    ----------
    size, width : int
        Hidden size, and rows of gate.
    dtype : numpy.dtype
        Type of hidden states and results.
    gate_up, down : str
        Formats of the matrices.
    halves : int
        2 where gate and up are a matrix each, one behind the other.
    bias_kind : int
        As the kernels count them; 0 without biases.
    """

    size: int
    width: int
    dtype: np.dtype
    gate_up: str
    down: str
    halves: int
    bias_kind: int

    @property
    def is_plain(self) -> bool:
        """Whether the matrices are numbers of `dtype`, without biases."""
        plain = SUFFIXES[self.dtype.name]
        return self.gate_up == self.down == plain and not self.bias_kind

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Blocks of `decode` that each multiprocessor runs at once: the formats' BLOCKS."""
        return 3 if {self.gate_up, self.down} <= {*SUFFIXES.values()} else 2

    def kernel(self, entry: str) -> str:
        """Return the name of a kernel for these experts."""
        suffix = SUFFIXES[self.dtype.name]
        return kernel_name(entry, suffix, self.gate_up, self.down, self.halves)


def kind_of(layout: ExpertLayout, layer: int, dtype: np.dtype | None) -> ExpertKind:
    """Return what a layer's experts are.

    Parameters
    ----------
    layout : ExpertLayout
    layer : int
    dtype : numpy.dtype or None
        Type of hidden states, if the experts' own does not say it: None stands for bfloat16.

    Raises
    ------
    ConfigError
        If there are no kernels for them.
    """
    roles = {role.name: role for role in layout.layers[layer]}
    if not _ROLES <= roles.keys() <= _ROLES | {*_BIASES} or len(roles) == 3:
        raise ConfigError(
            f"an expert of {', '.join(sorted(roles))} is not gated feed-forward alone "
            '("gate_up" and "down", with both biases or none); compute it from runtime.waves'
        )
    gate_up, down = roles["gate_up"], roles["down"]
    if len(down.shape) != 2 or gate_up.shape != (2 * down.shape[1], down.shape[0]):
        raise ConfigError(
            f"gate_up {list(gate_up.shape)} and down {list(down.shape)} do not fit each other"
        )
    if down.matrices != 1 or gate_up.matrices > 2:
        raise ConfigError(f"{gate_up.matrices} and {down.matrices} matrices have no kernel")
    own = {role.dtype for role in (gate_up, down) if not role.format}
    if len(own) > 1 or any(one.name not in SUFFIXES for one in own):
        raise ConfigError(
            f"experts of {gate_up.dtype} and {down.dtype} have no kernels; kernels exist for "
            f"{', '.join(SUFFIXES)}"
        )
    is_quantized = gate_up.format or down.format
    taken = (dtype or named("bfloat16")) if is_quantized else own.pop()
    if taken.name not in SUFFIXES or dtype not in (None, taken):
        raise ConfigError(
            f"hidden states of {dtype} do not suit these experts; they take "
            f"{', '.join(SUFFIXES) if is_quantized else taken}"
        )
    return ExpertKind(
        down.shape[0],
        down.shape[1],
        taken,
        _format(gate_up),
        _format(down),
        gate_up.matrices,
        _bias_kind(roles, gate_up.shape[0], down.shape[0]),
    )


def check_experts(layout: ExpertLayout) -> None:
    """Raise the reason as a ConfigError if a GPU has no kernels for a layer's experts."""
    for layer in range(layout.num_layers):
        kind_of(layout, layer, None)


def named(dtype: str) -> np.dtype:
    """Return a dtype by its name, bfloat16 too."""
    import ml_dtypes  # noqa: F401 - with it NumPy knows bfloat16 by name

    return np.dtype(dtype)


def _format(role: Role) -> str:
    if not role.format:
        return SUFFIXES[role.dtype.name]
    if role.is_tiled:
        raise ConfigError(
            f"{role.name} is in the compute form of {role.format}, which kernels of processors "
            "read; on a GPU open the checkpoint that it was packed from"
        )
    cuda_type(role.format)
    check_matrix(role.name, role.format, *role.matrix_shape)
    return role.format


def _bias_kind(roles: Mapping[str, Role], *sizes: int) -> int:
    """Return the type of biases, as the kernels count them."""
    found = [roles[name] for name in _BIASES if name in roles]
    for role, size in zip(found, sizes, strict=False):
        if role.shape != (size,) or role.dtype != found[0].dtype or role.format:
            raise ConfigError(f"{role.name} {role.dtype} {list(role.shape)} is not [{size}]")
    if not found:
        return 0
    if found[0].dtype.name not in _BIAS_KINDS:
        raise ConfigError(
            f"biases of {found[0].dtype} have no kernel; kernels take {', '.join(_BIAS_KINDS)}"
        )
    return _BIAS_KINDS[found[0].dtype.name]
