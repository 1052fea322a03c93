"""`moecache.open`: from a path and a budget to a runtime."""

import os
from collections.abc import Collection

import numpy.typing as npt

from moecache.prefault.sweep import Progress
from moecache.prefetch.predict import Predictor
from moecache.ranks import Share
from moecache.runtime.options import Options
from moecache.runtime.plan import plan
from moecache.runtime.runtime import ExpertRuntime


def open(  # noqa: A001 - called as moecache.open
    path: str | os.PathLike[str],
    memory: int | str | None = None,
    device: str = "cpu",
    *,
    slots: int | None = None,
    policy: str | None = None,
    scope: str | None = None,
    dtype: npt.DTypeLike | None = None,
    top_k: int | None = None,
    read: str | None = None,
    reserve: int | str | None = None,
    lock: bool | None = None,
    profile: str | os.PathLike[str] | None = None,
    loader_threads: int | None = None,
    prefetch: str | Predictor | None = None,
    prefault: str | None = None,
    progress: Progress | None = None,
    record_trace: str | os.PathLike[str] | None = None,
    warmpin: int | str | None = None,
    warmpin_after: int | None = None,
    register: str | None = None,
    layers: Collection[str] | None = None,
    context_tokens: int | None = None,
    host_bytes: int | None = None,
    share: Share | None = None,
) -> ExpertRuntime:
    """Open a checkpoint's experts for use in a bounded amount of memory.

    The same as `moecache.plan(...).open()`. `moecache.Options` says what each argument does.

    Returns
    -------
    ExpertRuntime
        A context manager; `close` it.

    Raises
    ------
    ConfigError
        If an argument cannot be used.
    CapacityError
        If the memory does not hold a slot and a staging slot, if the slots would
        not fit into what is free, or cannot be locked.
    MissingDependencyError
        If slots on a GPU were asked for and CuPy is not installed.
    MoeCacheError
        If the GPU cannot be used.
    StoreError
        If the checkpoint cannot be read, or has no experts.
    """
    arguments = locals()
    del arguments["path"]
    return plan(path, options=Options(**arguments)).open()
