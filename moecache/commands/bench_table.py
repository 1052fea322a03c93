"""The table of `moecache bench`."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from moecache.commands.contestants import Contestant
from moecache.units import format_bytes

_RESIDENT = "resident"
_MOST_COLUMNS = 1000


def print_bench(console: Console, contestants: list[Contestant], *, compare: bool) -> None:
    """Print the medians, a row for each contestant.

    All columns are there, whether or not the terminal has room for them.

    Parameters
    ----------
    console : Console
    contestants : list of Contestant
    compare : bool
        Also show rates as shares of the fully resident model's, if it ran.
    """
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("load\ns", "load_s", "{:.2f}".format),
        ("prefill\ntok/s", "prefill_tokens_per_s", "{:.1f}".format),
        ("decode\ntok/s", "decode_tokens_per_s", "{:.1f}".format),
        ("hit\nrate", "hit_rate", "{:.1%}".format),
        ("read\na token", "bytes_per_token", format_bytes),
        ("stalls\nms a token", "stall_ms_per_token", "{:.2f}".format),
        ("slots", "slot_bytes", format_bytes),
        ("peak\nRSS", "peak_rss_bytes", format_bytes),
        ("of it\nimports", "imports_rss_bytes", format_bytes),
    ]
    resident = next(
        (one.median() for one in contestants if one.task["kind"] == _RESIDENT and one.runs), None
    )
    shares = resident if compare else None
    table = Table()
    table.add_column("", no_wrap=True)
    for title, name, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
        if shares is not None and name.endswith("tokens_per_s"):
            table.add_column("of\nresident", justify="right", no_wrap=True)
    for contestant in contestants:
        median = contestant.median()
        cells = []
        for _, name, form in columns:
            cells.append(form(median[name]) if name in median else "-")
            if shares is not None and name.endswith("tokens_per_s"):
                cells.append(f"{median[name] / shares[name]:.2f}" if name in median else "-")
        table.add_row(contestant.name, *cells)
    wide = console.options.update(max_width=_MOST_COLUMNS)
    needed = console.measure(table, options=wide).maximum
    console.width = max(console.width, needed)
    console.print(table)
