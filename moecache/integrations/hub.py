"""Whether the Hugging Face hub, or its cache on this machine, has a model of a name."""

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moecache.errors import MissingDependencyError, MoeCacheError, StoreError
from moecache.stores._checkpoint import INDEX_NAME

# Seconds for the one attempt to reach the hub.
TIMEOUT_S = 5.0
_OPTIONS = ("cache_dir", "revision", "subfolder")


class NoSuchFileError(StoreError):
    """The hub has the repository, but not this file in it."""


def look_up(path: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Return what `from_pretrained` is to be told of where a model's files are.

    Nothing is asked of the network for what is there as a path, or in the hub's cache, whole: then
    the answer is `local_files_only=True`. Else the hub is asked once.

    Parameters
    ----------
    path : str or Path
    **options
        Arguments of `from_pretrained`; those that concern the hub are looked at.

    Raises
    ------
    StoreError
        If the hub has no such model, does not give it to this user, or cannot be reached.
    """
    if os.path.exists(path) or options.get("local_files_only"):
        return {}
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError as error:
        raise MissingDependencyError(
            f"{str(path)!r} is no path here, and to look for it on the Hugging Face hub needs "
            "huggingface_hub; install it with: pip install 'moecache[transformers]'"
        ) from error
    given = {name: options[name] for name in _OPTIONS if options.get(name)}
    subfolder = given.pop("subfolder", "")

    def cached(file: str) -> Path | None:
        name = f"{subfolder}/{file}" if subfolder else file
        found = huggingface_hub.try_to_load_from_cache(str(path), name, **given)
        return Path(found) if isinstance(found, str) else None

    if not options.get("force_download"):
        config = cached("config.json")
        if config is not None and is_whole(config.parent):
            return {"local_files_only": True}
        if config is not None and constants.HF_HUB_OFFLINE:
            return {}
    ask(
        constants.ENDPOINT,
        str(path),
        f"{subfolder}/config.json" if subfolder else "config.json",
        given.get("revision"),
        options.get("token"),
    )
    return {}


@functools.lru_cache
def ask(
    endpoint: str, name: str, file: str, revision: str | None, token: str | bool | None
) -> None:
    """Raise StoreError unless the hub has a model; it is asked once only."""
    import huggingface_hub

    with telling(endpoint, name, file, revision):
        url = huggingface_hub.hf_hub_url(name, file, revision=revision)
        huggingface_hub.get_hf_file_metadata(url, token=token, timeout=TIMEOUT_S)


@contextlib.contextmanager
def telling(endpoint: str, name: str, file: str, revision: str | None = None) -> Iterator[None]:
    """Raise a StoreError that says what an error of the hub, or of the way there, means.

    Parameters
    ----------
    endpoint : str
        The hub's address.
    name : str
        The repository.
    file : str
        The file that is asked for.
    revision : str, optional
    """
    from huggingface_hub import constants, errors

    here = f"{name!r}: there is no such file or directory here, and"
    if constants.HF_HUB_OFFLINE:
        raise StoreError(
            f"{here} none in the hub's cache, while HF_HUB_OFFLINE forbids to ask the hub"
        )
    try:
        yield
    except (MoeCacheError, MemoryError):
        raise
    except errors.GatedRepoError as error:
        raise StoreError(
            f"{here} the hub gives it only to those who accepted its terms: do so at "
            f"{endpoint}/{name}, and log in with: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise StoreError(f"{here} the hub has no revision {revision!r} of it") from error
    except errors.RemoteEntryNotFoundError as error:
        raise NoSuchFileError(
            f"{here} the hub's has no {file}; is it a model of transformers?"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        code = getattr(getattr(error, "response", None), "status_code", 0)
        # The hub does not tell private models from missing ones.
        if code in {401, 403, 404}:
            raise StoreError(
                f"{here} the hub ({endpoint}) has no such model, or a private one; check the name, "
                "or log in with: hf auth login"
            ) from error
        if code == 429:
            raise StoreError(
                f"{here} the hub ({endpoint}) has been asked too often from here; wait some "
                "minutes, or log in with: hf auth login"
            ) from error
        raise StoreError(f"{here} the hub ({endpoint}) says: {_line(error)}") from error
    except Exception as error:  # of the HTTP library, whose name depends on the hub's version
        if isinstance(error, OSError) and error.errno is not None and error.filename:
            raise StoreError(f"{error.filename}: cannot be written: {error.strerror}") from error
        raise StoreError(
            f"{here} the hub ({endpoint}) could not be reached: {_line(error)}; check the name, "
            "or the network"
        ) from error


def is_whole(snapshot: Path, *, needs_tokenizer: bool = True) -> bool:
    """Return whether the cache has all files of a model that can be told."""
    index = snapshot / INDEX_NAME
    try:
        config = json.loads((snapshot / "config.json").read_bytes())
        names = {"model.safetensors"}
        if index.exists():
            names = {*json.loads(index.read_bytes())["weight_map"].values()}
        # Code of the checkpoint's own lies in files of any name.
        return (
            isinstance(config, dict)
            and "auto_map" not in config
            and all((snapshot / name).is_file() for name in names)
            and (not needs_tokenizer or any(snapshot.glob("*token*")))
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
