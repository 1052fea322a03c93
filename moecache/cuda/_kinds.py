"""ExpertKind: the facts about a layer's experts that the kernels need."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moecache.cuda._formats import check_matrix, cuda_type
from moecache.cuda._sources import kernel_name
from moecache.errors import ConfigError
from moecache.layout import ExpertLayout, Role

# Suffixes of the kernels' names, by the type of hidden states.
SUFFIXES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_BIAS_KINDS = {"float32": 1, "float16": 2, "bfloat16": 3}


@dataclass(frozen=True)
class ExpertKind:
    """How the experts of a layer are stored, and what they take.

    Parameters
    ----------
    size, width : int
        Hidden size, and rows of up.
    dtype : numpy.dtype
        Type of hidden states and results.
    gate_up, down : str
        Formats of the matrices; without a gate the first is up's.
    halves : int
        2 where gate and up are a matrix each, one behind the other, 1 where they are one, and 0
        where there is no gate.
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
    def is_gated(self) -> bool:
        """Whether there is a gate."""
        return self.halves > 0

    @property
    def wide(self) -> str:
        """The role of the first matrix."""
        return "gate_up" if self.is_gated else "up"

    @property
    def wide_rows(self) -> int:
        """Rows of the first matrix."""
        return self.width * (2 if self.is_gated else 1)

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
    wide = "gate_up" if "gate_up" in roles else "up"
    biases = (f"{wide}_bias", "down_bias")
    if roles.keys() not in ({wide, "down"}, {wide, "down", *biases}):
        raise ConfigError(
            f"an expert of {', '.join(sorted(roles))} is no feed-forward that has a kernel "
            '("gate_up" or "up", and "down", with both biases or none); compute it from '
            "runtime.waves"
        )
    up, down = roles[wide], roles["down"]
    num_parts = 2 if wide == "gate_up" else 1
    if len(down.shape) != 2 or up.shape != (num_parts * down.shape[1], down.shape[0]):
        raise ConfigError(
            f"{wide} {list(up.shape)} and down {list(down.shape)} do not fit each other"
        )
    if down.matrices != 1 or up.matrices > num_parts:
        raise ConfigError(f"{up.matrices} and {down.matrices} matrices have no kernel")
    own = {role.dtype for role in (up, down) if not role.format}
    if len(own) > 1 or any(one.name not in SUFFIXES for one in own):
        raise ConfigError(
            f"experts of {up.dtype} and {down.dtype} have no kernels; kernels exist for "
            f"{', '.join(SUFFIXES)}"
        )
    is_quantized = up.format or down.format
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
        _format(up),
        _format(down),
        up.matrices if wide == "gate_up" else 0,
        _bias_kind([roles[name] for name in biases if name in roles], up.shape[0], down.shape[0]),
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


def _bias_kind(found: Sequence[Role], *sizes: int) -> int:
    """Return the type of biases, as the kernels count them."""
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
