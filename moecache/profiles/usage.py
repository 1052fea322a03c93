"""How a runtime's experts are used, from one run to the next."""

import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from moecache.cache._cache import ExpertCache
from moecache.errors import MoeCacheError
from moecache.loading._loader import SlotLoader
from moecache.profiles.file import (
    ModelUsage,
    Profile,
    check_path,
    identity,
    read_profile,
    update_profile,
)
from moecache.profiles.warm_start import WarmStart
from moecache.reader.disk import DiskSpeed, disk_of
from moecache.stores import ExpertStore, FileStore

logger = logging.getLogger(__name__)


class KeptUsage:
    """Notes of earlier runs about a model, and of this one; fills slots by them.

    Parameters
    ----------
    store : ExpertStore
    cache : ExpertCache
    loader : SlotLoader
    check_usable : callable
        Raises an error if the runtime can be used no more.
    disk : DiskSpeed, optional
        The known figures of the store's disk.
    held : ndarray of bool, shape [num_layers, num_experts], optional
        Experts that may be brought in; by default all.

    Attributes
    ----------
    warm_start : WarmStart or None
        The thread that fills free slots: of the last `use` that found experts, or of `fill`.
    """

    def __init__(
        self,
        store: ExpertStore,
        cache: ExpertCache,
        loader: SlotLoader,
        check_usable: Callable[[], None],
        disk: DiskSpeed | None = None,
        held: np.ndarray | None = None,
    ) -> None:
        self.warm_start: WarmStart | None = None
        self._store = store
        self._cache = cache
        self._loader = loader
        self._check_usable = check_usable
        self._disk = disk
        self._held = held
        self._model = identity(store.layout)
        self._earlier: ModelUsage | None = None
        self._path: str | os.PathLike[str] | None = None

    def use(self, path: str | os.PathLike[str], profile: Profile | None = None) -> None:
        """Go on from what earlier runs kept in a profile, and keep this one there at the end.

        ECHO's state is restored if it has seen nothing yet, and free slots are filled in the
        background: see `warm_start`. These experts do not count as accesses. A warm start that
        still goes on is cancelled: two would take each other's slots.

        Parameters
        ----------
        path : str or Path
            A profile that cannot be used, or has other models only, is a warning.
        profile : Profile, optional
            The profile, if it was read already.

        Raises
        ------
        ConfigError
            If this is not a path.
        """
        self._check_usable()
        check_path(path)
        self._end_warm_start()
        known = read_profile(path) if profile is None else profile
        if known is None:
            return
        self._path = path
        usage = known.models.get(self._model)
        if usage is None:
            if known.models:
                logger.warning(
                    "profile.foreign path=%s has the experts of %d other models, not of this one; "
                    "starting cold",
                    path,
                    len(known.models),
                )
            return
        cache, echo = self._cache, self._cache.echo
        try:
            keys = valuable_keys(usage, cache, self._held)
            # A state without a ring does not suit one with a ring; this run keeps its own.
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
            return
        self._earlier = usage
        logger.info("profile.resumed path=%s policy=%s experts=%d", path, usage.policy, len(keys))
        if keys:
            self.warm_start = WarmStart(self._loader, cache, keys)

    def fill(self) -> WarmStart:
        """Begin to bring experts into slots that are free, from the first layer on.

        Runs in the background; `wait` for it before a CUDA graph of resident steps is captured.
        These experts do not count as accesses. A warm start that still goes on is cancelled.
        """
        self._check_usable()
        self._end_warm_start()
        is_missing = self._cache.slot_table < 0
        if self._held is not None:
            is_missing &= self._held
        missing = np.flatnonzero(is_missing.reshape(-1))
        self.warm_start = WarmStart(self._loader, self._cache, missing.tolist())
        return self.warm_start

    @property
    def path(self) -> str | os.PathLike[str] | None:
        """The profile that is written at the end, if one is."""
        return self._path

    def save(self, path: str | os.PathLike[str]) -> None:
        """Note how experts were used, and what is known of the disk, for `open(profile=)`.

        Other models and disks that the file has are kept.

        Raises
        ------
        ConfigError
            If this is not a path.
        StoreError
            If it cannot be written, or is no profile. The file that was there is kept.
        """
        self._check_usable()
        self._save(path)

    def keep(self) -> None:
        """Save what is known to the profile that it came from, if any; never fails."""
        profiler = self._cache.profiler
        # A run that used nothing has nothing to add to earlier findings.
        if self._path is None or profiler.num_hits + profiler.num_misses == 0:
            return
        try:
            self._save(self._path)
        except (MoeCacheError, OSError, ValueError, MemoryError) as error:
            logger.warning("profile.not_written %s", error)

    def _save(self, path: str | os.PathLike[str]) -> None:
        usage = usage_of(self._cache, self._earlier)
        update_profile(path, disks=self._disks(), models={self._model: usage})

    def _disks(self) -> dict[str, Any]:
        if self._disk is None or not isinstance(self._store, FileStore):
            return {}
        return {disk_of(self._store): asdict(self._disk)}

    def _end_warm_start(self) -> None:
        if self.warm_start is not None:
            self.warm_start.cancel()
        self.warm_start = None


def valuable_keys(
    usage: ModelUsage, cache: ExpertCache, held: np.ndarray | None = None
) -> list[int]:
    """Return which experts to bring in, the most valuable first, no more than there is room for.

    Experts that were resident at the end come first, in the order of ECHO's values, or of how
    often they were used; then what else was used. With `held`, only of these experts.

    Raises
    ------
    ValueError
        If the usage is of a cache of another shape.
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
