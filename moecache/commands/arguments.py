"""What commands that study traces have in common: files, lists of names, where values are wrong."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from moecache.errors import CapacityError, ConfigError
from moecache.study.importers import load_any
from moecache.study.traces import Trace


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


def check_outputs(arguments: argparse.Namespace, *options: str) -> None:
    """Refuse what cannot be written before anything is replayed."""
    for option in options:
        path = getattr(arguments, option)
        if path == "":
            raise ConfigError(f"--{option} is empty; is a shell variable unset?")
        if path is not None and not Path(path).parent.is_dir():
            raise ConfigError(f"--{option}: there is no directory {Path(path).parent}")


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
    """Name the option in what is said of its value."""
    try:
        yield
    except (ConfigError, CapacityError) as error:
        raise ConfigError(f"{option}: {error}") from error
