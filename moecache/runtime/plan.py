"""Plan: all that `open` decides, each with its reason, before anything is allocated."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moecache.cuda import Device, open_device, parse_device
from moecache.errors import CapacityError, ConfigError
from moecache.layout import ExpertLayout
from moecache.policies.making import policy_name
from moecache.reader.disk import STAGING_BYTES
from moecache.runtime.cuda_opening import most_on_gpu, usable_bytes
from moecache.runtime.decisions import Decisions, buffer_bytes
from moecache.runtime.opening import open_with
from moecache.runtime.options import Options, takes_options
from moecache.runtime.runtime import ExpertRuntime
from moecache.settings import Choice, Settings
from moecache.sizing.headroom import check_fits, headroom
from moecache.sizing.host_memory import free_host_bytes
from moecache.sizing.planning import RESERVE_BYTES, SizingPlan, num_staging_slots
from moecache.sizing.planning import plan as plan_slots
from moecache.slots import CudaSlots, HostSlots
from moecache.stores import CheckpointStore, open_store
from moecache.units import format_bytes, parse_budget, parse_bytes

_WAYS = {"buffered": "through the page cache", "direct": "direct", "mmap": "from the mapped file"}


@dataclass(frozen=True)
class Plan(Decisions):
    """The decisions of `moecache.open` for a checkpoint and a budget; nothing is allocated yet.

    `Decisions` has the fields, and `reasons` says why.
    """

    def describe(self) -> str:
        """Return the plan as lines of text, each with its reason."""
        return "\n".join(f"{name:<9}  {value}: {why}" for name, value, why in self.rows())

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield (what, value, reason) of all that a reader wants to know."""
        why = self.reasons
        slots = f"{self.capacity} of {self.num_experts} experts"
        if self.staging_slots:
            slots += f" and {self.staging_slots} for staging"
        yield "slots", f"{slots}, {format_bytes(self.slots_bytes)}", why["capacity"]
        yield "slot", format_bytes(self.slot_bytes), "as allocated"
        yield "kept free", format_bytes(self.reserve_bytes), why["reserve_bytes"]
        yield "reads", _WAYS[self.read], why["read"]
        yield "policy", f"{policy_name(self.policy)}, scope {self.scope}", why["policy"]
        mode = self.prefetch if isinstance(self.prefetch, str) else type(self.prefetch).__name__
        yield "prefetch", mode, why["prefetch"]
        yield "pre-fault", self.prefault, why["prefault"]

    def open(self) -> ExpertRuntime:
        """Return a runtime that does this; see `moecache.open`."""
        return open_with(self, find_store(self.path, self.options))


@takes_options
def plan(
    path: str | os.PathLike[str] | CheckpointStore,
    memory: int | str | None = None,
    device: str = "cpu",
    *,
    options: Options | None = None,
    **keywords: Any,
) -> Plan:
    """Return what `moecache.open` would do, without allocating anything.

    Reads the checkpoint's headers, and asks how much memory is free.

    Parameters
    ----------
    path : str, Path or CheckpointStore
        A Hugging Face checkpoint directory, one .safetensors file, or a .gguf file; see
        `open_store`. Or one that is open, and stays so.
    memory, device, **keywords
        As for `moecache.open`; `Options` lists them.
    options : Options, optional
        All of them as one object, instead.

    Raises
    ------
    ConfigError
        If an option cannot be used, or there are no experts.
    CapacityError
        If the memory does not hold a slot and a staging slot, or the slots would not fit
        into what is free.
    MoeCacheError
        If the GPU cannot be used.
    StoreError
        If the checkpoint cannot be read.
    """
    options = Options.of(options, memory=memory, device=device, **keywords)
    settings = Settings.from_environ()
    if isinstance(path, CheckpointStore):
        return plan_store(path, options, settings)
    with find_store(path, options) as store:
        return plan_store(store, options, settings)


