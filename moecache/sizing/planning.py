"""From bytes to slots: how many experts fit, and whether that is enough."""

from dataclasses import dataclass
from enum import Enum

from moecache.layout import ExpertLayout
from moecache.units import format_bytes, parse_bytes

RESERVE_BYTES = 512 * 2**20
MAX_STAGING_SLOTS = 8


class SizingStatus(Enum):
    """How a plan turned out."""

    EMPTY = "empty"
    UNKNOWN_EXPERT_SIZE = "unknown expert size"
    BUDGET_EXHAUSTED = "budget exhausted"
    BELOW_RECOMMENDED = "below recommended"
    OK = "ok"


@dataclass(frozen=True)
class SizingPlan:
    """How many slots a budget buys.

    Parameters
    ----------
    slots : int
        Slots to make: at least 1, at most `total_slots`.
    budget_slots : int
        Slots that the budget pays for; 0 if it does not even pay for one.
    recommended_slots : int
        Twice the experts that one token uses, over all layers, at most all
        (arXiv 2505.16056).
    cycle_slots : int
        Experts that one token uses over all layers; with fewer slots, a policy
        that goes by recency alone never hits.
    total_slots : int
        All experts.
    status : SizingStatus
    slot_bytes : int
        Bytes of a slot as allocated.
    """

    slots: int
    budget_slots: int
    recommended_slots: int
    cycle_slots: int
    total_slots: int
    status: SizingStatus
    slot_bytes: int

    @property
    def advice(self) -> str:
        """Advice on the number of slots; empty if there is none."""
        if self.status is SizingStatus.UNKNOWN_EXPERT_SIZE:
            return "the size of an expert is not known"
        if self.status is SizingStatus.BUDGET_EXHAUSTED:
            return f"the budget is smaller than one slot of {format_bytes(self.slot_bytes)}"
        if self.status is not SizingStatus.BELOW_RECOMMENDED:
            return ""
        wanted = format_bytes(self.recommended_slots * self.slot_bytes)
        text = f"{self.recommended_slots} ({wanted}) are recommended"
        if self.slots < self.cycle_slots:
            text += f", and below {self.cycle_slots} most accesses miss"
        return text

    def describe(self) -> str:
        """Return the plan as one line with figures and, if need be, the remedy."""
        if self.status is SizingStatus.EMPTY:
            return "no experts"
        size = format_bytes(self.slots * self.slot_bytes)
        text = f"{self.slots} of {self.total_slots} experts ({size})"
        return f"{text}; {self.advice}" if self.advice else text


def plan(
    layout: ExpertLayout,
    free_bytes: int | str,
    *,
    reserve_bytes: int | str = RESERVE_BYTES,
    staging_slots: int = 0,
    slot_bytes: int | None = None,
    total_slots: int | None = None,
) -> SizingPlan:
    """Return how many slots fit into free memory.

    Parameters
    ----------
    layout : ExpertLayout
    free_bytes : int or str
        Memory that is free once everything else (trunk, KV cache) is in place.
    reserve_bytes : int or str, default 512 MiB
        Left free.
    staging_slots : int, default 0
        Slots for steps that ask for more than their share. They come out of the
        same budget, unless everything fits without them.
    slot_bytes : int, optional
        Bytes of a slot as allocated; the layout's own sum by default.
    total_slots : int, optional
        Experts that may be asked for; by default all of the layout.
    """
    # Numbers may be negative: more is needed than there is.
    free_bytes = parse_bytes(free_bytes) if isinstance(free_bytes, str) else free_bytes
    reserve_bytes = parse_bytes(reserve_bytes) if isinstance(reserve_bytes, str) else reserve_bytes
    slot_bytes = layout.slot_bytes if slot_bytes is None else slot_bytes
    total = layout.total_experts if total_slots is None else total_slots
    recommended = min(total, layout.num_layers * min(layout.num_experts, 2 * layout.top_k))
    cycle = layout.num_layers * layout.top_k
    if total == 0:
        return SizingPlan(0, 0, 0, 0, 0, SizingStatus.EMPTY, slot_bytes)
    if slot_bytes == 0:
        status = SizingStatus.UNKNOWN_EXPERT_SIZE
        return SizingPlan(total, total, recommended, cycle, total, status, slot_bytes)
    budget = max(0, (free_bytes - reserve_bytes) // slot_bytes)
    if budget < total:
        budget = max(0, budget - staging_slots)
    slots = min(max(budget, 1), total)
    if budget == 0:
        status = SizingStatus.BUDGET_EXHAUSTED
    elif slots < recommended:
        status = SizingStatus.BELOW_RECOMMENDED
    else:
        status = SizingStatus.OK
    return SizingPlan(slots, budget, recommended, cycle, total, status, slot_bytes)


def num_staging_slots(top_k: int, num_slots: int) -> int:
    """Return how many slots to have beside a cache of `num_slots`; a `top_k` of 0 is unknown."""
    # Enough for reads to overlap a prompt's computation, and not so many that
    # the cache of a tight budget suffers.
    return max(1, min(top_k or MAX_STAGING_SLOTS, MAX_STAGING_SLOTS, num_slots // 8))
