"""All that is measured on a GPU, and the report of it: what bench/gpu.sh runs.

    python -m bench.gpu upload|decode|resident|mxfp4|memory|host [--json OUT] [options]
    python bench/gpu.py report --work DIR --out FILE --stage NAME... [--fact KEY=VALUE]...

A measurement is a function (argv, device) of the module beside this one that has its name in
`MEASUREMENTS`. Its device is an argument, so that tests run all of it on one that they made. The
report puts what the stages of bench/gpu.sh left into one JSON, and says whether all went well; a
stage leaves NAME.status (exit code, seconds, seconds allowed), NAME.log, and maybe NAME.json or
NAME.xml. It needs Python alone, so that there is one of a build that failed, too: this file
imports nothing else before something is measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

    from moecache.cuda import Device

NUM_RUNS = 20
MEASUREMENTS = {
    "upload": "bench.gpu_copies",
    "decode": "bench.gpu_decode",
    "resident": "bench.gpu_decode",
    "mxfp4": "bench.gpu_decode",
    "memory": "bench.gpu_copies",
    "host": "bench.gpu_host",
}
# Exit codes of `timeout`, and of a process that it had to kill.
TIMED_OUT = (124, 137)
TAIL_CHARACTERS = 2000
COUNTS = ("tests", "failures", "errors", "skipped")

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a measurement, or make the report; return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="bench.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("what", choices=[*MEASUREMENTS, "report"])
    what = parser.parse_args(given[:1]).what
    if what == "report":
        return report(given[1:])
    code: int = getattr(importlib.import_module(MEASUREMENTS[what]), what)(given[1:])
    return code


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


def show_bounds(bounds: Iterable[Mapping[str, Any]], console: Console) -> bool:
    """Print each bound; return whether all hold."""
    holds = True
    for one in bounds:
        holds &= one["holds"]
        found = "     -" if one["found"] is None else f"{one['found']:6.3f}"
        console.print(
            f"{'yes' if one['holds'] else 'NO ':3} {found} {one['relation']} {one['limit']}  "
            f"{one['name']}{'  (' + one['note'] + ')' if one['note'] else ''}"
        )
    return holds


def parser_of(document: str | None, *, runs: bool = True) -> argparse.ArgumentParser:
    """Return a parser with what these benchmarks take: all of them, or those that have runs."""
    parser = argparse.ArgumentParser(description=(document or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda:0", metavar="NAME")
    if runs:
        parser.add_argument("--runs", type=int, default=NUM_RUNS, help="medians are over so many")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures there")
    return parser


def run_benchmark(
    measure: Callable[[Device, argparse.Namespace], dict[str, Any]],
    show: Callable[[dict[str, Any], Console], None],
    arguments: argparse.Namespace,
    device: Device | None,
) -> int:
    """Measure, print and write the figures; return 1 if a bound does not hold, 2 without a GPU."""
    # Not with this file, of which a report needs a part that imports nothing.
    from rich.console import Console

    from bench.machine import describe_machine
    from moecache.cuda import open_device
    from moecache.errors import MoeCacheError

    console = Console(width=140, highlight=False)
    console.print(describe_machine())
    try:
        device = device or open_device(arguments.device)
    except MoeCacheError as error:
        console.print(f"skipped: {error}", markup=False)
        return 2
    console.print(device.description, markup=False)
    found = {
        "machine": describe_machine(),
        "device": device.description,
        **measure(device, arguments),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    show(found, console)
    return 0 if show_bounds(found["bounds"], console) else 1


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


def report(argv: Sequence[str]) -> int:
    """Write the report and print a line per stage; return 1 if one failed or missed a bound."""
    parser = argparse.ArgumentParser(prog="gpu.py report")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--stage", action="append", default=[], metavar="NAME")
    parser.add_argument("--fact", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args(argv)
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
