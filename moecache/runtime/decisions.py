"""Decisions: a plan's facts, without its methods."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moecache.cuda import Device
from moecache.layout import ExpertLayout
from moecache.runtime.options import Options
from moecache.settings import Choice
from moecache.sizing.headroom import Headroom
from moecache.sizing.planning import SizingPlan
from moecache.slots.cuda import MAX_PINNED_BYTES
from moecache.slots.host import MAX_CONVERTED_BYTES, converts


@dataclass(frozen=True)
class Decisions:
    """All that `moecache.open` decides.

    Attributes
    ----------
    path : str
    options : Options
    layout : ExpertLayout
    capacity, staging_slots : int
        Experts in the cache, and slots beside it.
    borrowed_slots : int
        Slots of the cache that are in memory of the KV cache, until it needs that.
    slot_bytes : int
        Bytes of one slot, as allocated.
    sizing : SizingPlan or None
        How the number of slots came from the budget; `None` if `slots` says it.
    device : str
        The place of the slots, in words.
    headroom : Headroom
        Memory that the host needs beside the slots.
    reserve_bytes : int
        The part of the device's memory that stays free.
    read : {"buffered", "direct", "mmap"}
    staging_bytes : int
        Buffers of the reads.
    policy : str, class, function or object
    scope, prefault : str
    prefetch : str or Predictor
    lock : bool
    warmpin : int or str
    warmpin_after : int
    loader_threads : int or None
        `None`: 2; 8 where direct reads find no io_uring; up to 12 for cached reads of a GPU.
    profile, expert_stats : str, Path or None
    record_trace : Choice
    reasons : dict of str to str
        Why, by the names of the attributes above.
    """

    path: str
    options: Options
    layout: ExpertLayout
    capacity: int
    staging_slots: int
    slot_bytes: int
    sizing: SizingPlan | None
    device: str
    headroom: Headroom
    reserve_bytes: int
    read: str
    staging_bytes: int
    policy: Any
    scope: str
    prefetch: Any
    prefault: str
    lock: bool
    warmpin: int | str
    warmpin_after: int
    loader_threads: int | None
    profile: str | os.PathLike[str] | None
    expert_stats: str | os.PathLike[str] | None
    record_trace: Choice
    reasons: Mapping[str, str]
    gpu: Device | None = field(repr=False, compare=False)
    borrowed_slots: int = 0

    @property
    def num_experts(self) -> int:
        """Experts that may be asked for: all, or those of a share."""
        share = self.options.share
        return self.layout.total_experts if share is None else share.num_experts

    @property
    def slots_bytes(self) -> int:
        """Bytes of all slots."""
        return (self.capacity + self.staging_slots) * self.slot_bytes

    @property
    def buffer_bytes(self) -> int:
        """Most bytes of the host's memory for what is copied or converted on its way."""
        return buffer_bytes(self.layout, self.options, on_gpu=self.gpu is not None)


def buffer_bytes(layout: ExpertLayout, options: Options, *, on_gpu: bool) -> int:
    """Return the most bytes of the host's memory for what is copied or converted on its way."""
    widest = max(map(layout.expert_bytes, range(layout.num_layers)))
    if on_gpu:
        return max(4 * widest, MAX_PINNED_BYTES)
    # An expert that is converted is first read into a buffer beside its slot.
    is_converted = converts(layout, options.dtype)
    return max(2 * widest, MAX_CONVERTED_BYTES) + widest if is_converted else 0
