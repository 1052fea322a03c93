"""The files of a checkpoint's tokenizer, as far as they can be read without tokenizers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from moecache.errors import FormatError
from moecache.stores._checkpoint import read_config
from moecache.stores._file import ReadOnlyFile

_MOST_BYTES = 2**28


class TokenizerFiles(NamedTuple):
    """What lies beside a checkpoint's weights.

    Parameters
    ----------
    tokenizer : Path
        tokenizer.json, which may not be there.
    config : dict
        The content of tokenizer_config.json, {} if there is none.
    template : str, dict of str to str, or None
        The chat template, or several by their names.
    """

    tokenizer: Path
    config: dict[str, Any]
    template: str | dict[str, str] | None

    @property
    def why_transformers(self) -> str:
        """Why transformers alone makes a tokenizer of them; "" if tokenizers can."""
        if not self.tokenizer.is_file():
            return "it has no tokenizer.json"
        # transformers does so but for pairs of bytes.
        if self.config.get("clean_up_tokenization_spaces") and self._model_type() != "BPE":
            return "its tokenizer cleans spaces up"
        return ""

    def _model_type(self) -> object:
        model = read_config(self.tokenizer).get("model")
        return model.get("type", "BPE") if isinstance(model, dict) else None


def find_tokenizer_files(path: Path) -> TokenizerFiles:
    """Return the files of a checkpoint's tokenizer.

    Parameters
    ----------
    path : Path
        The checkpoint's directory, or one of its files.

    Raises
    ------
    StoreError
        If one cannot be read.
    FormatError
        If one is damaged.
    """
    directory = path if path.is_dir() else path.parent
    config = read_config(directory / "tokenizer_config.json")
    return TokenizerFiles(directory / "tokenizer.json", config, _template(directory, config))


def read_text(file: Path) -> str:
    """Return a file's text."""
    opened = ReadOnlyFile(file)
    if opened.nbytes > _MOST_BYTES:
        raise FormatError(f"{file}: has {opened.nbytes} bytes, too many")
    raw = bytearray(opened.nbytes)
    if raw:
        opened.read(0, [memoryview(raw)], "it")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{file}: is not UTF-8: {error}") from error


def _template(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template; files go before tokenizer_config.json."""
    file = directory / "chat_template.jinja"
    others = {
        one.stem: read_text(one)
        for one in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    found: Any = read_text(file) if file.is_file() else config.get("chat_template")
    if isinstance(found, list):
        found = {
            one["name"]: one["template"]
            for one in found
            if isinstance(one, dict) and isinstance(one.get("name"), str) and "template" in one
        }
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"{directory}: the chat template has a lone surrogate") from error
    if isinstance(found, str):
        return {"default": found, **others} if others else found
    several = {**(found if isinstance(found, dict) else {}), **others}
    kept = {k: v for k, v in several.items() if isinstance(k, str) and isinstance(v, str)}
    return kept or None
