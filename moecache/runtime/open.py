"""`moecache.open`: from a checkpoint and a budget to a runtime."""

import contextlib
import os
from typing import Any

from moecache.runtime.opening import open_with
from moecache.runtime.options import Options, takes_options
from moecache.runtime.plan import find_store, plan_store
from moecache.runtime.runtime import ExpertRuntime
from moecache.settings import Settings
from moecache.stores import CheckpointStore


@takes_options
def open(  # noqa: A001 - called as moecache.open
    path: str | os.PathLike[str] | CheckpointStore,
    memory: int | str | None = None,
    device: str = "cpu",
    *,
    options: Options | None = None,
    **keywords: Any,
) -> ExpertRuntime:
    """Open a checkpoint's experts for use in a bounded amount of memory.

    Does what `moecache.plan` says.

    Parameters
    ----------
    path : str, Path or CheckpointStore
        A Hugging Face checkpoint directory, one .safetensors file, or a .gguf file; see
        `open_store`. One that is open is closed with the runtime, and also on an error.
    memory, device, **keywords
        `moecache.Options` says what each does.
    options : Options, optional
        All of them as one object, instead.

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
    options = Options.of(options, memory=memory, device=device, **keywords)
    settings = Settings.from_environ()
    with contextlib.ExitStack() as undo:
        if isinstance(path, CheckpointStore):
            undo.callback(path.close)
        store = find_store(path, options)
        undo.callback(store.close)
        chosen = plan_store(store, options, settings)
        undo.pop_all()
    return open_with(chosen, store)
