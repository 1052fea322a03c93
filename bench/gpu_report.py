"""Puts what the stages of bench/gpu.sh left into one JSON, and says whether all went well.

Needs Python alone, so that there is a report of a build that failed, too. A stage leaves
NAME.status (exit code, seconds, seconds allowed), NAME.log, and maybe NAME.json or NAME.xml.

    python bench/gpu_report.py --work DIR --out FILE --stage NAME... [--fact KEY=VALUE]...
"""

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Exit codes of `timeout`, and of a process that it had to kill.
TIMED_OUT = (124, 137)
TAIL_CHARACTERS = 2000
COUNTS = ("tests", "failures", "errors", "skipped")


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


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and print a line per stage; return 1 if one failed or missed a bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--stage", action="append", default=[], metavar="NAME")
    parser.add_argument("--fact", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args(argv)
    facts = {key: value for key, _, value in (fact.partition("=") for fact in arguments.fact)}
    report = merge(arguments.work, arguments.stage, facts)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, stage in report["stages"].items():
        note = stage.get("note") or stage.get("tests") or ""
        print(f"{name:10} {stage['status']:14} {stage.get('seconds', 0):7.1f} s  {note}".rstrip())
    print(f"bounds kept: {report['num_bounds_held']} of {report['num_bounds']}; {arguments.out}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
