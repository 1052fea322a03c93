"""`moecache trace info`: a trace's facts, and its consequences for caching."""

import argparse
import json
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from moecache.commands.arguments import TRACES_HELP
from moecache.commands.paths import printable
from moecache.study.importers import load_any
from moecache.study.statistics import SHARES, TraceStatistics, mean, statistics
from moecache.traces.trace import Trace

_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 64
# Characters that the table's other columns take.
_OTHERS = 57


def add_parser(actions: Any) -> None:
    """Add the action to the parser."""
    parser: argparse.ArgumentParser = actions.add_parser(
        "info",
        help="show what a trace is and how its routing behaves",
        description="Show what a trace is, the figures that decide how well it can be cached, and "
        "a line per layer: how often its experts were used (a column is an expert, or several), "
        "the share of the busiest tenth, the overlap with the token before, and the working set "
        "of 16 tokens. Reads every form that convert reads.",
        epilog="example: moecache trace info examples/traces/tiny_moe.npz --json",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help=TRACES_HELP)
    parser.add_argument("--json", action="store_true", help="all figures, an object per file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what the files have; return the exit code."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    described = []
    for name in arguments.files:
        trace = load_any(name)
        figures = statistics(trace)
        if arguments.json:
            described.append(_as_json(name, trace, figures))
            continue
        console.print(printable(name), style="bold")
        for line in (*trace.describe().splitlines(), *figures.describe().splitlines()):
            console.print(printable(line))
        console.print(_layer_table(figures, console.width - _OTHERS))
    if arguments.json:
        console.print(json.dumps(described, indent=1, allow_nan=False))
    return 0


def heat(counts: np.ndarray, columns: int = _COLUMNS) -> str:
    """Return how often experts were used as text, the busiest of the columns highest."""
    parts = np.array_split(counts, min(columns, len(counts)))
    means = np.array([part.mean() for part in parts])
    most = means.max()
    if most == 0:
        return _BLOCKS[0] * len(means)
    # Any use at all is visible.
    return "".join(_BLOCKS[int(np.ceil(value / most * 8))] for value in means)


def _layer_table(figures: TraceStatistics, width: int) -> Table:
    table = Table("layer", "use of its experts", "top 10%", "overlap", "in 16 tokens", "entropy")
    tenth, sixteen = SHARES.index(0.10), figures.windows.index(16)
    for index, layer in enumerate(figures.layers):
        table.add_row(
            str(layer),
            heat(figures.counts[index], max(8, min(width, _COLUMNS))),
            _percent(figures.top_shares[index, tenth]),
            _percent(figures.overlap[index]),
            _number(figures.working_set[index, sixteen]),
            _percent(figures.relative_entropy[index]),
        )
    table.add_section()
    table.add_row(
        "mean",
        "",
        _percent(mean(figures.top_shares[:, tenth])),
        _percent(mean(figures.overlap)),
        _number(mean(figures.working_set[:, sixteen])),
        _percent(mean(figures.relative_entropy)),
    )
    return table


def _as_json(name: str, trace: Trace, figures: TraceStatistics) -> dict[str, Any]:
    return {
        "file": name,
        "digest": trace.digest,
        "num_steps": trace.num_steps,
        "num_sequences": len(np.unique(trace.sequence)),
        "num_prefill_tokens": len(trace.prefill()),
        "metadata": dict(trace.metadata),
        **figures.to_dict(),
    }


def _percent(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.1%}"


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.1f}"
