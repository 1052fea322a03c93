"""`moecache inspect`: a checkpoint's experts, and what a memory budget buys."""

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from moecache.commands.paths import printable
from moecache.host_memory import free_host_bytes
from moecache.layout import ExpertLayout
from moecache.opening import plan_slots
from moecache.slots import HostSlots
from moecache.stores import open_store
from moecache.units import format_bytes


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show a checkpoint's experts and what a memory budget buys",
        description="Show how a checkpoint's experts are laid out, and how many of them a memory "
        "budget holds. Reads headers only.",
        epilog="example: moecache inspect ./Qwen3-30B-A3B --memory 8GiB",
    )
    parser.add_argument("path", help="checkpoint directory or .safetensors file")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help='memory for experts: "8GiB", "512MiB", or a share of them, "25%%" '
        "(default: what is free now, less 512 MiB)",
    )
    parser.add_argument("--top-k", type=int, help="experts per token, if config.json does not say")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the layout and the plan; return the exit code."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    with open_store(arguments.path, top_k=arguments.top_k) as store:
        layout = store.layout
        console.print(
            f"{printable(store.path)}  {printable(store.config.get('model_type', ''))}",
            style="bold",
        )
        if layout.total_experts == 0:
            console.print("no experts: not a mixture-of-experts model, or of an unknown form")
            return 1
        top_k = f"top-{layout.top_k}" if layout.top_k else "top-k unknown"
        console.print(
            f"{layout.num_layers} MoE layers x {layout.num_experts} experts, {top_k}; "
            f"{format_bytes(layout.total_bytes)} in experts"
        )
        console.print(_layer_table(layout))
        planned, staging = plan_slots(layout, arguments.memory, None)
        slot_bytes = HostSlots.bytes_per_slot(layout)
        console.print(
            f"slot {format_bytes(slot_bytes)}, free memory {format_bytes(free_host_bytes())}"
        )
        console.print(f"plan: {planned.describe()}")
        if staging:
            console.print(f"      and {staging} staging slots")
    return 0


def _layer_table(layout: ExpertLayout) -> Table:
    """Return the roles of every layer, layers that are alike in one row."""
    table = Table("layers", "role", "shape", "dtype", "bytes")
    first = 0
    for layer in range(1, layout.num_layers + 1):
        if layer < layout.num_layers and layout.layers[layer] == layout.layers[first]:
            continue
        span = f"{first}-{layer - 1}" if layer - 1 > first else str(first)
        names = printable(layout.layer_names[first]) + (" ..." if layer - 1 > first else "")
        for index, role in enumerate(layout.layers[first]):
            table.add_row(
                f"{span}  {names}" if index == 0 else "",
                role.name,
                " x ".join(map(str, role.shape)),
                str(role.dtype),
                format_bytes(role.nbytes),
            )
        first = layer
    return table
