"""`moecache replay`: recorded routing through every policy, and what memory buys."""

import argparse
import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console

from moecache.commands.arguments import (
    TRACES_HELP,
    add_force,
    add_option,
    check_outputs,
    choose,
    load_traces,
    naming,
    split,
)
from moecache.commands.paths import printable
from moecache.commands.replay_tables import print_layers, print_table
from moecache.errors import ConfigError, SweepError
from moecache.files import Kind, write_whole
from moecache.policies.making import SCOPES
from moecache.study import plots
from moecache.study._arguments import BELADY, POLICIES, clip_capacity, total_experts
from moecache.study.advice import DEFAULT_POLICIES, expert_size, recommend
from moecache.study.sweeps import sweep, sweep_error
from moecache.study.table import CSV_FILE, PARQUET_FILE, Table
from moecache.traces.trace import Trace
from moecache.units import format_bytes, parse_budget

_DEFAULT_POLICIES = ("lru", "slru", "lfru", "echo", BELADY)
_DEFAULT_CAPACITIES = ("12.5%", "25%", "50%")
# How pictures begin in which matplotlib does not name itself: svgz, gif, jpg, tiff, webp.
_UNNAMED = (b"\x1f\x8b", b"GIF8", b"\xff\xd8\xff", b"II*\0", b"RIFF")
_PICTURE_FILE = Kind(
    "a picture of matplotlib's",
    lambda data: b"Matplotlib" in data or data.startswith(_UNNAMED),
)


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="compare policies and capacities on recorded routing",
        description="Put routing traces through the cache with several policies and capacities, "
        "and show the hit rates; belady is the optimum, which knows the future. Reads every form "
        "of trace that `moecache trace convert` reads. docs/study.md says more.",
        epilog="examples: moecache replay examples/traces/tiny_moe.npz | "
        "moecache replay run.npz --policy all --capacity 10%,20%,30% --scope global,layer | "
        "moecache replay run.npz --memory 4GiB,8GiB --expert-bytes 3MiB | "
        "moecache replay run.npz --recommend 4GiB | "
        "moecache replay run.npz --plot curves.png",
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help=TRACES_HELP)
    defaults = ",".join(_DEFAULT_POLICIES)
    add_option(parser, "policy", names=(*POLICIES, BELADY), instead=defaults)
    add_option(parser, "scope", names=SCOPES)
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--capacity",
        metavar="LIST",
        help="slots, or shares of all experts: 64,25%%,0.25 (default: 12.5%%,25%%,50%%)",
    )
    add_option(
        size,
        "memory",
        "; a list, instead of a capacity: 2GiB,4GiB",
        metavar="LIST",
        instead="none",
    )
    size.add_argument(
        "--recommend", metavar="MEMORY", help="say what to set for so much memory, and why"
    )
    parser.add_argument(
        "--expert-bytes",
        metavar="SIZE",
        help="bytes of an expert, 3MiB (default: what the trace says)",
    )
    parser.add_argument("--per-layer", action="store_true", help="the layers' hit rates, too")
    shown = parser.add_argument_group("output")
    shown.add_argument("--json", action="store_true", help="all figures, instead of the table")
    shown.add_argument("--csv", metavar="FILE", help="write the figures there, too")
    shown.add_argument("--parquet", metavar="FILE", help="the same; needs pandas and pyarrow")
    shown.add_argument(
        "--plot",
        metavar="FILE",
        help="draw miss ratios at a dozen sizes from 3 to 100%% of the experts, which are "
        "replayed as well, and at those asked for: .png, .svg, .pdf",
    )
    add_force(shown)
    where = parser.add_argument_group("for many or long traces")
    where.add_argument(
        "--processes", type=int, metavar="N", help="how many work side by side (default: as needed)"
    )
    where.add_argument("--cluster", metavar="ADDRESS", help="a Dask scheduler to work for this")
    where.add_argument("--resume", metavar="FILE", help="keep what is done there, and go on")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replay, show, write; return the exit code."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if arguments.recommend is not None:
        return _recommend(console, arguments)
    _check_workers(arguments)
    check_outputs(
        arguments,
        dict.fromkeys(arguments.traces, "the trace"),
        csv=CSV_FILE,
        parquet=PARQUET_FILE,
        plot=_PICTURE_FILE,
        resume=None,
    )
    policies = choose("policy", arguments.policy, (*POLICIES, BELADY), _DEFAULT_POLICIES)
    scopes = choose("scope", arguments.scope, SCOPES, ("global",))
    if arguments.plot:
        with naming("--plot"):
            plots.check_suffix(arguments.plot)
    traces = load_traces(arguments.traces)
    slots = {name: _slots(arguments, trace, scopes) for name, trace in traces.items()}
    table, failures = _sweep(arguments, traces, policies, scopes, slots)
    drawn = table
    if arguments.plot:
        others = _drawn_slots(traces, scopes, slots)
        more, failed = _sweep(arguments, traces, policies, scopes, others)
        drawn, failures = Table.join([table, more]), failures + failed
    if arguments.json:
        found = [
            {**row, "layer_hit_rates": rates} if arguments.per_layer else row
            for row, rates in zip(table, table.per_layer, strict=True)
        ]
        console.print(json.dumps(found, indent=1, allow_nan=False))
    else:
        print_table(console, table, traces, _sizes(arguments, traces))
        if arguments.per_layer:
            print_layers(console, table, traces)
    if arguments.csv:
        table.to_csv(arguments.csv, force=arguments.force)
    if arguments.parquet:
        table.to_parquet(arguments.parquet, force=arguments.force)
    if arguments.plot:
        _plot(arguments, traces, policies, scopes, drawn)
    if failures:
        # Successful replays have been shown by now.
        given = "" if arguments.resume else "with --resume from the start, "
        remedy = f"{given}the same command repeats only what failed"
        raise sweep_error(drawn, failures, remedy) from failures[0][1]
    return 0


