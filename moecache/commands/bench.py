"""`moecache bench`: how fast a model is at several memories, and beside other ways to run it."""

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from moecache import prefault
from moecache.commands.arguments import (
    add_force,
    add_option,
    check_outputs,
    choose,
    explain,
    naming,
    split,
)
from moecache.commands.bench_table import print_bench
from moecache.commands.contestants import Contestant, chosen, differing, run_process
from moecache.commands.generate import add_model_options
from moecache.commands.machine import describe_facts, machine_facts
from moecache.commands.paths import HUB_NAMES, find_model, map_file
from moecache.commands.ranks import num_ranks, rank, telling
from moecache.decoding.families import has_kernels
from moecache.errors import ConfigError, MissingDependencyError, MoeCacheError
from moecache.files import Kind, write_whole
from moecache.kernels import default_compute
from moecache.settings import COMPUTE, DEFAULT_POLICY, POLICIES
from moecache.stores import open_store
from moecache.units import check_seed, format_bytes, parse_budget

JSON_VERSION = 1
# The most tokens and runs; no model takes more.
_MOST = 2**24
_JSON_FILE = Kind(
    "a file of figures of moecache bench",
    lambda data: data.startswith(b'{\n "version": ') and b'\n "machine": ' in data,
)


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure a model's speed at several memories, and beside other ways to run it",
        description="Measure how fast a mixture-of-experts model reads a prompt (prefill) and "
        "generates (decode) with its experts in several amounts of memory and under several "
        "policies. Every run is a process of its own, and runs of different kinds take turns; "
        "medians are shown. All that multiply alike must generate the same tokens, else the exit "
        "code is 1. Under torchrun the experts are spread over its processes. Needs pip install "
        "'moecache[transformers]'.",
        epilog="examples: moecache bench ./OLMoE-1B-7B | "
        "moecache bench ./Qwen3-30B-A3B --memories 4GiB,8GiB --policies echo,lru --sample | "
        "moecache bench ./Qwen3-30B-A3B --compare --cold --json figures.json",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a checkpoint directory, a .gguf file (of a split one any part), or {HUB_NAMES}",
    )
    add_option(parser, "memory", flag="--memories", metavar="LIST", default="25%,50%,100%")
    add_option(parser, "policy", flag="--policies", names=POLICIES)
    add_model_options(parser)
    parser.add_argument(
        "--compute",
        metavar="LIST",
        help=f"what multiplies; names, or all: {explain(COMPUTE)} (default: torch, or fast for "
        "what was packed in a format)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also run the model fully resident, with accelerate's disk_offload, and with a "
        "device_map that has the experts on disk; rates are shown as shares of the first",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="drop the checkpoint from the page cache before each run is loaded, and again "
        "before what is measured (default: bring it in)",
    )
    work = parser.add_argument_group("work")
    work.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="default: 128")
    work.add_argument("--new-tokens", type=int, default=64, metavar="N", help="default: 64")
    work.add_argument(
        "--warm-up",
        type=int,
        default=16,
        metavar="N",
        help="tokens to generate after another prompt, before anything is measured (default: 16)",
    )
    work.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="runs of each (default: 3)"
    )
    work.add_argument(
        "--sample",
        action="store_true",
        help="draw tokens at temperature 1 instead of taking the likeliest, after which small "
        "models repeat themselves",
    )
    work.add_argument("--seed", type=int, default=0, help="seed of what is drawn (default: 0)")
    work.add_argument(
        "--threads", type=int, metavar="N", help="torch's and the kernels' (default: their own)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures of all runs there")
    add_force(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run everything in turn, show the table; return the exit code."""
    if arguments.compare and num_ranks() > 1:
        raise ConfigError("--compare is for one process; leave it out under torchrun")
    with telling():
        memories, policies, compute = _check(arguments)
    if arguments.compare and importlib.util.find_spec("accelerate") is None:
        raise MissingDependencyError(
            "--compare needs accelerate; install it with: pip install 'moecache[transformers]'"
        )
    console = Console(
        stderr=True, quiet=rank() > 0, highlight=False, soft_wrap=True, markup=False, emoji=False
    )
    facts = machine_facts("torch", "transformers", *(("accelerate",) * arguments.compare))
    console.print(describe_facts(facts), style="dim")
    task: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("model", "prompt_tokens", "new_tokens", "warm_up", "sample", "seed")
    }
    task |= {name: getattr(arguments, name) for name in ("threads", "dtype", "cold", "verbose")}
    task["ranks"] = num_ranks()
    with console.status("looking at the model"):
        task |= run_process({**task, "kind": "prepare"})
    files = [Path(file) for file in task["files"]]
    task["checkpoint_bytes"] = sum(file.stat().st_size for file in files)
    contestants = chosen(
        memories,
        policies,
        compute,
        {"prefetch": arguments.prefetch, "read": arguments.read},
        all_=arguments.compare,
    )
    _run_all(console, contestants, task, arguments.repeats)
    facts["threads"] = next((run["threads"] for one in contestants for run in one.runs), None)
    console.print(
        f"{'prose' if task['text'] else 'random tokens, as there is no tokenizer'}; "
        f"{facts['threads']} threads, page cache {'cold' if arguments.cold else 'warm'}, "
        f"checkpoint {format_bytes(task['checkpoint_bytes'])}",
        style="dim",
    )
    others = differing(contestants)
    if arguments.json and rank() == 0:
        found = _figures(task, facts, contestants, same=not others)
        text = json.dumps(found, indent=1, allow_nan=False) + "\n"
        write_whole(arguments.json, text.encode(), _JSON_FILE, force=arguments.force)
    table = Console(quiet=rank() > 0, highlight=False, markup=False, emoji=False)
    print_bench(table, contestants, compare=arguments.compare)
    for contestant in contestants:
        if contestant.over:
            console.print(f"{contestant.name}: {contestant.left_out or contestant.error}")
        elif task["ranks"] > 1:
            console.print(f"{contestant.name}, rank by rank: {_by_rank(contestant)}")
    if others:
        raise MoeCacheError(
            f"other tokens than {next(one.name for one in contestants if one.runs)} were "
            f"generated by: {'; '.join(others)}: their figures are of other work"
        )
    is_whole = any(one.runs for one in contestants) and not any(one.error for one in contestants)
    return 0 if is_whole else 1


def _run_all(
    console: Console, contestants: list[Contestant], task: dict[str, Any], repeats: int
) -> None:
    """Run each contestant once, then each once more: a disturbance reaches all of them."""
    files = [Path(file) for file in task["files"]]
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs, elapsed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # An estimate needs a few runs, however long each takes.
    bar = Progress(*columns, console=console, transient=True, speed_estimate_period=3600)
    with bar:
        shown = bar.add_task("", total=repeats * len(contestants))
        for repeat in range(repeats):
            for contestant in contestants:
                if contestant.over:
                    bar.advance(shown)
                    continue
                bar.update(shown, description=f"{contestant.name}, run {repeat + 1} of {repeats}")
                regions = [region for file in files if (region := map_file(file)) is not None]
                if task["cold"]:
                    prefault.evict(regions)
                else:
                    report = prefault.warm(regions, keep_mapped=False)
                    if not report.ran and report.reason != "resident":
                        # Larger than the page cache: as warm as the runs themselves leave it.
                        console.print(report.message, style="dim")
                del regions
                contestant.run(task)
                bar.advance(shown)


def _check(arguments: argparse.Namespace) -> tuple[list[str], list[str], list[str]]:
    """Return memories, policies and ways to compute; refuse the rest before anything runs."""
    bounds = {
        "prompt_tokens": (1, _MOST),
        "new_tokens": (2, _MOST),
        "warm_up": (0, _MOST),
        "repeats": (1, _MOST),
        "threads": (1, 256),
    }
    for name, (least, most) in bounds.items():
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be from {least} to {most}, got {value}"
            )
    check_seed(arguments.seed, "--seed")
    memories = split("--memories", arguments.memories)
    with naming("--memories"):
        for memory in memories:
            parse_budget(memory, 1)
    check_outputs(arguments, {arguments.model: "the model"}, json=_JSON_FILE)
    policies = choose("policies", arguments.policies, POLICIES, (DEFAULT_POLICY,))
    ways = choose("compute", arguments.compute, list(COMPUTE), ())
    find_model(arguments)
    ways = ways or [_usual_compute(arguments.model)]
    return memories, policies, ways


def _usual_compute(model: str) -> str:
    """Return what multiplies a model's experts if nobody says."""
    if not os.path.exists(model):
        return "torch"
    with open_store(model) as store:
        kind = str(store.config.get("model_type"))
        is_known = has_kernels(kind)
        return default_compute(store.layout) if is_known else "torch"


def _by_rank(contestant: Contestant) -> str:
    """Return what each rank did in the last run, and all of them together."""
    found = contestant.runs[-1]["ranks"]
    parts = [
        f"{number}: {one['slots']} slots, hit rate {one['hit_rate']:.1%}, "
        f"{format_bytes(round(one['bytes_per_token']))} read per token"
        for number, one in enumerate(found)
    ]
    slots, read = (sum(one[name] for one in found) for name in ("slots", "bytes_per_token"))
    return f"{'; '.join(parts)}; all: {slots} slots, {format_bytes(round(read))}"


def _figures(
    task: dict[str, Any],
    facts: dict[str, Any],
    contestants: list[Contestant],
    *,
    same: bool,
) -> dict[str, Any]:
    return {
        "version": JSON_VERSION,
        "machine": facts,
        "settings": {key: value for key, value in task.items() if key != "verbose"},
        "same_tokens": same,
        "contestants": [contestant.to_dict() for contestant in contestants],
    }
