"""From a plan to a runtime: files, slots, reader, disk, pre-fault, profile."""

import contextlib
import logging
import os

from moecache._prefault import PAGE_SIZE
from moecache.cache._cache import ExpertCache
from moecache.errors import ConfigError, MoeCacheError
from moecache.kernels.startup import usable_cores
from moecache.prefault import BackgroundSweep, Region, warm
from moecache.profiles.disk import keep_speed, speed_of
from moecache.profiles.file import Profile, read_profile
from moecache.reader._reader import Reader
from moecache.reader.disk import DiskSpeed, apply, calibrate, open_reader
from moecache.runtime import head_start
from moecache.runtime.borrowed import Borrowed
from moecache.runtime.cuda_opening import make_slots
from moecache.runtime.decisions import Decisions
from moecache.runtime.runtime import ExpertRuntime
from moecache.settings import DEFAULT_LOADER_THREADS, parse_prefault
from moecache.sizing.headroom import check_fits
from moecache.sizing.host_memory import free_host_bytes
from moecache.slots import HostSlots, SlotPool
from moecache.stores import CheckpointStore

logger = logging.getLogger(__name__)

# Without io_uring each direct read in flight takes a thread.
DIRECT_THREADS = 8
# A GPU takes experts faster than a few cores copy them out of the page cache.
COPYING_THREADS = 12


def open_with(plan: Decisions, store: CheckpointStore) -> ExpertRuntime:
    """Return a runtime that does what was planned; it owns the store. On an error, close the store.

    Raises
    ------
    CapacityError
        If what was planned does not fit any more, or slots cannot be locked.
    """
    logger.info("runtime.planned %s", plan.reasons["capacity"])
    with contextlib.ExitStack() as undo:
        undo.callback(store.close)
        store.mapped = plan.read == "mmap"
        if plan.record_trace.origin == "argument":
            # Imported here: a runtime that records nothing does not need it.
            from moecache.traces.recording import check_recordable

            check_recordable(plan.record_trace.value)
        pool, capacity = _make_pool(plan, undo)
        reader = None
        if plan.read != "mmap":
            reader = open_reader(
                store,
                direct=plan.read == "direct",
                staging_bytes=plan.staging_bytes,
                shares_copies=plan.gpu is not None,
            )
            undo.callback(reader.close)
            if reader.direct and isinstance(pool, HostSlots):
                pool.align_to_file(_begins(store), reader.alignment)
        if plan.gpu is None and plan.lock:
            pool.lock()  # type: ignore[attr-defined]
        profile = None if plan.profile is None else read_profile(plan.profile)
        disk = None
        if reader is not None and reader.direct:
            disk = _measure_disk(reader, store, pool, plan.profile, profile)
        threads = plan.loader_threads
        if threads is None:
            threads = default_threads(reader, on_gpu=plan.gpu is not None)
        sweep = _start_prefault(plan, store, pool, file=reader is None or not reader.direct)
        if sweep is not None:
            undo.callback(sweep.cancel)
        layout = plan.layout
        runtime = ExpertRuntime(
            store,
            pool,
            ExpertCache(
                layout.num_layers,
                layout.num_experts,
                capacity,
                policy=plan.policy,
                scope=plan.scope,
            ),
            loader_threads=threads,
            expert_stats=plan.expert_stats,
            reader=reader,
            prefetch=plan.prefetch,
            warmpin=plan.warmpin,
            warmpin_after=plan.warmpin_after,
            disk=disk,
            prefault=sweep,
            share=plan.options.share,
        )
        undo.pop_all()
    spare = plan.headroom.spare_bytes // 2  # the other half is for what nobody announces
    runtime.borrowed = Borrowed(runtime.cache, pool, plan.borrowed_slots, spare)
    try:
        _start_recording(runtime, plan)
        if profile is not None and plan.profile is not None:
            runtime.usage.use(plan.profile, profile)
    except BaseException:
        runtime.close()
        raise
    return runtime


def default_threads(reader: Reader | None, *, on_gpu: bool) -> int:
    """Return how many threads read by default."""
    if reader is None or reader.engine != "threads":
        return DEFAULT_LOADER_THREADS
    if reader.direct:
        return DIRECT_THREADS
    return min(COPYING_THREADS, usable_cores()) if on_gpu else DEFAULT_LOADER_THREADS


