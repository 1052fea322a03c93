"""What commands share: traces from files, lists of names, output files, options named in errors."""

import argparse
import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moecache.errors import CapacityError, ConfigError
from moecache.files import Kind, check_replaced
from moecache.study.importers import load_any
from moecache.traces.trace import Trace


def load_traces(names: Sequence[str]) -> dict[str, Trace]:
    """Return the traces of files, by the shortest names that tell them apart."""
    traces: dict[str, Trace] = {}
    for name in names:
        short = Path(name).name.partition(".")[0] or name
        short = name if short in traces else short
        if short in traces:
            raise ConfigError(f"{name} is there twice")
        traces[short] = load_any(name)
    return traces


def add_force(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --force, without which `check_outputs` refuses to replace other files."""
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace an output file of any kind (default: only one that is empty or of the kind "
        "that is written)",
    )


def check_outputs(
    arguments: argparse.Namespace, inputs: Mapping[str, str], **kinds: Kind | None
) -> None:
    """Refuse outputs that cannot be written, or would replace an input or a file of another kind.

    Called before anything runs, so that no work is lost.

    Parameters
    ----------
    arguments : Namespace
    inputs : mapping of str to str
        Paths that the command reads, and what they are.
    **kinds : Kind or None
        The kind of file that each option's path gets; `None` if its writer knows what it replaces.
    """
    taken = dict(inputs)
    for name, kind in kinds.items():
        path = getattr(arguments, name)
        option = f"--{name.replace('_', '-')}"
        if path == "":
            raise ConfigError(f"{option} is empty; is a shell variable unset?")
        if path is None:
            continue
        if not Path(path).parent.is_dir():
            raise ConfigError(f"{option}: there is no directory {Path(path).parent}")
        check_output(option, path, taken, None if arguments.force else kind)
        taken[path] = option


def check_output(
    option: str, path: str, taken: Mapping[str, str], kind: Kind | None = None
) -> None:
    """Refuse to write over a file that the same command reads or writes, or one of another kind.

    Parameters
    ----------
    option : str
        The option that gave the path.
    path : str
    taken : mapping of str to str
        Other paths, and what they are. Links are followed; devices and pipes may be shared.
    kind : Kind, optional
        The kind of file that is to be written.

    Raises
    ------
    ConfigError
        If the path is one of `taken`, or a file of another kind.
    """
    for other, name in taken.items():
        if _is_same_file(path, other):
            raise ConfigError(f"{option} {path} is {name} as well; name another file")
    if kind is not None:
        with naming(option):
            check_replaced(path, kind)


def _is_same_file(one: str, other: str) -> bool:
    try:
        # A hard link is the file, too.
        found = os.stat(one)
        if not stat.S_ISREG(found.st_mode):
            return False
        if os.path.samestat(found, os.stat(other)):
            return True
    except (OSError, ValueError):  # not there yet, or no path at all: opening it says so
        pass
    try:
        return os.path.realpath(one) == os.path.realpath(other)
    except (OSError, ValueError):
        return False


def choose(
    option: str, given: str | None, known: Sequence[str], default: Sequence[str]
) -> list[str]:
    """Return the names of a list, all of those known for "all", or the default."""
    if given is None:
        return list(default)
    if given.strip() == "all":
        return list(known)
    names = split(f"--{option}", given)
    for name in names:
        if name not in known:
            raise ConfigError(f"--{option}: {name!r} is not one of all, {', '.join(known)}")
    return names


def split(option: str, given: str) -> list[str]:
    """Return the entries of a list, each once."""
    parts = [part.strip() for part in given.split(",")]
    if not all(parts):
        raise ConfigError(f"{option}: {given!r} has an empty entry")
    return list(dict.fromkeys(parts))


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Name the option in errors about its value."""
    try:
        yield
    except (ConfigError, CapacityError) as error:
        raise ConfigError(f"{option}: {error}") from error
