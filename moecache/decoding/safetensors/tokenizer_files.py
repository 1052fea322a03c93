"""The files of a checkpoint's tokenizer, as far as they can be read without tokenizers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from moecache.errors import FormatError
from moecache.stores._checkpoint import read_config, read_small

# Classes beside weights that cut texts in one way.
_OF_RANKS = tuple(f"tokenization_{name}.TikTokenTokenizer" for name in ("kimi", "moonshot"))


class TokenizerFiles(NamedTuple):
    """What lies beside a checkpoint's weights.

    Parameters
    ----------
    tokenizer : Path
        tokenizer.json, which may not be there.
    ranks : Path
        tiktoken.model, which may be there instead.
    config : dict
        The content of tokenizer_config.json, {} if there is none.
    template : str, dict of str to str, or None
        The chat template, or several by their names.
    """

    tokenizer: Path
    ranks: Path
    config: dict[str, Any]
    template: str | dict[str, str] | None

    def why_transformers(self) -> str:
        """Return why transformers alone makes a tokenizer of them; "" if tokenizers can."""
        if not self.tokenizer.is_file():
            return "" if self.has_ranks() else "it has no tokenizer.json"
        # transformers does so but for pairs of bytes.
        if self.config.get("clean_up_tokenization_spaces") and self._model_type() != "BPE":
            return "its tokenizer cleans spaces up"
        return ""

    def has_ranks(self) -> bool:
        """Return whether a tokenizer is tokens and ranks alone, cut as Kimi's are."""
        classes = self.config.get("auto_map")
        named = classes.get("AutoTokenizer") if isinstance(classes, dict) else None
        first = named[0] if isinstance(named, list) and named else named
        is_known = isinstance(first, str) and first.rpartition("--")[2] in _OF_RANKS
        return is_known and not self.tokenizer.is_file() and self.ranks.is_file()

    def _model_type(self) -> object:
        model = read_config(self.tokenizer).get("model")
        return model.get("type", "BPE") if isinstance(model, dict) else None


def find_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Return the files of a checkpoint's tokenizer.

    Parameters
    ----------
    directory : Path

    Raises
    ------
    StoreError
        If one cannot be read.
    FormatError
        If one is damaged.
    """
    config = read_config(directory / "tokenizer_config.json")
    plain, ranks = (directory / name for name in ("tokenizer.json", "tiktoken.model"))
    return TokenizerFiles(plain, ranks, config, _template(directory, config))


def read_text(file: Path) -> str:
    """Return a file's text."""
    try:
        return read_small(file).decode()
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
