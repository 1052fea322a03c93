"""A snapshot as lines of text."""

from moecache.telemetry._counters import RuntimeCounters
from moecache.units import format_bytes, format_ns

_CAUSES = ("demand", "bulk", "prefetch", "warm_start")


def describe(stats: RuntimeCounters) -> str:
    """Return the text of `RuntimeStats.describe`."""
    lines = [
        (
            f"experts {stats.num_resident} resident, {stats.num_pinned} pinned, "
            f"{stats.num_in_flight} in flight, {stats.capacity} slots, "
            f"{stats.total_experts} in the model; {stats.staging_slots} staging slots; "
            f"{format_bytes(stats.pool_bytes)} in all"
        ),
        f"policy {stats.policy}, scope {stats.scope}, {stats.num_evictions} evictions",
        (
            f"steps {stats.num_steps}, {stats.num_resident_steps} of them all resident "
            f"({_share(stats.num_resident_steps, stats.num_steps)}); "
            f"{stats.num_sequences} sequences begun; {stats.elapsed_s:.1f} s"
        ),
        (f"reads {stats.num_reads} ({describe_bytes(stats)}), {stats.num_failed_reads} failed"),
    ]
    if stats.num_stalls:
        lines.append(
            f"half of the stalls took at most {format_ns(stats.stall_p50_ns)}, 99 % at most "
            f"{format_ns(stats.stall_p99_ns)}"
        )
    if stats.reading is not None:
        lines.append(stats.reading.describe())
    if stats.uploads is not None:
        lines.append(stats.uploads.describe())
    if stats.prefetch is not None:
        lines.append(stats.prefetch.describe())
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def describe_bytes(stats: RuntimeCounters) -> str:
    """Return the bytes read, and by cause where there are several."""
    causes = {name: getattr(stats, f"bytes_{name}") for name in _CAUSES}
    parts = [f"{name} {format_bytes(value)}" for name, value in causes.items() if value]
    total = format_bytes(stats.bytes_read)
    return f"{total}: {', '.join(parts)}" if parts else total
