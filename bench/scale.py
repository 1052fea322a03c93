"""Tokens per second from one machine to a rack, simulated on recorded routing.

Puts the traces of a folder, by default ../shared/traces beside the checkout, through 1 to 16
machines and several networks; through placements that are planned on a trace's first half; and
through batches. All rates are of the second half, whose caches the first half has warmed.

    python -m bench.scale [--traces DIR] [--json OUT] [--plot PNG]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.hit_rates import TRACES, as_batch, load
from moecache.ranks import Placement
from moecache.study import RanksTiming, Trace, simulate_ranks
from moecache.study.statistics import expert_counts


class Model(NamedTuple):
    """A model whose routing was recorded: what an expert and a row of it take."""

    title: str
    expert_bytes: int
    row_bytes: int


# Bytes as in the checkpoints named: experts of 3 x 2048 x 1024 in bf16, of Q4_K_M; rows of bf16.
MODELS = {
    "nvmoe-olmoe": Model("OLMoE-1B-7B, bf16", 12_582_912, 4096),
    "bigmoe-qwen": Model("Qwen3-30B-A3B, Q4_K_M", 3_059_712, 4096),
}
# One machine: a disk of 3 GB/s, and some 70 tokens/s of 48 layers where nothing is read.
MACHINE: dict[str, Any] = {"bandwidth": "3GB/s", "latency_ns": "80us", "compute_ns": "300us"}
NETWORKS = ("1GbE", "2.5GbE", "10GbE", "100GbE")
RANKS = (1, 2, 4, 8, 16)
BATCHES = (1, 2, 4, 8, 16)
CAPACITY = 0.125
PLACED_RANKS, BATCH_RANKS = 4, 8


def warm(trace: Trace, num_ranks: int, **options: Any) -> dict[str, float]:
    """Return tokens/s of the second half of the steps, and shares of its time."""
    steps = trace.step[:-1] != trace.step[1:]
    ends = [row + 1 for row, ended in enumerate(steps.tolist()) if ended]
    first_half = trace[: ends[len(ends) // 2]]
    given = {"capacity": CAPACITY, **MACHINE, **options}
    before = simulate_ranks(first_half, num_ranks, **given)
    after = simulate_ranks(trace, num_ranks, **given)
    total_ns = after.total_ns - before.total_ns
    parts = {
        "network": after.network_ns - before.network_ns,
        "slower ranks": _mean_waited(after) - _mean_waited(before),
        "reads": _mean_stall(after) - _mean_stall(before),
    }
    shares = {name: ns / total_ns for name, ns in parts.items()}
    tokens = trace.num_tokens - first_half.num_tokens
    return {
        "tokens_per_s": tokens / (total_ns / 1e9),
        **shares,
        "computing": 1 - sum(shares.values()),
        "sent_per_token": (after.network_bytes - before.network_bytes) / tokens,
    }


def _mean_waited(timing: RanksTiming) -> float:
    return sum(timing.waited_ns) / timing.num_ranks


def _mean_stall(timing: RanksTiming) -> float:
    return sum(one.stall_ns for one in timing.ranks) / timing.num_ranks


def scale(trace: Trace, model: Model, ranks: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Return what each network makes of each number of machines."""
    sizes = {"expert_bytes": model.expert_bytes, "row_bytes": model.row_bytes}
    return {
        network: {str(count): warm(trace, count, network=network, **sizes) for count in ranks}
        for network in NETWORKS
    }


