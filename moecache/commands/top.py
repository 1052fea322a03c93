"""`moecache top`: a running server's cache, from its Prometheus metrics."""

import argparse
import time
from typing import Any, NoReturn

from rich.console import Console
from rich.live import Live

from moecache.commands.live import render
from moecache.commands.metrics import metrics_url, read_metrics
from moecache.commands.paths import printable
from moecache.commands.samples import Sample
from moecache.errors import ConfigError, MoeCacheError


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "top",
        help="watch a running server's cache, from its Prometheus metrics",
        description="Read the Prometheus metrics of a process that has registered "
        "moecache.telemetry.PrometheusCollector(runtime), and show them until Ctrl-C: hit rate, "
        "by layer too if the collector has per_layer=True, bytes read per second by cause, "
        "stalls, what is read ahead. Several runtimes are added up. Where the output is no "
        "terminal, a panel is printed per interval. Needs the extra: "
        "pip install 'moecache[prometheus]'.",
        epilog="example: moecache top localhost:9100   (in another terminal: "
        "moecache demo --metrics 9100)",
    )
    parser.add_argument(
        "url",
        help="http:// address of the metrics: http://localhost:9100/metrics, or localhost:9100",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="between two readings (default: 1)",
    )
    parser.add_argument(
        "--once", action="store_true", help="show the figures since the start, and end"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the panel until Ctrl-C; return the exit code."""
    if not 0.1 <= arguments.interval <= 3600:
        raise ConfigError(f"--interval must be 0.1 to 3600 seconds, got {arguments.interval}")
    url = metrics_url(arguments.url)
    console = Console(highlight=False, markup=False)
    ascii_only = not console.encoding.startswith("utf")
    last = read_metrics(url)
    if arguments.once:
        console.print(render(last, ascii_only=ascii_only))
        return 0
    try:
        if console.is_terminal and not console.is_dumb_terminal:
            _watch(console, url, last, arguments.interval, ascii_only=ascii_only)
        while True:
            time.sleep(arguments.interval)
            sample = read_metrics(url)
            console.print(render(sample, sample.since(last), ascii_only=ascii_only))
            last = sample
    except KeyboardInterrupt:
        return 0


def _watch(
    console: Console, url: str, last: Sample, interval_s: float, *, ascii_only: bool
) -> NoReturn:
    panel = render(last, ascii_only=ascii_only, note=printable(url))
    with Live(panel, console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                sample = read_metrics(url)
                since = sample.since(last)
                panel = render(sample, since, ascii_only=ascii_only, note=printable(url))
                last = sample
            except MoeCacheError as error:
                # A server that restarts comes back.
                panel = render(last, ascii_only=ascii_only, note=f"{error}; trying again")
            live.update(panel, refresh=True)
