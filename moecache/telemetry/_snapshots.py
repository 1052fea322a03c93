"""RuntimeStats: a frozen snapshot of what a runtime did, as text, JSON and HTML."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from moecache.cache._profiler import stall_bucket_ns
from moecache.telemetry import _html, _text
from moecache.telemetry._counters import PARTS, RuntimeCounters

# Of `RuntimeStats.to_dict`: raised when a key goes or changes its meaning.
JSON_VERSION: Final = 1


@dataclass(frozen=True)
class RuntimeStats(RuntimeCounters):
    """What a runtime counted so far, or with `later - earlier` over an interval.

    `RuntimeCounters` has the fields.
    """

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
