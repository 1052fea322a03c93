"""`moecache plan-ranks`: which machine owns which experts, by how they are used."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from moecache.commands.arguments import TRACES_HELP, add_force, check_outputs, naming
from moecache.commands.paths import HUB_NAMES, hub_path, open_experts, printable
from moecache.errors import ConfigError
from moecache.layout import ExpertLayout
from moecache.profiles.file import Profile, identity, read_profile
from moecache.ranks import Placement
from moecache.ranks._file import PLACEMENT_FILE
from moecache.study.importers import load_any
from moecache.study.statistics import expert_counts
from moecache.traces.trace import Trace
from moecache.units import format_bytes, parse_bytes

DEFAULT_OUTPUT = "placement.json"
# Steps of a trace: enough to tell how much a step asks of the slowest rank, and quick.
MAX_STEPS = 2048


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan-ranks",
        help="spread a model's experts over several machines",
        description="Say which machine owns which experts, so that all have as much to do as "
        "they can take, and write that to a file for `moecache simulate --placement` and "
        "`load(expert_parallel=True, placement=FILE)`. How experts are used comes from a routing "
        "trace, or from a profile of earlier runs; without either all count alike. Machines with "
        "more memory own more. Shows, for each rank, what it holds and what of the uses it can "
        "expect. docs/scale.md.",
        epilog="examples: moecache plan-ranks ./Qwen3-30B-A3B --ranks 4 | "
        "moecache plan-ranks ./Qwen3-30B-A3B --ranks 2 --trace run.npz --memory 8GiB,16GiB | "
        "moecache plan-ranks --trace run.npz --ranks 2 --memory 12G,12G",
    )
    parser.add_argument(
        "path",
        nargs="?",
        metavar="MODEL",
        help="checkpoint directory, .safetensors or .gguf file, or "
        f"{HUB_NAMES}; headers only are read. Without it "
        "the trace says how many experts there are",
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="how many machines")
    used = parser.add_mutually_exclusive_group()
    used.add_argument("--trace", metavar="FILE", help=TRACES_HELP)
    used.add_argument(
        "--profile",
        dest="usage",
        action="append",
        metavar="FILE",
        help="what earlier runs of the model noted (needs MODEL); once for each rank's file",
    )
    parser.add_argument(
        "--memory",
        dest="memories",
        metavar="LIST",
        help="of each rank for experts, 8GiB,16GiB: shares go by it (default: all the same)",
    )
    parser.add_argument(
        "--output", metavar="FILE", default=DEFAULT_OUTPUT, help="default: %(default)s"
    )
    add_force(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Model:
    """The experts to be spread: uses [L, E], bytes of one by layer (or none), the trace."""

    counts: np.ndarray
    expert_bytes: np.ndarray | None
    trace: Trace | None
    source: str


def run(arguments: argparse.Namespace) -> int:
    """Make a placement, show and write it; return the exit code."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    inputs = dict.fromkeys(arguments.usage or (), "the profile")
    if arguments.trace is not None:
        inputs[arguments.trace] = "the trace"
    check_outputs(arguments, inputs, output=PLACEMENT_FILE)
    memory = _memory(arguments)
    model = _model(arguments)
    with naming("--ranks"):
        Placement.even(model.counts.shape[0], model.counts.shape[1], arguments.ranks)
    with naming("--ranks" if memory is None else "--memory"):
        placement = Placement.balanced(model.counts, arguments.ranks, memory)
    placement.save(arguments.output, force=arguments.force)
    _show(console, placement, model, memory)
    console.print(
        f"wrote {printable(arguments.output)}: load(..., expert_parallel=True, placement="
        f"'{printable(arguments.output)}')"
    )
    return 0


def _memory(arguments: argparse.Namespace) -> list[int] | None:
    if arguments.memories is None:
        return None
    with naming("--memory"):
        sizes = [parse_bytes(part.strip()) for part in arguments.memories.split(",")]
        if len(sizes) != arguments.ranks:
            raise ConfigError(
                f"{arguments.memories!r} has {len(sizes)} sizes, for {arguments.ranks} ranks; give "
                "one for each"
            )
        if min(sizes) < 1:
            raise ConfigError(f"{arguments.memories!r} has a rank without memory")
    return sizes


