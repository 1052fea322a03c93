"""SlotKernel: the gated experts of a layer, computed in the slots they are in."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from moecache.errors import ConfigError
from moecache.formats import TILE_ROWS, StackedFormat, find_format, format_of
from moecache.kernels._experts import Experts
from moecache.kernels._matrix import Matrix
from moecache.kernels.matrices import type_of
from moecache.layout import Role
from moecache.units import whole_number

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
        Of activation "swiglu"; "clamped_silu" has the limit alone.

    Attributes
    ----------
    hidden_size : int
    experts : Experts
        The same for compiled code.
    num_computed, busy_ns : int
        Experts computed for a single token, and the time that took, as `count` was told.

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
    ) -> None:
        num_slots = whole_number(num_slots, "num_slots", 1, 2**31 - 1)
        if activation in ("swiglu", "clamped_silu") and not limit >= 0:
            raise ConfigError(f"activations cannot be limited to {limit}")
        first, second = expert(0), expert(min(1, num_slots - 1))
        _check_roles(first)
        _check_alike(first, second)
        is_gated = "gate_up" in first
        wide = "gate_up" if is_gated else "up"
        if is_interleaved and not is_gated:
            raise ConfigError("rows of gate and up alternate, and there is no gate")
        known = {role.name: role for role in roles}
        (ups, up_shape), ((down,), down_shape) = (
            _matrices(name, first[name], known.get(name), number)
            for name, number in ((wide, 1 + (is_gated and not is_interleaved)), ("down", 1))
        )
        self.hidden_size, width = down_shape
        if up_shape != (width * (1 + is_gated), self.hidden_size):
            raise ConfigError(
                f"{wide} {list(up_shape)} and down {list(down_shape)} are not "
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

        self.experts = Experts(
            ups,
            _distance(first[wide], second[wide]),
            down,
            _distance(first["down"], second["down"]),
            width,
            is_interleaved=is_interleaved,
            activation=activation,
            alpha=alpha,
            limit=limit,
            up_bias=bias(f"{wide}_bias", up_shape[0]),
            down_bias=bias("down_bias", self.hidden_size),
            owner=(first, second),
        )
        self.num_computed = self.busy_ns = 0
        # With the addresses of torch's tensors no array is made for a call. Inputs are converted
        # once for all waves of a step.
        self.inputs_at = self.experts.inputs
        self.compute_at = self.experts.compute

    def count(self, num_experts: int, busy_ns: int) -> None:
        """Note that experts were computed for a single token, and how long it took."""
        self.num_computed += num_experts
        self.busy_ns += busy_ns

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
        top_k = whole_number(top_k, "top_k", 1, 2**31 - 1)
        wanted = [(len(hidden), self.hidden_size), (len(hidden) * top_k, self.hidden_size)]
        for name, array, shape in zip(("hidden", "rows"), (hidden, rows), wanted, strict=True):
            if array.shape != shape or not array.flags.c_contiguous:
                raise ConfigError(f"{name} {list(array.shape)} is no contiguous {list(shape)}")
        if not rows.flags.writeable:
            raise ConfigError("rows are read-only; the results are written there")
        if len(slots) and not 0 <= slots.min() <= slots.max() < self.num_slots:
            raise ValueError(f"slots {slots} are not in [0, {self.num_slots})")
        inputs = self.inputs_at(hidden.ctypes.data, type_of(hidden), len(hidden), hidden.strides[0])
        self.compute_at(
            slots,
            offsets,
            pairs,
            top_k,
            inputs,
            rows.ctypes.data,
            type_of(rows),
            rows.strides[0],
        )


def _check_roles(roles: Mapping[str, np.ndarray]) -> None:
    wide = {"gate_up", "up"} & roles.keys()
    if not roles.keys() <= _ROLES or len(wide) != 1 or "down" not in roles:
        raise ConfigError(
            f"an expert of {', '.join(sorted(roles))} is no feed-forward of gate_up (or up) and "
            "down that has a kernel"
        )


def _check_alike(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> None:
    """Raise ConfigError if two slots do not hold the same, as all are read by one's addresses."""
    for name in first.keys() | second.keys():
        one, two = first.get(name), second.get(name)
        if one is None or two is None:
            raise ConfigError(f"not every slot has {name}")
        if (one.shape, one.dtype, one.strides) != (two.shape, two.dtype, two.strides):
            raise ConfigError(
                f"{name} is {one.dtype} {list(one.shape)} in one slot and {two.dtype} "
                f"{list(two.shape)} in another"
            )


def _matrices(
    name: str, array: np.ndarray, role: Role | None, number: int
) -> tuple[list[Matrix], tuple[int, ...]]:
    """Return a role as `number` matrices of as many rows each, and its shape."""
    if role is not None and role.format:
        return _formed(name, array, role, number), role.shape
    if array.ndim != 2 or not array.flags.c_contiguous:
        raise ConfigError(f"{name} {list(array.shape)} is no contiguous matrix [rows, columns]")
    rows, columns = array.shape[0] // number, array.shape[1]
    plain, stride = format_of(array.dtype).name, array.strides[0]
    starts = [array.ctypes.data + i * rows * stride for i in range(number)]
    return [Matrix(start, plain, rows, columns, stride, array) for start in starts], array.shape


def _formed(name: str, array: np.ndarray, role: Role, number: int) -> list[Matrix]:
    known = find_format(role.format)
    if not known.has_form:
        raise ConfigError(f"{name} is {role.format}, which has no compute form")
    formats = known.formats if isinstance(known, StackedFormat) else (known,) * role.matrices
    rows, columns = role.shape[0] // number, role.shape[1]
    if number < len(formats):
        raise ConfigError(f"rows of {name} alternate in one matrix, not in two")
    if number > len(formats):
        # One matrix is taken for two, of whole tiles.
        if rows % TILE_ROWS:
            raise ConfigError(
                f"up begins at row {rows} of {name}; in a compute form that is a multiple of "
                f"{TILE_ROWS}"
            )
        formats *= number
    if isinstance(known, StackedFormat):
        sizes = known.sizes(*role.shape, is_form=True)
    else:
        sizes = [known.form_bytes(rows, columns)] * number
    if array.nbytes < sum(sizes) or not array.flags.c_contiguous:
        raise ConfigError(
            f"{name} has {array.nbytes} bytes; {role.shape[0]} x {columns} of {role.format} are "
            f"{sum(sizes)}, one after the other"
        )
    starts = [array.ctypes.data + sum(sizes[:i]) for i in range(number)]
    return [
        Matrix(start, one.name, rows, columns, None, array)
        for start, one in zip(starts, formats, strict=True)
    ]


def _distance(first: np.ndarray, second: np.ndarray) -> int:
    return second.ctypes.data - first.ctypes.data
