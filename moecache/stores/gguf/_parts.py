"""The files of a GGUF model: one, or a split into several."""

import re
from collections.abc import Sequence
from pathlib import Path

from moecache.errors import ConfigError, FormatError, StoreError
from moecache.stores._checkpoint import INDEX_NAME
from moecache.stores._file import ReadOnlyFile
from moecache.stores._header import shown
from moecache.stores._paths import is_directory, is_file
from moecache.stores.gguf._header import GgufEntry, Header

_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
# Files beside a model that are none: the encoder of images, statistics of activations.
_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, or a directory that has these and no safetensors."""
    if not is_directory(path):
        return path.suffix.lower() == ".gguf"
    files = _listed(path)
    endings = {file.suffix for file in files}
    is_indexed = any(file.name == INDEX_NAME for file in files)
    return ".gguf" in endings and ".safetensors" not in endings and not is_indexed


def find_parts(path: Path) -> list[Path]:
    """Return the files of a model, in their order, given a directory or any of them.

    Raises
    ------
    ConfigError
        If a directory has several models.
    FormatError
        If one of the files is not there.
    """
    if is_directory(path):
        models: dict[str, Path] = {}
        for file in _listed(path):
            if file.suffix == ".gguf" and not _BESIDE.search(file.name):
                models.setdefault(_PART.sub(r"\g<name>-of-\g<count>", file.name), file)
        if len(models) > 1:
            names = ", ".join(file.name for file in list(models.values())[:20])
            raise ConfigError(f"{path}: has several models; give the path of one of them: {names}")
        if not models:
            raise StoreError(f"{path}: there is no .gguf file of a model")
        (path,) = models.values()
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) < 2:
        return [path]
    files = []
    for number in range(1, int(match["count"]) + 1):
        files.append(path.with_name(f"{match['name']}-{number:05}-of-{match['count']}.gguf"))
        if not is_file(files[-1]):
            raise FormatError(f"{path}: part {shown(files[-1].name)} is missing; download it")
    return files


def part_name(path: Path) -> str:
    """Return what the name of a file, or of each part of a split one, begins with."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match["name"]


def merge_parts(
    files: Sequence[ReadOnlyFile], headers: Sequence[Header]
) -> dict[str, tuple[int, GgufEntry]]:
    """Return all tensors with the numbers of their files.

    Raises
    ------
    FormatError
        If the files are no parts of one model.
    """
    first = headers[0].metadata
    tensors: dict[str, tuple[int, GgufEntry]] = {}
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        said = header.metadata
        count = said.number("split.count") or 1
        if count != len(files) or said.number("split.no") != number:
            raise FormatError(
                f"{file.path}: says that it is part {said.number('split.no') + 1} of {count}, but "
                f"is part {number + 1} of {len(files)} by its name (parts are called "
                "NAME-00001-of-00002.gguf); download it again"
            )
        for key in said:
            if key.startswith("general.") and key in first and said[key] != first[key]:
                raise FormatError(
                    f"{file.path}: its {key} is {shown(said[key])}, that of {files[0].path.name} "
                    f"is {shown(first[key])}: they are parts of different models"
                )
        for name, entry in header.tensors.items():
            if name in tensors:
                other = files[tensors[name][0]].path.name
                raise FormatError(f"{file.path}: tensor {shown(name)} is also in {other}")
            tensors[name] = (number, entry)
    total = first.number("split.tensors.count")
    if len(files) > 1 and total != len(tensors):
        raise FormatError(
            f"{files[0].path}: has {total} tensors in all parts by its own words, but "
            f"{len(tensors)} are there; download it again"
        )
    return tensors


def _listed(path: Path) -> list[Path]:
    try:
        return sorted(file for file in path.iterdir() if not file.name.startswith("."))
    except OSError as error:
        raise StoreError(f"{path}: cannot be listed: {error.strerror}") from error
