"""The panel of `moecache top` and `moecache demo --live`."""

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moecache.commands.paths import printable
from moecache.commands.samples import Sample, sample_stats
from moecache.runtime.runtime import ExpertRuntime
from moecache.units import format_bytes, format_ns

_CAUSES = ("demand", "bulk", "prefetch", "warm_start")
_MOST_CELLS = 60
_WINDOW_S = 1.0
_REFRESHES_PER_S = 8
_TEXT_LINES = 8
# The height is the hit rate, for terminals and readers without colours; blank is no access.
_HEIGHTS = "▁▂▃▄▅▆▇█"
_DIGITS = "0123456789"
# From red over amber to green, colours of the 256 that every terminal of today has.
_COLOURS = ("color(160)", "color(166)", "color(172)", "color(142)", "color(106)", "color(34)")


def render(
    total: Sample, recent: Sample | None = None, *, ascii_only: bool = False, note: str = ""
) -> Panel:
    """Return the panel of a runtime's figures.

    Parameters
    ----------
    total : Sample
        All that was counted so far.
    recent : Sample, optional
        Recent counters; without them, rates are those of `total`.
    ascii_only : bool, default False
        Draw the heat strip in digits, tenths of the hit rate.
    note : str
        Text below the panel.
    """
    now = total if recent is None else recent
    counts, gauges = now.counts, total.gauges
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row(
        "hit rate",
        Text(
            f"{_percent(total.hit_rate)} since the start"
            if recent is None
            else f"{_percent(recent.hit_rate)} now, {_percent(total.hit_rate)} since the start"
        ),
    )
    # A moment has too few accesses to a layer: those since the start, if there are none now.
    rates = [
        lately if lately is not None else ever
        for lately, ever in zip(now.hit_rates, total.hit_rates, strict=True)
    ]
    if rates:
        table.add_row("by layer", _strip(rates, _DIGITS if ascii_only else _HEIGHTS))
    else:
        table.add_row("by layer", Text("not served; PrometheusCollector(..., per_layer=True)"))
    table.add_row("read", Text(_bytes_per_s(now)))
    table.add_row(
        "stalls",
        Text(
            f"{now.per_s('stalls'):,.0f}/s, {now.per_s('stall_s'):.1%} of the time, "
            f"p99 {format_ns(now.stall_percentile_s(99) * 1e9)}"
        ),
    )
    table.add_row(
        "steps",
        Text(
            f"{now.per_s('steps'):,.0f}/s, "
            f"{_percent(_share(counts['resident_steps'], counts['steps']))} of them all resident; "
            f"{now.per_s('evictions'):,.0f} evictions/s"
        ),
    )
    table.add_row(
        "experts",
        Text(
            f"{gauges['resident']:,.0f} of {gauges['experts']:,.0f} resident in "
            f"{gauges['slots']:,.0f} slots, {gauges['pinned']:,.0f} pinned, "
            f"{gauges['in_flight']:,.0f} in flight"
        ),
    )
    table.add_row(
        "prefetch",
        Text(
            f"{total.prefetch}; precision {_percent(now.precision)} ({counts['useful']:,.0f} "
            f"useful, {counts['late']:,.0f} late, {counts['wrong']:,.0f} wrong, "
            f"{counts['cancelled']:,.0f} cancelled), {counts['dropped']:,.0f} dropped"
            if total.prefetch
            else "none"
        ),
    )
    if total.counts["failed"]:
        failed = f"{total.counts['failed']:,.0f} reads since the start"
        table.add_row("failed", Text(failed, style="bold red"))
    return Panel(
        table,
        title=Text(f"moecache, {total.policy}"),
        title_align="left",
        subtitle=Text(note) if note else None,
        subtitle_align="left",
        expand=False,
    )


class LiveView:
    """Shows a runtime's panel on a terminal while something else runs.

    Parameters
    ----------
    console : Console
    runtime : ExpertRuntime
        Stays open for as long as the panel is shown.
    """

    def __init__(self, console: Console, runtime: ExpertRuntime) -> None:
        self._runtime = runtime
        self._ascii_only = not console.encoding.startswith("utf")
        self._width = console.width
        self._recent: deque[Sample] = deque([sample_stats(runtime.stats())])
        self._text = ""
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_S,
            redirect_stdout=False,
        )

    def write(self, text: str) -> None:
        """Show text above the panel: its last lines."""
        self._text += text

    def __enter__(self) -> Self:
        """Begin to show."""
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop; the panel of that moment stays."""
        self._live.stop()

    def _render(self) -> RenderableType:
        total = sample_stats(self._runtime.stats())
        self._recent.append(total)
        while self._recent[1].taken_s < total.taken_s - _WINDOW_S:
            self._recent.popleft()
        panel = render(total, total.since(self._recent[0]), ascii_only=self._ascii_only)
        lines = self._text.splitlines()[-_TEXT_LINES:]
        shown = "\n".join(printable(line)[: self._width] for line in lines)
        return Group(Text(shown), panel) if shown else panel


def _strip(rates: Sequence[float | None], glyphs: str) -> Text:
    cells = min(len(rates), _MOST_CELLS)
    text = Text(no_wrap=True)
    for cell in range(cells):
        start, stop = (number * len(rates) // cells for number in (cell, cell + 1))
        known = [rate for rate in rates[start:stop] if rate is not None]
        if not known:
            text.append(" ")
            continue
        rate = min(1.0, max(0.0, sum(known) / len(known)))
        text.append(
            glyphs[min(len(glyphs) - 1, int(rate * len(glyphs)))],
            style=_COLOURS[min(len(_COLOURS) - 1, int(rate * len(_COLOURS)))],
        )
    known = [rate for rate in rates if rate is not None]
    if known:
        text.append(f"  {min(known):.0%} to {max(known):.0%}")
    return text


def _bytes_per_s(sample: Sample) -> str:
    rates = {cause: sample.per_s(cause) for cause in _CAUSES}
    parts = [f"{cause} {format_bytes(rate)}" for cause, rate in rates.items() if rate]
    total = f"{format_bytes(sum(rates.values()))}/s"
    return f"{total}: {', '.join(parts)}" if parts else total


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
