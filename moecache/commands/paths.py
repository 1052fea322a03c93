"""PATH arguments of the commands: files, directories and checkpoints."""

import argparse
import logging
import mmap
import os
from pathlib import Path

from moecache._prefault import address_of
from moecache.errors import ConfigError, StoreError
from moecache.prefault.regions import Region
from moecache.stores import CheckpointStore, open_store
from moecache.stores._paths import check_model, find_path
from moecache.stores.gguf._parts import find_parts, is_gguf

logger = logging.getLogger(__name__)

# The names that a MODEL may have, for helps.
HUB_NAMES = (
    "a name on the Hugging Face hub: user/repo, of a GGUF user/repo:Q4_K_M, of a revision "
    "user/repo@REVISION"
)


def find_files(name: str) -> list[Path]:
    """Return a file itself, or all files below a directory that are not hidden.

    One part of a GGUF in parts stands for all, as for `load`.

    Directories that cannot be listed are logged as a warning.

    Raises
    ------
    ConfigError
        If no file can have such a name.
    StoreError
        If there is nothing; FormatError if a part is missing.
    """
    path = find_path(name)
    if not path.is_dir():
        return find_parts(path) if is_gguf(path) else [path]
    files = []

    def warn(error: OSError) -> None:
        logger.warning("paths.skipped %s: %s", printable(error.filename), error.strerror)

    for directory, names, leaves in os.walk(path, onerror=warn):
        names[:] = sorted(name for name in names if not name.startswith("."))
        shown = (Path(directory) / leaf for leaf in sorted(leaves) if not leaf.startswith("."))
        files += [file for file in shown if file.is_file()]
    if not files:
        raise StoreError(f"{path}: there is no file in it")
    return files


def map_file(path: Path) -> Region | None:
    """Return the whole file as a region, or None if it is empty.

    Raises
    ------
    StoreError
        If it cannot be mapped.
    """
    try:
        if not path.is_file():
            raise StoreError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return None
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be mapped: {error}") from error
    return Region(*address_of(mapping), mapping)


def has_experts(path: str) -> bool:
    """Return whether a path is a checkpoint with experts that can be told apart."""
    try:
        with open_store(path) as store:
            return store.layout.total_experts > 0
    except (ConfigError, StoreError):
        return False


def open_experts(path: str, layers: list[int] | None) -> tuple[CheckpointStore, list[int]]:
    """Return the store of a checkpoint, to be closed, and the layers that were asked for.

    By default these are the layers that the model runs, without those that guess further tokens.

    Raises
    ------
    ConfigError
        If it has no experts, or not such layers.
    StoreError
        If it is no checkpoint that is read here.
    """
    store = open_store(path)
    try:
        if layers is None:
            store.leave_mtp_out()
        num_layers = store.layout.num_layers
        if store.layout.total_experts == 0:
            raise ConfigError(f"{path}: there are no experts; is it a mixture-of-experts model?")
        for layer in layers or ():
            if layer >= num_layers:
                raise ConfigError(f"{path}: there is no MoE layer {layer}, it has {num_layers}")
    except BaseException:
        store.close()
        raise
    return store, list(range(num_layers)) if layers is None else layers


def printable(text: object) -> str:
    """Return a name without what a terminal would obey: a checkpoint is not to be trusted."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def printable_lines(text: str) -> str:
    """Return lines without what a terminal would obey."""
    return "\n".join(map(printable, text.splitlines()))


def add_hub_options(parser: argparse.ArgumentParser) -> None:
    """Add llama-server's options of a model on the hub; the parser has MODEL of -hf."""
    parser.add_argument(
        "-hf",
        "-hfr",
        "--hf-repo",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="a name on the hub, instead of MODEL",
    )
    parser.add_argument(
        "-hff",
        "--hf-file",
        metavar="FILE",
        help="the repository's GGUF file to take, instead of a quantisation; of a split one any "
        "part",
    )


def hub_path(name: str, file: str | None = None) -> str:
    """Return a path as it is, and of a model of the hub its path in the cache, once it is there.

    Raises
    ------
    StoreError
        As `moecache.integrations.hub_download.resolve`.
    """
    from moecache.integrations.hub_download import resolve

    return resolve(name, file=file)


def find_model(arguments: argparse.Namespace) -> None:
    """Put the path of the model in the place of its name, which `named` keeps, and check it.

    Called before the model is looked at otherwise, and before torch, whose import takes seconds.

    Raises
    ------
    ConfigError
        If no file can have such a name.
    StoreError
        If there is no such model, here or on the hub, or it is of no known format.
    """
    arguments.named = arguments.model
    arguments.model = hub_path(arguments.model, getattr(arguments, "hf_file", None))
    check_model(arguments.model)
    check_format(arguments.model)


def check_format(model: str) -> None:
    """Raise, as `open_store` does, if a model on this machine has experts in no known format.

    Before anything else is looked at: without it, a missing tokenizer would be found first. For a
    model that is not on this machine, raise StoreError unless the hub has it.
    """
    if os.path.exists(model):
        open_store(model).close()
        return
    from moecache.integrations.hub import look_up

    look_up(model)
