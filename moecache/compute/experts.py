"""The routed feed-forward over slots: tokens grouped by expert, rows + sum.

Every (token, choice) pair gets a row of its own, and rows are summed at the
end: the result depends neither on the order in which experts arrive nor on
what was in the cache. transformers' `grouped_mm` has the same form.
"""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from moecache.compute._on_device import on_device
from moecache.errors import ConfigError
from moecache.kernels import SlotKernel, values_in
from moecache.runtime.runtime import ExpertRuntime
from moecache.runtime.steps import Wave

Activation = Callable[[np.ndarray], np.ndarray]


def silu(x: np.ndarray) -> np.ndarray:
    """Return x * sigmoid(x), stable for every x."""
    # exp of a negative number only: no overflow warning for large |x|.
    small = np.exp(-np.abs(x))
    return x * np.where(x >= 0, 1, small) / (1 + small)


def gated_rows(
    hidden: np.ndarray,
    weights: dict[str, np.ndarray],
    activation: Activation = silu,
) -> np.ndarray:
    """Return one expert's output, down(activation(gate(x)) * up(x)), for its tokens.

    Parameters
    ----------
    hidden : ndarray of float, shape [n, hidden_size]
    weights : dict of role to ndarray
        "gate_up" [2 * width, hidden_size], gate above up, and "down"
        [hidden_size, width]. Weights of another dtype than hidden's are converted
        here, at every use; slots can hold them converted.
    activation : callable, default silu

    Returns
    -------
    ndarray, shape [n, hidden_size], of hidden's dtype

    Raises
    ------
    ConfigError
        If the expert has other weights too: the result would be wrong.
    """
    gate_up, down = _converted(weights, "gate_up", hidden.dtype)
    both = hidden @ gate_up.T
    width = both.shape[1] // 2
    return (activation(both[:, :width]) * both[:, width:]) @ down.T


def ungated_rows(
    hidden: np.ndarray, weights: dict[str, np.ndarray], activation: Activation
) -> np.ndarray:
    """Return the output of an expert without a gate, down(activation(up(x))), for its tokens.

    Parameters
    ----------
    hidden : ndarray of float, shape [n, hidden_size]
    weights : dict of role to ndarray
        "up" [width, hidden_size] and "down" [hidden_size, width], converted as
        `gated_rows` says.
    activation : callable

    Returns
    -------
    ndarray, shape [n, hidden_size], of hidden's dtype

    Raises
    ------
    ConfigError
        If the expert has other weights too: the result would be wrong.
    """
    up, down = _converted(weights, "up", hidden.dtype)
    return activation(hidden @ up.T) @ down.T


