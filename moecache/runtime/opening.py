"""`moecache.open`: from a path and a budget to a runtime."""

import contextlib
import logging
import os
from collections.abc import Collection
from typing import Any

import numpy.typing as npt

from moecache._prefault import PAGE_SIZE
from moecache.cache._cache import ExpertCache
from moecache.cuda import Device, open_device, parse_device
from moecache.errors import CapacityError, ConfigError, MoeCacheError
from moecache.layout import ExpertLayout
from moecache.prefault import BackgroundSweep, Region, warm
from moecache.prefault.sweep import Progress
from moecache.prefetch.predict import Predictor
from moecache.profiles.disk import keep_speed, speed_of
from moecache.profiles.file import Profile, check_path, read_profile
from moecache.reader._reader import Reader
from moecache.reader.disk import (
    STAGING_BYTES,
    DiskSpeed,
    apply,
    calibrate,
    disk_of,
    open_reader,
)
from moecache.runtime.cuda_opening import check_register, make_slots, register_experts, usable_bytes
from moecache.runtime.runtime import ExpertRuntime
from moecache.settings import (
    DEFAULT_LOADER_THREADS,
    DEFAULT_POLICY,
    DEFAULT_PREFAULT,
    DEFAULT_PREFETCH,
    DEFAULT_READ,
    DEFAULT_SCOPE,
    DEFAULT_WARMPIN,
    DEFAULT_WARMPIN_AFTER,
    READ_MODES,
    Settings,
    parse_prefault,
)
from moecache.sizing.headroom import check_fits, fits_beside, headroom
from moecache.sizing.host_memory import free_host_bytes
from moecache.sizing.planning import RESERVE_BYTES, SizingPlan, num_staging_slots, plan
from moecache.slots import CudaSlots, HostSlots, SlotPool
from moecache.slots.cuda import MAX_PINNED_BYTES
from moecache.slots.host import MAX_CONVERTED_BYTES
from moecache.stores import SafetensorsStore, open_store
from moecache.units import format_bytes, parse_budget, parse_bytes

logger = logging.getLogger(__name__)

# Without io_uring there are as many direct reads in flight as threads.
DIRECT_THREADS = 8
# What was found out about disks, by device.
_disks: dict[str, DiskSpeed] = {}


