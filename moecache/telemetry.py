"""RuntimeStats: a frozen snapshot of what a runtime did, and its text."""

from dataclasses import dataclass

from moecache.units import format_bytes


@dataclass(frozen=True)
class RuntimeStats:
    """Counters of a runtime at one moment.

    Attributes
    ----------
    num_steps : int
        Layers of forward calls that asked for experts.
    num_hits, num_misses : int
        Distinct experts per step that were, or were not, there.
    num_evictions : int
    num_reads, num_failed_reads : int
        Experts read from the store. Fewer than misses if steps share a read.
    bytes_read : int
        From the store, into slots.
    num_stalls, stall_ns : int
        How often and how long steps had nothing to compute and waited.
    num_resident, capacity, staging_slots, total_experts : int
        Experts in the cache, its slots, slots beside it, experts of the model.
    pool_bytes : int
        Memory of all slots.
    policy, scope : str
    """

    num_steps: int
    num_hits: int
    num_misses: int
    num_evictions: int
    num_reads: int
    num_failed_reads: int
    bytes_read: int
    num_stalls: int
    stall_ns: int
    num_resident: int
    capacity: int
    staging_slots: int
    total_experts: int
    pool_bytes: int
    policy: str
    scope: str

    @property
    def hit_rate(self) -> float:
        """Share of accesses that were hits; 0.0 before the first."""
        accesses = self.num_hits + self.num_misses
        return self.num_hits / accesses if accesses else 0.0

    def describe(self) -> str:
        """Return the snapshot as lines of text."""
        lines = [
            (
                f"experts {self.num_resident} resident, {self.capacity} slots, "
                f"{self.total_experts} in the model; {self.staging_slots} staging slots; "
                f"{format_bytes(self.pool_bytes)} in all"
            ),
            f"policy {self.policy}, scope {self.scope}, {self.num_evictions} evictions",
            (
                f"steps {self.num_steps}, reads {self.num_reads} "
                f"({format_bytes(self.bytes_read)}), {self.num_failed_reads} failed"
            ),
        ]
        return "\n".join(lines)
