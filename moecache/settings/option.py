"""One option of `open`: its argument, its variable, its meaning."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moecache.errors import ConfigError

PREFIX = "MOECACHE_"


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
