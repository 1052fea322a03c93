"""Settings: the options of `open`, and every MOECACHE_* variable.

The only file that reads the environment.
"""

import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from moecache.errors import ConfigError
from moecache.policies.making import SCOPES
from moecache.policies.registry import policy_names
from moecache.units import parse_budget, parse_bytes

logger = logging.getLogger(__name__)

# Those that `open` takes; replays know more.
POLICIES = policy_names()
DEFAULT_POLICY = "echo"
DEFAULT_SCOPE = "global"
DEFAULT_LOADER_THREADS = 2
PREFAULT_MODES = ("auto", "background", "off", "force")
DEFAULT_PREFAULT = "auto"
# Instructions of the kernels, the best last.
KERNEL_LEVELS = ("generic", "neon", "avx2", "avxvnni", "avx512vnni", "avx512", "amx")
# The values of `compute=` that `load` takes.
COMPUTE = {
    "torch": "transformers' own products, its output bit for bit",
    "fast": "moecache's kernels, quicker in decode; sums are rounded otherwise",
}
READ_MODES = ("auto", "buffered", "direct", "mmap")
DEFAULT_READ = "auto"
PREFETCH_MODES = ("auto", "echo", "hints", "last", "off")
DEFAULT_PREFETCH = "auto"
DEFAULT_WARMPIN = "auto"
DEFAULT_WARMPIN_AFTER = 512

PREFIX = "MOECACHE_"
# Read when the package is built, not when it runs.
_BUILD_VARIABLES = {"MOECACHE_BUILD", "MOECACHE_BUILD_CACHE"}

_OFF = ("0", "false", "no", "disabled", "off")
_ON = ("1", "true", "on", "yes", "enabled")
_PREFAULT_WORDS = {
    **{mode: mode for mode in PREFAULT_MODES},
    **dict.fromkeys(_OFF, "off"),
    **dict.fromkeys(_ON, "force"),
}


@dataclass(frozen=True)
class Option:
    """One thing that `moecache.open` can be told, by an argument or by the environment.

    Attributes
    ----------
    name : str
        Name of the argument; the variable is MOECACHE_ and the name in capitals.
    parse : callable (str) -> object
        Converts a variable's text; raises ValueError (a ConfigError is one).
    expected : str
        The kind of value, in words.
    default : object
        The value if neither is given; None: see `instead`.
    instead : str
        The default in words.
    help : str
        The setting's meaning, for `--help`.
    values : str
        The values, for docs/settings.md, in Markdown.
    choices : tuple of str
        All values, if they are a few words.
    metavar : str
        The value's name in `--help`, if not the choices.
    is_argument : bool
        Whether `moecache.open` takes it, too.
    takes_objects : bool
        Whether the argument may be no name but an object, which is looked at where it is used.
    """

    name: str
    parse: Callable[[str], Any]
    expected: str
    default: Any
    instead: str
    help: str
    values: str
    choices: tuple[str, ...] = ()
    metavar: str = ""
    is_argument: bool = True
    takes_objects: bool = False

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return PREFIX + self.name.upper()

    def read(self, text: str) -> Any:
        """Return the value of an argument that is given as a variable would be.

        Raises
        ------
        ConfigError
            If it has none.
        """
        try:
            return self.parse(text.strip())
        except ValueError:
            raise ConfigError(f"{self.name} {text!r} is not {self.expected}") from None

    def check(self, value: Any) -> Any:
        """Return a value that is one of the choices.

        Raises
        ------
        ConfigError
            If it is not.
        """
        if self.takes_objects and not isinstance(value, str):
            return value
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.name} {value!r} is not one of {', '.join(self.choices)}")
        return value


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError
    return int(text)


def _threads(text: str) -> int:
    if len(text) > 3:
        raise ValueError
    return _number(text)


def _cores(text: str) -> int:
    number = _threads(text)
    if not 1 <= number <= 256:
        raise ValueError
    return number


