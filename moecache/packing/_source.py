"""What is packed: a checkpoint's tensors, where they lie, and whether they stay as they are."""

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moecache.errors import ConfigError, FormatError, StoreError
from moecache.stores import SafetensorsStore
from moecache.stores._header import TensorEntry
from moecache.stores._index import Piece
from moecache.stores._paths import find_path

# Weights in this or another form: they would only lie about beside the packed ones.
_WEIGHTS = frozenset(
    (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")
)
_INDEX_ENDINGS = (".safetensors.index.json", ".bin.index.json")
MANIFEST_NAME = "moecache-pack.json"
# Starts the names of the tensors that only fill up to the next boundary.
PADDING_PREFIX = "__moecache_padding__."
_HASH_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class OtherFile:
    """A file that goes along as it is: where from, under which name, how large."""

    path: Path
    name: str
    nbytes: int


class Source(SafetensorsStore):
    """A checkpoint to be packed, with the places of its tensors.

    Raises
    ------
    ConfigError
        If it has no experts.
    StoreError
        If it cannot be read; FormatError if it is damaged or of another form.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        found = find_path(path)
        if found.is_file() and found.suffix != ".safetensors":
            raise FormatError(f"{path}: only .safetensors files and directories of them are packed")
        super().__init__(found)
        if self.layout.total_experts == 0:
            self.close()
            raise ConfigError(f"{path}: there are no experts; is it a mixture-of-experts model?")
        self._stamps = [_stamp(file.descriptor) for file in self.files]

    @property
    def tensors(self) -> Mapping[str, tuple[int, TensorEntry]]:
        """Every tensor by its name: the number of its file, and its entry there."""
        return self._tensors

    def pieces(self, layer: int) -> Sequence[Piece]:
        """Return the pieces of a layer's experts, in the order of the layout's roles."""
        return self._pieces[layer]

    def read(self, file: int, offset: int, buffer: memoryview, what: str) -> None:
        """Fill the buffer from a file of the checkpoint; StoreError names file and offset."""
        self.files[file].read(offset, [buffer], what)

    def check_unchanged(self, what: str) -> None:
        """Raise StoreError if a file is not what it was when it was opened."""
        for number, stamp in enumerate(self._stamps):
            file = self.files[number]
            size, changed_ns = _stamp(file.descriptor)
            if (size, changed_ns) != stamp:
                raise StoreError(
                    f"{file.path}: was changed while {what} was packed: it had {stamp[0]} bytes "
                    f"of {stamp[1]} ns, now {size} bytes of {changed_ns} ns; pack it again when "
                    "nobody writes to it"
                )

    def identity(self) -> str:
        """Return what tells this checkpoint from another, or from an earlier one."""
        facts = [
            [self.files[number].path.name, *stamp, self._hash_header(number)]
            for number, stamp in enumerate(self._stamps)
        ]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def other_files(self) -> list[OtherFile]:
        """Return the files that go along: configuration, tokenizer, text; no weights.

        Of a checkpoint that is one file this is the config.json beside it. Hidden
        files, and directories that are links, stay behind.
        """
        if not self.path.is_dir():
            config = self.path.parent / "config.json"
            return [_other(config, config.name)] if config.is_file() else []
        found = []
        for directory, names, leaves in os.walk(self.path, onerror=_refuse):
            names[:] = sorted(name for name in names if _goes_along(name))
            for leaf in sorted(leaves):
                path = Path(directory) / leaf
                if _goes_along(leaf) and path.is_file():
                    found.append(_other(path, path.relative_to(self.path).as_posix()))
        return found

    def _hash_header(self, number: int) -> str:
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


def _stamp(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _goes_along(name: str) -> bool:
    return not (
        name.startswith(".")
        or name.endswith((".partial", *_INDEX_ENDINGS))
        or os.path.splitext(name)[1] in _WEIGHTS
        or name == MANIFEST_NAME
    )


def _other(path: Path, name: str) -> OtherFile:
    return OtherFile(path, name, path.stat().st_size)


def _refuse(error: OSError) -> None:
    raise StoreError(f"{error.filename}: cannot be read: {error.strerror}") from error