def open(  # noqa: A001, PLR0915 - called as moecache.open; a plan, step by step
    path: str | os.PathLike[str],
    memory: int | str | None = None,
    device: str = "cpu",
    *,
    slots: int | None = None,
    policy: str | None = None,
    scope: str | None = None,
    dtype: npt.DTypeLike | None = None,
    top_k: int | None = None,
    read: str | None = None,
    reserve: int | str | None = None,
    lock: bool | None = None,
    profile: str | os.PathLike[str] | None = None,
    loader_threads: int | None = None,
    prefetch: str | Predictor | None = None,
    prefault: str | None = None,
    progress: Progress | None = None,
    record_trace: str | os.PathLike[str] | None = None,
    warmpin: int | str | None = None,
    warmpin_after: int | None = None,
    register: str | None = None,
    layers: Collection[str] | None = None,
) -> ExpertRuntime:
    """Open a checkpoint's experts for use in a bounded amount of memory.

    Parameters
    ----------
    path : str or Path
        A Hugging Face checkpoint directory, or one .safetensors file.
    memory : int or str, optional
        Bytes for all slots, such as "4GiB", or a share of the experts' own
        bytes, such as "25%". By default MOECACHE_MEMORY, else what is free less
        `reserve`.
    device : str, default "cpu"
        Where the slots are: "cpu", or a GPU, "cuda" or "cuda:1". There `memory` is the GPU's,
        and by default what it has free less `reserve`; where other programs were faster, there
        are fewer slots, and a warning.
    slots : int, optional
        Number of experts to keep, instead of `memory`; staging slots come on top.
    policy : str, optional
        Who is evicted, see `ExpertCache`. By default MOECACHE_POLICY, else "echo".
    scope : {"global", "layer"}, optional
        Whether layers share the slots. By default MOECACHE_SCOPE, else "global".
    dtype : numpy dtype, optional
        Convert experts to it as they are read. By default slots hold what the
        file holds, and on a GPU always.
    top_k : int, optional
        Experts per token, if config.json does not say.
    read : {"auto", "direct", "buffered", "mmap"}, optional
        How experts are read: around the page cache (for models larger than
        memory: nothing is in memory twice), through it, or copied from the mapped
        file. "auto": through the page cache if all experts fit into the memory
        that slots, trunk and KV cache leave; else direct. By default
        MOECACHE_READ, else "auto".
    reserve : int or str, optional
        What a plan without `memory` leaves free. By default MOECACHE_RESERVE,
        else 512 MiB, the bytes of all other tensors, and a KV cache of up to
        4,096 tokens. Say less if those are in memory already.
    lock : bool, optional
        Keep the slots from being swapped out (mlock). By default MOECACHE_LOCK,
        else False.
    profile : str or Path, optional
        A file that keeps what is found out about the disk, so that the next start
        need not measure it, and how experts were used, so that it starts warm: free
        slots are filled in the background (`runtime.warm_start`) before anybody asks.
        Written on `close`. A file that cannot be used is a warning. By default
        MOECACHE_PROFILE, else none.
    loader_threads : int, optional
        Threads that read; with io_uring, one or none that helps with long
        prompts. By default MOECACHE_LOADER_THREADS, else 2; where direct reads
        find no io_uring, 8.
    prefetch : {"auto", "echo", "last", "hints", "off"} or Predictor, optional
        Which experts are read before their layer asks for them: those that ECHO
        foresees, those of the last token, those that `runtime.hint` names, or those of
        an object that predicts. "auto": as "echo", as long as tokens are faster with it
        than without, which is tried from time to time; the report says what was found.
        By default MOECACHE_PREFETCH, else "auto".
    prefault : {"auto", "background", "off", "force"}, optional
        Back the slots with memory, and bring the experts' part of the file into
        the page cache, so that no request waits for page faults. "force": all of
        it, before this returns. "background": as much of the file as fits beside
        the slots, while the host goes on; `runtime.prefault` says how far it is.
        "auto": all of it before this returns if every expert has a slot and it
        fits, else as "background". Of the file nothing, if reads are direct. By
        default MOECACHE_PREFAULT, else "auto". It never makes `open` fail.
    progress : callable (done_bytes, total_bytes), optional
        Called some ten times a second while that goes on.
    record_trace : str or Path, optional
        Note what the router chooses, and write it there on `close`; see
        `ExpertRuntime.record_trace`, which can be given more memory than the 256 MiB
        that this notes at most (`max_bytes=`). By default MOECACHE_RECORD_TRACE, else
        nothing is noted.
    warmpin : int or "auto", optional
        Once `warmpin_after` accesses were counted, keep this many experts of each layer
        for good: the most used of those that are there, the busiest layers' first, at
        most half the cache. 0: none. "auto": as many as a token uses, unless everything
        fits; none with the policies "echo" and "haz2". By default MOECACHE_WARMPIN, else
        "auto".
    warmpin_after : int, optional
        By default MOECACHE_WARMPIN_AFTER, else 512.
    register : {"off", "host"}, default "off"
        For slots on a GPU. "host": pin the mapped file's pages, all of it, so that experts are
        copied from there and pass through no buffer. For models that RAM holds; where it does
        not, or the system refuses, that is a warning, and they pass through buffers.
    layers : collection of str, optional
        Names of the MoE layers that run, if the checkpoint has others too; see
        `SafetensorsStore`.

    Returns
    -------
    ExpertRuntime
        A context manager; `close` it.

    Raises
    ------
    ConfigError
        If an argument cannot be used.
    CapacityError
        If the memory does not hold a slot and a staging slot, if the slots would
        not fit into what is free, or cannot be locked.
    MissingDependencyError
        If slots on a GPU were asked for and CuPy is not installed.
    MoeCacheError
        If the GPU cannot be used.
    StoreError
        If the checkpoint cannot be read, or has no experts.
    """
    settings = Settings.from_environ()
    _check_arguments(device, slots, memory, loader_threads, top_k, progress, lock, profile)
    gpu = None if parse_device(device) is None else open_device(device)
    _check_on_device(gpu, dtype, lock)
    registers = check_register(register, gpu, read)
    way = "mmap" if registers else _first(read, settings.read, DEFAULT_READ)
    if way not in READ_MODES:
        raise ConfigError(f"read {way!r} is not one of {', '.join(READ_MODES)}")
    store = open_store(path, top_k=top_k, mapped=way == "mmap", layers=layers)
    reader: Reader | None = None
    with contextlib.ExitStack() as undo:
        undo.callback(store.close)
        layout = store.layout
        if layout.total_experts == 0:
            raise ConfigError(f"{path}: there are no experts; is it a mixture-of-experts model?")
        widest = max(map(layout.expert_bytes, range(layout.num_layers)))
        # What is converted is read beside its slot first.
        converted = 0 if dtype is None else max(2 * widest, MAX_CONVERTED_BYTES) + widest
        # Of the device that has the slots: what is staged for a GPU is the host's.
        beside = 0 if gpu is not None else STAGING_BYTES + converted
        room = headroom(store.trunk_bytes, store.config, staging_bytes=beside)
        left = _first(reserve, settings.reserve)
        reserve_bytes = room.nbytes if left is None else parse_bytes(left)
        if slots is None:
            planned, staging = plan_slots(
                layout,
                _first(memory, settings.memory),
                dtype,
                reserve_bytes=reserve_bytes,
                gpu=gpu,
            )
            capacity = planned.slots
            logger.info("runtime.planned %s", planned.describe())
        else:
            if slots < 1:
                raise ConfigError(f"slots must be at least 1, got {slots}")
            capacity = min(slots, layout.total_experts)
            staging = 0
            if capacity < layout.total_experts:
                staging = num_staging_slots(layout.top_k, capacity)
        pool: SlotPool | None = None
        if gpu is not None:
            pool, capacity = make_slots(gpu, layout, capacity, staging)
            undo.callback(pool.close)
            converted = _pinned_bytes(layout)
            if registers and not register_experts(pool, store):
                way = _first(settings.read, DEFAULT_READ)
        # Of the host.
        slots_bytes = 0
        if gpu is None:
            slots_bytes = (capacity + staging) * HostSlots.bytes_per_slot(layout, dtype)
        way = reading_mode(
            way,
            layout,
            slots_bytes=slots_bytes,
            reserve_bytes=reserve_bytes,
            on_gpu=gpu is not None,
        )
        if way != "mmap":
            # A request's reads are no larger than the slots they go to.
            most = STAGING_BYTES if gpu is not None else min(STAGING_BYTES, slots_bytes)
            reader = open_reader(store, direct=way == "direct", staging_bytes=most)
            undo.callback(reader.close)
        staged = 0 if reader is None else reader.staging_bytes
        check_fits(slots_bytes, staged + min(converted, layout.total_bytes))
        cache = ExpertCache(
            layout.num_layers,
            layout.num_experts,
            capacity,
            policy=_first(policy, settings.policy, DEFAULT_POLICY),
            scope=_first(scope, settings.scope, DEFAULT_SCOPE),
        )
        if pool is None:
            pool = host = HostSlots(layout, capacity + staging, dtype=dtype)
            if _first(lock, settings.lock, False):
                host.lock()
        alone = reader is not None and reader.direct and reader.engine == "threads"
        runtime = ExpertRuntime(
            store,
            pool,
            cache,
            loader_threads=_first(
                loader_threads,
                settings.loader_threads,
                DIRECT_THREADS if alone else DEFAULT_LOADER_THREADS,
            ),
            expert_stats=settings.expert_stats,
            reader=reader,
            prefetch=_first(prefetch, settings.prefetch, DEFAULT_PREFETCH),
            warmpin=_first(warmpin, settings.warmpin, DEFAULT_WARMPIN),
            warmpin_after=_first(warmpin_after, settings.warmpin_after, DEFAULT_WARMPIN_AFTER),
        )
        undo.pop_all()
    try:
        kept_at = _first(profile, settings.profile)
        known = None if kept_at is None else read_profile(kept_at)
        if reader is not None and reader.direct:
            _measure_disk(runtime, reader, store, pool, kept_at, known)
        mode = parse_prefault(_first(prefault, settings.prefault, DEFAULT_PREFAULT))
        runtime.prefault = _start_prefault(
            runtime, mode, pool, progress, file=reader is None or not reader.direct
        )
        _start_recording(runtime, record_trace, settings.record_trace)
        if known is not None:
            runtime.use_profile(kept_at, known)
    except BaseException:
        runtime.close()
        raise
    return runtime


