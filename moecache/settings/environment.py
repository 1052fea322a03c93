"""Settings: every MOECACHE_* variable, and what a launcher says of this process.

The only file that reads the environment.
"""

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from moecache.settings.option import PREFIX
from moecache.settings.options import OPTIONS

logger = logging.getLogger(__name__)

# Read when the package is built, not when it runs.
_BUILD_VARIABLES = {"MOECACHE_BUILD", "MOECACHE_BUILD_CACHE"}


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


def let_idle_threads_sleep() -> None:
    """Have torch's threads give up their cores while they wait, unless the user said otherwise.

    By default they look for work for milliseconds: with two threads on two cores that took half of
    the time from kernels and readers. OpenMP reads it when torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _warn_unknown(variable: str, known: list[str]) -> None:
    # A word in common says more than similar letters.
    words = set(variable.split("_")[1:])
    related = [name for name in known if words & set(name.split("_")[1:])]
    nearest = difflib.get_close_matches(
        variable, related or known, n=1, cutoff=0 if related else 0.6
    )
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
    logger.warning("settings.unknown %s is not a setting; %s", variable, hint)
