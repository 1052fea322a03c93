"""From the command to the first token, as a user waits for it: whole processes, from outside.

    python -m bench.first_token MODEL                    # a directory, or a GGUF file
    python -m bench.real_size FILE.gguf                  # a model of 17 GB
    python -m bench.first_token FILE.gguf --limit 6GiB --backed both --profile --json FILE
    python -m bench.first_token FILE.gguf --limit 6GiB --also ../before     # another checkout

Contestants are `moecache generate` of this checkout, of others (--also), the same with a profile
that an earlier run wrote of another prompt (--profile), and llama.cpp on the mapped file, where
MODEL is a GGUF file and llama-cpp-python is installed. All read the same prompt and decode
greedily. They take turns, in the other order every second round; a first run of each, which brings
Python and libraries into the page cache and compiles what has no bytecode yet, does not count.

The clock starts with the process and stops at its first byte of text; a first token that is no
whole character comes with the next one. What is in memory then decides the figure:

- The model's pages. Each run begins without them (cold) or with them (--warm). Pages that are there
  before count in no limit: a warm file larger than the limit is in memory all the same.
- Free memory. A virtual machine's host may take back what has been free for some 2 s, and whoever
  touches it next waits for the host. By default each run begins after --pause seconds, so that free
  memory is the host's. With --backed as much as will be used is touched by another process, which
  is killed as the clock starts: what it had is the guest's for some 2 s more. On a machine of its
  own both are the same.

Shown are medians, least and most: seconds to the first token, and from the last one to the end of
the process; CPU seconds of all threads; bytes read from disks; most memory resident (of llama.cpp
with mapped pages). A limit needs root, or a cgroup of one's own.
"""

import argparse
import re
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.disks import describe_read_ahead
from bench.first_token_contestants import (
    PROFILE,
    Contestant,
    Kind,
    find_contestants,
    write_profiles,
)
from bench.limits import MemoryLimit, NoLimitError
from bench.page_cache import ModelPages, PageCacheError
from bench.prompt_text import prompt_text
from bench.runs import begin, write_figures
from bench.timed_process import TimedProcess
from moecache import kernels
from moecache.errors import MoeCacheError
from moecache.units import format_bytes, parse_bytes

