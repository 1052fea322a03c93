"""All that is measured on a GPU, and the report of it: what bench/gpu.sh runs.

    python -m bench.gpu upload [--runs 20] [--bytes 1GiB] [--directory DIR] [--json OUT]
    python -m bench.gpu decode|resident|mxfp4 [--runs 20] [--tokens 16] [--layers 48] [--json OUT]
    python -m bench.gpu formats [--runs 20] [--layers 8] [--only FORMAT]... [--json OUT]
    python -m bench.gpu model [--runs 5] [--tokens 64] [--layers 48] [--no-anchor] [--json OUT]
    python -m bench.gpu memory [--evictions 100000] [--rounds 50] [--json OUT]
    python -m bench.gpu host [--layers 48] [--experts 128] [--runs 200] [--json OUT]
    python bench/gpu.py report --work DIR --out FILE --stage NAME... [--fact KEY=VALUE]...

A measurement is the function `measure_...` (device, arguments) of the module beside this one that
`MEASUREMENTS` names; its options are here, and its table is in `bench.gpu_tables`. Its device is an
argument, so that tests run all of it on one that they made; `host` needs none. The report puts what
the stages of bench/gpu.sh left into one JSON, and says whether all went well; a stage leaves
NAME.status (exit code, seconds, seconds allowed), NAME.log, and maybe NAME.json or NAME.xml. It
needs Python alone, so that there is one of a build that failed, too: this file imports nothing else
before something is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import signal
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from moecache.cuda import Device

MEASUREMENTS = {
    "upload": ("bench.gpu_copies", "how fast misses reach a GPU"),
    "decode": ("bench.gpu_decode", "decode in several ways"),
    "resident": (
        "bench.gpu_decode",
        "decode with slots for all, nine in ten and half of the experts",
    ),
    "mxfp4": ("bench.gpu_decode", "what `resident` does, with gpt-oss-20b's shapes in MXFP4"),
    "formats": ("bench.gpu_formats", "one layer's decode in every format, of the GPU's memory"),
    "model": ("bench.gpu_model", "a whole model of 30B-A3B's shapes, graphs and modules"),
    "memory": ("bench.gpu_memory", "whether memory of GPU and host stays the same"),
    "host": ("bench.gpu_host", "host time per layer, against a device that does nothing"),
}
# Exit codes of `timeout`, and of a process that it had to kill.
TIMED_OUT = (124, 137)
INTERRUPTED = 130
TAIL_CHARACTERS = 2000
COUNTS = ("tests", "failures", "errors", "skipped")

T = TypeVar("T")


def main(
    argv: Sequence[str] | None = None, device: Device | None = None, size: object = None
) -> int:
    """Run a measurement, or make the report; return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        By default the process's.
    device : Device, optional
        By default the one that --device names.
    size : StackSize or sequence of Shape, optional
        The stack that is decoded, or the experts that are uploaded; by default the measurement's.
    """
    arguments = _parser().parse_args(argv)
    arguments.size = size
    return report(arguments) if arguments.what == "report" else run_benchmark(arguments, device)


def _parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="bench.gpu", description=description)
    commands = parser.add_subparsers(dest="what", required=True)
    of = {
        name: commands.add_parser(name, help=text, description=text)
        for name, (_, text) in MEASUREMENTS.items()
    }
    for name, command in of.items():
        command.add_argument("--json", type=Path, metavar="OUT", help="write the figures there")
        if name != "host":
            command.add_argument("--device", default="cuda:0", metavar="NAME")
        if name != "memory":
            default = {"host": 200, "model": 5}.get(name, 20)
            command.add_argument(
                "--runs", type=int, default=default, help="medians are over so many"
            )
        if name in {"upload", "decode", "resident", "mxfp4", "formats"}:
            command.add_argument(
                "--copy-bytes", default="1GiB", help="bytes of the copy that is the limit"
            )
        if name in {"decode", "resident", "mxfp4"}:
            command.add_argument("--tokens", type=int, default=16, help="in each run")
            command.add_argument("--layers", type=int, help="at most; by default all")
            command.add_argument(
                "--width", type=int, help="width of an expert, instead of the model's"
            )
            command.add_argument("--trace", type=Path, metavar="FILE", help="recorded routing")
    upload, decode, memory, host = of["upload"], of["decode"], of["memory"], of["host"]
    formats, model = of["formats"], of["model"]
    formats.add_argument("--tokens", type=int, default=16, help="in each run")
    formats.add_argument("--layers", type=int, default=8, help="in a token (8)")
    formats.add_argument(
        "--only", action="append", metavar="FORMAT", help="such as q4_k; by default all"
    )
    model.add_argument("--tokens", type=int, default=64, help="in each run")
    model.add_argument("--layers", type=int, help="by default all 48; 1.3 GB each")
    model.add_argument("--directory", type=Path, metavar="DIR", help="for the model's files")
    model.add_argument(
        "--no-anchor", action="store_true", help="leave out transformers without slots"
    )
    upload.add_argument("--bytes", default="1GiB", help="bytes of experts, copied in each run")
    upload.add_argument("--look-ups", type=int, default=5000, help="in each run")
    upload.add_argument("--pause-us", type=float, default=100, help="between the storm's requests")
    upload.add_argument("--directory", type=Path, metavar="DIR", help="for the file of experts")
    decode.add_argument("--threads", type=int, default=8, help="threads that fill pinned buffers")
    memory.add_argument("--evictions", type=int, default=100_000)
    memory.add_argument("--rounds", type=int, default=50)
    host.add_argument("--layers", type=int, default=48)
    host.add_argument("--experts", type=int, default=128)
    made = commands.add_parser("report", help="put what stages left into one JSON")
    made.add_argument("--work", type=Path, required=True, metavar="DIR")
    made.add_argument("--out", type=Path, required=True, metavar="FILE")
    made.add_argument("--stage", action="append", default=[], metavar="NAME")
    made.add_argument("--fact", action="append", default=[], metavar="KEY=VALUE")
    return parser


def run_benchmark(arguments: argparse.Namespace, device: Device | None) -> int:
    """Measure, print and write the figures; return 1 if a bound does not hold, 2 without a GPU.

    `host` returns 0 also where a bound does not hold. An interrupt writes what is done, with
    "partial" and no bounds, and returns 130.
    """
    # Not with this file, of which a report needs a part that imports nothing.
    from rich.console import Console

    from bench.gpu_tables import SHOWN, show_bounds
    from bench.machine import describe_machine
    from moecache.cuda import open_device
    from moecache.errors import MoeCacheError

    what = arguments.what
    console = Console(width=140, highlight=False)
    console.print(describe_machine())
    found: dict[str, Any] = {"machine": describe_machine()}
    if what != "host":
        try:
            device = device or open_device(arguments.device)
        except MoeCacheError as error:
            console.print(f"skipped: {error}", markup=False)
            return 2
        console.print(device.description, markup=False)
        found["device"] = device.description
    module = importlib.import_module(MEASUREMENTS[what][0])
    # What is done so far: a measurement that is interrupted leaves that.
    arguments.progress = {}
    with _one_interrupt():
        try:
            found |= getattr(module, f"measure_{what}")(device, arguments)
        except KeyboardInterrupt:
            found |= {"partial": True, **arguments.progress, "bounds": []}
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n")
            console.print(f"interrupted; done: {', '.join(arguments.progress) or 'nothing'}")
            return INTERRUPTED
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    SHOWN[what](found, console)
    return 0 if show_bounds(found["bounds"], console) or what == "host" else 1


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """Let Ctrl-C interrupt a block once; what it writes then is not lost to another one.

    `timeout` sends two: to its child, and to its group.
    """
    before = signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        # Here, not where it is caught: another one may come on the way there.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def bound(
    name: str, relation: str, limit: float, found: float | None, note: str = ""
) -> dict[str, Any]:
    """Return a bound and whether it holds; what could not be measured does not, and says why."""
    holds = found is not None and (found >= limit if relation == ">=" else found <= limit)
    return {
        "name": name,
        "relation": relation,
        "limit": limit,
        "found": found,
        "holds": holds,
        "note": note,
    }


def turns(contestants: Sequence[T], run: int) -> list[T]:
    """Return the order of the contestants in a run: each goes first once in a while."""
    first = run % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def read_stage(work: Path, name: str) -> dict[str, Any]:
    """Return what became of a stage: its status, its figures, and the end of its log if need be.

    The status is "ok", "bounds missed", "failed", "timed out" or "left out".
    """
    status, log = work / f"{name}.status", work / f"{name}.log"
    tail = log.read_text(errors="replace")[-TAIL_CHARACTERS:] if log.is_file() else ""
    if not status.is_file():
        return {"status": "left out", "note": tail.strip()}
    code, seconds, limit = status.read_text().split()
    stage: dict[str, Any] = {
        "exit_code": int(code),
        "seconds": float(seconds),
        "limit_s": float(limit),
    }
    result, tests = work / f"{name}.json", work / f"{name}.xml"
    if result.is_file():
        stage["result"] = json.loads(result.read_text())
    if tests.is_file():
        stage["tests"] = count_tests(tests)
    if stage["exit_code"] in TIMED_OUT:
        stage["status"] = "timed out"
    elif "result" in stage and stage["exit_code"] in {0, 1}:
        held = all(one["holds"] for one in stage["result"]["bounds"])
        stage["status"] = "ok" if held else "bounds missed"
    elif stage["exit_code"] or ("tests" in stage and not stage["tests"]["passed"]):
        stage["status"] = "failed"
    else:
        stage["status"] = "ok"
    if stage["status"] in {"failed", "timed out"}:
        stage["log_tail"] = tail
    return stage


def count_tests(path: Path) -> dict[str, int]:
    """Return how many tests of a JUnit file ran, and how many of them passed."""
    # The file is from our own run of pytest.
    suites = ET.parse(path).getroot().iter("testsuite")  # noqa: S314
    found = dict.fromkeys(COUNTS, 0)
    for suite in suites:
        for key in COUNTS:
            found[key] += int(suite.get(key, 0))
    found["passed"] = found["tests"] - found["failures"] - found["errors"] - found["skipped"]
    return found


def merge(work: Path, stages: Sequence[str], facts: dict[str, str]) -> dict[str, Any]:
    """Return the report: facts of the machine, the stages, and all bounds in one list."""
    read = {name: read_stage(work, name) for name in stages}
    bounds = [
        {"stage": name, **one}
        for name, stage in read.items()
        for one in stage.get("result", {}).get("bounds", ())
    ]
    return {
        **facts,
        "ok": all(stage["status"] in {"ok", "left out"} for stage in read.values()),
        "num_bounds": len(bounds),
        "num_bounds_held": sum(one["holds"] for one in bounds),
        "bounds": bounds,
        "stages": read,
    }


def report(arguments: argparse.Namespace) -> int:
    """Write the report and print a line per stage; return 1 if one failed or missed a bound."""
    facts = {key: value for key, _, value in (fact.partition("=") for fact in arguments.fact)}
    made = merge(arguments.work, arguments.stage, facts)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(made, indent=1) + "\n")
    for name, stage in made["stages"].items():
        note = stage.get("note") or stage.get("tests") or ""
        print(f"{name:10} {stage['status']:14} {stage.get('seconds', 0):7.1f} s  {note}".rstrip())
    print(f"bounds kept: {made['num_bounds_held']} of {made['num_bounds']}; {arguments.out}")
    return 0 if made["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
