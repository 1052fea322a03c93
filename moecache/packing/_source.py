"""The checkpoint to pack: its tensors, where they lie, and whether they stay as they are."""

import errno
import hashlib
import json
import os
import re
import stat
import struct
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from moecache.errors import ConfigError, FormatError, StoreError
from moecache.stores import CheckpointStore, SafetensorsStore
from moecache.stores._file import ReadOnlyFile
from moecache.stores._header import TensorEntry
from moecache.stores._index import is_expert
from moecache.stores._parts import TensorPart
from moecache.stores._paths import find_path, is_directory, is_file
from moecache.stores._quantized import BESIDE

# Weights in this or another form: beside the packed ones they would only take room.
_WEIGHTS = frozenset(
    (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")
)
_INDEX_ENDINGS = (".safetensors.index.json", ".bin.index.json")
MANIFEST_NAME = "moecache-pack.json"
# Starts the names of the tensors that only fill up to the next boundary.
PADDING_PREFIX = "__moecache_padding__."
_HASH_CHUNK_BYTES = 2**20
_CONFIG_NAME = "config.json"
# Files that other programs read beside config.json, or instead of it.
_QUANTIZATION_NAMES = {"quantize_config.json", "quant_config.json", "hf_quant_config.json"}
_EXPERT = re.compile(r".+\.experts\.\d+\.", re.ASCII)


# A name in the checkpoint, and the target of this link.
Link = tuple[str, str]


@dataclass(frozen=True)
class OtherFile:
    """A file that goes along: where from, under which name, how large; its text, if that is new."""

    path: Path
    name: str
    nbytes: int
    text: bytes | None = None


@dataclass(frozen=True)
class Others:
    """The files of a checkpoint beside its weights.

    Parameters
    ----------
    files : sequence of OtherFile
        Files that are copied along.
    left_behind : sequence of (str, str)
        Links to directories and to nothing, and their targets as written.
    """

    files: Sequence[OtherFile]
    left_behind: Sequence[Link] = ()


class Origin(CheckpointStore):
    """A checkpoint to be packed, in files of any form.

    Raises
    ------
    ConfigError
        If it has no experts.
    """

    _stamps: Sequence[tuple[int, int]]

    def begin(self) -> None:
        """Note what the files are like, and look whether they can be packed; called once."""
        if self.layout.total_experts == 0:
            self.close()
            raise ConfigError(
                f"{self.path}: there are no experts; is it a mixture-of-experts model?"
            )
        # A trunk that cannot be read is not copied.
        self.trunk_matrices  # noqa: B018 - matched when it is first asked for
        self._stamps = [_stamp(file) for file in self.files]

    def pieces(self, layer: int) -> Sequence[TensorPart]:
        """Return the pieces of a layer's experts, in the order of the layout's roles."""
        return self._pieces[layer]

    def read(self, file: int, offset: int, buffer: memoryview, what: str) -> None:
        """Fill the buffer from a file of the checkpoint; StoreError names file and offset."""
        self.files[file].read(offset, [buffer], what)

    def check_unchanged(self, what: str) -> None:
        """Raise StoreError if a file is not what it was when it was opened."""
        for number, stamp in enumerate(self._stamps):
            file = self.files[number]
            size, changed_ns = _stamp(file)
            if (size, changed_ns) != stamp:
                raise StoreError(
                    f"{file.path}: was changed while {what} was packed: it had {stamp[0]} bytes "
                    f"of {stamp[1]} ns, now {size} bytes of {changed_ns} ns; pack it again when "
                    "nothing writes to it"
                )

    def identity(self) -> str:
        """Return what tells this checkpoint from others and from earlier versions of itself."""
        facts = [
            [self.files[number].path.name, *stamp, self.hash_header(number)]
            for number, stamp in enumerate(self._stamps)
        ]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    @abstractmethod
    def hash_header(self, number: int) -> str:
        """Return a checksum of what a file says of its tensors."""

    def others(self, config: bytes | None = None) -> Others:
        """Return what goes along, with another text of config.json if one is given: nothing."""
        del config
        return Others([])

    def linked(self, others: Others) -> list[Link]:
        """Return the files that are links to files outside of the checkpoint."""
        paths = [other.path for other in others.files]
        directory = self.path.parent
        if is_directory(self.path):
            directory = self.path
            paths += [file.path for file in self.files]
        root, found = directory.resolve(), []
        for path in sorted(paths):
            target = path.resolve()
            if root not in target.parents:
                found.append((path.relative_to(directory).as_posix(), str(target)))
        return found


class Source(Origin, SafetensorsStore):
    """A checkpoint in safetensors to be packed, with the places of its tensors.

    Raises
    ------
    ConfigError
        If it has no experts.
    StoreError
        If it cannot be read; FormatError if it is damaged or of another form.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        found = find_path(path)
        if is_file(found) and found.suffix != ".safetensors":
            raise FormatError(
                f"{path}: only .safetensors files, .gguf files and directories of them are packed"
            )
        super().__init__(found)
        self.begin()

    @property
    def tensors(self) -> Mapping[str, tuple[int, TensorEntry]]:
        """Every tensor by its name: the number of its file, and its entry there."""
        return self._tensors

    @property
    def is_quantized(self) -> bool:
        """Whether a publisher quantized any of it."""
        return bool(self.trunk_matrices) or any(
            role.format and not role.is_tiled for roles in self.layout.layers for role in roles
        )

    @property
    def is_transposed(self) -> bool:
        """Whether the model has quantized matrices [in, out]: gpt-oss, published in MXFP4."""
        return self.quantization == "mxfp4"

    def matrices(self, layer: int) -> list[list[TensorPart]]:
        """Return the same pieces, the parts of a matrix together."""
        found: list[list[TensorPart]] = []
        for piece in self._pieces[layer]:
            if piece.weight:
                found.append([])
            found[-1].append(piece)
        return found

    def weight_of(self, piece: TensorPart, expert: int) -> str:
        """Return the name that an expert's matrix has where it is not quantized."""
        first, own = (_EXPERT.match(piece.sources[number]) for number in (0, expert))
        assert first is not None
        assert own is not None
        return own[0] + piece.weight[first.end() :]

    def beside(self) -> set[str]:
        """Return the tensors that only say more about quantized matrices, such as their shapes."""
        names = set()
        for weight in self.trunk_matrices:
            module = weight.removesuffix("weight")
            for suffix in BESIDE:
                names |= {f"{weight}{suffix}", f"{module}{suffix.lstrip('_')}"}
        parts = {name for pieces in self._pieces for piece in pieces for name in piece.sources}
        return names | {name for name in self._tensors.keys() - parts if is_expert(name)}

    def others(self, config: bytes | None = None) -> Others:
        """Return what goes along: configuration, tokenizer, text; no weights.

        If the checkpoint is one file, this is the config.json beside it. Hidden files,
        links to directories and links to nothing stay behind.

        Parameters
        ----------
        config : bytes, optional
            The new content of config.json, if there is one; other files that say how weights
            are quantized then stay behind.

        Raises
        ------
        StoreError
            If a device, pipe or socket would be copied, or a directory cannot be read.
        """
        found = self._others()
        if config is None:
            return found
        files = [
            replace(file, text=config, nbytes=len(config)) if file.name == _CONFIG_NAME else file
            for file in found.files
            if file.name not in _QUANTIZATION_NAMES
        ]
        return replace(found, files=files)

    def _others(self) -> Others:
        if not is_directory(self.path):
            config = self.path.parent / _CONFIG_NAME
            size = _file_bytes(config)
            return Others([] if size is None else [OtherFile(config, config.name, size)])
        files: list[OtherFile] = []
        left_behind: list[Link] = []
        for directory, names, leaves in os.walk(self.path, onerror=_refuse):
            names[:] = sorted(name for name in names if _goes_along(name))
            for leaf in sorted([*names, *filter(_goes_along, leaves)]):
                path = Path(directory) / leaf
                name = path.relative_to(self.path).as_posix()
                size = _file_bytes(path)
                if size is not None:
                    files.append(OtherFile(path, name, size))
                elif path.is_symlink():
                    left_behind.append((name, os.readlink(path)))
        return Others(files, left_behind)

    def hash_header(self, number: int) -> str:
        """Return a checksum of the JSON of a file."""
        file, digest = self.files[number], hashlib.blake2b(digest_size=16)
        prefix = bytearray(8)
        file.read(0, [memoryview(prefix)], "the header's length")
        (left,), offset = struct.unpack("<Q", prefix), 8
        while left:
            chunk = bytearray(min(left, _HASH_CHUNK_BYTES))
            file.read(offset, [memoryview(chunk)], "the header")
            digest.update(chunk)
            left, offset = left - len(chunk), offset + len(chunk)
        return digest.hexdigest()


def _stamp(file: ReadOnlyFile) -> tuple[int, int]:
    status = file.status()
    return status.st_size, status.st_mtime_ns


def _goes_along(name: str) -> bool:
    return not (
        name.startswith(".")
        or name.endswith((".partial", *_INDEX_ENDINGS))
        or os.path.splitext(name)[1] in _WEIGHTS
        or name == MANIFEST_NAME
    )


def _file_bytes(path: Path) -> int | None:
    """Return the size of a file; None for a directory, or if nothing is there."""
    try:
        status = path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            _refuse(error)
        return None
    if stat.S_ISDIR(status.st_mode):
        return None
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(
            f"{path}: is a device, pipe or socket, or a link to one; take it out of the checkpoint"
        )
    return status.st_size


def _refuse(error: OSError) -> NoReturn:
    raise StoreError(f"{error.filename}: cannot be read: {error.strerror}") from error
