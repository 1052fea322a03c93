"""Settings: every MOECACHE_* variable. The only file that reads the environment."""

import difflib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

from moecache.errors import ConfigError
from moecache.units import parse_budget, parse_bytes

logger = logging.getLogger(__name__)

POLICIES = (
    "arc",
    "echo",
    "fifo",
    "haz2",
    "least-stale",
    "lecar",
    "lfru",
    "lfu",
    "lrfu",
    "lru",
    "s3-fifo",
    "sieve",
    "slru",
    "slru-lfu",
    "w-tinylfu",
)
SCOPES = ("global", "layer")
DEFAULT_POLICY = "echo"
DEFAULT_SCOPE = "global"
DEFAULT_LOADER_THREADS = 2
PREFAULT_MODES = ("auto", "background", "off", "force")
DEFAULT_PREFAULT = "auto"
READ_MODES = ("auto", "buffered", "direct", "mmap")
DEFAULT_READ = "auto"
PREFETCH_MODES = ("auto", "echo", "hints", "last", "off")
DEFAULT_PREFETCH = "auto"
DEFAULT_WARMPIN = "auto"
DEFAULT_WARMPIN_AFTER = 512

PREFIX = "MOECACHE_"
# Read when the package is built, not when it runs.
_BUILD_VARIABLES = {"MOECACHE_BUILD"}


@dataclass(frozen=True)
class Settings:
    """What the environment asks for; None where it is silent.

    An argument beats the environment, the environment beats the default.
    docs/settings.md lists the variables.
    """

    memory: str | None = None
    policy: str | None = None
    scope: str | None = None
    loader_threads: int | None = None
    expert_stats: str | None = None
    prefault: str | None = None
    read: str | None = None
    prefetch: str | None = None
    reserve: str | None = None
    lock: bool | None = None
    profile: str | None = None
    record_trace: str | None = None
    warmpin: int | str | None = None
    warmpin_after: int | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the MOECACHE_* variables.

        A value that cannot be read is a warning that names variable, value and
        what happens instead; an unknown name is a warning with the nearest
        known one. Empty values count as not set.

        Parameters
        ----------
        environ : mapping, optional
            Instead of the process's environment.
        """
        environ = os.environ if environ is None else environ
        known = {PREFIX + field.name.upper(): field.name for field in fields(cls)}
        values: dict[str, str | int | bool] = {}
        for variable in sorted(environ):
            if not variable.startswith(PREFIX) or variable in _BUILD_VARIABLES:
                continue
            text = environ[variable].strip()
            if variable not in known:
                _warn_unknown(variable, list(known))
            elif text:
                name = known[variable]
                value = _parse(name, text)
                if value is None:
                    logger.warning(
                        "settings.malformed %s=%r is not %s; using the default, %s",
                        variable,
                        text,
                        *_EXPECTED[name],
                    )
                else:
                    values[name] = value
        return cls(**values)  # type: ignore[arg-type]


# What a value has to be, and what is used instead.
_EXPECTED = {
    "memory": ("a size such as 4GiB or a share such as 25%", "what is free"),
    "policy": (f"one of {', '.join(POLICIES)}", DEFAULT_POLICY),
    "scope": (f"one of {', '.join(SCOPES)}", DEFAULT_SCOPE),
    "loader_threads": ("a number of threads", str(DEFAULT_LOADER_THREADS)),
    "prefault": (f"one of {', '.join(PREFAULT_MODES)}", DEFAULT_PREFAULT),
    "read": (f"one of {', '.join(READ_MODES)}", DEFAULT_READ),
    "prefetch": (f"one of {', '.join(PREFETCH_MODES)}", DEFAULT_PREFETCH),
    "reserve": ("a size such as 2GiB", "512 MiB, trunk and KV cache"),
    "lock": ("one of on, off", "off"),
    "warmpin": ("a number of experts, auto or off", DEFAULT_WARMPIN),
    "warmpin_after": ("a number of accesses", str(DEFAULT_WARMPIN_AFTER)),
}


_OFF = ("0", "false", "no", "disabled", "off")
_ON = ("1", "true", "on", "yes", "enabled")
_PREFAULT_WORDS = {
    **{mode: mode for mode in PREFAULT_MODES},
    **dict.fromkeys(_OFF, "off"),
    **dict.fromkeys(_ON, "force"),
}


def parse_prefault(mode: object, known: tuple[str, ...] = PREFAULT_MODES) -> str:
    """Return a pre-fault mode; what is not known is a warning and the default.

    Parameters
    ----------
    mode : str, int or bool
        One of `known`, 0 and 1, or a word that switches things off or on.
    known : tuple of str
    """
    found = _PREFAULT_WORDS.get(str(mode).strip().lower())
    if found in known:
        return found
    logger.warning(
        "settings.malformed prefault=%r is not one of %s; using the default, %s",
        mode,
        ", ".join(known),
        DEFAULT_PREFAULT,
    )
    return DEFAULT_PREFAULT


_CHOICES = {"policy": POLICIES, "scope": SCOPES, "read": READ_MODES}


def _parse(name: str, text: str) -> str | int | bool | None:
    if name == "loader_threads":
        return int(text) if re.fullmatch(r"[0-9]{1,3}", text) else None
    if name in {"warmpin", "warmpin_after"}:
        if name == "warmpin" and text.lower() in {"auto", *_OFF}:
            return "auto" if text.lower() == "auto" else 0
        return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None
    if name in _CHOICES:
        return text if text in _CHOICES[name] else None
    if name == "lock":
        return {**dict.fromkeys(_OFF, False), **dict.fromkeys(_ON, True)}.get(text.lower())
    if name == "prefetch":
        words = {**dict.fromkeys(_OFF, "off"), **dict.fromkeys(_ON, DEFAULT_PREFETCH)}
        words.update((mode, mode) for mode in PREFETCH_MODES)
        return words.get(text.lower())
    if name == "prefault":
        return _PREFAULT_WORDS.get(text.lower())
    if name in {"memory", "reserve"}:
        try:
            parse_budget(text, 0) if name == "memory" else parse_bytes(text)
        except ConfigError:
            return None
    return text


def _warn_unknown(variable: str, known: list[str]) -> None:
    # A word in common says more than letters do.
    words = set(variable.split("_")[1:])
    related = [name for name in known if words & set(name.split("_")[1:])]
    nearest = difflib.get_close_matches(
        variable, related or known, n=1, cutoff=0 if related else 0.6
    )
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
    logger.warning("settings.unknown %s is not a setting; %s", variable, hint)
