"""Shared by commands: arguments of options, traces, lists, output files, options in errors."""

import argparse
import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moecache.errors import CapacityError, ConfigError
from moecache.files import Kind, check_replaced
from moecache.settings import OPTIONS
from moecache.study.importers import load_any
from moecache.traces.trace import Trace

# The help text of every command that takes traces.
TRACES_HELP = "a routing trace of a run, and no model: .npz, or what moecache trace convert reads"
# Modes of prefetch that need neither hints nor routers.
PLAIN_MODES = {"echo": "what ECHO foresees", "last": "the layer's last experts", "off": "none"}


def add_option(
    parser: argparse._ActionsContainer,
    name: str,
    more: str = "",
    *,
    flag: str = "",
    modes: Mapping[str, str] | None = None,
    names: Sequence[str] = (),
    instead: str = "",
    **keywords: Any,
) -> None:
    """Add the argument of an option, as the table in `moecache.settings` describes it.

    Parameters
    ----------
    parser : ArgumentParser or a group of one
    name : str
        Name of the option.
    more : str
        The command's addition to the table's help.
    flag : str, optional
        By default -- and the name.
    modes : mapping of str to str, optional
        Choices, and what each means, instead of the table's.
    names : sequence of str, optional
        Names of which the argument takes a list; `choose` reads it.
    instead : str, optional
        The default in words, if it is neither the table's nor `default=`.
    **keywords
        Other arguments of `add_argument`; they beat the table.
    """
    option = OPTIONS[name]
    choices = tuple(modes or option.choices)
    if names:
        more += f"; names, or all: {', '.join(names)}"
        keywords["metavar"] = "LIST"
    elif "action" not in keywords:
        keywords = {"choices": choices or None, "metavar": option.metavar or None} | keywords
        if modes:
            more += f": {explain(modes)}"
        elif choices and option.metavar:
            more += f": {', '.join(choices)}"
    # The default of memory is what is free, less that of another option.
    others = re.sub(r"`(\w+)`", lambda match: OPTIONS[match[1]].instead, option.instead)
    instead = instead or keywords.get("default") or others
    told = "" if instead in {"none", "off"} else f" (default: {instead})"
    text = f"{option.help}{more}{told}".replace("%", "%%")
    parser.add_argument(flag or f"--{name.replace('_', '-')}", help=text, **keywords)


def explain(modes: Mapping[str, str]) -> str:
    """Return choices, each with what it means, as a line of help."""
    return ", ".join(f"{mode} ({meaning})" for mode, meaning in modes.items())


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


def add_force(parser: argparse._ActionsContainer) -> None:
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
