"""`moecache trace`: recorded routing, described, converted or recorded with the demo's model."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from moecache.commands import trace_info, trace_record
from moecache.commands.arguments import add_force, check_output
from moecache.commands.paths import printable
from moecache.errors import ConfigError, FormatError
from moecache.study.importers import FORMATS, load_any
from moecache.traces.trace import TRACE_FILE, Trace

# A smaller file is read before anybody could look at a bar.
_BAR_BYTES = 50 * 10**6


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "trace",
        help="show, convert and record routing traces",
        description="Routing traces: which experts a model's router chose, token by token. "
        "docs/traces.md says what the figures mean and which forms can be read.",
        epilog="example: moecache trace info examples/traces/tiny_moe.npz",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    trace_info.add_parser(actions)
    _add_convert(actions)
    trace_record.add_parser(actions)


def _add_convert(actions: Any) -> None:
    parser: argparse.ArgumentParser = actions.add_parser(
        "convert",
        help="write a trace of another program as .npz",
        description="Read a trace of any known form and write it as .npz. The form is told by "
        "the content: npz; token-pairs (JSON lines of [layer, expert]); llama-topk (JSON lines of "
        "llama.cpp's ffn_moe_topk); route-csv (BigMoeOnEdge); routed-experts (vLLM, SGLang: "
        ".npy, .npz or responses as JSON lines).",
        epilog="example: moecache trace convert run.route.csv run.npz --license Apache-2.0",
    )
    parser.add_argument("input", metavar="IN", help="the file to read")
    parser.add_argument("output", metavar="OUT.npz", help="the file to write")
    add_force(parser)
    parser.add_argument("--format", default="auto", choices=("auto", *FORMATS))
    parser.add_argument(
        "--num-experts",
        type=int,
        metavar="N",
        help="experts per layer, where the file does not say (default: the highest id + 1)",
    )
    parser.add_argument("--model", metavar="NAME", help="goes into the trace")
    parser.add_argument("--license", metavar="NAME", help="goes into the trace")
    parser.add_argument("--source", metavar="TEXT", help="where it is from; goes into the trace")
    shape = parser.add_argument_group("for responses of SGLang, which do not say their shape")
    shape.add_argument("--num-layers", type=int, metavar="N")
    shape.add_argument("--top-k", type=int, metavar="N")
    parser.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    for option in ("num_experts", "num_layers", "top_k"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} must be at least 1, got {value}")
    inputs = {arguments.input: "the file to read"}
    check_output("OUT.npz", arguments.output, inputs, None if arguments.force else TRACE_FILE)
    names = ("model", "license", "source", "num_layers", "top_k")
    given = {name: getattr(arguments, name) for name in names}
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    found = _read(console, arguments, {name: v for name, v in given.items() if v is not None})
    found.save(arguments.output, force=arguments.force)
    console.print(printable(f"{arguments.output}: {found!r}"))
    if found.metadata.get("num_experts_inferred"):
        console.print(
            f"the file does not say how many experts there are: {found.num_experts} by the "
            "highest id; --num-experts says otherwise",
            style="yellow",
        )
    return 0


def _read(console: Console, arguments: argparse.Namespace, given: dict[str, Any]) -> Trace:
    path = Path(arguments.input)
    large = path.is_file() and path.stat().st_size > _BAR_BYTES
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(
        *columns, console=console, transient=True, disable=not (large and console.is_terminal)
    ) as bar:
        task = bar.add_task("", total=None)
        try:
            return load_any(
                path,
                format=arguments.format,
                num_experts=arguments.num_experts,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
                **given,
            )
        except FormatError as error:
            text = str(error).replace("num_layers and top_k", "--num-layers and --top-k")
            raise FormatError(text) from error
