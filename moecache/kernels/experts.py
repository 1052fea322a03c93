"""SlotKernel: the gated experts of a layer, computed in the slots they are in."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from moecache.errors import ConfigError
from moecache.formats import format_of
from moecache.kernels._kernels import Experts, Matrix, least_row_bytes
from moecache.kernels.forms import has_form
from moecache.kernels.matrices import type_of
from moecache.layout import Role

# Of the names that a layout has: these and no others can be computed.
_ROLES = {"gate_up", "up", "down", "gate_up_bias", "up_bias", "down_bias"}


class SlotKernel:
    """Computes down(act(gate(x)) * up(x)) of experts where they are.

    Parameters
    ----------
    expert : callable (slot) -> dict of role to ndarray
        The weights in a slot: "gate_up" [2 * width, hidden_size] or "up" [width, hidden_size],
        "down" [hidden_size, width], and biases. All slots lie at one distance from each other.
    num_slots : int
    roles : sequence of Role, optional
        What says format and shape of arrays that are in a compute form, such as
        `layout.layers[layer]`.
    activation : str, default "silu"
        One of `ACTIVATIONS`.
    is_interleaved : bool, default False
        Whether rows of gate and up alternate; else gate's are above up's.
    alpha, limit : float
        Of activation "swiglu".
    activations : {"float", "int8"}, default "float"
        How inputs, and what goes down, are multiplied with blocks of integers; see `products`.

    Attributes
    ----------
    hidden_size : int

    Raises
    ------
    ConfigError
        If the roles, shapes or dtypes are not those of a gated feed-forward.
    """

    def __init__(
        self,
        expert: Callable[[int], Mapping[str, np.ndarray]],
        num_slots: int,
        *,
        roles: Sequence[Role] = (),
        activation: str = "silu",
        is_interleaved: bool = False,
        alpha: float = 1.702,
        limit: float = 7.0,
        activations: str = "float",
    ) -> None:
        first, second = expert(0), expert(min(1, num_slots - 1))
        _check_roles(first)
        is_gated = "gate_up" in first
        wide = "gate_up" if is_gated else "up"
        known = {role.name: role for role in roles}
        up, down = (_matrix(name, first[name], known.get(name)) for name in (wide, "down"))
        self.hidden_size, width = down.rows, down.columns
        if (up.rows, up.columns) != (width * (1 + is_gated), self.hidden_size):
            raise ConfigError(
                f"{wide} {[up.rows, up.columns]} and down {[down.rows, down.columns]} are not "
                "[rows, columns] of one feed-forward; experts that are stored transposed have no "
                "kernel"
            )
        self.num_slots = num_slots

        def bias(role: str, rows: int) -> tuple[int, int, str] | None:
            array = first.get(role)
            if array is None:
                return None
            if array.shape != (rows,) or not array.flags.c_contiguous:
                raise ConfigError(f"{role} {list(array.shape)} is not [{rows}]")
            return array.ctypes.data, _distance(array, second[role]), type_of(array)

        self._experts = Experts(
            up,
            _distance(first[wide], second[wide]),
            down,
            _distance(first["down"], second["down"]),
            width,
            width if is_gated and not is_interleaved else 0,
            is_gated=is_gated,
            is_interleaved=is_interleaved,
            activation=activation,
            alpha=alpha,
            limit=limit,
            up_bias=bias(f"{wide}_bias", up.rows),
            down_bias=bias("down_bias", self.hidden_size),
            activations=activations,
            owner=(first, second),
        )
        # With the addresses of torch's tensors no array is made for a call.
        self.compute_at = self._experts.compute

    def compute(
        self,
        hidden: np.ndarray,
        slots: np.ndarray,
        offsets: np.ndarray,
        pairs: np.ndarray,
        top_k: int,
        rows: np.ndarray,
    ) -> None:
        """Write the rows that a wave covers.

        Parameters
        ----------
        hidden : ndarray of float32 or bfloat16, shape [num_tokens, hidden_size]
        slots, offsets, pairs, top_k
            As a `Wave` has them.
        rows : ndarray of float32 or bfloat16, shape [num_tokens * top_k, hidden_size]
            Written in place.

        Raises
        ------
        ConfigError
            If shapes or dtypes do not fit.
        """
        wanted = [(len(hidden), self.hidden_size), (len(hidden) * top_k, self.hidden_size)]
        for name, array, shape in zip(("hidden", "rows"), (hidden, rows), wanted, strict=True):
            if array.shape != shape or not array.flags.c_contiguous:
                raise ConfigError(f"{name} {list(array.shape)} is no contiguous {list(shape)}")
        if not rows.flags.writeable:
            raise ConfigError("rows are read-only; the results are written there")
        if len(slots) and not 0 <= slots.min() <= slots.max() < self.num_slots:
            raise ValueError(f"slots {slots} are not in [0, {self.num_slots})")
        self.compute_at(
            *(slots, offsets, pairs, top_k),
            *(hidden.ctypes.data, type_of(hidden), len(hidden), hidden.strides[0]),
            *(rows.ctypes.data, type_of(rows), rows.strides[0]),
        )


def _check_roles(roles: Mapping[str, np.ndarray]) -> None:
    wide = {"gate_up", "up"} & roles.keys()
    if not roles.keys() <= _ROLES or len(wide) != 1 or "down" not in roles:
        raise ConfigError(
            f"an expert of {', '.join(sorted(roles))} is no feed-forward of gate_up (or up) and "
            "down that has a kernel"
        )


def _matrix(name: str, array: np.ndarray, role: Role | None) -> Matrix:
    if role is not None and role.format:
        if not has_form(role.format):
            raise ConfigError(f"{name} is {role.format}, which has no kernel")
        rows, columns = role.shape
        row_bytes = least_row_bytes(role.format, columns)
        return Matrix(array.ctypes.data, role.format, rows, columns, row_bytes, array)
    if array.ndim != 2 or not array.flags.c_contiguous:
        raise ConfigError(f"{name} {list(array.shape)} is no contiguous matrix [rows, columns]")
    rows, columns = array.shape
    form = format_of(array.dtype).name
    return Matrix(array.ctypes.data, form, rows, columns, array.strides[0], array)


def _distance(first: np.ndarray, second: np.ndarray) -> int:
    return second.ctypes.data - first.ctypes.data
