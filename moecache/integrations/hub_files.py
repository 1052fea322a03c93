"""Which files of a repository on the hub make up a model: names, quantisations, parts."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from moecache.errors import StoreError

# What llama.cpp takes where nobody says.
DEFAULT_QUANT = "Q4_K_M"
_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9_][\w.-]{0,95}/[\w.-]{1,96})"
    r"(@(?P<revision>[\w.-]+(/[\w.-]+)*))?(:(?P<quant>[\w.-]{1,64}))?",
    re.ASCII,
)
_QUANT = re.compile(
    r"((?:UD|QAT)-)?((?:IQ|TQ|Q)\d\w*|BF16|FP?16|FP?32|FP8\w*|MXFP4\w*|NVFP4\w*)",
    re.ASCII | re.IGNORECASE,
)
_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
# Files beside a model that are none: encoders of images, statistics, heads that guess ahead.
_BESIDE = re.compile(r"mmproj|imatrix|(?<![a-z0-9])mtp(?![a-z0-9])", re.IGNORECASE)
# Files beside the weights that transformers and the tokenizers read.
_SMALL = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken")
# Names that a message lists.
_LISTED = 20


@dataclass(frozen=True)
class HubName:
    """A name as a user writes it: `user/repo`, `user/repo:Q4_K_M`, `user/repo@revision`.

    Attributes
    ----------
    repo : str
        The repository, with its owner.
    revision : str or None
        A branch, tag or commit.
    quant : str or None
        The quantisation of a GGUF.
    """

    repo: str
    revision: str | None = None
    quant: str | None = None

    @classmethod
    def parse(cls, text: str) -> "HubName | None":
        """Return the parts of a name, `None` if it has not the form of one with an owner."""
        match = _NAME.fullmatch(text)
        if match is None or text.lower().endswith(".gguf") or ".." in text:
            return None
        return cls(match["repo"], match["revision"], match["quant"])


def is_safe(file: str) -> bool:
    """Return whether a file of a listing lies below the repository, whatever the system."""
    parts = file.split("/")
    return not ("\\" in file or ":" in file or "\0" in file or {"", ".", ".."} & {*parts})


def choose_gguf(
    name: str, files: Iterable[str], quant: str | None = None, file: str | None = None
) -> list[str]:
    """Return the GGUF file of a quantisation, all of its parts in their order.

    Parameters
    ----------
    name : str
        The model's name, for errors.
    files : iterable of str
        The repository's files.
    quant : str, optional
        Its name, in any case. By default Q4_K_M, else the only one that there is.
    file : str, optional
        One file, or part, instead.

    Raises
    ------
    StoreError
        If there is none such, or several; the error lists what there is.
    """
    models = _models(files)
    if file is not None:
        found = [key for key, parts in models.items() if file in parts.values()]
        if not found:
            raise StoreError(f"{name}: has no model in {file!r}; it has {_list(_shown(models))}")
    else:
        found = _matching(models, DEFAULT_QUANT if quant is None else quant)
        if not found and quant is None:
            found = list(models)
    if not models:
        raise StoreError(f"{name}: the repository has no .gguf file of a model")
    if not found:
        quants = sorted({quant_of(key) or key for key in models})
        raise StoreError(f"{name}: there is no quantisation {quant!r}; it has {_list(quants)}")
    if len(found) > 1:
        if quant is None:
            quants = sorted({quant_of(key) or key for key in found})
            raise StoreError(
                f"{name}: has several quantisations and no {DEFAULT_QUANT}; say which, as in "
                f"{name}:{quants[0]}: {_list(quants)}"
            )
        raise StoreError(
            f"{name}: {quant} is the quantisation of several models; give the whole tag, or name "
            f"the file with --hf-file: {_list(_shown({key: models[key] for key in found}))}"
        )
    return _whole(name, models[found[0]])


def choose_safetensors(files: Iterable[str]) -> list[str]:
    """Return what transformers reads of a repository: weights in safetensors, and small files."""
    root = sorted(file for file in files if "/" not in file and not file.startswith("."))
    return [
        file
        for file in root
        if (file.endswith(".safetensors") and not file.startswith("consolidated"))
        # An index of another format's weights leads nowhere.
        or (file.endswith(_SMALL) and not file.endswith(".bin.index.json"))
    ]


def quant_of(file: str) -> str:
    """Return the quantisation that a GGUF's path says, that of its folder if only that does."""
    folder, _, last = file.rpartition("/")
    stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", last)
    for text in (stem, folder):
        found = [
            match
            for match in _QUANT.finditer(text)
            if not (match.start() and text[match.start() - 1].isalnum())
        ]
        if found:
            return found[-1][0].upper()
    return ""


def _models(files: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return the models of a listing: the parts of each by number, 0 for one in a file."""
    models: dict[str, dict[int, str]] = {}
    for file in sorted(files):
        last = file.rpartition("/")[2]
        if not last.lower().endswith(".gguf") or _BESIDE.search(last) or not is_safe(file):
            continue
        match = _PART.fullmatch(file)
        if match is None:
            models[file] = {0: file}
        else:
            key = f"{match['name']}-of-{match['count']}"
            models.setdefault(key, {})[int(match["number"])] = file
    # By the name of a part: it ends as a file does.
    return {next(iter(parts.values())): parts for parts in models.values()}


def _matching(models: Iterable[str], quant: str) -> list[str]:
    """Return the models of a quantisation; those called exactly so, else those with that word."""
    exact = [key for key in models if quant_of(key) == quant.upper()]
    if exact:
        return exact
    # A quantisation is set off by an underscore, too; other words may have one in them.
    before = "A-Za-z0-9" if _QUANT.fullmatch(quant) else "A-Za-z0-9_"
    word = re.compile(rf"(?<![{before}]){re.escape(quant)}(?![A-Za-z0-9_])", re.IGNORECASE)
    in_file = [key for key in models if word.search(key.rpartition("/")[2])]
    return in_file or [key for key in models if not quant_of(key) and word.search(key)]


def _whole(name: str, parts: dict[int, str]) -> list[str]:
    """Return the files of a model; StoreError if a part is missing."""
    match = _PART.fullmatch(next(iter(parts.values())))
    if match is None:
        return list(parts.values())
    count = int(match["count"])
    missing = [number for number in range(1, count + 1) if number not in parts]
    if missing:
        raise StoreError(
            f"{name}: part {missing[0]} of {count} of {match['name']} is missing; part "
            f"{min(parts)} is there"
        )
    return [parts[number] for number in range(1, count + 1)]


def _shown(models: dict[str, dict[int, str]]) -> list[str]:
    return [
        f"{key} ({len(parts)} parts)" if len(parts) > 1 else key for key, parts in models.items()
    ]


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(names[:_LISTED]) or "none") + more