WHICH = {"no": (False,), "yes": (True,), "both": (False, True)}
PROMPT = re.compile(r"prompt of (\d+)")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if contestants read prompts of other lengths."""
    arguments = _arguments(argv)
    print(describe_read_ahead(arguments.model), flush=True)
    try:
        return compare(arguments)
    except (PageCacheError, MoeCacheError) as error:
        raise SystemExit(str(error)) from error


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.first_token",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="a directory, or a GGUF file")
    add("--also", type=Path, action="append", default=[], metavar="DIR", help="another checkout")
    add("--profile", action="store_true", help="with a profile of an earlier run as well")
    add("--limit", action="append", metavar="SIZE", help="of memory; may be repeated (none)")
    which: dict[str, Any] = {"nargs": "?", "const": "yes", "default": "no", "choices": WHICH}
    add("--warm", **which, help="the model in the page cache: no, yes (the option alone) or both")
    add("--backed", **which, help="free memory that is the guest's: likewise")
    add("--pause", type=float, default=4, help="seconds before a run that is not backed (4)")
    add("--prompt-tokens", type=int, default=37, help="in the prompt (37)")
    add("--max-new-tokens", type=int, default=2, help="to generate (2)")
    add("--memory", metavar="SIZE", help="for moecache's experts (what it finds)")
    add("--compute", metavar="NAME", help="moecache's (what it chooses)")
    arguments = begin(parser, argv, rounds=5, threads=kernels.num_threads())
    for name in ("prompt_tokens", "max_new_tokens", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    arguments.model = arguments.model.absolute()
    return arguments


def compare(arguments: argparse.Namespace) -> int:
    """Run all contestants in turns and show how they went; return the exit code."""
    pages = ModelPages(arguments.model)
    limits = _limits(arguments)
    kinds = [
        Kind(limit, is_warm, is_backed)
        for limit in limits
        for is_warm in WHICH[arguments.warm]
        for is_backed in WHICH[arguments.backed]
    ]
    prompt = prompt_text(arguments.model, arguments.prompt_tokens, seed=0)
    contestants, left_out = find_contestants(arguments, prompt)
    for reason in left_out:
        say(f"left out: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        for one in contestants:
            if one.name == PROFILE:
                say("an earlier run writes a profile")
                write_profiles(arguments, one, limits, pages, Path(folder))
        for one in contestants:
            say(f"a run that does not count: {one.name}")
            one.run(kinds[0], pages, threads=arguments.threads)
        for number in range(arguments.rounds):
            for kind in kinds:
                for one in contestants[:: -1 if number % 2 else 1]:
                    found = one.run(kind, pages, threads=arguments.threads, pause_s=arguments.pause)
                    one.runs.setdefault(kind, []).append(found)
                    place = f"round {number + 1} of {arguments.rounds}"
                    say(f"{place}: {one.name}, {_line(kind, found)}")
            # After each round: a later one may fail.
            figures = [figure(one, kind) for kind in kinds for one in contestants]
            lengths = {length for one in figures for length in one["prompt_tokens"]}
            named = ("backed", "compute", "max_new_tokens", "memory", "pause", "rounds", "warm")
            write_figures(
                arguments,
                model=arguments.model.name,
                model_bytes=pages.nbytes,
                read_ahead=describe_read_ahead(arguments.model),
                **{name: getattr(arguments, name) for name in named},
                prompt_tokens=len(prompt.tokens),
                same_prompt=lengths == {len(prompt.tokens)},
                figures=figures,
            )
    console = Console()
    (console if console.is_terminal else Console(width=150)).print(_table(figures))
    if lengths != {len(prompt.tokens)}:
        print(f"PROMPTS DIFFER: of {len(prompt.tokens)} tokens, contestants say that they read")
        print(*(f"{one['name']}: {one['prompt_tokens']}" for one in figures), sep="\n")
        return 1
    print(f"all have read a prompt of {len(prompt.tokens)} tokens")
    return 0


def say(text: str) -> None:
    """Tell how far the benchmark is; standard output has its results alone."""
    print(text, file=sys.stderr, flush=True)


def _limits(arguments: argparse.Namespace) -> list[int | None]:
    """Return the limits to run in; if the system lets none be made, say so."""
    if not arguments.limit:
        return [None]
    found = [parse_bytes(limit) for limit in arguments.limit]
    try:
        with MemoryLimit(found[0]):
            return list(found)
    except NoLimitError as error:
        reason = str(error).partition(". ")[0]
        say(f"left out: --limit, which needs root ({reason}); all have the machine's memory")
        return [None]


def figure(one: Contestant, kind: Kind) -> dict[str, Any]:
    """Return what a contestant did in runs of a kind: median, least and most, and each run."""
    runs = one.runs[kind]
    measured = {
        "first_s": [run.first_s for run in runs],
        "end_s": [run.end_s for run in runs],
        "cpu_s": [run.user_s + run.system_s for run in runs],
        "read_bytes": [run.read_bytes for run in runs],
        "peak_bytes": [run.peak_bytes for run in runs],
    }
    return {
        "name": one.name,
        "commit": one.commit,
        "limit_bytes": kind.limit,
        "pages": _pages(kind),
        "memory": _memory(kind),
        "prompt_tokens": sorted({_prompt_tokens(run) for run in runs}, key=str),
        **{
            name: [statistics.median(values), min(values), max(values)]
            for name, values in measured.items()
        },
        "runs": [asdict(run) for run in runs],
    }


def _pages(kind: Kind) -> str:
    return "warm" if kind.is_warm else "cold"


def _memory(kind: Kind) -> str:
    return "backed" if kind.is_backed else "the host's"


def _prompt_tokens(run: TimedProcess) -> int | None:
    """Return how many tokens of a prompt a process says it has read; `None` if it does not."""
    found = PROMPT.search(run.errors)
    return int(found[1]) if found else None


def _limit(limit_bytes: int | None) -> str:
    return "none" if limit_bytes is None else format_bytes(limit_bytes)


def _line(kind: Kind, run: TimedProcess) -> str:
    return (
        f"limit {_limit(kind.limit)}, {_pages(kind)}, memory {_memory(kind)}: first token after "
        f"{run.first_s:.2f} s, {run.user_s + run.system_s:.1f} CPU-s ({run.system_s:.1f} of the "
        f"system), {format_bytes(run.read_bytes)} read, {format_bytes(run.peak_bytes)} resident"
    )


def _table(figures: list[dict[str, Any]]) -> Table:
    table = Table(title="From the command to the first token: median (least to most)")
    for name in ("limit", "pages", "free memory", "contestant"):
        table.add_column(name)
    for name in ("first token, s", "then to the end, s", "CPU, s", "read", "resident at most"):
        table.add_column(name, justify="right")
    for one in figures:
        median, least, most = one["first_s"]
        table.add_row(
            _limit(one["limit_bytes"]),
            one["pages"],
            one["memory"],
            f"{one['name']} {one['commit']}".strip(),
            f"{median:.2f} ({least:.2f} to {most:.2f})",
            f"{one['end_s'][0]:.2f}",
            f"{one['cpu_s'][0]:.1f}",
            format_bytes(one["read_bytes"][0]),
            format_bytes(one["peak_bytes"][0]),
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