def batches(trace: Trace, model: Model, sizes: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Return what batches make of one machine, and of several on each network."""
    given = {"expert_bytes": model.expert_bytes, "row_bytes": model.row_bytes}
    mixed = {str(size): as_batch(trace, size) if size > 1 else trace for size in sizes}
    found = {"one machine": {size: warm(one, 1, **given) for size, one in mixed.items()}}
    for network in NETWORKS:
        found[network] = {
            size: warm(one, BATCH_RANKS, network=network, **given) for size, one in mixed.items()
        }
    return found


def placements(trace: Trace, model: Model) -> dict[str, dict[str, Any]]:
    """Return what placements, planned on the first half, make of the second."""
    sizes = {"expert_bytes": model.expert_bytes, "row_bytes": model.row_bytes}
    known = trace[: len(trace) // 2]
    shape = (trace.num_layers, trace.num_experts)
    named = {
        "in turn": Placement.even(*shape, PLACED_RANKS),
        "by usage": Placement.balanced(expert_counts(known), PLACED_RANKS),
    }
    return {
        name: {
            str(capacity): warm(trace, PLACED_RANKS, placement=one, capacity=capacity, **sizes)
            for capacity in (CAPACITY, 0.25, "100%")
        }
        for name, one in named.items()
    }


def show(console: Console, title: str, found: dict[str, dict[str, Any]]) -> None:
    """Print a table: tokens/s by row and column, and shares of the time."""
    columns = list(next(iter(found.values())))
    table = Table("", *columns, title=title)
    for name, cells in found.items():
        row = [
            f"{cell['tokens_per_s']:.1f} ({cell['reads']:.0%} {cell['slower ranks']:.0%} "
            f"{cell['network']:.0%})"
            for cell in cells.values()
        ]
        table.add_row(name, *row)
    console.print(table)


def plot(results: dict[str, Any], path: str) -> None:
    """Draw tokens/s by machines for each model, what their time goes to, and batches."""
    from matplotlib.figure import Figure

    scales = results["scale"]
    figure = Figure(figsize=(12, 7.6), layout="constrained")
    axes = figure.subplots(2, 2)
    for axis, (name, networks) in zip(axes[0], scales.items(), strict=False):
        for network, cells in networks.items():
            axis.plot(
                [int(count) for count in cells],
                [cell["tokens_per_s"] for cell in cells.values()],
                marker="o",
                label=network,
            )
        axis.set_title(f"{MODELS[name].title}: an eighth of the experts in each", fontsize=10)
        axis.set(xlabel="machines", ylabel="tokens per second")
        axis.legend(frameon=False, fontsize=9)
    last = axes[1, 0]
    cells = list(scales.values())[-1]["10GbE"]
    base = [0.0] * len(cells)
    for part in ("computing", "reads", "slower ranks", "network"):
        heights = [cell[part] for cell in cells.values()]
        last.bar(list(cells), heights, bottom=base, label=part)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    last.set_title(f"{MODELS[list(scales)[-1]].title}, 10GbE: where the time goes", fontsize=10)
    last.set(xlabel="machines", ylabel="share of the time", ylim=(0, 1))
    last.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    for name in NETWORKS:
        cells = results["batches"][name]
        axes[1, 1].plot(
            [int(size) for size in cells],
            [cell["tokens_per_s"] for cell in cells.values()],
            marker="o",
            label=name,
        )
    axes[1, 1].set_title(
        f"{MODELS['nvmoe-olmoe'].title}, {BATCH_RANKS} machines: batches", fontsize=10
    )
    axes[1, 1].set(xlabel="sequences at once", ylabel="tokens per second, all together")
    axes[1, 1].legend(frameon=False, fontsize=9)
    for axis in (*axes[0], axes[1, 1]):
        axis.set_xscale("log", base=2)
        ticks = sorted({float(x) for line in axis.get_lines() for x in line.get_xdata()})
        axis.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
        axis.set_ylim(bottom=0)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    """Simulate, print tables, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR")
    parser.add_argument("--tokens", type=int, metavar="N", help="of each trace (default: all)")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures there")
    parser.add_argument("--plot", metavar="PNG", help="draw them there (needs matplotlib)")
    arguments = parser.parse_args(argv)
    console = Console(width=160, highlight=False)
    if not all((arguments.traces / f"{name}.npz").is_file() for name in MODELS):
        console.print(f"skipped: the traces are not in {arguments.traces}; --traces says where")
        return 0
    traces = {name: load(arguments.traces, name).decode()[: arguments.tokens] for name in MODELS}
    results: dict[str, Any] = {"machine": {**MACHINE, "capacity": CAPACITY}, "scale": {}}
    results["placements"] = {}
    console.print("tokens/s (share of the time: own reads, slower ranks, network)")
    for name, trace in traces.items():
        model = MODELS[name]
        found = results["scale"][name] = scale(trace, model, tuple(arguments.ranks))
        show(console, f"{model.title}, {len(trace)} tokens: machines", found)
        placed = results["placements"][name] = placements(trace, model)
        show(console, f"{model.title}, {PLACED_RANKS} machines on 10GbE: slots", placed)
    name = "nvmoe-olmoe"
    found = results["batches"] = batches(traces[name], MODELS[name], tuple(arguments.batch))
    show(console, f"{MODELS[name].title}, {BATCH_RANKS} machines: sequences at once", found)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.plot:
        plot(results, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
