"""The tokenizer of a checkpoint, with its chat template, of the files beside its weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from moecache.decoding.files.tokenizer import FileTokenizer
from moecache.decoding.safetensors.ranks import read_ranks
from moecache.decoding.safetensors.tokenizer_files import find_tokenizer_files, read_text
from moecache.errors import FormatError, MoeCacheError, StoreError

_NAMES = ("bos", "eos", "unk", "pad", "mask")


def read_directory(directory: Path) -> FileTokenizer:
    """Return a checkpoint's tokenizer: tokenizer.json's, with what tokenizer_config.json adds.

    Parameters
    ----------
    directory : Path

    Raises
    ------
    StoreError
        If it has none that tokenizers can read, or a file cannot be read.
    FormatError
        If one is damaged.
    """
    files = find_tokenizer_files(directory)
    why = files.why_transformers()
    if why:
        raise StoreError(
            f"{directory}: {why}; copy the published model's tokenizer.json there, "
            "or install transformers: pip install 'moecache[transformers]'"
        )
    said, has_ranks = files.config, files.has_ranks()
    file = files.ranks if has_ranks else files.tokenizer
    text = "" if has_ranks else read_text(file)
    try:
        special = {name: _token(said.get(f"{name}_token")) for name in _NAMES}
        known = {name: token.content for name, token in special.items() if token is not None}
        added = dict(_by_id(said))
        found = read_ranks(file, added) if has_ranks else Tokenizer.from_str(text)
        num_added = len(found.get_added_tokens_decoder())
        # A text is as long as it is.
        found.no_truncation()
        found.no_padding()
        if not has_ranks:
            found.add_tokens(_added(said))
        found.add_special_tokens([token for token in special.values() if token is not None])
        if has_ranks and len(found.get_added_tokens_decoder()) != num_added:
            raise FormatError(f"{directory}: a token of tokenizer_config.json has no id")
    except MoeCacheError:
        raise
    except Exception as error:  # tokenizers has no class for its errors
        raise FormatError(f"{file}: cannot be used: {str(error)[:200]}") from error
    return FileTokenizer(found, known, files.template)


def _token(said: Any) -> AddedToken | None:
    """Return a token: configurations have its text alone, or with how it is cut."""
    if isinstance(said, dict) and isinstance(said.get("content"), str):
        kinds = {name: bool(said.get(name)) for name in ("lstrip", "rstrip", "single_word")}
        normalized = bool(said.get("normalized"))
        return AddedToken(said["content"], special=True, normalized=normalized, **kinds)
    return AddedToken(said, special=True, normalized=False) if isinstance(said, str) else None


def _by_id(said: Mapping[str, Any]) -> list[tuple[int, AddedToken]]:
    """Return the tokens that tokenizer_config.json adds by their ids, in their order."""
    listed = said.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    found = []
    for key in sorted((key for key in listed if key.isdecimal()), key=int):
        token = _token(listed[key])
        if token is not None:
            token.special = bool(listed[key].get("special"))
            found.append((int(key), token))
    return found


def _added(said: Mapping[str, Any]) -> list[AddedToken]:
    """Return the tokens that tokenizer_config.json adds, in the order of their ids."""
    found = [token for _, token in _by_id(said)]
    for key in ("extra_special_tokens", "additional_special_tokens"):
        more = said.get(key)
        more = list(more.values()) if isinstance(more, dict) else more
        found += filter(None, map(_token, more if isinstance(more, list) else []))
    return found
