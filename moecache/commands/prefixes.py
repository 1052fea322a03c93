"""Options of commands that keep the pages of prompts, and the cache that they ask for."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moecache.commands.arguments import naming
from moecache.errors import ConfigError
from moecache.runtime.runtime import ExpertRuntime
from moecache.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from moecache.decoding.prefixes import PrefixCache, PrefixStats

_DEFAULT_BYTES = 512 * 2**20
# By default pages take no more of what is free once the model is loaded.
_DEFAULT_SHARE = 8
_DEFAULT_DISK = "8GiB"


def add_prefix_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `opened_prefixes` reads."""
    group = parser.add_argument_group(
        "prompts",
        "A prompt is read in pages of 256 tokens. One that begins like an earlier prompt is read "
        "from where they differ on, with the same answer, bit for bit. A command that reads one "
        "prompt keeps none without --prefix-cache.",
    )
    group.add_argument(
        "--prefix-memory",
        metavar="SIZE",
        help="memory for pages of earlier prompts, beside that for experts; 0 keeps none (default: "
        f"{format_bytes(_DEFAULT_BYTES)}, or an eighth of what is free if that is less)",
    )
    group.add_argument(
        "--prefix-cache",
        metavar="DIR",
        help="keep them in files of this directory, too, from one run to the next (default: no)",
    )
    group.add_argument(
        "--prefix-disk",
        metavar="SIZE",
        default=_DEFAULT_DISK,
        help=f"what these files may take (default: {_DEFAULT_DISK})",
    )


def check_prefixes(arguments: argparse.Namespace) -> None:
    """Refuse options that cannot be used, before anything is loaded."""
    if arguments.prefix_memory is not None:
        with naming("--prefix-memory"):
            parse_bytes(arguments.prefix_memory)
    with naming("--prefix-disk"):
        parse_bytes(arguments.prefix_disk)
    directory = arguments.prefix_cache
    if directory == "":
        raise ConfigError("--prefix-cache is empty; is a shell variable unset?")
    if directory is not None and Path(directory).exists() and not Path(directory).is_dir():
        raise ConfigError(f"--prefix-cache: {directory} is a file; name a directory")


@contextlib.contextmanager
def opened_prefixes(
    arguments: argparse.Namespace,
    runtime: ExpertRuntime,
    open_prefixes: "Callable[..., PrefixCache | None]",
) -> "Iterator[PrefixCache | None]":
    """Yield a cache of prompts' pages, closed at the end; `None` if there is none.

    Parameters
    ----------
    arguments : Namespace
    runtime : ExpertRuntime
        Beside whose slots there is memory.
    open_prefixes : callable (max_bytes, directory=, max_disk_bytes=)
        Returns a cache for the model, or `None`.
    """
    if arguments.prefix_memory is None:
        max_bytes = min(_DEFAULT_BYTES, runtime.borrowed.room_bytes() // _DEFAULT_SHARE)
    else:
        max_bytes = parse_bytes(arguments.prefix_memory)
    directory = arguments.prefix_cache
    if max_bytes == 0 and directory is None:
        yield None
        return
    prefixes = open_prefixes(
        max_bytes,
        directory=None if directory is None else Path(directory),
        max_disk_bytes=0 if directory is None else parse_bytes(arguments.prefix_disk),
    )
    try:
        yield prefixes
    finally:
        if prefixes is not None:
            prefixes.close()


def describe(stats: "PrefixStats") -> str:
    """Return a line about what a cache holds, and what it saved."""
    share = stats.hit_tokens / stats.asked_tokens if stats.asked_tokens else 0.0
    disk = f", {format_bytes(stats.disk_bytes)} in files" if stats.disk_bytes else ""
    return (
        f"prompts: {stats.hit_tokens} of {stats.asked_tokens} tokens known ({share:.0%}); "
        f"{stats.num_pages} pages in {format_bytes(stats.nbytes)}{disk}"
    )
