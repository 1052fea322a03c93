"""RuntimeStats: a frozen snapshot of what a runtime did, as text, JSON and HTML."""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any, Final, Self

from moecache.cache._cache import ExpertCache
from moecache.cache._profiler import stall_bucket_ns
from moecache.loading._loader import SlotLoader
from moecache.loading.load import Cause
from moecache.telemetry import _html, _text
from moecache.telemetry._counters import PARTS, RuntimeCounters

# Version of `RuntimeStats.to_dict`: raised when a key goes or changes its meaning.
JSON_VERSION: Final = 1


@dataclass(frozen=True)
class RuntimeStats(RuntimeCounters):
    """The counters of a runtime so far, or with `later - earlier` over an interval.

    `RuntimeCounters` has the fields.
    """

    @classmethod
    def of(
        cls,
        cache: ExpertCache,
        loader: SlotLoader,
        *,
        num_sequences: int,
        total_experts: int,
        pool_bytes: int,
        opened_ns: int,
        **parts: Any,
    ) -> Self:
        """Return the counters as they are now."""
        profiler, counts = cache.profiler, loader.counts
        return cls(
            num_steps=counts.num_steps,
            num_resident_steps=counts.num_resident_steps,
            num_sequences=num_sequences,
            num_hits=profiler.num_hits,
            num_misses=profiler.num_misses,
            hits_by_layer=tuple(profiler.hits_by_layer.tolist()),
            misses_by_layer=tuple(profiler.misses_by_layer.tolist()),
            num_evictions=cache.num_evictions,
            num_reads=counts.num_reads,
            num_failed_reads=counts.num_failed_reads,
            bytes_demand=counts.bytes_read[Cause.DEMAND],
            bytes_bulk=counts.bytes_read[Cause.BULK],
            bytes_prefetch=counts.bytes_read[Cause.PREFETCH],
            bytes_warm_start=counts.bytes_read[Cause.WARM_START],
            num_stalls=profiler.num_miss_stalls,
            stall_ns=profiler.miss_stall_ns,
            stall_histogram=profiler.stall_histogram,
            num_in_flight=loader.num_in_flight,
            num_resident=cache.num_resident,
            num_pinned=cache.num_pinned,
            capacity=cache.capacity - cache.num_withheld,
            staging_slots=loader.num_staging,
            total_experts=total_experts,
            pool_bytes=pool_bytes,
            policy=cache.policy,
            scope=cache.scope,
            opened_ns=opened_ns,
            since_ns=opened_ns,
            taken_ns=time.monotonic_ns(),
            num_resets=profiler.num_resets,
            **parts,
        )

    def describe(self) -> str:
        """Return the snapshot as lines of text."""
        return _text.describe(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain ints, floats, strings, lists and dicts, with what follows from them.

        `version` is raised when a key goes or changes its meaning. `stall_histogram` has
        pairs of the longest length of a bucket, in nanoseconds, and its number of stalls,
        for buckets that have any.
        """
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in {*PARTS, "stall_histogram"}
        }
        return {
            "version": JSON_VERSION,
            **{
                name: list(value) if isinstance(value, tuple) else value
                for name, value in fields.items()
            },
            "stall_histogram": [
                [stall_bucket_ns(bucket), number]
                for bucket, number in enumerate(self.stall_histogram)
                if number
            ],
            "stall_p50_ns": self.stall_p50_ns,
            "stall_p99_ns": self.stall_p99_ns,
            "hit_rate": self.hit_rate,
            "hit_rates": list(self.hit_rates),
            "bytes_read": self.bytes_read,
            "elapsed_s": self.elapsed_s,
            **{
                name: None if part is None else dataclasses.asdict(part)
                for name, part in ((name, getattr(self, name)) for name in PARTS)
            },
        }

    def to_json(self) -> str:
        """Return `to_dict` as one line of JSON."""
        import json

        return json.dumps(self.to_dict(), allow_nan=False)

    def _repr_html_(self) -> str:
        """Return it as a notebook shows it."""
        return _html.render(self)
