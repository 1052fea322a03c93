"""Checks of what is given as the path of a checkpoint."""

import errno
import os
import re
import stat
from pathlib import Path

from moecache.errors import ConfigError, StoreError

# A name on the Hugging Face hub, with its owner or without.
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[\w.-]{1,96})?", re.ASCII)
# Characters of a long path that a message shows.
_SHOWN = 200


def check_name(path: object) -> str:
    """Return a path as text.

    Raises
    ------
    ConfigError
        If no file can have such a name.
    """
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str):
        raise ConfigError(f"a path must be a str or Path, got {ascii(path)[:_SHOWN]}")
    if not name:
        raise ConfigError("the path is empty; is a shell variable unset?")
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name[:_SHOWN]!a} is no path: {error.reason}; check it") from error
    if b"\0" in encoded:
        raise ConfigError(f"{name[:_SHOWN]!a} is no path: it has a NUL in it; check it")
    return name


def find_path(path: object) -> Path:
    """Return the path of something that is there.

    Raises
    ------
    ConfigError
        If no file can have such a name.
    StoreError
        If nothing is there, or that cannot be told.
    """
    name = check_name(path)
    try:
        os.stat(name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(f"{name}: no such file or directory") from error
    except OSError as error:
        raise StoreError(
            f"{name[:_SHOWN]}: cannot be opened: {error.strerror}; check the path"
        ) from error
    return Path(name)


def status_of(path: str | Path, *, follow: bool = True) -> os.stat_result | None:
    """Return what the system says of a path, or of a link there; None if nothing is there.

    Unlike `os.path.exists`, which takes a file that cannot be looked at for none.

    Raises
    ------
    StoreError
        If that cannot be told.
    """
    try:
        return os.stat(path, follow_symlinks=follow)
    except ValueError:  # no file can have such a name
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def is_file(path: str | Path) -> bool:
    """Return whether there is a regular file; StoreError if that cannot be told."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_directory(path: str | Path) -> bool:
    """Return whether there is a directory; StoreError if that cannot be told."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def check_model(path: object) -> None:
    """Raise if this can be no directory, no GGUF file and no name on the hub.

    Raises
    ------
    ConfigError
        If no file can have such a name.
    StoreError
        If there is no such directory, or file.
    """
    name = check_name(path)
    is_hub_name = _HUB_NAME.fullmatch(name) and not name.lower().endswith(".gguf")
    if os.path.isdir(name) or (is_hub_name and not os.path.exists(name)):
        return
    if name.lower().endswith(".gguf") and os.path.isfile(name):
        return
    raise StoreError(
        f"{name[:_SHOWN]!r}: there is no such model; it is a directory with config.json and "
        "safetensors files, a .gguf file, or a name on the Hugging Face hub"
    )