def _converted(
    weights: dict[str, np.ndarray], wide: str, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return the two matrices of an expert that has no other weights."""
    _check_roles(weights.keys(), wide)
    return (
        weights[wide].astype(dtype, copy=False),
        weights["down"].astype(dtype, copy=False),
    )


def _check_roles(roles: Iterable[str], wide: str) -> None:
    if set(roles) != {wide, "down"}:
        raise ConfigError(
            f"an expert of {', '.join(sorted(roles))} is not feed-forward alone "
            f'("{wide}" and "down", without biases or scales); compute it from runtime.waves'
        )


def compute_wave(
    hidden: np.ndarray,
    wave: Wave,
    experts: Callable[[int], dict[str, np.ndarray]],
    rows: np.ndarray,
    activation: Activation = silu,
) -> None:
    """Compute the rows that a wave covers.

    Parameters
    ----------
    hidden : ndarray of float, shape [num_tokens, hidden_size]
    wave : Wave
    experts : callable
        Returns the weights in a slot.
    rows : ndarray of float, shape [num_tokens * top_k, hidden_size]
        Written in place.
    activation : callable, default silu
    """
    for slot, pairs in wave:
        weights = experts(slot)
        compute = ungated_rows if "up" in weights else gated_rows
        rows[pairs] = compute(hidden[pairs // wave.top_k], weights, activation)


def combine(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted sum of each token's rows.

    Parameters
    ----------
    rows : ndarray of float, shape [num_tokens * top_k, hidden_size]
    weights : ndarray of float, shape [num_tokens, top_k]
        The router's. They are multiplied before anything is summed or cast.

    Returns
    -------
    ndarray of float, shape [num_tokens, hidden_size]
    """
    num_tokens, top_k = weights.shape
    weighted = rows * weights.reshape(-1, 1)
    return weighted.reshape(num_tokens, top_k, rows.shape[1]).sum(1)


def feed_forward(
    runtime: ExpertRuntime,
    layer: int,
    hidden: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    activation: Activation = silu,
    *,
    compute: str = "numpy",
    sequences: npt.ArrayLike | None = None,
) -> np.ndarray:
    """Return the output of a layer's routed experts.

    Hits are computed while misses are read. The output does not depend on what
    was in the cache, bit for bit.

    Parameters
    ----------
    runtime : ExpertRuntime
    layer : int
    hidden : ndarray of float, shape [num_tokens, hidden_size]
        Or, like `weights`, an array on the GPU that has the slots; see `CudaExperts`.
    ids : ndarray of int32 or int64, shape [num_tokens, top_k]
        The router's choice.
    weights : ndarray of float, shape [num_tokens, top_k]
    activation : callable, default silu
        Of the gate's product, or of up's where experts have no gate.
    compute : {"numpy", "fast"}, default "numpy"
        The multiplier: NumPy's BLAS, or the kernels of `moecache.kernels`. With these, hidden is
        float32 or bfloat16, slots may hold bfloat16 as the file does or weights in a format's
        compute form (NumPy dequantizes these at every use), a token's result has the same
        bits alone and among others, and `activation` is silu.
    sequences : array of int, shape [num_tokens], optional
        Which sequence each token is of, where they are of several; see `ExpertRuntime.waves`.
        On a GPU say so with `ExpertRuntime.begin_sequence`.

    Returns
    -------
    ndarray of float, shape [num_tokens, hidden_size]
        Of a runtime with a share, the sum of the experts that it has.

    Raises
    ------
    ConfigError
        If an array is elsewhere, or its shape or dtype does not fit, or the experts have biases,
        scales, or other shapes than those of a feed-forward.
    ValueError
        If the layer or an id is out of range.
    TypeError
        If ids are no integers.
    """
    if compute not in ("numpy", "fast"):
        raise ConfigError(f"compute {compute!r} is not one of numpy, fast")
    if not isinstance(hidden, np.ndarray) and getattr(runtime.pool, "device", None) is not None:
        if activation is not silu:
            raise ConfigError(
                "on a GPU give the activation's name: compute.on_device(runtime, activation)"
            )
        if sequences is not None:
            raise ConfigError(
                "on a GPU the rows of a batch keep their places: leave out sequences, and say how "
                "many begin with runtime.begin_sequence(batch=)"
            )
        return on_device(runtime)(layer, hidden, ids, weights)
    ids = np.asarray(ids)
    _check(runtime, layer, hidden, ids, weights)
    # Rows of experts that another rank has are left as they are.
    new = np.empty if runtime.share is None else np.zeros
    if compute != "numpy":
        if activation is not silu:
            raise ConfigError(
                f'compute="{compute}" has silu alone; for others see kernels.SlotKernel'
            )
        kernel = _kernel(runtime, layer)
        hidden = np.ascontiguousarray(hidden)
        rows = new((ids.size, hidden.shape[1]), np.float32)

        def compute_rows(wave: Wave) -> None:
            kernel.compute(hidden, wave.slots, wave.offsets, wave.pairs, wave.top_k, rows)

    else:
        rows = new((ids.size, hidden.shape[1]), hidden.dtype)
        roles = {role.name: role for role in runtime.pool.layout.layers[layer]}

        def weights_in(slot: int) -> dict[str, np.ndarray]:
            found = runtime.expert(slot, layer)
            return {name: values_in(array, roles[name]) for name, array in found.items()}

        def compute_rows(wave: Wave) -> None:
            compute_wave(hidden, wave, weights_in, rows, activation)

    waves = runtime.waves(layer, ids, sequences=sequences)
    try:
        for wave in waves:
            compute_rows(wave)
    finally:
        # A traceback that is kept would keep the leases as well.
        waves.close()
    out = combine(rows, weights)
    return out if compute == "numpy" else out.astype(hidden.dtype, copy=False)


def _check(runtime: ExpertRuntime, layer: int, hidden: Any, ids: np.ndarray, weights: Any) -> None:
    """Raise an error for arrays and experts whose product would be wrong."""
    for name, array in (("hidden", hidden), ("weights", weights)):
        if not isinstance(array, np.ndarray):
            raise ConfigError(
                f"{name} is a {type(array).__name__}; the slots are in RAM: give an array of NumPy"
            )
        if array.dtype.kind not in "fV":  # V: bfloat16 of ml_dtypes
            raise ConfigError(f"{name} is {array.dtype}; give an array of float")
    runtime.layout.check(layer)
    shapes = {role.name: role.shape for role in runtime.pool.layout.layers[layer]}
    wide = "up" if "up" in shapes else "gate_up"
    _check_roles(shapes, wide)
    down = shapes["down"]
    if len(down) != 2 or shapes[wide] != (down[1] * (1 if wide == "up" else 2), down[0]):
        raise ConfigError(
            f"{wide} {list(shapes[wide])} and down {list(down)} are not [rows, columns] of one "
            "feed-forward; compute it from runtime.waves"
            + (
                f", or call transpose_roles({sorted(turned)}) of the store before it is opened"
                if (turned := runtime.layout.find_transposed())
                else ""
            )
        )
    if hidden.ndim != 2 or hidden.shape[1] != down[0]:
        raise ConfigError(f"hidden {list(hidden.shape)} must be [num_tokens, {down[0]}]")
    if ids.ndim != 2 or len(ids) != len(hidden) or weights.shape != ids.shape:
        raise ConfigError(
            f"ids {list(ids.shape)} and weights {list(weights.shape)} must both be "
            f"[{len(hidden)}, top_k], a row for each of hidden"
        )


# Kernels of each runtime, by layer; they go with the runtime.
_kernels: WeakKeyDictionary[ExpertRuntime, dict[int, SlotKernel]] = WeakKeyDictionary()


def _kernel(runtime: ExpertRuntime, layer: int) -> SlotKernel:
    known = _kernels.setdefault(runtime, {})
    if layer not in known:
        pool = runtime.pool
        known[layer] = SlotKernel(
            lambda slot: pool.expert(slot, layer),
            pool.num_slots,
            roles=pool.layout.layers[layer],
        )
    return known[layer]
