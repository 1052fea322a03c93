"""`moecache inspect`: a checkpoint's experts, and what a memory budget buys."""

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from moecache.commands.paths import printable
from moecache.cuda import Device, open_device, parse_device
from moecache.errors import CapacityError, ConfigError
from moecache.layout import ExpertLayout
from moecache.reader.disk import STAGING_BYTES
from moecache.runtime.opening import plan_slots, reading_mode
from moecache.settings import Settings
from moecache.sizing.headroom import Headroom, check_fits, headroom
from moecache.sizing.host_memory import cgroup_limits, free_host_bytes
from moecache.slots import CudaSlots, HostSlots
from moecache.stores import open_store
from moecache.units import format_bytes, parse_bytes

_WAYS = {"buffered": "through the page cache", "direct": "direct", "mmap": "from the mapped file"}


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show a checkpoint's experts and what a memory budget buys",
        description="Show how a checkpoint's experts are laid out, and how many of them a memory "
        "budget holds: what is free, in this machine and in every memory cgroup this process is "
        "in, what the trunk and a KV cache take of it, and how many slots that leaves. Reads "
        "headers only. Exit code 1 if the slots would not fit.",
        epilog="example: moecache inspect ./Qwen3-30B-A3B --memory 8GiB; on a GPU: moecache "
        "inspect ./Qwen3-30B-A3B --device cuda",
    )
    parser.add_argument("path", help="checkpoint directory or .safetensors file")
    parser.add_argument(
        "--memory",
        nargs="?",
        metavar="SIZE",
        help='memory for experts: "8GiB", "512MiB", or a share of them, "25%%" '
        "(default, and without SIZE: MOECACHE_MEMORY, else what is free now, less trunk, KV cache "
        "and 512 MiB, or less MOECACHE_RESERVE)",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help='where the slots would be: "cpu" (default), or a GPU, "cuda" or "cuda:1"',
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="length of the KV cache that is left room for (default: the model's, at most 4096)",
    )
    parser.add_argument("--top-k", type=int, help="experts per token, if config.json does not say")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the layout and the plan; return the exit code."""
    if arguments.context is not None and arguments.context < 0:
        raise ConfigError(f"--context must not be negative, got {arguments.context}")
    settings = Settings.from_environ()
    gpu = None if parse_device(arguments.device) is None else open_device(arguments.device)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    with open_store(arguments.path, top_k=arguments.top_k) as store:
        layout = store.layout
        kind = store.config.get("model_type")
        kind = printable(kind[:100]) if isinstance(kind, str) else ""
        console.print(f"{printable(store.path)}  {kind}", style="bold")
        if layout.total_experts == 0:
            console.print("no experts: not a mixture-of-experts model, or of an unknown form")
            return 1
        top_k = f"top-{layout.top_k}" if layout.top_k else "top-k unknown"
        console.print(
            f"{layout.num_layers} MoE layers x {layout.num_experts} experts, {top_k}; "
            f"{format_bytes(layout.total_bytes)} in experts"
        )
        console.print(_layer_table(layout))
        room = headroom(
            store.trunk_bytes,
            store.config,
            staging_bytes=STAGING_BYTES if gpu is None else 0,
            context_tokens=arguments.context,
        )
        reserve_bytes = room.nbytes
        if settings.reserve is not None:
            reserve_bytes = parse_bytes(settings.reserve)
        console.print(_memory_table(room, gpu, settings.reserve))
        memory = settings.choose("memory", arguments.memory).value
        planned, staging = plan_slots(layout, memory, None, reserve_bytes=reserve_bytes, gpu=gpu)
        pool = HostSlots if gpu is None else CudaSlots
        slot_bytes = pool.bytes_per_slot(layout)
        console.print(f"slot {format_bytes(slot_bytes)} as allocated")
        console.print(f"plan: {planned.describe()}")
        if staging:
            console.print(f"      and {staging} staging slots")
        slots_bytes = (planned.slots + staging) * slot_bytes
        if gpu is None:
            check_fits(slots_bytes, room.staging_bytes)
        elif slots_bytes > gpu.free_bytes():
            raise CapacityError(
                f"slots of {format_bytes(slots_bytes)} need more than the "
                f"{format_bytes(gpu.free_bytes())} that {gpu.description} has free; lower memory"
            )
        left = (free_host_bytes() if gpu is None else gpu.free_bytes()) - slots_bytes
        needed = room.nbytes - room.spare_bytes
        if left < needed:
            console.print(
                f"      they leave {format_bytes(left)}; trunk, KV cache and staging need "
                f"{format_bytes(needed)}, unless they are in memory already",
                style="yellow",
            )
        read = settings.choose("read")
        way = reading_mode(
            read.value,
            layout,
            slots_bytes=slots_bytes,
            reserve_bytes=reserve_bytes,
            on_gpu=gpu is not None,
        )
        console.print(f"reads: {_WAYS[way]}, by {read.origin}")
    return 0


def _memory_table(room: Headroom, gpu: Device | None, reserve: str | None) -> Table:
    """Return what there is, and what is needed beside the slots, or said to be."""
    import psutil

    machine = psutil.virtual_memory()
    table = Table("memory", "free", "of")
    table.add_row("machine", format_bytes(machine.available), format_bytes(machine.total))
    if gpu is not None:
        table.add_row(gpu.description, format_bytes(gpu.free_bytes()), "")
    for group in cgroup_limits():
        table.add_row(
            f"cgroup {printable(group.path)}",
            format_bytes(group.room_bytes),
            format_bytes(group.limit_bytes),
        )
    table.add_section()
    parts = {
        "trunk": room.trunk_bytes,
        f"KV cache, {room.context_tokens} tokens": room.kv_cache_bytes,
        **({"reads' staging buffers": room.staging_bytes} if gpu is None else {}),
        "to spare": room.spare_bytes,
    }
    if reserve is not None:
        parts = {"MOECACHE_RESERVE": parse_bytes(reserve)}
    for name, nbytes in parts.items():
        table.add_row(name, f"- {format_bytes(nbytes)}", "")
    table.add_section()
    free = free_host_bytes() if gpu is None else gpu.free_bytes()
    table.add_row("for slots", format_bytes(max(0, free - sum(parts.values()))), "")
    return table


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
