"""ExpertRuntime: store, slots and cache behind one object."""

import logging
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from moecache import steps
from moecache._cache import ExpertCache
from moecache._profiler import AccessProfiler
from moecache.errors import CapacityError, ConfigError, MoeCacheError
from moecache.layout import ExpertLayout
from moecache.loader import SlotLoader
from moecache.settings import (
    DEFAULT_LOADER_THREADS,
    DEFAULT_POLICY,
    DEFAULT_SCOPE,
    Settings,
)
from moecache.sizing import RESERVE_BYTES, SizingPlan, free_host_bytes, plan
from moecache.slots import HostSlots, SlotPool
from moecache.steps import Lease, Wave
from moecache.stores import ExpertStore, open_store
from moecache.telemetry import RuntimeStats
from moecache.units import format_bytes, parse_budget

logger = logging.getLogger(__name__)

MAX_STAGING_SLOTS = 8
MAX_LOADER_THREADS = 999


class ExpertRuntime:
    """Hands a host loop the experts of each layer, resident or read on demand.

    Made by `moecache.open`, or from parts: any store and a pool with at least
    `cache.capacity` slots; what it has beyond are staging slots. Methods may be
    called from several threads, but not in a forked child.

    Parameters
    ----------
    store : ExpertStore
        Closed with the runtime.
    pool : SlotPool
        Closed with the runtime.
    cache : ExpertCache
    loader_threads : int, default 2
        Threads that read experts while the host computes; 0 reads only in the
        thread that waits.
    expert_stats : str or Path, optional
        Write `report()` there on `close`.
    """

    def __init__(
        self,
        store: ExpertStore,
        pool: SlotPool,
        cache: ExpertCache,
        *,
        loader_threads: int = DEFAULT_LOADER_THREADS,
        expert_stats: str | os.PathLike[str] | None = None,
    ) -> None:
        layout = store.layout
        if (cache.num_layers, cache.num_experts) != (layout.num_layers, layout.num_experts):
            raise ConfigError(
                f"the cache is for {cache.num_layers} x {cache.num_experts} experts, "
                f"the store has {layout.num_layers} x {layout.num_experts}"
            )
        if pool.num_slots < cache.capacity:
            raise ConfigError(
                f"the pool has {pool.num_slots} slots, the cache needs {cache.capacity}"
            )
        if pool.num_slots == cache.capacity < layout.total_experts:
            raise ConfigError(
                f"the pool needs at least {cache.capacity + 1} slots: one for staging, "
                "as not all experts fit"
            )
        if loader_threads < 0:
            raise ConfigError(f"loader_threads must not be negative, got {loader_threads}")
        if loader_threads > MAX_LOADER_THREADS:
            raise ConfigError(
                f"loader_threads must be at most {MAX_LOADER_THREADS}, got {loader_threads}"
            )
        self._store = store
        self._pool = pool
        self._cache = cache
        self._expert_stats = expert_stats
        self._process = os.getpid()
        self._closed = False
        self._pool_bytes = pool.nbytes
        self._loader = SlotLoader(store, pool, cache, loader_threads)
        logger.info(
            "runtime.opened experts=%d slots=%d slot_bytes=%d policy=%s scope=%s",
            layout.total_experts,
            cache.capacity,
            pool.nbytes // pool.num_slots,
            cache.policy,
            cache.scope,
        )

    @property
    def layout(self) -> ExpertLayout:
        """What the experts look like."""
        return self._store.layout

    @property
    def store(self) -> ExpertStore:
        """Where experts come from."""
        return self._store

    @property
    def cache(self) -> ExpertCache:
        """Which expert is in which slot."""
        return self._cache

    @property
    def profiler(self) -> AccessProfiler:
        """Which expert is used how often."""
        return self._cache.profiler

    def waves(
        self, layer: int, ids: npt.ArrayLike, *, ignore_out_of_range: bool = False
    ) -> Generator[Wave, None, None]:
        """Yield the experts of a step in parts, what is resident first.

        While the host computes a wave, misses are read; each later wave is what
        has arrived by then. A wave's slots are leased until the next one is
        asked for. Works for any number of experts, also more than there are
        slots. Close the iterator (or run it to its end) to end the leases.

        Parameters
        ----------
        layer : int
            Number of the MoE layer, from 0.
        ids : ndarray of int32 or int64, shape [..., top_k]
            What the router chose for each token. More than one token is a bulk
            step: it admits no more experts than the layer's fair share.
        ignore_out_of_range : bool, default False
            Drop ids outside [0, num_experts): pairs of experts elsewhere.

        Raises
        ------
        ValueError
            If the layer or an id is out of range. Raised by the first `next`.
        StoreError
            If an expert cannot be read. All leases are ended; call again.
        """
        self._check_usable()
        yield from steps.waves(
            self._loader,
            self._cache,
            layer,
            np.asarray(ids),
            ignore_out_of_range=ignore_out_of_range,
        )

    def lease(self, layer: int, ids: npt.ArrayLike, *, ignore_out_of_range: bool = False) -> Lease:
        """Return all experts of a step at once, when the last one has arrived.

        Parameters
        ----------
        layer : int
        ids : ndarray of int32 or int64, any shape
        ignore_out_of_range : bool, default False

        Returns
        -------
        Lease
            A context manager; `slots` has the shape of `ids`.

        Raises
        ------
        CapacityError
            If the cache has too few slots for them; use `waves`.
        ValueError
            If the layer or an id is out of range.
        StoreError
            If an expert cannot be read. Nothing stays leased; call again.
        """
        self._check_usable()
        return steps.lease(
            self._loader,
            self._cache,
            layer,
            np.asarray(ids),
            ignore_out_of_range=ignore_out_of_range,
        )

    def slab(self, role: str) -> np.ndarray:
        """Return all slots of a role, an array [num_slots, *shape], indexed by slot."""
        return self._pool.slab(role)

    def expert(self, slot: int, layer: int) -> dict[str, np.ndarray]:
        """Return the weights in a leased slot, per role, in the shapes of `layer`."""
        return self._pool.expert(slot, layer)

    def begin_sequence(self) -> None:
        """Say that the next tokens do not continue the last ones."""
        self._cache.begin_sequence()

    def stats(self) -> RuntimeStats:
        """Return the counters as they are now."""
        profiler, cache = self._cache.profiler, self._cache
        return RuntimeStats(
            num_steps=self._loader.num_steps,
            num_hits=profiler.num_hits,
            num_misses=profiler.num_misses,
            num_evictions=cache.num_evictions,
            num_reads=self._loader.num_reads,
            num_failed_reads=self._loader.num_failed_reads,
            bytes_read=self._loader.bytes_read,
            num_stalls=profiler.num_miss_stalls,
            stall_ns=profiler.miss_stall_ns,
            num_resident=cache.num_resident,
            capacity=cache.capacity,
            staging_slots=self._loader.num_staging,
            total_experts=self.layout.total_experts,
            pool_bytes=self._pool_bytes,
            policy=cache.policy,
            scope=cache.scope,
        )

    def report(self) -> str:
        """Return the counters as text, with a line per layer."""
        return f"{self.stats().describe()}\n{self._cache.profiler.report()}"

    def close(self) -> None:
        """Stop the threads, write the report if asked for, free slots and file.

        A second call does nothing. Never fails because of the report.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            # A forked child: the threads and the report are the parent's.
            return
        try:
            self._loader.close()
            self._write_report()
        finally:
            try:
                self._pool.close()
            finally:
                self._store.close()
        logger.info("runtime.closed hit_rate=%.3f", self._cache.profiler.hit_rate)

    def _write_report(self) -> None:
        if self._expert_stats is not None:
            try:
                Path(self._expert_stats).write_text(self.report() + "\n")
            except OSError as error:
                logger.warning("runtime.no_report path=%s error=%s", self._expert_stats, error)

    def __enter__(self) -> Self:
        """Return the runtime."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the runtime."""
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise MoeCacheError("the runtime is closed")
        if os.getpid() != self._process:
            raise MoeCacheError(
                "this runtime was opened by the parent process, and its threads did not survive "
                "the fork; open one in the child"
            )