def find_store(path: str | os.PathLike[str] | CheckpointStore, options: Options) -> CheckpointStore:
    """Return the checkpoint, opened unless it is; the caller closes it."""
    if isinstance(path, CheckpointStore):
        if options.layers is not None:
            path.keep_layers(options.layers)
        return path
    return open_store(path, top_k=options.top_k, layers=options.layers)


def plan_store(store: CheckpointStore, options: Options, settings: Settings) -> Plan:
    """Return what is decided for an open checkpoint."""
    gpu = None if parse_device(options.device) is None else open_device(options.device)
    layout = store.layout
    if layout.total_experts == 0:
        raise ConfigError(f"{store.path}: there are no experts; is it a mixture-of-experts model?")
    if options.share is not None:
        options.share.check(layout)
    total = layout.total_experts if options.share is None else options.share.num_experts
    reasons: dict[str, str] = {}

    def choose(name: str) -> Any:
        value, origin = settings.choose(name, getattr(options, name, None))
        reasons[name] = origin
        return value

    buffers = buffer_bytes(layout, options, on_gpu=gpu is not None)
    room = headroom(
        store.trunk_bytes if options.host_bytes is None else options.host_bytes,
        store.config,
        # Staging for a GPU takes the host's memory, not that of the device with the slots.
        staging_bytes=0 if gpu is not None else STAGING_BYTES + buffers,
        context_tokens=options.context_tokens,
        token_bytes=options.token_bytes,
        state_bytes=options.state_bytes,
        free_bytes=free_host_bytes() if gpu is None else None,
    )
    if options.host_bytes is not None:
        room = replace(room, takes="trunk, products and prompts")
    reserve = choose("reserve")
    reserve_bytes = room.nbytes if reserve is None else parse_bytes(reserve)
    reasons["reserve_bytes"] = room.describe() if reserve is None else reasons["reserve"]
    slot_bytes = (
        HostSlots.bytes_per_slot(layout, options.dtype)
        if gpu is None
        else CudaSlots.bytes_per_slot(layout)
    )
    if slot_bytes == 0:
        raise ConfigError("the experts have no weights: every role is of size 0")
    memory = choose("memory") if options.slots is None else None
    sizing, capacity, staging, reasons["capacity"] = _slots_of(
        layout, options, total, memory, slot_bytes, reserve_bytes, gpu, reasons.get("memory", "")
    )
    scope = choose("scope")
    if options.share is not None and scope == "layer" and staging == 0:
        # Layers have as many slots each, but not as many experts of the share.
        staging = num_staging_slots(layout.top_k, capacity)
    if gpu is not None:
        fewer, staging = most_on_gpu(gpu, layout, capacity, staging)
        if fewer < capacity:
            reasons["capacity"] += f"; fewer than {capacity}, for want of memory on {gpu.name}"
        capacity = fewer
    lock = choose("lock")
    borrowed = 0
    if memory is None and reserve is None and gpu is None and scope == "global" and not lock:
        borrowed = _num_borrowed(options, capacity, total, room.later_bytes // slot_bytes)
    if borrowed:
        reasons["capacity"] += f"; {borrowed} of them until the KV cache needs their memory"
    # What is borrowed counts as the KV cache's from here on.
    slots_bytes = 0 if gpu is not None else (capacity + staging) * slot_bytes
    read, reasons["read"] = _way_of_reading(
        layout, options, choose("read"), reasons["read"], slots_bytes, reserve_bytes, gpu
    )
    # A request's reads are no larger than the slots they go to.
    staging_bytes = STAGING_BYTES if gpu is not None else min(STAGING_BYTES, slots_bytes)
    staging_bytes = 0 if read == "mmap" else staging_bytes
    record_trace = settings.choose("record_trace", options.record_trace)
    # Ranks on one machine do not write the same file.
    own = _as_given if options.share is None else options.share.own_path
    check_fits(
        slots_bytes + borrowed * slot_bytes, staging_bytes + min(buffers, layout.total_bytes)
    )
    return Plan(
        path=os.fspath(store.path),
        options=options,
        layout=layout,
        capacity=capacity + borrowed,
        borrowed_slots=borrowed,
        staging_slots=staging,
        slot_bytes=slot_bytes,
        sizing=sizing,
        device="cpu" if gpu is None else gpu.description,
        headroom=room,
        reserve_bytes=reserve_bytes,
        read=read,
        staging_bytes=staging_bytes,
        policy=choose("policy"),
        scope=scope,
        prefetch=choose("prefetch"),
        prefault=choose("prefault"),
        lock=lock,
        warmpin=choose("warmpin"),
        warmpin_after=choose("warmpin_after"),
        loader_threads=choose("loader_threads"),
        profile=own(choose("profile")),
        expert_stats=own(settings.expert_stats),
        record_trace=Choice(own(record_trace.value), record_trace.origin),
        reasons=reasons,
        gpu=gpu,
    )


def _slots_of(
    layout: ExpertLayout,
    options: Options,
    total: int,
    memory: int | str | None,
    slot_bytes: int,
    reserve_bytes: int,
    gpu: Device | None,
    origin: str,
) -> tuple[SizingPlan | None, int, int, str]:
    """Return how slots come from a budget, if they do, their number, staging slots, and why."""
    if options.slots is not None:
        capacity = min(options.slots, total)
        staging = num_staging_slots(layout.top_k, capacity)
        why = f"slots={options.slots} (argument)"
        return None, capacity, staging if capacity < total else 0, why
    sizing, staging = _budgeted(layout, total, memory, slot_bytes, reserve_bytes, gpu)
    budget = "what is free, less what is kept free" if memory is None else f"memory {memory}"
    advice = f"; {sizing.advice}" if sizing.advice else ""
    return sizing, sizing.slots, staging, f"{budget} ({origin}){advice}"


def _budgeted(
    layout: ExpertLayout,
    total: int,
    memory: int | str | None,
    slot_bytes: int,
    reserve_bytes: int,
    gpu: Device | None,
) -> tuple[SizingPlan, int]:
    """Return the slots and staging slots that a budget holds, of a GPU's memory if there is one."""
    if memory is None:
        free = free_host_bytes() if gpu is None else gpu.free_bytes()
        reserve = reserve_bytes
    else:
        free, reserve = parse_budget(memory, total * slot_bytes), 0
    if gpu is not None:
        free = usable_bytes(gpu, free - reserve) + reserve
    staging = num_staging_slots(layout.top_k, max(0, free - reserve) // slot_bytes)
    found = plan_slots(
        layout,
        free,
        reserve_bytes=reserve,
        staging_slots=staging,
        slot_bytes=slot_bytes,
        total_slots=total,
    )
    if found.budget_slots == 0:
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
    return found, 0 if found.slots == total else staging


def _num_borrowed(options: Options, capacity: int, total: int, most: int) -> int:
    """Return how many slots there may be in memory of a KV cache that is not needed yet."""
    if not options.makes_room or options.slots is not None or options.share is not None:
        return 0
    # One less than all: where every expert has a slot there is no staging.
    return max(0, min(most, total - 1 - capacity))


def _way_of_reading(
    layout: ExpertLayout,
    options: Options,
    asked: str,
    origin: str,
    slots_bytes: int,
    reserve_bytes: int,
    gpu: Device | None,
) -> tuple[str, str]:
    """Return how experts are read, and why."""
    share = options.share
    total_bytes = layout.total_bytes if share is None else share.num_bytes(layout)
    experts = format_bytes(total_bytes)
    if asked != "auto":
        return asked, origin
    if gpu is not None:
        # The host's memory holds pinned buffers, but none of the slots on a GPU.
        slots_bytes = buffer_bytes(layout, options, on_gpu=True)
        reserve_bytes = RESERVE_BYTES
    left = max(0, free_host_bytes() - slots_bytes - reserve_bytes)
    if left >= total_bytes:
        return "buffered", f"the page cache has room for all experts, {experts} ({origin})"
    why = f"the page cache would have {format_bytes(left)} for experts of {experts}"
    return "direct", f"{why} ({origin})"


def _as_given(path: Any) -> Any:
    return path