def _model(arguments: argparse.Namespace) -> _Model:
    trace = None if arguments.trace is None else load_any(arguments.trace)
    if arguments.path is None:
        if trace is None:
            raise ConfigError("give a MODEL, or a --trace, which says how many experts there are")
        nbytes = trace.metadata.get("expert_bytes")
        known = isinstance(nbytes, int) and not isinstance(nbytes, bool) and nbytes > 0
        sizes = np.full(trace.num_layers, nbytes) if known else None
        return _Model(expert_counts(trace), sizes, trace, "the trace")
    store, _ = open_experts(hub_path(arguments.path), None)
    with store:
        layout = store.layout
    sizes = np.array([layout.expert_bytes(layer) for layer in range(layout.num_layers)])
    shape = (layout.num_layers, layout.num_experts)
    if trace is not None:
        if (trace.num_layers, trace.num_experts) != shape:
            raise ConfigError(
                f"--trace {arguments.trace}: is of {trace.num_layers} layers of "
                f"{trace.num_experts} experts, the model has {shape[0]} of {shape[1]}; record one "
                "of this model"
            )
        return _Model(expert_counts(trace), sizes, trace, "the trace")
    if arguments.usage is not None:
        counts = sum(_profile_counts(path, layout) for path in arguments.usage)
        return _Model(np.asarray(counts), sizes, None, "the profile")
    return _Model(np.ones(shape, np.int64), sizes, None, "")


def _profile_counts(path: str, layout: ExpertLayout) -> np.ndarray:
    profile = read_profile(path) or Profile()
    usage = profile.models.get(identity(layout))
    shape = (layout.num_layers, layout.num_experts)
    if usage is None or usage.counts.shape != shape:
        raise ConfigError(
            f"--profile {path}: has no usage of this model; run it once with profile={path!r}, or "
            "give a --trace"
        )
    # As a file may say anything.
    return np.minimum(usage.counts, np.uint64(2**40)).astype(np.int64)


def _show(
    console: Console, placement: Placement, model: _Model, memory: Sequence[int] | None
) -> None:
    num_layers, num_ranks = placement.num_layers, placement.num_ranks
    console.print(
        f"{num_layers} layers of {placement.num_experts} experts on {num_ranks} ranks, "
        + (f"by their uses in {model.source}" if model.source else "all counting alike"),
        style="bold",
    )
    held = placement.num_held()
    loads = placement.loads(model.counts)
    total = max(1.0, float(loads.sum()))
    # Relative to the mean rank's time: 1 is a rank with as much to do as it can take.
    times = loads.sum(1) / total / placement.shares
    shown = Table("rank")
    columns = ["memory"] * (memory is not None) + ["experts"]
    columns += ["size"] * (model.expert_bytes is not None) + ["of uses", "of its share"]
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    for rank in range(num_ranks):
        cells = [] if memory is None else [format_bytes(memory[rank])]
        cells += [str(int(held[rank].sum()))]
        if model.expert_bytes is not None:
            cells.append(format_bytes(int(held[rank] @ model.expert_bytes)))
        cells += [f"{loads[rank].sum() / total:.2%}", f"{times[rank]:.1%}"]
        shown.add_row(str(rank), *cells)
    console.print(shown)
    even = Placement.even(num_layers, placement.num_experts, num_ranks)
    if model.source:
        console.print(
            f"the slowest rank of a layer has {_slowest(placement, model.counts):.2f} times the "
            f"mean's uses; dealt in turn, {_slowest(even, model.counts):.2f}"
        )
    if model.trace is not None:
        work, mean = _step_work(placement, model.trace)
        in_turn, _ = _step_work(even, model.trace)
        console.print(
            f"in a step, the slowest computes {work:.2f} experts of a layer, the mean rank "
            f"{mean:.2f}; dealt in turn, the slowest {in_turn:.2f}"
        )


def _slowest(placement: Placement, counts: np.ndarray) -> float:
    """Return the largest use for its share of each layer, against the mean, over all layers."""
    loads = placement.loads(counts) / (placement.shares[:, None] * placement.num_ranks)
    total = loads.mean(0).sum()
    return float(loads.max(0).sum() / total) if total else 1.0


def _step_work(placement: Placement, trace: Trace) -> tuple[float, float]:
    """Return what a step's slowest rank has to do in a layer on average, and the ranks' mean.

    In experts: distinct ones that the rank computes, for an even share; of the trace's last steps.
    """
    steps = np.cumsum(np.diff(trace.step, prepend=-1) != 0) - 1
    recent = steps > (steps[-1] if len(steps) else 0) - MAX_STEPS
    token, layer, place = np.nonzero(recent[:, None, None] & (trace.experts >= 0))
    # Each expert of a step's layer once.
    step, layer, expert = np.unique(
        np.stack([steps[token], layer, trace.experts[token, layer, place]]), axis=1
    )
    if not len(step):
        return 0.0, 0.0
    num_ranks = placement.num_ranks
    _, row = np.unique(step * placement.num_layers + layer, return_inverse=True)
    keys = row * num_ranks + placement.owners[layer, expert]
    count = int(row.max()) + 1
    work = np.bincount(keys, minlength=count * num_ranks).reshape(count, num_ranks)
    slowest = (work / (placement.shares * num_ranks)).max(1).mean()
    return float(slowest), len(step) / num_ranks / count