def plan_slots(
    layout: ExpertLayout,
    memory: int | str | None,
    dtype: npt.DTypeLike | None,
    *,
    reserve_bytes: int = RESERVE_BYTES,
    gpu: Device | None = None,
) -> tuple[SizingPlan, int]:
    """Return the plan of `open` for a memory budget, of a GPU if there is one, and staging slots.

    Raises
    ------
    CapacityError
        If the budget does not hold one slot and the staging slots.
    """
    if gpu is None:
        slot_bytes = HostSlots.bytes_per_slot(layout, dtype)
    else:
        slot_bytes = CudaSlots.bytes_per_slot(layout)
    if slot_bytes == 0:
        raise ConfigError("the experts have no weights: every role is of size 0")
    if memory is None:
        free = free_host_bytes() if gpu is None else gpu.free_bytes()
        reserve = reserve_bytes
    else:
        free, reserve = parse_budget(memory, layout.total_experts * slot_bytes), 0
    if gpu is not None:
        free = usable_bytes(gpu, free - reserve) + reserve
    staging = num_staging_slots(layout.top_k, max(0, free - reserve) // slot_bytes)
    planned = plan(
        layout, free, reserve_bytes=reserve, staging_slots=staging, slot_bytes=slot_bytes
    )
    if planned.budget_slots == 0:
        if memory is None:
            raise CapacityError(
                f"{format_bytes(free)} are free, of which {format_bytes(reserve)} stay reserved: "
                f"too little for one expert of {format_bytes(slot_bytes)} and {staging} for "
                "staging; free some memory, reserve less with reserve=, or say how much to use "
                "with memory="
            )
        need = format_bytes((1 + staging) * slot_bytes)
        raise CapacityError(
            f"a budget of {format_bytes(free)} does not hold one expert of "
            f"{format_bytes(slot_bytes)} and {staging} for staging; raise memory to at least {need}"
        )
    return planned, 0 if planned.slots == layout.total_experts else staging


def reading_mode(
    asked: str, layout: ExpertLayout, *, slots_bytes: int, reserve_bytes: int, on_gpu: bool
) -> str:
    """Return how `open` reads experts: as was asked, or what "auto" comes to.

    "buffered" if the page cache can hold all experts beside what else is in RAM, else "direct".

    Parameters
    ----------
    asked : {"auto", "direct", "buffered", "mmap"}
    layout : ExpertLayout
    slots_bytes, reserve_bytes : int
        What slots take of the device they are on, and what stays free there.
    on_gpu : bool
        Whether that is a GPU: of the host's memory its slots take none, but pinned buffers do.
    """
    if asked != "auto":
        return asked
    if on_gpu:
        slots_bytes, reserve_bytes = _pinned_bytes(layout), RESERVE_BYTES
    fits = fits_beside(slots_bytes, reserve_bytes, layout.total_bytes)
    return "buffered" if fits else "direct"


def _pinned_bytes(layout: ExpertLayout) -> int:
    """Return the most that buffers for copies to a GPU take of the host's memory."""
    return max(MAX_PINNED_BYTES, 4 * max(map(layout.expert_bytes, range(layout.num_layers))))


def _check_arguments(
    device: str,
    slots: int | None,
    memory: int | str | None,
    loader_threads: int | None,
    top_k: int | None,
    progress: Progress | None,
    lock: bool | None,
    profile: object,
) -> None:
    if profile is not None:
        check_path(profile)
    if lock not in {None, True, False}:
        raise ConfigError(f"lock must be True or False, got {lock!r}")
    parse_device(device)
    if slots is not None and memory is not None:
        raise ConfigError("give either memory or slots, not both")
    for name, value in (("slots", slots), ("loader_threads", loader_threads), ("top_k", top_k)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress must be callable, got {progress!r}")


def _check_on_device(gpu: Device | None, dtype: npt.DTypeLike | None, lock: bool | None) -> None:
    if gpu is None:
        return
    if dtype is not None:
        raise ConfigError(f"slots on {gpu.name} hold what the file holds; leave dtype out")
    if lock:
        raise ConfigError(f"slots on {gpu.name} are never swapped out; leave lock out")


def _start_recording(
    runtime: ExpertRuntime, asked: str | os.PathLike[str] | None, by_environment: str | None
) -> None:
    """Record the runtime's whole life, if an argument or the environment says so."""
    if asked is not None:
        runtime.record_trace(asked)
    elif by_environment is not None:
        try:
            runtime.record_trace(by_environment)
        except ConfigError as error:
            # As of any setting: a mistake there does not stop a program.
            logger.warning("settings.malformed MOECACHE_RECORD_TRACE: %s", error)


def _measure_disk(
    runtime: ExpertRuntime,
    reader: Reader,
    store: SafetensorsStore,
    pool: SlotPool,
    profile: str | os.PathLike[str] | None,
    known: Profile | None,
) -> None:
    """Tune the reader to the disk: to what was measured before, or is measured now."""
    kept = None if known is None else speed_of(known.disks, store)
    speed = kept or _disks.get(disk_of(store))
    if speed is not None and not apply(speed, reader):
        speed = None
    if speed is None:
        speed = calibrate(reader, store, pool)
    if speed is not None:
        _disks[disk_of(store)] = speed
        if profile is not None and known is not None and speed != kept:
            keep_speed(profile, store, speed)
    runtime.calibrated(speed)


def _start_prefault(
    runtime: ExpertRuntime,
    mode: str,
    pool: SlotPool,
    progress: Progress | None,
    *,
    file: bool,
) -> BackgroundSweep | None:
    """Back the slots with memory and bring experts into the page cache, or return None."""
    if mode == "off":
        return None
    sweep = None
    try:
        regions = [
            Region(*pair, getattr(pair, "owner", None))
            for pair in (runtime.store.regions() if file else ())
        ]
        # Nothing is read into the slots yet: what they will take still counts as free.
        room = free_host_bytes() * 4 // 5
        of_slots = [Region(*pair, getattr(pair, "owner", None)) for pair in pool.regions()]
        slots = _cut_to(of_slots, room)
        rest = room - sum(num_bytes for _, num_bytes in of_slots)
        chosen = regions if mode == "force" else _cut_to(regions, rest)
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
