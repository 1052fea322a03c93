"""The difference of two snapshots: the counts in between."""

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Snapshot = TypeVar("Snapshot", bound=DataclassInstance)


def subtracted(
    later: "Snapshot", earlier: "Snapshot", counters: Collection[str], **others: Any
) -> "Snapshot":
    """Return `later` with its counters less those of `earlier`, and `others` in place of its own.

    Parameters
    ----------
    later, earlier : dataclass
        Two snapshots of one kind.
    counters : collection of str
        Fields that hold an int, or a tuple of them.
    others : object
        Other changes.
    """
    changes = {name: _less(getattr(later, name), getattr(earlier, name)) for name in counters}
    return dataclasses.replace(later, **changes, **others)


def _less(later: Any, earlier: Any) -> Any:
    if isinstance(later, tuple):
        return tuple(one - other for one, other in zip(later, earlier, strict=True))
    return later - earlier