def _pins(text: str) -> int | str:
    if text.lower() == "auto":
        return "auto"
    return 0 if text.lower() in _OFF else _number(text)


def _switch(text: str) -> bool:
    return _word({**dict.fromkeys(_OFF, False), **dict.fromkeys(_ON, True)})(text)


def _memory(text: str) -> str:
    parse_budget(text, 0)
    return text


def _size(text: str) -> str:
    parse_bytes(text)
    return text


def _word(words: Mapping[str, Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text.lower() not in words:
            raise ValueError
        return words[text.lower()]

    return parse


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return parse


def _listed(choices: tuple[str, ...]) -> str:
    return " ".join(f"`{choice}`" for choice in choices)


OPTIONS = {
    option.name: option
    for option in (
        Option(
            "memory",
            _memory,
            "a size such as 4GiB or a share such as 25%",
            None,
            "what is free, less `reserve`",
            'memory for experts: "16GiB", or a share of them, "25%"',
            "`4GiB`, `512MiB`, bytes, or a share of the experts such as `25%`",
            metavar="SIZE",
        ),
        Option(
            "policy",
            _one_of(POLICIES),
            f"one of {', '.join(POLICIES)}",
            DEFAULT_POLICY,
            DEFAULT_POLICY,
            "which expert is evicted",
            f"{_listed(POLICIES)}, see [policies.md](policies.md); the argument also takes a "
            "policy of your own",
            POLICIES,
            "NAME",
            takes_objects=True,
        ),
        Option(
            "scope",
            _one_of(SCOPES),
            f"one of {', '.join(SCOPES)}",
            DEFAULT_SCOPE,
            DEFAULT_SCOPE,
            "whether layers share the slots",
            "`global` (layers compete for slots), `layer` (each has its share)",
            SCOPES,
        ),
        Option(
            "read",
            _one_of(READ_MODES),
            f"one of {', '.join(READ_MODES)}",
            DEFAULT_READ,
            DEFAULT_READ,
            "how experts are read: buffered (through the page cache), direct (around it), mmap "
            "(copied from the mapped file), auto (buffered if memory beside the slots holds all "
            "experts, else direct)",
            f"{_listed(READ_MODES)}, see below",
            READ_MODES,
        ),
        Option(
            "reserve",
            _size,
            "a size such as 2GiB",
            None,
            "trunk, KV cache, buffers, and 1/16 of what is free (32 to 512 MiB; on a GPU 512 MiB)",
            "memory that a plan without --memory leaves free",
            "a size: the memory that a plan without `memory` leaves free",
        ),
        Option(
            "lock",
            _switch,
            "one of on, off",
            False,
            "off",
            "lock the memory (mlock), so that the system keeps it",
            "on or off (1/0, true/false, yes/no, enabled/disabled): mlock the slots",
        ),
        Option(
            "profile",
            str,
            "a path",
            None,
            "none",
            "start warm from what earlier runs kept there, and keep this run's use of experts",
            "a path: findings about the disk, and how experts were used, are kept there "
            "on `close`; see below",
            metavar="FILE",
        ),
        Option(
            "loader_threads",
            _threads,
            "a number of threads",
            None,
            f"{DEFAULT_LOADER_THREADS}; 8 for direct reads without io_uring, up to 12 for a GPU "
            "and cached reads",
            "threads that read experts",
            "0 and up; 0 reads only in the thread that waits; with io_uring a number above 1 "
            "counts as 1",
        ),
        Option(
            "prefault",
            _word(_PREFAULT_WORDS),
            f"one of {', '.join(PREFAULT_MODES)}",
            DEFAULT_PREFAULT,
            DEFAULT_PREFAULT,
            "what is brought into memory before the first request",
            f"{_listed(PREFAULT_MODES)}; also 0, false, no, disabled (off) and 1, true, on, yes, "
            "enabled (force)",
        ),
        Option(
            "prefetch",
            _word(
                {
                    **dict.fromkeys(_OFF, "off"),
                    **dict.fromkeys(_ON, DEFAULT_PREFETCH),
                    **{mode: mode for mode in PREFETCH_MODES},
                }
            ),
            f"one of {', '.join(PREFETCH_MODES)}",
            DEFAULT_PREFETCH,
            DEFAULT_PREFETCH,
            "which predictor's guesses are read before a layer asks",
            f"{_listed(PREFETCH_MODES)}, see [prefetch.md](prefetch.md); also 0, false, no, "
            "disabled (off) and 1, true, on, yes, enabled (auto); the argument also takes a "
            "predictor",
        ),
        Option(
            "expert_stats",
            str,
            "a path",
            None,
            "none",
            "write the report there on close",
            "a path: the report is written there on `close`; a path that cannot be written is a "
            "warning",
            is_argument=False,
        ),
        Option(
            "warmpin",
            _pins,
            "a number of experts, auto or off",
            DEFAULT_WARMPIN,
            DEFAULT_WARMPIN,
            "experts of each layer that are pinned, once",
            "experts of each layer to pin, once, after `warmpin_after` accesses; 0 or off: none; "
            "`auto`",
        ),
        Option(
            "warmpin_after",
            _number,
            "a number of accesses",
            DEFAULT_WARMPIN_AFTER,
            str(DEFAULT_WARMPIN_AFTER),
            "accesses, hits and misses together, that are counted before the warm pin",
            "0 and up: accesses, hits and misses together, that are counted before `warmpin` pins",
        ),
        Option(
            "record_trace",
            str,
            "a path",
            None,
            "none",
            "write which experts each token chose, for `moecache replay` (.npz)",
            "a path: the router's choices are written there on `close`, see "
            "[traces.md](traces.md); as a variable, a path that cannot be written is a warning; of "
            "several runtimes the last to close writes it",
            metavar="FILE",
        ),
        Option(
            "threads",
            _cores,
            "a number of threads from 1 to 256",
            None,
            "the cores that the process may use",
            "threads that compute experts (`load` takes `num_threads`)",
            "1 to 256: threads of the kernels; `load` takes `num_threads`",
            is_argument=False,
        ),
        Option(
            "kernels",
            _one_of(KERNEL_LEVELS),
            f"one of {', '.join(KERNEL_LEVELS)}",
            None,
            "the best one that the processor has",
            "instructions that the kernels use",
            f"{_listed(KERNEL_LEVELS)}: instructions that the kernels use, for tests",
            KERNEL_LEVELS,
            is_argument=False,
        ),
    )
}


def ranks_environ(number: int) -> dict[str, str]:
    """Return the environment of a child that is this process's rank in another group of ranks.

    Parameters
    ----------
    number : int
        Number of the group: the same on all ranks, another for each group. Children that share
        torchrun's store need names of their own in it, too.
    """
    # The store of torchrun, which outlives the child, or one that rank 0's child makes.
    port = os.environ.get("MASTER_PORT", "")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not port.isdigit():
        return {**os.environ}
    return {**os.environ, "MASTER_PORT": str(int(port) + number)}


class Launched(NamedTuple):
    """The facts given by torchrun, or another launcher of several processes; `None`: none."""

    rank: int | None
    num_ranks: int | None
    local_rank: int | None


def launched_ranks(environ: Mapping[str, str] | None = None) -> Launched:
    """Return which of how many processes this is, by RANK, WORLD_SIZE and LOCAL_RANK."""
    given = os.environ if environ is None else environ
    found = [given.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    return Launched(*(int(text) if text.isascii() and text.isdigit() else None for text in found))


class Choice(NamedTuple):
    """The value that counts, and its origin: "argument", a variable's name, or "default"."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Settings:
    """The environment's settings; each option is an attribute, None if it is not set.

    An argument beats the environment, the environment beats the default.
    docs/settings.md lists the variables.
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """Return what a variable says, None if it is not set."""
        if name not in OPTIONS:
            raise AttributeError(name)
        return self.values.get(name)

    def choose(self, name: str, argument: Any = None) -> Choice:
        """Return the value that counts: the argument, the environment's, or the default.

        Raises
        ------
        ConfigError
            If the argument is not one of the option's choices.
        """
        option = OPTIONS[name]
        if argument is not None:
            return Choice(option.check(argument), "argument")
        if self.values.get(name) is not None:
            return Choice(self.values[name], option.variable)
        return Choice(option.default, "default")

    @classmethod
    def from_environ(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        only: tuple[str, ...] | None = None,
        is_told: bool = True,
    ) -> Self:
        """Read the MOECACHE_* variables.

        A value that cannot be read is a warning that names variable, value and
        what happens instead; an unknown name is a warning with the nearest
        known one. Empty values count as not set.

        Parameters
        ----------
        environ : mapping, optional
            Read instead of the process's environment.
        only : tuple of str, optional
            Options to be read; the others are not looked at.
        is_told : bool, default True
            Whether there are warnings; not where they come again.
        """
        environ = os.environ if environ is None else environ
        if only is not None:
            asked = [OPTIONS[name].variable for name in only]
            environ = {name: environ[name] for name in asked if name in environ}
        known = {option.variable: option for option in OPTIONS.values()}
        values: dict[str, Any] = {}
        for variable in sorted(environ):
            if not variable.startswith(PREFIX) or variable in _BUILD_VARIABLES:
                continue
            text = environ[variable].strip()
            if variable not in known:
                if is_told:
                    _warn_unknown(variable, list(known))
            elif text:
                option = known[variable]
                try:
                    values[option.name] = option.parse(text)
                except ValueError:
                    logger.log(
                        logging.WARNING if is_told else logging.DEBUG,
                        "settings.malformed %s=%r is not %s; using the default, %s",
                        variable,
                        text,
                        option.expected,
                        option.instead.replace("`", ""),
                    )
        return cls(values)


def markdown_table() -> str:
    """Return the table of docs/settings.md."""
    lines = ["| variable | argument of `moecache.open` | values | default |", "|-|-|-|-|"]
    for option in OPTIONS.values():
        argument = f"`{option.name}`" if option.is_argument else ""
        default = f"`{option.default}`" if option.default in option.choices else option.instead
        lines.append(f"| `{option.variable}` | {argument} | {option.values} | {default} |")
    return "\n".join(lines)


def prefaults(mode: object) -> bool:
    """Return whether a pre-fault mode, known or not, asks for anything."""
    return _PREFAULT_WORDS.get(str(mode).strip().lower()) != "off"


def parse_prefault(mode: object, known: tuple[str, ...] = PREFAULT_MODES) -> str:
    """Return a pre-fault mode.

    Parameters
    ----------
    mode : str, int or bool
        One of `known`, 0 and 1, or a word that switches things off or on.
    known : tuple of str

    Raises
    ------
    ConfigError
        If it is another one.
    """
    found = _PREFAULT_WORDS.get(str(mode).strip().lower())
    if found not in known:
        raise ConfigError(f"prefault {mode!r} is not one of {', '.join(known)}")
    return found


def _warn_unknown(variable: str, known: list[str]) -> None:
    # A word in common says more than similar letters.
    words = set(variable.split("_")[1:])
    related = [name for name in known if words & set(name.split("_")[1:])]
    nearest = difflib.get_close_matches(
        variable, related or known, n=1, cutoff=0 if related else 0.6
    )
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
    logger.warning("settings.unknown %s is not a setting; %s", variable, hint)


def let_idle_threads_sleep() -> None:
    """Have torch's threads give up their cores while they wait, unless the user said otherwise.

    By default they look for work for milliseconds: with two threads on two cores that took half of
    the time from kernels and readers. OpenMP reads it when torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