def _recommend(console: Console, arguments: argparse.Namespace) -> int:
    others = ("per_layer", "csv", "parquet", "plot", "force", "processes", "cluster", "resume")
    for name in others:
        if getattr(arguments, name) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning with --recommend")
    policies = choose("policy", arguments.policy, POLICIES, DEFAULT_POLICIES)
    scopes = choose("scope", arguments.scope, SCOPES, SCOPES)
    found = []
    for name, trace in load_traces(arguments.traces).items():
        with naming("--expert-bytes"):
            size = expert_size(trace, arguments.expert_bytes)
        with (
            naming("--recommend"),
            console.status("replaying") if console.is_terminal else _still(),
        ):
            advice = recommend(
                trace, arguments.recommend, expert_bytes=size, policies=policies, scopes=scopes
            )
        found.append({"trace": name, **asdict(advice)})
        if not arguments.json:
            console.print(printable(name), style="bold")
            console.print(advice.describe())
    if arguments.json:
        console.print(json.dumps(found, indent=1, allow_nan=False))
    return 0


def _sweep(
    arguments: argparse.Namespace,
    traces: dict[str, Trace],
    policies: list[str],
    scopes: list[str],
    slots: dict[str, list[int]],
) -> tuple[Table, list[tuple[dict[str, Any], Exception]]]:
    """Sweep trace by trace where slots depend on it, and all at once where they do not.

    Returns
    -------
    table : Table
    failures : list of (dict, Exception)
        As a SweepError has them.
    """
    rounds = [({name: traces[name]}, slots[name]) for name in traces]
    if len({tuple(chosen) for chosen in slots.values()}) == 1:
        rounds = [(traces, next(iter(slots.values())))]
    tables: list[Table] = []
    failures: list[tuple[dict[str, Any], Exception]] = []
    for some, chosen in rounds:
        try:
            table = sweep(
                some,
                policies,
                chosen,
                scopes=scopes,
                processes=arguments.processes,
                cluster=arguments.cluster,
                resume=arguments.resume,
                progress=Console(stderr=True).is_terminal,
            )
        except SweepError as error:
            table = error.table
            failures += error.failures
        tables.append(table)
    return Table.join(tables), failures


