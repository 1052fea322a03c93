"""RuntimeCounters: a runtime's counters, and figures that follow from them."""

from dataclasses import dataclass
from typing import Any, Final, Self

from moecache.errors import ConfigError
from moecache.telemetry._difference import subtracted
from moecache.telemetry._prefetch import PrefetchStats
from moecache.telemetry._reading import ReadingStats
from moecache.telemetry._stalls import stall_percentile_ns
from moecache.telemetry._uploads import UploadStats

_COUNTERS: Final = (
    *("num_steps", "num_resident_steps", "num_evictions", "num_reads", "num_failed_reads"),
    *("bytes_demand", "bytes_bulk", "bytes_prefetch", "bytes_warm_start", "num_sequences"),
)
# Those that `AccessProfiler.reset` sets to zero.
_PROFILED: Final = (
    *("num_hits", "num_misses", "hits_by_layer", "misses_by_layer"),
    *("num_stalls", "stall_ns", "stall_histogram"),
)
# Snapshots of their own, or None.
PARTS: Final = ("reading", "prefetch", "uploads")


@dataclass(frozen=True)
class RuntimeCounters:
    """Counters of a runtime at one moment, or with `later - earlier` over an interval.

    Attributes
    ----------
    num_steps, num_resident_steps : int
        Layers of forward calls that asked for experts; those that found all of them.
    num_sequences : int
        Sequences that `begin_sequence` began.
    num_hits, num_misses : int
        Distinct experts per step that were, or were not, there.
    hits_by_layer, misses_by_layer : tuple of int
        The same for each layer.
    num_evictions : int
    num_reads, num_failed_reads : int
        Experts read from the store. Fewer than misses if steps share a read.
    bytes_demand, bytes_bulk, bytes_prefetch, bytes_warm_start : int
        Read from the store into slots: for a step of one token, for one of many, ahead of
        any, and because an earlier run used them.
    num_stalls, stall_ns : int
        How often and how long steps had nothing to compute and waited.
    stall_histogram : tuple of int
        Stalls by their length, see `AccessProfiler.stall_histogram`.
    num_in_flight : int
        Experts that are being read, or wait for it.
    num_resident, num_pinned, capacity, staging_slots, total_experts : int
        Experts in the cache, those that are never evicted, its slots, slots beside it,
        experts of the model.
    pool_bytes : int
        Memory of all slots.
    policy, scope : str
    opened_ns, since_ns, taken_ns : int
        On the monotonic clock: when the runtime was made, since when these figures count,
        and when they were taken.
    num_resets : int
        How often the profiler was reset.
    reading : ReadingStats or None
        None if the store itself reads.
    prefetch : PrefetchStats or None
        None if nothing is read ahead.
    uploads : UploadStats or None
        None if the slots are in RAM: experts are used where they were read to.
    """

    num_steps: int
    num_resident_steps: int
    num_sequences: int
    num_hits: int
    num_misses: int
    hits_by_layer: tuple[int, ...]
    misses_by_layer: tuple[int, ...]
    num_evictions: int
    num_reads: int
    num_failed_reads: int
    bytes_demand: int
    bytes_bulk: int
    bytes_prefetch: int
    bytes_warm_start: int
    num_stalls: int
    stall_ns: int
    stall_histogram: tuple[int, ...]
    num_in_flight: int
    num_resident: int
    num_pinned: int
    capacity: int
    staging_slots: int
    total_experts: int
    pool_bytes: int
    policy: str
    scope: str
    opened_ns: int
    since_ns: int
    taken_ns: int
    num_resets: int = 0
    reading: ReadingStats | None = None
    prefetch: PrefetchStats | None = None
    uploads: UploadStats | None = None

    @property
    def num_layers(self) -> int:
        """MoE layers of the model."""
        return len(self.hits_by_layer)

    @property
    def hit_rate(self) -> float:
        """Share of accesses that were hits; 0.0 before the first."""
        return _rate(self.num_hits, self.num_misses)

    @property
    def hit_rates(self) -> tuple[float | None, ...]:
        """The hit rate of each layer; None for one without accesses."""
        return tuple(
            _rate(hits, misses) if hits + misses else None
            for hits, misses in zip(self.hits_by_layer, self.misses_by_layer, strict=True)
        )

    @property
    def bytes_read(self) -> int:
        """Bytes from the store into slots, for any cause."""
        return self.bytes_demand + self.bytes_bulk + self.bytes_prefetch + self.bytes_warm_start

    @property
    def elapsed_s(self) -> float:
        """Seconds in which this was counted: since the runtime was made, or the interval's."""
        return (self.taken_ns - self.since_ns) / 1e9

    @property
    def bytes_per_s(self) -> float:
        """Bytes read per second of `elapsed_s`."""
        return self._per_s(self.bytes_read)

    @property
    def steps_per_s(self) -> float:
        """Steps per second of `elapsed_s`."""
        return self._per_s(self.num_steps)

    @property
    def stalls_per_s(self) -> float:
        """Stalls per second of `elapsed_s`."""
        return self._per_s(self.num_stalls)

    @property
    def stall_p50_ns(self) -> int:
        """Length that half of the stalls do not exceed, see `stall_percentile_ns`."""
        return stall_percentile_ns(self.stall_histogram, 50)

    @property
    def stall_p99_ns(self) -> int:
        """Length that 99 % of the stalls do not exceed, see `stall_percentile_ns`."""
        return stall_percentile_ns(self.stall_histogram, 99)

    def __sub__(self, earlier: "RuntimeCounters") -> Self:
        """Return what was counted between two snapshots of one runtime.

        Figures that are no counters (experts resident, pinned, in flight, slots) are those of
        the later one. If the profiler was reset in between, its figures are those since then.

        Raises
        ------
        ConfigError
            If they are not of one runtime, not in this order, or one is a difference itself.
        """
        if not isinstance(earlier, RuntimeCounters):
            return NotImplemented
        if self.opened_ns != earlier.opened_ns or self.num_layers != earlier.num_layers:
            raise ConfigError(
                "these snapshots are of different runtimes; subtract one that the same "
                "runtime's stats() gave before"
            )
        for one in (self, earlier):
            if one.since_ns != one.opened_ns:
                raise ConfigError(
                    f"a difference over {one.elapsed_s:.3f} s is no snapshot; subtract what "
                    "stats() gave"
                )
        if earlier.taken_ns > self.taken_ns:
            raise ConfigError(
                f"the snapshot to subtract is {(earlier.taken_ns - self.taken_ns) / 1e9:.3f} s "
                "newer than the other; write later - earlier"
            )
        reset = self.num_resets != earlier.num_resets
        found: Any = subtracted(
            self,
            earlier,
            _COUNTERS if reset else (*_COUNTERS, *_PROFILED),
            since_ns=earlier.taken_ns,
            **{name: _since(getattr(self, name), getattr(earlier, name)) for name in PARTS},
        )
        return found

    def _per_s(self, number: int) -> float:
        return number / self.elapsed_s if self.elapsed_s > 0 else 0.0


def _since(later: Any, earlier: Any) -> Any:
    return later if later is None or earlier is None else later - earlier


def _rate(hits: int, misses: int) -> float:
    return hits / (hits + misses) if hits + misses else 0.0
