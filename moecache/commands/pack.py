"""`moecache pack`: a checkpoint written anew so that every expert is one aligned read."""

import argparse
import contextlib
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from moecache.commands.paths import HUB_NAMES, hub_path, printable
from moecache.errors import ConfigError
from moecache.stores import is_gguf, open_store
from moecache.units import format_bytes


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "pack",
        usage="%(prog)s [--format FORMAT | --compute-form] [--dry-run | --verify] MODEL OUT\n"
        "       %(prog)s --verify OUT",
        help="write a checkpoint anew, every expert one aligned read",
        description="Write a safetensors checkpoint anew: experts.safetensors with each expert in "
        "one piece at a multiple of 4 KiB, trunk.safetensors with the rest, and the other files "
        "as they are. No bit of any tensor changes unless --format says so. An expert that is not "
        "in memory is then one direct read. Needs as much disk as the model has. Interrupted, it "
        "goes on where it was when called again; until it is complete, all is in OUT.partial. "
        "Links to files are followed, and named if they lead out of MODEL; links to directories "
        "stay behind. A GGUF becomes one in two parts: the trunk, and the experts, each in one "
        "piece at a multiple of 4 KiB, in the types that they had; --compute-form has them ready "
        "to be multiplied.",
        epilog="examples: moecache pack ./Qwen3-30B-A3B ./Qwen3-30B-A3B-packed | "
        "moecache pack --verify ./Qwen3-30B-A3B-packed | "
        "moecache pack --format int4 ./Qwen3-30B-A3B ./Qwen3-30B-A3B-int4 | "
        "moecache pack --format bf16 ./gpt-oss-20b ./gpt-oss-20b-bf16 | "
        "moecache pack --compute-form model.gguf ./packed",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="checkpoint directory, .safetensors or .gguf file (of a split one any part), or "
        f"{HUB_NAMES}; it is only read",
    )
    parser.add_argument("out", metavar="OUT", nargs="?", help="directory to make, or to verify")
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        help="quantize the experts' matrices: q8_0 or fp8, about half of bfloat16's bytes to keep "
        "and to read, or q4_0, int4 or mxfp4, little more than a quarter, at the price of the "
        "rounding that the report says of each layer; computed as they lie, by moecache alone. "
        "fp8 has a scale for 128 x 128 weights and wants columns in multiples of that, the others "
        "one for 32. A full name chooses another block, such as 'fp8[64x64,f32]'. bf16 "
        "dequantizes: experts and trunk of a checkpoint in FP8, MXFP4, NVFP4, int4, AWQ or GPTQ "
        "become the tensors of the model that it was made of, for any program to read",
    )
    parser.add_argument(
        "--compute-form",
        action="store_true",
        help="of a GGUF: write experts in the order in which kernels read them, at most 3 "
        "percent more bytes of Q4_K to Q6_K, and the same values; a read then lands in its slot "
        "ready to be computed. Other programs see bytes",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run",
        action="store_true",
        help="only show how much would be written, and what is free; exit code 1 if too little",
    )
    instead.add_argument(
        "--verify",
        action="store_true",
        help="read what was packed again and compare it with its checksums; with OUT alone, of "
        "an earlier pack",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Pack, verify, or show the figures; return the exit code."""
    # Imported here: the checksum code takes 7 MiB, which no other command needs.
    from moecache import packing

    console = Console(highlight=False, soft_wrap=True, markup=False)
    model, out = arguments.model, arguments.out
    if arguments.verify and model is not None and out is None:
        if arguments.format is not None or arguments.compute_form:
            option = "--compute-form" if arguments.format is None else "--format"
            raise ConfigError(f"{option} is for packing; a packed directory says its own")
        _verify(console, model)
        return 0
    if model is None or out is None:
        raise ConfigError(
            "say what to pack and where to: moecache pack MODEL OUT; or what to check: "
            "moecache pack --verify OUT"
        )
    model = hub_path(model)
    how = {"format": arguments.format, "compute_form": arguments.compute_form}
    if arguments.dry_run:
        code = _print_plan(console, packing.plan(model, out, **how))
        _estimate(console, model, None, how)
        return code
    _estimate(console, model, out, how)
    try:
        with _bar(console, "packing") as show:
            report = packing.pack(model, out, **how, progress=show)
    except KeyboardInterrupt:
        console.print("what is finished stays; the same command goes on with it")
        raise
    for line in (report.describe(), *report.describe_deviations(), *report.plan.describe_links()):
        console.print(printable(line))
    if arguments.verify:
        _verify(console, out)
    path = str(report.path)
    console.print(
        f"use it: moecache generate {printable(shlex.quote(path))} 'Why is the sky blue?', or in "
        f"Python: load({path!r}), moecache.open({path!r})"
    )
    return 0


def _estimate(console: Console, model: str, out: str | None, how: dict[str, Any]) -> None:
    """Say what a GGUF's experts in compute form cost and save, or would if it was asked for.

    Nothing is written without `out`, by whose disk it is told how long that takes.
    """
    from moecache import packing

    if how["format"] is not None or not is_gguf(Path(model)):
        return
    directory = None
    if out is not None:
        # What cannot be packed there is an error before anything is measured.
        packing.plan(model, out, **how)
        directory = Path(out).absolute().parent
    with open_store(model) as store:
        estimate = packing.estimate_form(store, directory)
    if estimate is not None and how["compute_form"]:
        console.print(f"writes {estimate.describe()}")
    elif estimate is not None and estimate.pays:
        console.print(f"with --compute-form: {estimate.describe()}")


def _verify(console: Console, out: str) -> None:
    from moecache import packing

    begun = time.perf_counter()
    with _bar(console, "verifying") as show:
        nbytes = packing.verify(out, progress=show)
    seconds = time.perf_counter() - begun
    console.print(
        f"verified {format_bytes(nbytes)} of {printable(out)} in {seconds:.1f} s "
        f"({nbytes / 2**30 / max(seconds, 1e-9):.2f} GiB/s): every checksum agrees"
    )


def _print_plan(console: Console, plan: Any) -> int:
    num_experts = plan.num_layers * plan.num_experts
    console.print(
        f"experts  {format_bytes(plan.expert_bytes)} in {plan.num_layers} layers x "
        f"{plan.num_experts} experts, {format_bytes(plan.expert_bytes / num_experts)} each\n"
        f"trunk    {format_bytes(plan.trunk_bytes)}\n"
        f"padding  {format_bytes(plan.padding_bytes)}, {plan.padding_share:.2%} of all\n"
        f"others   {format_bytes(plan.other_bytes)}\n"
        f"needed   {format_bytes(plan.disk_bytes)}, free are {format_bytes(plan.free_bytes)}"
    )
    for line in plan.describe_links():
        console.print(printable(line))
    if plan.disk_bytes <= plan.free_bytes:
        return 0
    console.print("there is too little room; free some, or write to another disk")
    return 1


@contextlib.contextmanager
def _bar(console: Console, word: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal; yield what is to be called."""
    columns = (
        TextColumn(word),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    first: tuple[int, float] | None = None
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None, rate="")

        def show(done: int, total: int) -> None:
            nonlocal first
            now = time.perf_counter()
            if first is None:
                # An earlier run's bytes were not written at this speed.
                first = (done, now)
                bar.reset(task, total=total, completed=done)
                return
            rate = (done - first[0]) / max(now - first[1], 1e-9)
            bar.update(task, completed=done, rate=f"{format_bytes(rate)}/s")

        yield show
