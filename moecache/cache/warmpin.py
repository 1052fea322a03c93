"""Warm pin: after the first requests, the experts that they used most stay."""

import logging
import threading

import numpy as np

from moecache.cache._cache import ExpertCache
from moecache.cache._profiler import AccessProfiler
from moecache.errors import ConfigError
from moecache.settings import DEFAULT_WARMPIN_AFTER

logger = logging.getLogger(__name__)

# These predict every expert's next use: a pin could only keep an expert that they value less.
UNPINNED_POLICIES = ("echo", "haz2")


def auto_pins(num_layers: int, num_experts: int, top_k: int, capacity: int) -> int:
    """Return how many experts of each layer to pin by default: as many as a token uses.

    0 if the cache holds everything.
    """
    if capacity >= num_layers * num_experts:
        return 0
    return min(max(top_k, 1), num_experts)


def choose_pins(
    profiler: AccessProfiler,
    slot_table: np.ndarray,
    n: int,
    *,
    max_pins: int,
    max_layer_pins: int | None = None,
) -> list[tuple[int, int]]:
    """Return the (layer, expert) pairs to pin, the busiest layer's first.

    Parameters
    ----------
    profiler : AccessProfiler
    slot_table : ndarray of int32, shape [num_layers, num_experts]
        Slot of each expert, -1 where it is not resident.
    n : int
        Experts of each layer: its most used resident ones, ties by id.
    max_pins : int
        Most pins in all; the least busy layers go without.
    max_layer_pins : int, optional
        Most pins of each layer.
    """
    pins: list[tuple[int, int]] = []
    n = n if max_layer_pins is None else min(n, max_layer_pins)
    layers = sorted(
        range(profiler.num_layers), key=lambda layer: (-profiler.layer_access_count(layer), layer)
    )
    for layer in layers:
        if profiler.layer_access_count(layer) == 0 or len(pins) >= max_pins:
            break
        resident = [
            expert
            for expert in profiler.top_experts(layer, profiler.num_experts)
            if slot_table[layer, expert] >= 0
        ]
        pins += [(layer, expert) for expert in resident[:n]]
    return pins[:max_pins]


class WarmPin:
    """Pins once, when enough accesses have been counted.

    At most half of the cache is pinned, and with scope "layer" at most half of each layer's
    slots. The profiler's report lists the pinned experts.

    Parameters
    ----------
    cache : ExpertCache
    top_k : int
        Experts per token, 0 if not known.
    n : int or "auto", default "auto"
        Experts of each layer; 0 pins none. "auto": `auto_pins`, but none under the
        policies "echo" and "haz2".
    after : int, default 512
        Accesses, hits included, before it pins.

    Attributes
    ----------
    n : int
        Experts of each layer to pin, "auto" resolved; 0 if nothing will be pinned.

    Raises
    ------
    ConfigError
        If `n` or `after` is not a whole number from 0 on, and `n` is not "auto" either.
    """

    def __init__(
        self,
        cache: ExpertCache,
        top_k: int,
        n: int | str = "auto",
        after: int = DEFAULT_WARMPIN_AFTER,
    ) -> None:
        for name, value in (("warmpin", n), ("warmpin_after", after)):
            if not (isinstance(value, int) and not isinstance(value, bool) and value >= 0) and (
                name != "warmpin" or value != "auto"
            ):
                words = ' or "auto"' if name == "warmpin" else ""
                raise ConfigError(f"{name} must be a whole number from 0 on{words}, got {value!r}")
        self._cache = cache
        self._profiler = cache.profiler
        self._after = after
        self._once = threading.Lock()
        if isinstance(n, int):
            self.n = n
        elif cache.policy in UNPINNED_POLICIES:
            self.n = 0
        else:
            self.n = auto_pins(cache.num_layers, cache.num_experts, top_k, cache.capacity)

    def look(self) -> bool:
        """Pin once enough accesses were counted; return whether that has happened by now."""
        if self._profiler.num_hits + self._profiler.num_misses < self._after:
            return False
        if self._once.acquire(blocking=False):
            self._pin()
        return True

    def _pin(self) -> None:
        cache = self._cache
        share = None if cache.scope == "global" else cache.fair_share(cache.num_layers - 1) // 2
        chosen = choose_pins(
            self._profiler,
            cache.slot_table,
            self.n,
            max_pins=cache.capacity // 2,
            max_layer_pins=share,
        )
        # A policy may have no room for a pin; an expert evicted meanwhile is not pinned either.
        pinned = [pair for pair in chosen if cache.pin(*pair)]
        self._profiler.record_warm_pin(pinned)
        logger.info(
            "warmpin.pinned experts=%d of=%d slots=%d after=%d",
            len(pinned),
            len(chosen),
            cache.capacity,
            self._after,
        )
