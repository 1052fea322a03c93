"""How a runtime's experts are used, from one run to the next."""

import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from moecache.cache._cache import ExpertCache
from moecache.errors import MoeCacheError
from moecache.layout import ExpertLayout
from moecache.loading.loader import SlotLoader
from moecache.profiles.file import (
    ModelUsage,
    Profile,
    check_path,
    identity,
    read_profile,
    update_profile,
)
from moecache.profiles.warm_start import WarmStart

logger = logging.getLogger(__name__)


class KeptUsage:
    """What an earlier run noted of a model, and what this one will.

    Parameters
    ----------
    layout : ExpertLayout
    cache : ExpertCache
    held : ndarray of bool, shape [num_layers, num_experts], optional
        Experts that may be brought in; by default all.
    """

    def __init__(
        self, layout: ExpertLayout, cache: ExpertCache, held: np.ndarray | None = None
    ) -> None:
        self._held = held
        self._model = identity(layout)
        self._cache = cache
        self._earlier: ModelUsage | None = None
        self._path: str | os.PathLike[str] | None = None
        self._warm_start: WarmStart | None = None

    def use(
        self, path: str | os.PathLike[str], profile: Profile | None, loader: SlotLoader
    ) -> WarmStart | None:
        """Go on from what a profile has: what ECHO had learned, and what was in the cache.

        What cannot be used is a warning. A warm start that goes on is cancelled: two would
        take each other's slots.

        Returns
        -------
        WarmStart or None
            `None` if nothing is worth a slot, or none is free.

        Raises
        ------
        ConfigError
            If this is not a path.
        """
        check_path(path)
        if self._warm_start is not None:
            self._warm_start.cancel()
        known = read_profile(path) if profile is None else profile
        if known is None:
            return None
        self._path = path
        usage = known.models.get(self._model)
        if usage is None:
            if known.models:
                logger.warning(
                    "profile.foreign path=%s has the experts of %d other models, not of this one; "
                    "starting cold",
                    *(path, len(known.models)),
                )
            return None
        cache, echo = self._cache, self._cache.echo
        try:
            keys = valuable_keys(usage, cache, self._held)
            # A state without a ring does not suit one with a ring; what this run has learned stays.
            if (
                usage.echo
                and echo is not None
                and echo.num_tokens == 0
                and ("masks" in usage.echo) == echo.ring
            ):
                echo.restore(usage.echo)
                cache.begin_sequence()
        except ValueError as error:
            logger.warning("profile.ignored %s: %s; starting cold", path, error)
            return None
        self._earlier = usage
        logger.info("profile.resumed path=%s policy=%s experts=%d", path, usage.policy, len(keys))
        self._warm_start = WarmStart(loader, cache, keys) if keys else None
        return self._warm_start

    @property
    def path(self) -> str | os.PathLike[str] | None:
        """The profile in use, if one is."""
        return self._path

    def save(self, path: str | os.PathLike[str], disks: Mapping[str, Any]) -> None:
        """Note what is known by now, beside what the file has of others.

        Raises
        ------
        ConfigError
            If this is not a path.
        StoreError
            If it cannot be written, or is no profile. What was there before still is.
        """
        usage = usage_of(self._cache, self._earlier)
        update_profile(path, disks=disks, models={self._model: usage})

    def keep(self, disks: Mapping[str, Any]) -> None:
        """Save what is known to the profile that it came from, if any; never fails."""
        profiler = self._cache.profiler
        # A run that used nothing has nothing to add to what earlier ones found out.
        if self._path is None or profiler.num_hits + profiler.num_misses == 0:
            return
        try:
            self.save(self._path, disks)
        except (MoeCacheError, OSError, ValueError, MemoryError) as error:
            logger.warning("profile.not_written %s", error)


def valuable_keys(
    usage: ModelUsage, cache: ExpertCache, held: np.ndarray | None = None
) -> list[int]:
    """Return which experts to bring in, the most valuable first, no more than there is room for.

    Experts that were resident at the end come first, in the order of ECHO's values, or of how
    often they were used; then what else was used. With `held`, only of these experts.

    Raises
    ------
    ValueError
        If the usage is not that of such a cache.
    """
    shape, num_keys = (cache.num_layers, cache.num_experts), cache.num_layers * cache.num_experts
    values = usage.echo.get("values", usage.counts)
    residents = usage.residents
    if usage.counts.shape != shape or values.shape != shape:
        raise ValueError(f"its counts are {list(usage.counts.shape)}, not {list(shape)}")
    if (
        residents.ndim != 1
        or residents.dtype.kind != "i"
        or not ((residents >= 0) & (residents < num_keys)).all()
    ):
        raise ValueError(f"its residents are not all in [0, {num_keys})")
    was_there = np.zeros(num_keys, bool)
    was_there[residents] = True
    order = np.lexsort((-values.reshape(-1).astype(np.float64), ~was_there))
    wanted = was_there[order] | (usage.counts.reshape(-1)[order] > 0)
    if held is not None:
        wanted &= held.reshape(-1)[order]
    keys = order[wanted].tolist()
    if cache.scope == "global":
        return keys[: cache.num_free]
    room = [cache.fair_share(layer) for layer in range(cache.num_layers)]
    chosen = []
    for key in keys:
        layer = key // cache.num_experts
        if room[layer] > 0:
            room[layer] -= 1
            chosen.append(key)
    return chosen[: cache.num_free]


def usage_of(cache: ExpertCache, earlier: ModelUsage | None) -> ModelUsage:
    """Return how a cache's experts were used, in earlier runs too."""
    counts = cache.profiler.counts.copy()
    echo = {} if cache.echo is None else cache.echo.state()
    if earlier is not None:
        # Clipped, as a file may say anything; halved, as a model's use changes.
        counts += np.minimum(earlier.counts, np.uint64(2**40)) // np.uint64(2)
        echo = echo or dict(earlier.echo)
    residents = np.flatnonzero(cache.slot_table.reshape(-1) >= 0).astype(np.int32)
    return ModelUsage(cache.policy, counts, residents, echo)
