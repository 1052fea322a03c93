"""`moecache warm`: files brought into memory before they are needed."""

import argparse
import contextlib
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from moecache import prefault
from moecache._prefault import advise_willneed, lock_pages
from moecache.commands.arguments import add_option
from moecache.commands.paths import HUB_NAMES, find_files, hub_path, map_file, open_experts
from moecache.commands.residency import print_status
from moecache.errors import ConfigError, StoreError
from moecache.prefault.regions import Region
from moecache.sizing.host_memory import total_host_bytes
from moecache.units import format_bytes

# The kernel reads ahead at least this much for one hint, by its own default.
_HINT_BYTES = 2**17
_PATHS_HELP = (
    "a checkpoint directory, a .safetensors or .gguf file (of a split one any part, for all), "
    f"{HUB_NAMES}, or any other file or directory"
)
# From linux/capability.h.
_CAP_IPC_LOCK = 14


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "warm",
        help="bring model files into memory before the first request",
        description="Read files into the page cache as fast as the disk gives them, so that no "
        "request waits for it later. Works on checkpoints and on any other file or directory. "
        "More than 80 % of the machine's memory (or of the cgroup's limit) is refused.",
        epilog="examples: moecache warm ./Qwen3-30B-A3B --experts-only | "
        "moecache warm model.gguf --status | moecache warm model.gguf --lock",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help=_PATHS_HELP)
    parser.add_argument(
        "--experts-only",
        action="store_true",
        help="only the routed experts of a checkpoint, in safetensors or GGUF",
    )
    parser.add_argument(
        "--layers",
        metavar="LIST",
        type=parse_layers,
        help="only the experts of these MoE layers, counted from 0: 0-11 or 0,2,8-11",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads that read (default: tried out)"
    )
    parser.add_argument(
        "--force", action="store_true", help="also if it is more than 80 %% of the memory"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--background-hint",
        action="store_true",
        help="only ask the kernel to read ahead, and do not wait for it",
    )
    add_option(instead, "lock", " until this command is interrupted", action="store_true")
    instead.add_argument(
        "--evict", action="store_true", help="drop the files from the page cache, for benchmarks"
    )
    instead.add_argument(
        "--status", action="store_true", help="show how much is in memory; reads nothing"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked for each path; return the exit code."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    by_layer = arguments.experts_only or arguments.layers is not None
    if arguments.status or arguments.evict or arguments.background_hint:
        if arguments.threads is not None:
            raise ConfigError("--threads has no meaning without a sweep")
        if arguments.force and not arguments.background_hint:
            raise ConfigError("--force has no meaning without a sweep")
    _raise_file_limit()
    arguments.paths = [hub_path(path) for path in arguments.paths]
    if arguments.status:
        return print_status(console, arguments.paths, arguments.layers, experts_only=by_layer)
    regions = list(_find_regions(arguments.paths, arguments.layers, by_layer=by_layer))
    if not regions:
        console.print("nothing to do: the files are empty")
        return 0
    if arguments.evict:
        return _evict(console, regions)
    if arguments.background_hint:
        return _hint(console, regions, force=arguments.force)
    return _warm(console, regions, arguments)


def parse_layers(text: str) -> list[int]:
    """Return the layers of "0-11" or "0,2,8-11"."""
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", part)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of layers; write 0-11 or 0,2,8")
        layers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return list(dict.fromkeys(layers))


def _find_regions(
    paths: list[str], layers: list[int] | None, *, by_layer: bool
) -> Iterator[Region]:
    seen: set[object] = set()
    for path in paths:
        if by_layer:
            store, chosen = open_experts(path, layers)
            with store:
                files = tuple(file.version[1:3] for file in store.files)
                if files not in seen:
                    yield from store.regions(chosen)
                seen.add(files)
            continue
        for file in find_files(path):
            # A checkpoint cache has many names for one file.
            status = file.stat()
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                region = map_file(file)
                if region is not None:
                    yield region


def _warm(console: Console, regions: list[Region], arguments: argparse.Namespace) -> int:
    if arguments.lock:
        _check_lock_limit(regions)
    columns = (
        TextColumn("warming"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        _RateColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)
        report = prefault.warm(
            regions,
            mode="force" if arguments.force else "auto",
            threads=arguments.threads,
            keep_mapped=arguments.lock,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if not report.ran and report.reason != "resident":
        raise ConfigError(report.message.replace("mode 'force'", "--force"))
    console.print(report.describe() if report.ran else report.message)
    if arguments.lock:
        return _hold_locked(console, regions)
    return 0


class _RateColumn(ProgressColumn):
    """The speed so far, in GiB/s."""

    def render(self, task: Task) -> Text:
        """Return the column's text."""
        return Text(f"{(task.speed or 0) / 2**30:.2f} GiB/s")


def _hold_locked(console: Console, regions: list[Region]) -> int:
    ranges, _owners = prefault.merge(regions)
    total = sum(nbytes for _, nbytes in ranges)
    for address, nbytes in ranges:
        try:
            lock_pages(address, nbytes)
        except OSError as error:
            raise StoreError(
                f"{format_bytes(total)} cannot be locked: {error.strerror}; "
                "is there so much memory?"
            ) from error
    try:
        console.print(f"{format_bytes(total)} locked in memory until Ctrl-C")
        signal.pause()
    except KeyboardInterrupt:
        console.print("released")
    return 0


def _hint(console: Console, regions: list[Region], *, force: bool) -> int:
    ranges, _owners = prefault.merge(regions)
    total = sum(nbytes for _, nbytes in ranges)
    verdict = prefault.decide(total, total_host_bytes(), mode="force" if force else "auto")
    if not verdict.run:
        raise ConfigError(verdict.message.replace("mode 'force'", "--force"))
    taken = sum(
        min(_HINT_BYTES, nbytes - start)
        for address, nbytes in ranges
        for start in range(0, nbytes, _HINT_BYTES)
        if advise_willneed(address + start, min(_HINT_BYTES, nbytes - start))
    )
    console.print(
        f"asked the kernel to read {format_bytes(taken)} ahead; --status shows how far it is"
    )
    return 0


def _evict(console: Console, regions: list[Region]) -> int:
    before = prefault.residency(regions)
    after = prefault.evict(regions)
    if not all(one.known for one in before):
        console.print("dropped what could be; the kernel does not tell how much that was")
        return 0
    resident = sum(one.resident_bytes for one in before)
    console.print(f"dropped {format_bytes(max(0, resident - after))} from the page cache")
    if after:
        console.print(
            f"{format_bytes(after)} stay: some process has them mapped or locked, or the file "
            "system keeps them"
        )
    return 0


def _raise_file_limit() -> None:
    """Have as many files open as is allowed: each is mapped, and a directory may have many."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _check_lock_limit(regions: list[Region]) -> None:
    """Raise if so much cannot be locked, before it is read."""
    total = sum(nbytes for _, nbytes in prefault.merge(regions)[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or total <= soft or _has_capability(_CAP_IPC_LOCK):
        return
    most = "unlimited" if hard == resource.RLIM_INFINITY else format_bytes(hard)
    raise StoreError(
        f"{format_bytes(total)} cannot be locked: the limit is {format_bytes(soft)}, at most "
        f"{most} without root; raise it with: ulimit -l {-(-total // 1024)}"
    )


def _has_capability(number: int) -> bool:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    held = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(held, 16) >> number & 1)