def _make_pool(plan: Decisions, undo: contextlib.ExitStack) -> tuple[SlotPool, int]:
    """Return the slots, and the number of them for the cache."""
    staging = plan.staging_slots
    if plan.gpu is None:
        # The free memory may have changed since the plan was made.
        buffers = min(plan.buffer_bytes, plan.layout.total_bytes)
        check_fits(plan.slots_bytes, plan.staging_bytes + buffers)
        pool = HostSlots(plan.layout, plan.capacity + staging, dtype=plan.options.dtype)
        undo.callback(pool.close)
        return pool, plan.capacity
    on_gpu, capacity = make_slots(plan.gpu, plan.layout, plan.capacity, staging)
    undo.callback(on_gpu.close)
    on_gpu.pin_ahead()
    return on_gpu, capacity


def _begins(store: CheckpointStore) -> list[dict[str, int]]:
    """Return where each layer's first expert begins in its file, role by role.

    The others of a layer begin whole blocks further, as a rule.
    """
    begins: list[dict[str, int]] = []
    for layer in range(store.layout.num_layers):
        found: dict[str, int] = {}
        for _, offset, spans in store.runs(layer, 0):
            at = offset
            for role, start, stop in spans:
                found.setdefault(role, at - start)
                at += stop - start
        begins.append(found)
    return begins


def _measure_disk(
    reader: Reader,
    store: CheckpointStore,
    pool: SlotPool,
    path: str | os.PathLike[str] | None,
    profile: Profile | None,
) -> DiskSpeed | None:
    """Tune the reader to the disk, by an earlier measurement or a new one."""
    kept = None if profile is None else speed_of(profile.disks, store)
    if kept is not None and apply(kept, reader):
        return kept
    speed = calibrate(reader, store, pool)
    if speed is not None and path is not None and profile is not None:
        keep_speed(path, store, speed)
    return speed


def _start_recording(runtime: ExpertRuntime, plan: Decisions) -> None:
    """Record the routing of the runtime's whole life, if an option says so."""
    path, origin = plan.record_trace
    if path is None:
        return
    try:
        runtime.record_trace(path)
    except ConfigError as error:
        # A mistake in the environment does not stop a program.
        if origin == "argument":
            raise
        logger.warning("settings.malformed %s: %s", origin, error)


def _start_prefault(
    plan: Decisions, store: CheckpointStore, pool: SlotPool, *, file: bool
) -> BackgroundSweep | None:
    """Back the slots with memory and bring experts into the page cache, or return None."""
    mode = parse_prefault(plan.prefault)
    if mode == "off":
        return None
    sweep = None
    share = plan.options.share
    held = None if share is None else share.held
    try:
        regions = [
            Region(*pair, getattr(pair, "owner", None))
            for pair in (store.regions(held=held) if file else ())
        ]
        # Nothing is in the slots yet: the memory that they will take still counts as free.
        room = free_host_bytes() * 4 // 5
        of_slots = [Region(*pair, getattr(pair, "owner", None)) for pair in pool.regions()]
        if plan.borrowed_slots:
            # The last ones may be given back; they have memory once they are filled.
            kept = plan.capacity - plan.borrowed_slots
            of_slots = [
                Region(one[0], one[1] // pool.num_slots * kept, one.owner) for one in of_slots
            ]
        slots = _cut_to(of_slots, room)
        rest = room - sum(num_bytes for _, num_bytes in of_slots)
        chosen = regions if mode == "force" else _cut_to(regions, rest)
        if not slots and not chosen:
            return None
        logger.info("prefault.chosen regions=%d of=%d mode=%s", len(chosen), len(regions), mode)
        all_in_slots = plan.capacity == plan.num_experts
        waits = mode == "force" or (mode == "auto" and all_in_slots and chosen == regions)
        sweep = warm(
            chosen + slots,
            mode="force" if mode == "force" else "auto",
            gate="always",  # the regions chosen above fit
            background=True,
            progress=plan.options.progress,
            keep_mapped=False,
            # Memory that is still backed is taken at once, before it is not; no file is read so.
            yielding=not (waits or (not chosen and head_start.has_given(store))),
        )
        if waits:
            sweep.join()
    except (MoeCacheError, OSError, RuntimeError, ValueError, MemoryError, ImportError) as error:
        # Pages that cannot be brought in may still be read later, or fail where they are needed.
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
