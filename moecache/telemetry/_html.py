"""A snapshot as HTML for notebooks: self-contained, no script, readable on light and dark."""

from html import escape

from moecache.telemetry._counters import RuntimeCounters
from moecache.telemetry._text import describe_bytes
from moecache.units import format_bytes, format_ns

# Everything but the heat takes the page's own colours: a notebook's theme need not be the system's.
_STYLE = (
    "font:13px/1.5 system-ui,sans-serif;color:inherit;border:1px solid rgba(128,128,128,.4);"
    "border-radius:6px;padding:10px 14px;max-width:44em"
)
_CELL = "flex:1 1 6px;min-width:4px;height:22px;border:1px solid rgba(128,128,128,.35)"
# Blue of Okabe and Ito's colours, stronger the higher the rate.
_HEAT = "rgba(0,114,178,{:.2f})"


def render(stats: RuntimeCounters) -> str:
    """Return the HTML of `RuntimeStats`."""
    rows = "".join(
        '<tr><td style="text-align:left;padding:1px 14px 1px 0;opacity:.7">'
        f'{escape(name)}</td><td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in _rows(stats)
    )
    return (
        f'<div style="{_STYLE}"><div><b>moecache</b> hit rate <b>{stats.hit_rate:.1%}</b> '
        f"over {stats.elapsed_s:.1f} s, {stats.num_steps} steps</div>"
        f"{_strip(stats)}"
        f'<table style="border-collapse:collapse;color:inherit">{rows}</table></div>'
    )


def _rows(stats: RuntimeCounters) -> list[tuple[str, str]]:
    rows = [
        (
            "experts",
            (
                f"{stats.num_resident} of {stats.total_experts} resident in {stats.capacity} "
                f"slots, {stats.num_pinned} pinned, {stats.num_in_flight} in flight; "
                f"{format_bytes(stats.pool_bytes)}"
            ),
        ),
        ("policy", f"{stats.policy}, scope {stats.scope}; {stats.num_evictions} evictions"),
        ("steps", f"{stats.num_resident_steps} of {stats.num_steps} found everything resident"),
        (
            "read",
            (
                f"{stats.num_reads} experts, {describe_bytes(stats)}; "
                f"{format_bytes(stats.bytes_per_s)}/s"
            ),
        ),
        (
            "stalls",
            (
                f"{stats.num_stalls}, {format_ns(stats.stall_ns)} in all; p50 "
                f"{format_ns(stats.stall_p50_ns)}, p99 {format_ns(stats.stall_p99_ns)}"
            ),
        ),
    ]
    if stats.num_failed_reads:
        rows.append(("failed", f"{stats.num_failed_reads} reads"))
    if stats.reading is not None:
        rows.append(("reading", stats.reading.describe().removeprefix("reading ")))
    if stats.uploads is not None:
        rows.append(("uploads", stats.uploads.describe().removeprefix("uploads ")))
    if stats.prefetch is not None:
        rows += [
            ("prefetch" if number == 0 else "", line.strip().removeprefix("prefetch "))
            for number, line in enumerate(stats.prefetch.describe().splitlines())
        ]
    return rows


def _strip(stats: RuntimeCounters) -> str:
    rates = stats.hit_rates
    cells = "".join(
        f'<span style="{_CELL};background:{_background(rate)}" '
        f'title="layer {layer}: {"no accesses" if rate is None else f"{rate:.1%}"}"></span>'
        for layer, rate in enumerate(rates)
    )
    known = [(rate, layer) for layer, rate in enumerate(rates) if rate is not None]
    if known:
        (least, worst), (most, best) = min(known), max(known)
        note = (
            f"hit rate by layer, 0 to {len(rates) - 1}: lowest {least:.1%} in layer {worst}, "
            f"highest {most:.1%} in layer {best}"
        )
    else:
        note = "no accesses so far"
    return (
        f'<div role="img" aria-label="{escape(note)}" '
        f'style="display:flex;gap:1px;margin:8px 0 2px">{cells}</div>'
        f'<div style="opacity:.7;margin-bottom:6px">{escape(note)}</div>'
    )


def _background(rate: float | None) -> str:
    if rate is None:
        return "repeating-linear-gradient(45deg,transparent 0 3px,rgba(128,128,128,.4) 3px 4px)"
    return _HEAT.format(rate)
