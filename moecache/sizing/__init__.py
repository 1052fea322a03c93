"""How much fits: slots by a budget, the host's memory, and what must stay free."""

from moecache.sizing.planning import (
    MAX_STAGING_SLOTS,
    RESERVE_BYTES,
    SizingPlan,
    SizingStatus,
    num_staging_slots,
    plan,
)

__all__ = [
    "MAX_STAGING_SLOTS",
    "RESERVE_BYTES",
    "SizingPlan",
    "SizingStatus",
    "num_staging_slots",
    "plan",
]
