"""RuntimeStats: a frozen snapshot of what a runtime did, and its text."""

from dataclasses import dataclass

from moecache.units import format_bytes


@dataclass(frozen=True)
class ReadingStats:
    """How experts are read from their files, and how fast that went.

    Attributes
    ----------
    way : {"direct", "buffered"}
        Around the page cache, or through it.
    engine : {"io_uring", "threads"}
    depth, piece_bytes : int
        Most reads in flight, and the largest.
    staging_bytes : int
        Memory for what cannot be read straight into its slot.
    num_reads, num_retries : int
        Reads that the kernel was asked for; those asked for again.
    bytes_read, bytes_copied : int
        From the file, whole blocks; through staging.
    busy_ns : int
        While at least one read was outstanding, until somebody looked.
    disk_bytes_per_s : float or None
        The best rate of the disk, if it was measured.
    """

    way: str
    engine: str
    depth: int
    piece_bytes: int
    staging_bytes: int
    num_reads: int
    num_retries: int
    bytes_read: int
    bytes_copied: int
    busy_ns: int
    disk_bytes_per_s: float | None

    @property
    def bytes_per_s(self) -> float:
        """Rate while at least one read was outstanding; 0.0 before the first."""
        return self.bytes_read / (self.busy_ns / 1e9) if self.busy_ns else 0.0

    def describe(self) -> str:
        """Return it as one line."""
        text = (
            f"reading {self.way} by {self.engine}, up to {self.depth} reads of "
            f"{format_bytes(self.piece_bytes)} at once; "
            f"{format_bytes(self.bytes_per_s)}/s while any was outstanding"
        )
        if self.disk_bytes_per_s:
            text += (
                f", {self.bytes_per_s / self.disk_bytes_per_s:.2f} of the disk's "
                f"{format_bytes(self.disk_bytes_per_s)}/s"
            )
        return f"{text}; {self.num_retries} retries" if self.num_retries else text


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
    reading : ReadingStats or None
        None if the store itself reads.
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
    reading: ReadingStats | None = None

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
        if self.reading is not None:
            lines.append(self.reading.describe())
        return "\n".join(lines)
