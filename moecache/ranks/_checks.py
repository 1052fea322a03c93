"""Checks of a placement's parts."""

from collections.abc import Sequence

import numpy as np

from moecache.errors import ConfigError

MAX_RANKS = 4096


def check_sizes(num_layers: int, num_experts: int) -> None:
    """Refuse what has no expert."""
    if num_layers < 1 or num_experts < 1:
        raise ConfigError(f"there must be layers and experts, got {num_layers} x {num_experts}")


def check_ranks(num_ranks: int, num_experts: int) -> None:
    """Refuse a number of ranks that is none, or more than the experts of a layer."""
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, (int, np.integer)):
        raise ConfigError(f"num_ranks must be a whole number, got {num_ranks!r}")
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ConfigError(f"num_ranks must be from 1 to {MAX_RANKS:,}, got {num_ranks}")
    if num_ranks > num_experts:
        raise ConfigError(
            f"{num_ranks} ranks are more than the {num_experts} experts of a layer, and some "
            f"would have nothing to do; use at most {num_experts} ranks"
        )


def parse_shares(shares: Sequence[float] | np.ndarray | None, num_ranks: int) -> np.ndarray:
    """Return shares with a sum of 1."""
    if shares is None:
        return np.full(num_ranks, 1 / num_ranks)
    parts = np.array(shares, np.float64)
    if parts.shape != (num_ranks,) or not np.isfinite(parts).all() or (parts <= 0).any():
        raise ConfigError(
            f"shares must be {num_ranks} positive numbers, one for each rank, got {shares!r:.200}"
        )
    # Shares that sum to 1 stay, bit for bit: a placement read from a file keeps its digest.
    total = parts.sum()
    return parts if abs(total - 1) < 1e-12 else parts / total
