"""Causes of reads, and the ends of reads that brought nothing."""

import enum
import logging
from typing import Any

from moecache.errors import FormatError, MoeCacheError
from moecache.stores.base import ExpertStore, FileStore

logger = logging.getLogger(__name__)

_MAX_LOGGED_CAUSES = 100


class Cause(enum.Enum):
    """Why an expert is read."""

    DEMAND = "demand"  # a token chose it
    BULK = "bulk"  # one of many tokens did
    PREFETCH = "prefetch"  # no token did so far, but one may
    WARM_START = "warm_start"  # an earlier run used it


class ReadCancelledError(MoeCacheError):
    """A read that was taken back, interrupted, or ended by `close`: no failure of the store."""


def named(error: Exception, load: Any, store: ExpertStore) -> Exception:
    """Return an error; one of an expert's bytes says whose they are, and in which files."""
    if not isinstance(error, FormatError):
        return error
    what = f"expert {load.expert} of layer {load.layer}"
    if isinstance(store, FileStore):
        runs = store.runs(load.layer, load.expert)
        paths = sorted({str(store.files[number].path) for number, *_ in runs})
        what = f"{', '.join(paths)}: {what}"
    told = FormatError(f"{what}: {error}")
    told.__cause__ = error
    return told


def interrupted(read: Any) -> ReadCancelledError:
    """Return how a read ends whose caller was interrupted; steps that wait have it read again."""
    return ReadCancelledError(
        f"reading expert {read.expert} of layer {read.layer} was interrupted; call again"
    )


def log_failure(load: Any, logged: set[tuple[type, str]]) -> None:
    """Log a failure that no step can be told of.

    Once per cause, which `logged` keeps: a dead disk fails every read.
    """
    cause = (type(load.error), str(load.error))
    if cause not in logged and len(logged) < _MAX_LOGGED_CAUSES:
        logged.add(cause)
        logger.warning(
            "loader.read_failed layer=%d expert=%d error=%s", load.layer, load.expert, load.error
        )


def log_stuck(num_reads: int) -> None:
    """Log that a loader was closed while reads had not come back."""
    logger.warning("loader.stuck reads=%d do not return", num_reads)
