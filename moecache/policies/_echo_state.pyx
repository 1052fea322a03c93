"""What an Echo has learned, as arrays: which of them there are, and whether they can be true."""

from libc.math cimport INFINITY

import numpy as np

from moecache.policies._echo_history cimport CELLS, NEVER
from moecache.policies._echo_loops cimport ECHO_RING
from moecache.policies._echo_ring cimport REBASE

# In this order.
cdef tuple NAMES = (
    "clock", "table", "samples", "scores", "fast", "slow", "own", "next_use", "values", "last",
    "cells", "masks", "before",
)


cdef dict in_order(dict arrays):
    """Return those of an Echo's arrays that are its state."""
    return {name: arrays[name] for name in NAMES if name in arrays}


cdef dict checked_state(state, dict known, int num_layers, int num_experts):
    """Return the arrays of a state, contiguous; `known` has an Echo's own.

    Raises ValueError if one is missing, of another shape or dtype, or cannot be an Echo's.
    """
    cdef dict given = {}
    if "before" in known and "before" not in state:
        state = {**state, "before": _one_after_another(state.get("clock"))}
    for name, array in known.items():
        found = state[name] if name in state else None
        dtype, shape = array.dtype, array.shape
        if not isinstance(found, np.ndarray) or (found.dtype, found.shape) != (dtype, shape):
            what = "nothing" if found is None else (
                f"{getattr(found, 'dtype', type(found).__name__)} "
                f"{list(getattr(found, 'shape', ()))}"
            )
            raise ValueError(f"{name} must be {dtype} {list(shape)}, got {what}")
        given[name] = np.ascontiguousarray(found)
    if len(state) != len(known):
        raise ValueError(f"unknown parts: {', '.join(sorted(set(state) - set(known)))}")
    _check_values(given, num_layers, num_experts)
    return given


cdef object _one_after_another(clock):
    """Return `before` for a ring that one sequence has filled."""
    token = int(clock[3]) if isinstance(clock, np.ndarray) and clock.shape == (4,) else 0
    ago = (token - np.arange(ECHO_RING)) % ECHO_RING
    return ((ago < ECHO_RING - 1) & (ago < token - 1)).astype(np.uint8)


cdef object _check_values(dict given, int num_layers, int num_experts):
    """Raise ValueError if a value is one that no Echo could have."""
    top_k, lowest, layer, token = given["clock"].tolist()
    # Rounding may leave a quotient of sums a little above 1.
    most = {"samples": np.finfo(np.float32).max, "next_use": 1.001, "values": 1.001}
    for name, array in given.items():
        if array.dtype == np.float32 and name != "scores":
            # Written so that NaN is out of range, too.
            _require(
                ((array >= 0) & (array <= most.get(name, 1))).all(),
                f"{name} must be between 0 and {most.get(name, 1):.4g}",
            )
    scores = given["scores"]
    _require(((scores < INFINITY) & (scores == scores)).all(), "scores must be below infinity")
    _require(0 <= top_k <= num_experts, f"top_k {top_k} is not in [0, {num_experts}]")
    _require(
        0 <= lowest <= num_layers and (lowest < num_layers or top_k == 0),
        f"the lowest layer, {lowest}, is not in [0, {num_layers})",
    )
    _require(0 <= layer < num_layers, f"layer {layer} is not in [0, {num_layers})")
    _require(0 <= token <= REBASE, f"the number of tokens, {token}, is not in [0, {REBASE}]")
    last = given["last"]
    # Before the first valid request of the lowest layer, later layers count as of the first token.
    latest = max(token, min(top_k, 1))
    _require(((last >= NEVER) & (last <= latest)).all(), f"last must be in [{NEVER}, {latest}]")
    _require((given["cells"] < CELLS).all(), f"cells must be below {CELLS}")
    if "before" in given:
        places = np.arange(ECHO_RING)
        before = given["before"].astype(np.int64)
        ago = (token - places) % ECHO_RING + before
        linked = (places - before)[before > 0] % ECHO_RING
        _require(
            (ago[before > 0] < min(ECHO_RING, max(1, token))).all()
            and len(set(linked.tolist())) == len(linked),
            "before must lead to an earlier token of the ring, each to its own",
        )
    if "masks" in given and num_experts % 64:
        # A bit beyond the last expert would be counted past the end of the votes.
        beyond = given["masks"][:, :, -1] >> np.uint64(num_experts % 64)
        _require(not beyond.any(), f"masks must have no bit from {num_experts} on")


cdef object _require(condition, message):
    if not condition:
        raise ValueError(f"no state of an Echo: {message}")
