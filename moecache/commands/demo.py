"""`moecache demo`: a real model generates text, offloaded and resident, and both agree."""

import argparse
import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from moecache.commands.arguments import add_option
from moecache.commands.example import (
    Generation,
    add_runtime_options,
    add_sampling_options,
    check_sampling,
    find_example,
    generate,
    write_text,
)
from moecache.commands.live import LiveView
from moecache.commands.metrics import served
from moecache.compute.experts import combine, gated_rows
from moecache.kernels import SlotKernel
from moecache.runtime.open import open  # noqa: A004 - moecache.open
from moecache.runtime.runtime import ExpertRuntime
from moecache.sizing.host_memory import peak_rss_bytes
from moecache.stores import CheckpointStore, open_store
from moecache.units import format_bytes

# Tokens of which `--profile` shows the hit rate: later on, every start is warm.
FIRST_TOKENS = 32
DEFAULT_PROMPT = 'class Cache:\n    """'
_POLL_S = 0.2


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="generate text with a fraction of the experts in memory, and check it",
        description="Generate text with the tiny model that comes with moecache, a NumPy host "
        "loop and a fraction of the experts in memory. Then generate it again with all experts "
        "resident, without a cache, and compare every logit bit by bit: exit code 1 if they "
        "differ.",
        epilog="example: moecache demo --memory 1MiB --policy lru",
    )
    add_runtime_options(parser)
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="text to continue")
    add_sampling_options(parser, max_new_tokens=400)
    add_option(parser, "profile")
    parser.add_argument(
        "--compute",
        choices=("numpy", "fast"),
        default="numpy",
        help="what multiplies experts: NumPy, or moecache's kernels, over weights as the file has "
        "them (default: %(default)s)",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        # Beside the one that stands before the command's name.
        dest="counters",
        help="show the counters, too: hits, bytes read, waits, read-ahead, memory of the process",
    )
    parser.add_argument("--report", action="store_true", help="show hit rates layer by layer")
    parser.add_argument(
        "--live",
        action="store_true",
        help="show hit rates by layer, reads and stalls while text is generated; does nothing "
        "where standard error is no terminal, or one that cannot move its cursor",
    )
    parser.add_argument(
        "--metrics",
        type=int,
        metavar="PORT",
        help="serve Prometheus metrics on this port of 127.0.0.1 (0: any that is free), for "
        "`moecache top`; at the end, on until Ctrl-C. Needs pip install 'moecache[prometheus]'",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate twice, compare, print the figures; return the exit code."""
    check_sampling(arguments, [arguments.prompt])
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    loop, directory = find_example(arguments.model)
    counters = arguments.counters or arguments.verbose
    if counters:
        versions = f"Python {platform.python_version()}, NumPy {np.__version__}"
        console.print(f"[dim]{platform.machine()}, {versions}[/]")
    imports_bytes = peak_rss_bytes()
    with (
        open_store(directory) as store,
        open(
            directory,
            arguments.memory,
            policy=arguments.policy,
            scope=arguments.scope,
            prefetch=arguments.prefetch,
            # NumPy would convert weights at every use.
            dtype=np.float32 if arguments.compute == "numpy" else None,
            profile=arguments.profile,
        ) as runtime,
        contextlib.ExitStack() as stack,
    ):
        if runtime.warm_start is not None:
            # The demo waits, to show what a warm start gains; a server would not.
            runtime.warm_start.wait()
        url = None
        if arguments.metrics is not None:
            url = stack.enter_context(served(runtime, arguments.metrics))
            console.print(f"metrics at {url}")
        model = loop.NumpyMoe(store, loop.through_moecache(runtime, arguments.compute))
        shown: list[float] = []
        offloaded = _generate(loop, model, arguments, runtime, console, shown)
        peak_bytes = peak_rss_bytes()
        trunk_bytes = model.nbytes
        del model
        resident = _generate_resident(loop, directory, arguments, len(offloaded.tokens), console)
        equal = offloaded.equals(resident)
        if arguments.profile and shown:
            start = "cold" if runtime.warm_start is None else "warm"
            console.print(
                f"{start} start hit rate {shown[-1]:.1%} of the prompt and the first "
                f"{len(shown)} tokens"
            )
        if counters:
            memory = peak_bytes, imports_bytes, trunk_bytes
            _print_counters(console, arguments, runtime, offloaded, resident, memory)
        if arguments.report:
            console.print(runtime.report())
        _print_summary(console, runtime, offloaded, resident, equal=equal)
        if url is not None:
            # The interrupt may come as soon as the line is there.
            with contextlib.suppress(KeyboardInterrupt):
                console.print(f"metrics at {url} until Ctrl-C")
                while True:
                    # Not pause(): a signal just before it would not end it.
                    time.sleep(_POLL_S)
    return 0 if equal else 1


def resident_experts(store: CheckpointStore) -> Callable[..., np.ndarray]:
    """Return routed experts that all lie in plain arrays: no slots, no cache, no waves."""
    layout = store.layout
    stacked = [
        {
            role.name: np.empty((layout.num_experts, *role.shape), np.float32)
            for role in layout.layers[layer]
        }
        for layer in range(layout.num_layers)
    ]
    for layer, roles in enumerate(stacked):
        parts = {role.name: np.empty(role.shape, role.dtype) for role in layout.layers[layer]}
        for expert in range(layout.num_experts):
            store.read_into(layer, expert, parts)
            for name, array in parts.items():
                roles[name][expert] = array

    def routed_experts(
        layer: int, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        rows = np.zeros((ids.size, hidden.shape[1]), hidden.dtype)
        flat, top_k = ids.reshape(-1), ids.shape[1]
        for expert in np.unique(flat):
            pairs = np.flatnonzero(flat == expert)
            weights_of = {name: array[expert] for name, array in stacked[layer].items()}
            rows[pairs] = gated_rows(hidden[pairs // top_k], weights_of)
        return combine(rows, weights)

    return routed_experts


def resident_kernels(store: CheckpointStore) -> Callable[..., np.ndarray]:
    """Return the same by the kernels, a step at once."""
    layout, kernels = store.layout, []
    for layer, roles in enumerate(layout.layers):
        stacks = {
            role.name: np.empty((layout.num_experts, *role.shape), role.dtype) for role in roles
        }
        for expert in range(layout.num_experts):
            store.read_into(layer, expert, {name: one[expert] for name, one in stacks.items()})
        kernels.append(SlotKernel(partial(_row, stacks), layout.num_experts))

    def routed_experts(
        layer: int, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        rows = np.empty((ids.size, hidden.shape[1]), np.float32)
        slots, counts = np.unique(ids, return_counts=True)
        pairs = np.argsort(ids.reshape(-1), kind="stable")
        offsets = np.concatenate([[0], np.cumsum(counts)])
        kernels[layer].compute(hidden, slots.astype(np.int32), offsets, pairs, ids.shape[1], rows)
        return combine(rows, weights).astype(hidden.dtype, copy=False)

    return routed_experts


def _row(stacks: dict[str, np.ndarray], expert: int) -> dict[str, np.ndarray]:
    return {name: stack[expert] for name, stack in stacks.items()}


def _generate(
    loop: ModuleType,
    model: Any,
    arguments: argparse.Namespace,
    runtime: ExpertRuntime,
    console: Console,
    hit_rates: list[float],
) -> Generation:
    """Generate, show the text, and note the hit rate after each of the first tokens."""

    def note() -> None:
        if len(hit_rates) < FIRST_TOKENS:
            hit_rates.append(runtime.profiler.hit_rate)

    def write(part: str) -> None:
        write_text(part)
        note()

    if not arguments.live or not console.is_terminal or console.is_dumb_terminal:
        write_text(arguments.prompt)
        generation = generate(loop, model, arguments.prompt, arguments, write)
        write_text("\n")
        return generation
    # One terminal cannot take both: the text goes there, too, when the panel is done.
    shared = sys.stdout is not None and sys.stdout.isatty()
    parts: list[str] = []
    try:
        with LiveView(console, runtime) as view:

            def show(part: str) -> None:
                note()
                parts.append(part)
                view.write(part)
                if not shared:
                    write_text(part)

            show(arguments.prompt)
            return generate(loop, model, arguments.prompt, arguments, show)
    finally:
        write_text(f"{''.join(parts)}\n" if shared else "\n")


def _generate_resident(
    loop: ModuleType,
    directory: Path,
    arguments: argparse.Namespace,
    num_tokens: int,
    console: Console,
) -> Generation:
    """Generate with all experts in plain arrays."""
    with open_store(directory) as store:
        experts = resident_experts if arguments.compute == "numpy" else resident_kernels
        model = loop.NumpyMoe(store, experts(store))
        # One tick per token; `track` shows nothing when the console is no terminal.
        ticks = iter(
            track(
                range(num_tokens),
                "all experts resident",
                console=console,
                transient=True,
                disable=not console.is_terminal,
            )
        )
        resident = generate(loop, model, arguments.prompt, arguments, lambda _: _advance(ticks))
        for _ in ticks:
            pass
    return resident


def _advance(ticks: Iterator[int]) -> None:
    next(ticks, None)


def _print_summary(
    console: Console,
    runtime: ExpertRuntime,
    offloaded: Generation,
    resident: Generation,
    *,
    equal: bool,
) -> None:
    """Say in four lines what was shown."""
    stats = runtime.stats()
    slots = stats.capacity + stats.staging_slots
    whole_bytes = stats.pool_bytes // slots * stats.total_experts
    console.print(
        f"text    {len(offloaded.tokens)} tokens, with at most {stats.capacity} of the model's "
        f"{stats.total_experts} experts in memory at a time"
    )
    console.print(
        f"speed   {offloaded.tokens_per_s:.0f} tokens/s this way, {resident.tokens_per_s:.0f} "
        "with all of them in memory"
    )
    console.print(
        f"memory  {format_bytes(stats.pool_bytes)} for experts this way, "
        f"{format_bytes(whole_bytes)} for all of them"
    )
    if equal:
        console.print("output  [bold green]equal, bit for bit[/], in every number of every token")
    else:
        console.print("output  [bold red]differs[/] from that with all experts in memory")


def _print_counters(
    console: Console,
    arguments: argparse.Namespace,
    runtime: ExpertRuntime,
    offloaded: Generation,
    resident: Generation,
    rss: tuple[int, int, int],
) -> None:
    stats = runtime.stats()
    peak_bytes, imports_bytes, trunk_bytes = rss
    rest = peak_bytes - imports_bytes - trunk_bytes - stats.pool_bytes
    for name, run in (("resident", resident), ("offloaded", offloaded)):
        prefill = len(os.fsencode(arguments.prompt)) / run.prefill_s
        console.print(f"{name:10} {run.tokens_per_s:7.0f} tokens/s decode, {prefill:7.0f} prefill")
    console.print(
        f"experts    {stats.capacity} of {stats.total_experts} in memory, "
        f"and {stats.staging_slots} staging slots: {format_bytes(stats.pool_bytes)}; "
        f"{stats.num_resident} resident now"
    )
    console.print(
        f"hit rate   {stats.hit_rate:.1%} with policy {stats.policy}, scope {stats.scope}; "
        f"{format_bytes(stats.bytes_read)} read, "
        f"{stats.stall_ns / 1e9:.2f} s waited for"
    )
    if stats.prefetch is not None:
        console.print(stats.prefetch.describe())
    console.print(
        f"peak RSS   {format_bytes(peak_bytes)}: imports {format_bytes(imports_bytes)}, "
        f"trunk and KV cache {format_bytes(trunk_bytes)}, slots {format_bytes(stats.pool_bytes)}, "
        f"the rest {format_bytes(rest)}"
    )
