"""Opening: a GGUF file's model, its experts in slots, its trunk in memory."""

import os
from collections.abc import Callable
from typing import Any

from moecache.decoding.gguf.model import TextModel
from moecache.decoding.gguf.recipes import FileModel
from moecache.decoding.gguf.trunk import Trunk
from moecache.decoding.program_model import PROMPT_TOKENS
from moecache.errors import ConfigError
from moecache.runtime.open import open as open_runtime
from moecache.stores import GgufStore, open_store
from moecache.units import parse_bytes

# Options of `moecache.Options` that are this module's own to give.
_OWN = {"device", "dtype", "layers", "makes_room", "share", "state_bytes", "token_bytes", "top_k"}


def open_text_model(
    path: str | os.PathLike[str] | GgufStore,
    memory: int | str | None = None,
    *,
    prefix_memory: int | str = 0,
    on_trunk: Callable[[FileModel, Trunk], object] = lambda *_: None,
    **options: Any,
) -> TextModel:
    """Open a GGUF file's model to compute text with it, without torch.

    Parameters
    ----------
    path : str, Path or GgufStore
        One that is open is closed with the model, and also on an error.
    memory : int or str, optional
        For the experts' slots, as `moecache.open` takes it; the trunk comes on top.
    prefix_memory : int or str, default 0
        That a cache of texts' pages will take, as `continuing.open_prefixes` makes one.
    on_trunk : callable (FileModel, Trunk), optional
        Given, as the trunk's reads begin, what the file says, and the trunk, whose `progress` says
        how far it is.
    **options
        Those of `moecache.Options` that say how experts are kept and read: not `device`, `dtype`,
        `layers`, `makes_room`, `share`, `state_bytes`, `token_bytes` or `top_k`. `prefetch` may
        also be "router": the next layer's router, given this layer's input.

    Returns
    -------
    TextModel
        A context manager; `close` it.

    Raises
    ------
    NoTextModelError
        If the file's model runs with torch alone.
    ConfigError
        If an option cannot be used.
    StoreError
        If the file cannot be read, or is another one at the end.
    """
    given = sorted(_OWN & options.keys())
    if given:
        raise ConfigError(f"{', '.join(given)} cannot be given for a model without torch")
    store = path if isinstance(path, GgufStore) else open_store(path)
    runtime = trunk = None
    try:
        if not isinstance(store, GgufStore):
            raise ConfigError(f"{path}: is no GGUF file")
        said = FileModel(store)
        is_forced = options.get("prefetch") == "router"
        if is_forced:
            # It still guesses for the first layer.
            options["prefetch"] = "echo"
        host_bytes = said.trunk_bytes + said.prompt_bytes(PROMPT_TOKENS)
        options |= {"token_bytes": said.bytes_per_token, "state_bytes": said.state_bytes}
        options["host_bytes"] = options.get("host_bytes", host_bytes) + parse_bytes(prefix_memory)
        # First: its calibration wants the disk for itself, and the plan leaves room for the trunk.
        runtime = open_runtime(store, memory, makes_room=True, **options)
        trunk = Trunk(store, said.names())
        on_trunk(said, trunk)
        model = TextModel(said, runtime, trunk, looks_ahead=is_forced)
        trunk.close()
        # A trunk and experts of two versions would be no model.
        store.check_current()
    except BaseException:
        # Its threads read from the store.
        if trunk is not None:
            trunk.close()
        if runtime is not None:
            runtime.close()
        store.close()
        raise
    return model