def _drawn_slots(
    traces: dict[str, Trace], scopes: list[str], asked: dict[str, list[int]]
) -> dict[str, list[int]]:
    """Return what is drawn besides the sizes that are asked for."""
    scope = "layer" if "layer" in scopes else "global"
    return {
        name: [slots for slots in plots.curve_slots(trace, scope) if slots not in asked[name]]
        for name, trace in traces.items()
    }


def _slots(arguments: argparse.Namespace, trace: Trace, scopes: list[str]) -> list[int]:
    """Return the capacities that are asked for, in slots; each scope takes each of them."""
    option = "--capacity" if arguments.memory is None else "--memory"
    default = ",".join(_DEFAULT_CAPACITIES)
    given = default if arguments.capacity is None else arguments.capacity
    given = given if option == "--capacity" else ""
    if arguments.capacity == "":
        raise ConfigError("--capacity is empty; leave it out for the default")
    asked: list[int | str] = [*split(option, given)] if given else []
    if option == "--memory":
        with naming("--expert-bytes"):
            size = expert_size(trace, arguments.expert_bytes)
        with naming(option):
            budgets = [
                parse_budget(text, total_experts(trace) * size)
                for text in split(option, arguments.memory)
            ]
            asked = [budget // size for budget in budgets]
            if min(budgets) < size:
                raise ConfigError(
                    f"{format_bytes(min(budgets))} holds no expert of {format_bytes(size)}"
                )
    with naming(option):
        return [max(clip_capacity(slots, trace, scope) for scope in scopes) for slots in asked]


def _sizes(arguments: argparse.Namespace, traces: dict[str, Trace]) -> dict[str, int]:
    """Return the bytes of an expert for the traces where they are known."""
    sizes = {}
    for name, trace in traces.items():
        if arguments.expert_bytes is not None or "expert_bytes" in trace.metadata:
            with naming("--expert-bytes"):
                sizes[name] = expert_size(trace, arguments.expert_bytes)
    return sizes


def _plot(
    arguments: argparse.Namespace,
    traces: dict[str, Trace],
    policies: list[str],
    scopes: list[str],
    table: Table,
) -> None:
    sizes = _sizes(arguments, traces)
    figure, axes = plots.blank(len(traces), len(scopes))
    for row, (name, trace) in enumerate(traces.items()):
        for column, scope in enumerate(scopes):
            ax = axes[row, column]
            points = {
                policy: [
                    (found["capacity"], found["miss_ratio"])
                    for found in table.select(trace=name, scope=scope, policy=policy)
                ]
                for policy in policies
            }
            plots.draw_curves(
                trace,
                points,
                lru="lru" in policies,
                scope=scope,
                expert_bytes=sizes.get(name),
                ax=ax,
            )
            if len(scopes) > 1 or scope != "global":
                ax.set_title(f"{ax.get_title('left') or name}, scope {scope}", loc="left")
    data = io.BytesIO()
    figure.savefig(data, format=arguments.plot.rpartition(".")[2].lower(), dpi=150)
    write_whole(arguments.plot, data.getvalue(), _PICTURE_FILE, force=arguments.force)


def _check_workers(arguments: argparse.Namespace) -> None:
    if arguments.processes is not None and arguments.processes < 0:
        raise ConfigError(f"--processes must be 0 or more, got {arguments.processes}")
    if arguments.processes is not None and arguments.cluster is not None:
        raise ConfigError("--processes and --cluster exclude each other")


@contextlib.contextmanager
def _still() -> Iterator[None]:
    yield
