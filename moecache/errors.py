"""The exceptions of moecache.

MoeCacheError
├── ConfigError (ValueError)             a setting or argument that cannot be used
├── CapacityError (ValueError)           more experts asked for than there is room
├── MissingDependencyError (ImportError) an optional package is not installed
├── SweepError                           parts of a study's sweep failed
└── StoreError                           experts cannot be read
    ├── FormatError (ValueError)         the file is damaged or of an unknown form
    └── ExpertNotFoundError (LookupError) the file has no such expert
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


class MoeCacheError(Exception):
    """Base of every exception that moecache raises for its own reasons."""


class ConfigError(MoeCacheError, ValueError):
    """A setting or argument that cannot be used."""


class CapacityError(MoeCacheError, ValueError):
    """More experts asked for than there is room."""


class MissingDependencyError(MoeCacheError, ImportError):
    """An optional package is not installed."""


class SweepError(MoeCacheError):
    """Parts of a study's sweep failed; the others are in `table`.

    Attributes
    ----------
    table : moecache.study.Table
    failures : list of (dict, Exception)
        Trace, policy, scope and capacity of each part that failed, and why.
    """

    def __init__(
        self, message: str, table: "Any", failures: "list[tuple[dict[str, Any], Exception]]"
    ) -> None:
        super().__init__(message)
        self.table = table
        self.failures = failures

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Keep table and failures on the way from another process."""
        return type(self), (str(self), self.table, self.failures)


class StoreError(MoeCacheError):
    """Experts cannot be read."""


class FormatError(StoreError, ValueError):
    """The file is damaged or of an unknown form."""


class ExpertNotFoundError(StoreError, LookupError):
    """The file has no such expert."""
