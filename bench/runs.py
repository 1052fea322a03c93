"""What benchmarks of the kernels share: options, a line about the machine, a file of figures."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from moecache import kernels


def begin(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, rounds: int, threads: int = 1
) -> argparse.Namespace:
    """Return the arguments, with those that all have; set the threads, say where this runs."""
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    kernels.use_threads(arguments.threads)
    print(f"{describe_machine()}, {kernels.level()}, {arguments.threads} threads", flush=True)
    return arguments


def write_figures(arguments: argparse.Namespace, **figures: Any) -> None:
    """Write what was measured, and where, if --json names a file."""
    if arguments.json is not None:
        found = {"machine": describe_machine(), "level": kernels.level()}
        found |= {"threads": arguments.threads, **figures}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