def open(  # noqa: A001 - called as moecache.open
    path: str | os.PathLike[str],
    memory: int | str | None = None,
    device: str = "cpu",
    *,
    slots: int | None = None,
    policy: str | None = None,
    scope: str | None = None,
    dtype: npt.DTypeLike | None = None,
    top_k: int | None = None,
    loader_threads: int | None = None,
) -> ExpertRuntime:
    """Open a checkpoint's experts for use in a bounded amount of memory.

    Parameters
    ----------
    path : str or Path
        A Hugging Face checkpoint directory, or one .safetensors file.
    memory : int or str, optional
        Bytes for all slots, such as "4GiB", or a share of the experts' own
        bytes, such as "25%". By default MOECACHE_MEMORY, else what is free less
        512 MiB.
    device : {"cpu"}, default "cpu"
        Where the slots are.
    slots : int, optional
        Number of experts to keep, instead of `memory`; staging slots come on top.
    policy : str, optional
        Who is evicted, see `ExpertCache`. By default MOECACHE_POLICY, else "slru".
    scope : {"global", "layer"}, optional
        Whether layers share the slots. By default MOECACHE_SCOPE, else "global".
    dtype : numpy dtype, optional
        Convert experts to it as they are read. By default slots hold what the
        file holds.
    top_k : int, optional
        Experts per token, if config.json does not say.
    loader_threads : int, optional
        Threads that read. By default MOECACHE_LOADER_THREADS, else 2.

    Returns
    -------
    ExpertRuntime
        A context manager; `close` it.

    Raises
    ------
    ConfigError
        If an argument cannot be used.
    CapacityError
        If the memory does not hold a slot and a staging slot.
    StoreError
        If the checkpoint cannot be read, or has no experts.
    """
    settings = Settings.from_environ()
    if device != "cpu":
        raise ConfigError(f'device {device!r} is not supported; the only one so far is "cpu"')
    if slots is not None and memory is not None:
        raise ConfigError("give either memory or slots, not both")
    for name, value in (("slots", slots), ("loader_threads", loader_threads), ("top_k", top_k)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")
    threads = _first(loader_threads, settings.loader_threads, DEFAULT_LOADER_THREADS)
    store = open_store(path, top_k=top_k)
    try:
        layout = store.layout
        if layout.total_experts == 0:
            raise ConfigError(f"{path}: there are no experts; is it a mixture-of-experts model?")
        if slots is None:
            planned, staging = plan_slots(layout, _first(memory, settings.memory), dtype)
            capacity = planned.slots
            logger.info("runtime.planned %s", planned.describe())
        else:
            if slots < 1:
                raise ConfigError(f"slots must be at least 1, got {slots}")
            capacity = min(slots, layout.total_experts)
            staging = 0 if capacity == layout.total_experts else _staging_slots(layout, capacity)
        cache = ExpertCache(
            layout.num_layers,
            layout.num_experts,
            capacity,
            policy=_first(policy, settings.policy, DEFAULT_POLICY),
            scope=_first(scope, settings.scope, DEFAULT_SCOPE),
        )
        pool = HostSlots(layout, capacity + staging, dtype=dtype)
        return ExpertRuntime(
            store, pool, cache, loader_threads=threads, expert_stats=settings.expert_stats
        )
    except BaseException:
        store.close()
        raise


def plan_slots(
    layout: ExpertLayout, memory: int | str | None, dtype: npt.DTypeLike | None
) -> tuple[SizingPlan, int]:
    """Return the plan of `open` for a memory budget, and its staging slots.

    Raises
    ------
    CapacityError
        If the budget does not hold one slot and the staging slots.
    """
    slot_bytes = HostSlots.bytes_per_slot(layout, dtype)
    if slot_bytes == 0:
        raise ConfigError("the experts have no weights: every role is of size 0")
    if memory is None:
        free, reserve = free_host_bytes(), RESERVE_BYTES
    else:
        free, reserve = parse_budget(memory, layout.total_experts * slot_bytes), 0
    staging = _staging_slots(layout, max(0, free - reserve) // slot_bytes)
    planned = plan(
        layout, free, reserve_bytes=reserve, staging_slots=staging, slot_bytes=slot_bytes
    )
    if planned.budget_slots == 0:
        if memory is None:
            raise CapacityError(
                f"{format_bytes(free)} are free, of which {format_bytes(reserve)} stay reserved: "
                f"too little for one expert of {format_bytes(slot_bytes)} and {staging} for "
                "staging; free some memory, or say how much to use with memory="
            )
        need = format_bytes((1 + staging) * slot_bytes)
        raise CapacityError(
            f"a budget of {format_bytes(free)} does not hold one expert of "
            f"{format_bytes(slot_bytes)} and {staging} for staging; raise memory to at least {need}"
        )
    return planned, 0 if planned.slots == layout.total_experts else staging


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _staging_slots(layout: ExpertLayout, num_slots: int) -> int:
    # Enough for reads to overlap a prompt's computation, and not so many that
    # the cache of a tight budget suffers.
    return max(1, min(layout.top_k or MAX_STAGING_SLOTS, MAX_STAGING_SLOTS, num_slots // 8))
