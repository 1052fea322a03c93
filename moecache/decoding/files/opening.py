"""Opening: a model of files, its experts in slots, its trunk in memory."""

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moecache.decoding.files.model import TextModel
from moecache.decoding.files.recipes import FileModel
from moecache.decoding.files.trunk import Trunk
from moecache.decoding.program_model import PROMPT_TOKENS
from moecache.errors import ConfigError, MissingDependencyError
from moecache.runtime.open import open as open_runtime
from moecache.stores import CheckpointStore, GgufStore, SafetensorsStore, open_store
from moecache.units import parse_bytes

if TYPE_CHECKING:
    from moecache.decoding.files.tokenizer import FileTokenizer

# Options of `moecache.Options` that are this module's own to give.
_OWN = {"device", "dtype", "layers", "makes_room", "share", "state_bytes", "token_bytes", "top_k"}


def read_tokenizer(store: CheckpointStore) -> "FileTokenizer":
    """Return the tokenizer of an open checkpoint.

    Raises
    ------
    ConfigError
        If it is of a kind that is not known, or contradicts itself.
    StoreError
        If it cannot be read, or there is none.
    MissingDependencyError
        If tokenizers is not installed.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise MissingDependencyError(
            "text needs tokenizers; install it with: pip install 'moecache[text]'"
        )
    if isinstance(store, GgufStore):
        from moecache.decoding.gguf import tokenizer

        return tokenizer.read_tokenizer(store.metadata)
    if isinstance(store, SafetensorsStore):
        from moecache.decoding.safetensors.tokenizer import read_directory

        return read_directory(store.directory)
    raise ConfigError(f"{store.path}: no tokenizer is known for {type(store).__name__}")


def open_text_model(
    path: str | os.PathLike[str] | CheckpointStore,
    memory: int | str | None = None,
    *,
    prefix_memory: int | str = 0,
    on_trunk: Callable[[FileModel, Trunk], object] = lambda *_: None,
    **options: Any,
) -> TextModel:
    """Open a model of files to compute text with it, without torch.

    Parameters
    ----------
    path : str, Path or CheckpointStore
        A GGUF file, or a checkpoint of safetensors. A store that is open is closed with the model,
        and also on an error.
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
    store = path if isinstance(path, CheckpointStore) else open_store(path)
    runtime = trunk = None
    try:
        said = FileModel(store)
        is_forced = options.get("prefetch") == "router"
        if is_forced:
            # It still guesses for the first layer.
            options["prefetch"] = "echo"
        host_bytes = said.trunk_bytes + said.prompt_bytes(PROMPT_TOKENS)
        options |= {"token_bytes": said.bytes_per_token, "state_bytes": said.state_bytes}
        if said.own_layers is not None:
            options["layers"] = said.own_layers
        options["host_bytes"] = options.get("host_bytes", host_bytes) + parse_bytes(prefix_memory)
        store.transpose_roles(said.transposed)
        # First: its calibration wants the disk for itself, and the plan leaves room for the trunk.
        runtime = open_runtime(store, memory, makes_room=True, **options)
        trunk = Trunk(said.tensors, said.names())
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
