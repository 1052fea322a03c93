"""Recording: a cache's steps, written as a trace when it ends."""

import itertools
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from moecache.cache._cache import ExpertCache
from moecache.cache._route_log import RouteLog
from moecache.errors import ConfigError, MoeCacheError
from moecache.files import check_replaced
from moecache.layout import ExpertLayout
from moecache.traces.trace import TRACE_FILE, Trace
from moecache.units import format_bytes

logger = logging.getLogger(__name__)


class Recording:
    """Note every step of a cache until the recording is closed, then write the trace.

    Made by `ExpertRuntime.record_trace`. A context manager. `close` never fails: what
    cannot be written is a warning in the log, and `trace` still has it.

    Parameters
    ----------
    cache : ExpertCache
    path : str or Path
        Written when the recording ends, whole or not at all; an existing trace is
        replaced. If no expert was used, nothing is written.
    top_k : int, optional
        Experts per token: flat ids are noted as rows of `top_k`.
    layers : list of int, optional
        The model's own layer numbers.
    max_bytes : int, default 256 MiB
        Bytes of the log after which nothing more is noted.
    force : bool, default False
        Replace a file of any kind.
    **metadata
        Added to the trace.

    Attributes
    ----------
    log : RouteLog
    trace : Trace or None
        The recorded trace; None before the end.
    saved : bool
        Whether it is in the file.

    Raises
    ------
    ConfigError
        If the path is a directory, or is in one that does not exist or cannot be
        written to; if something else is there; or if max_bytes is below 1.
    MoeCacheError
        If the cache is being recorded already.
    """

    def __init__(
        self,
        cache: ExpertCache,
        path: str | os.PathLike[str],
        *,
        top_k: int | None = None,
        layers: list[int] | None = None,
        max_bytes: int = 256 * 2**20,
        force: bool = False,
        **metadata: Any,
    ) -> None:
        self.path = Path(path)
        check_recordable(self.path, force=force)
        if cache.route_log is not None:
            raise MoeCacheError("the cache is being recorded already; close that recording first")
        self.log = RouteLog(cache.num_layers, cache.num_experts, top_k=top_k, max_bytes=max_bytes)
        self.trace: Trace | None = None
        self.saved = False
        self._cache = cache
        self._layers = layers
        self._force = force
        self._metadata = metadata if top_k is None else {"top_k": top_k, **metadata}
        self._process = os.getpid()
        self._closed = False
        cache.route_log = self.log
        logger.info("recording.started path=%s", self.path)

    @property
    def closed(self) -> bool:
        """Whether the recording has ended."""
        return self._closed

    def close(self) -> None:
        """End the recording and write it; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._cache.route_log is self.log:
            self._cache.route_log = None
        if os.getpid() != self._process:
            # A forked child: the file is the parent's.
            return
        if self.log.full:
            logger.warning(
                "recording.full steps=%d dropped=%d bytes=%d max_bytes=%d; "
                "give record_trace a larger max_bytes=, or record less at once",
                self.log.num_steps,
                self.log.num_dropped,
                self.log.num_bytes,
                self.log.max_bytes,
            )
        try:
            self.trace = from_log(self.log, layers=self._layers, **self._metadata)
            if not self.log.num_steps:
                logger.info("recording.empty path=%s: no expert was used", self.path)
                return
            self.trace.save(self.path, force=self._force)
        except (MoeCacheError, MemoryError, OSError, ValueError) as error:
            logger.warning("recording.lost path=%s error=%s", self.path, error)
            return
        self.saved = True
        self.log.clear()
        logger.info("recording.saved path=%s tokens=%d", self.path, self.trace.num_tokens)

    stop = close

    def __enter__(self) -> Self:
        """Return the recording."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the recording, also after a failure."""
        self.close()


def from_log(log: RouteLog, *, layers: npt.ArrayLike | None = None, **metadata: Any) -> Trace:
    """Return what a log has noted as a trace.

    A pass over the layers is a step, and each of its rows a token: prefill where
    there are several, decode where there is one. See `RouteLog.trace_parts`; steps that
    it leaves out are a warning, and `num_dropped_steps` in the metadata.

    Parameters
    ----------
    log : RouteLog
    layers : array of integers, optional
        The model's own layer numbers.
    **metadata
        As for `Trace`.
    """
    experts, phase, sequence, step, bulk, num_left_out = log.trace_parts()
    if num_left_out:
        logger.warning(
            "trace.cut left_out=%d of=%d steps: with them the trace would take more than %s; give "
            "RouteLog or record_trace a larger max_bytes=, or each step [tokens, top_k] ids",
            num_left_out,
            log.num_steps,
            format_bytes(log.max_bytes),
        )
    if log.num_dropped + num_left_out:
        metadata["num_dropped_steps"] = log.num_dropped + num_left_out
    experts.flags.writeable = False
    return Trace(
        experts,
        num_experts=log.num_experts,
        phase=phase,
        sequence=sequence,
        step=step,
        bulk=bulk,
        layers=layers,
        **metadata,
    )


def record(
    cache: ExpertCache,
    layout: ExpertLayout,
    path: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None,
    max_bytes: int,
    force: bool,
) -> Recording:
    """Start to record a cache; facts about its model go into the trace's metadata."""
    known: dict[str, Any] = {} if model is None else {"model": Path(os.path.abspath(model)).name}
    return Recording(
        cache,
        path,
        top_k=layout.top_k,
        layers=_layer_numbers(layout.layer_names),
        max_bytes=max_bytes,
        force=force,
        **known,
        expert_bytes=max(map(layout.expert_bytes, range(layout.num_layers))),
        policy=cache.policy,
        scope=cache.scope,
        capacity=cache.capacity,
    )


def _layer_numbers(names: Sequence[str]) -> list[int] | None:
    """Return the numbers in the layers' names, or None if they are not in order."""
    found = [re.search(r"\d+", name) for name in names]
    numbers = [int(match[0]) for match in found if match]
    increasing = all(one < two for one, two in itertools.pairwise(numbers))
    return numbers if len(numbers) == len(names) and increasing else None


def check_recordable(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raise if it is clear now that a recording cannot be written there.

    Raises
    ------
    ConfigError
        If there is no such directory, or something other than a trace is there (unless `force`).
    """
    path = Path(path)
    if not force:
        check_replaced(path, TRACE_FILE)
    directory = path.parent
    if not directory.is_dir():
        raise ConfigError(f"{path}: there is no directory {directory}; make it first")
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory; name a file in it, such as trace.npz")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: the directory {directory} cannot be written to")
