"""`moecache.open`: from a path and a budget to a runtime."""

import logging
import os
from typing import Any

import numpy.typing as npt

from moecache._cache import ExpertCache
from moecache._prefault import PAGE_SIZE
from moecache.errors import CapacityError, ConfigError, MoeCacheError
from moecache.host_memory import free_host_bytes
from moecache.layout import ExpertLayout
from moecache.prefault import BackgroundSweep, Region, warm
from moecache.runtime import ExpertRuntime
from moecache.settings import (
    DEFAULT_LOADER_THREADS,
    DEFAULT_POLICY,
    DEFAULT_PREFAULT,
    DEFAULT_SCOPE,
    Settings,
    parse_prefault,
)
from moecache.sizing import RESERVE_BYTES, SizingPlan, plan
from moecache.slots import HostSlots
from moecache.stores import open_store
from moecache.sweep import Progress
from moecache.units import format_bytes, parse_budget

logger = logging.getLogger(__name__)

MAX_STAGING_SLOTS = 8


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
    prefault: str | None = None,
    progress: Progress | None = None,
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
    prefault : {"auto", "background", "off", "force"}, optional
        Back the slots with memory, and bring the experts' part of the file into
        the page cache, so that no request waits for page faults. "force": all of
        it, before this returns. "background": as much of the file as fits beside
        the slots, while the host goes on; `runtime.prefault` says how far it is.
        "auto": all of it before this returns if every expert has a slot and it
        fits, else as "background". By default MOECACHE_PREFAULT, else "auto". It
        never makes `open` fail.
    progress : callable (done_bytes, total_bytes), optional
        Called some ten times a second while that goes on.

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
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress must be callable, got {progress!r}")
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
        runtime = ExpertRuntime(
            store, pool, cache, loader_threads=threads, expert_stats=settings.expert_stats
        )
    except BaseException:
        store.close()
        raise
    try:
        mode = parse_prefault(_first(prefault, settings.prefault, DEFAULT_PREFAULT))
        runtime.prefault = _start_prefault(runtime, mode, pool, progress)
    except BaseException:
        runtime.close()
        raise
    return runtime


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


def _start_prefault(
    runtime: ExpertRuntime, mode: str, pool: HostSlots, progress: Progress | None
) -> BackgroundSweep | None:
    """Back the slots with memory and bring experts into the page cache, or return None."""
    if mode == "off":
        return None
    sweep = None
    try:
        regions = [Region(*pair, getattr(pair, "owner", None)) for pair in runtime.store.regions()]
        # Nothing is read into the slots yet: what they will take still counts as free.
        room = free_host_bytes() * 4 // 5
        slots = _cut_to(pool.regions(), room)
        chosen = regions if mode == "force" else _cut_to(regions, room - pool.nbytes)
        if not slots and not chosen:
            return None
        logger.info("prefault.chosen regions=%d of=%d mode=%s", len(chosen), len(regions), mode)
        sweep = warm(
            chosen + slots,
            mode="force" if mode == "force" else "auto",
            gate="always",  # what fits was chosen above
            background=True,
            progress=progress,
            keep_mapped=False,
        )
        all_in_slots = runtime.cache.capacity == runtime.layout.total_experts
        if mode == "force" or (mode == "auto" and all_in_slots and chosen == regions):
            sweep.join()
    except (MoeCacheError, OSError, RuntimeError, ValueError, MemoryError, ImportError) as error:
        # What cannot be warmed may still be read, or fails where it is needed.
        logger.warning("prefault.failed %s", str(error))
    except BaseException:
        if sweep is not None:
            sweep.cancel()
        raise
    return sweep


def _cut_to(regions: list[Region], num_bytes: int) -> list[Region]:
    """Return the first `num_bytes` of the regions, in whole pages."""
    cut: list[Region] = []
    for region in regions:
        address, nbytes = region
        size = -(-(address % PAGE_SIZE + nbytes) // PAGE_SIZE) * PAGE_SIZE
        if size > num_bytes:
            part = num_bytes // PAGE_SIZE * PAGE_SIZE - address % PAGE_SIZE
            return [*cut, Region(address, part, region.owner)] if part > 0 else cut
        cut.append(region)
        num_bytes -= size
    return cut


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _staging_slots(layout: ExpertLayout, num_slots: int) -> int:
    # Enough for reads to overlap a prompt's computation, and not so many that
    # the cache of a tight budget suffers.
    return max(1, min(layout.top_k or MAX_STAGING_SLOTS, MAX_STAGING_SLOTS, num_slots // 8))
