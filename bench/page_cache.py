"""The pages of a model's files: dropped from the page cache, or read into it, and checked."""

from pathlib import Path

import numpy as np

from moecache import prefault
from moecache.commands.paths import find_files
from moecache.units import format_bytes

# Pages that another process has in its hands for a moment, of a large file.
_SMALL_SHARE = 1 / 1000
_PIECE_BYTES = 2**24
# The system takes some pages for huge ones, of any file.
_TRIES = 3


class PageCacheError(RuntimeError):
    """Files do not leave memory, or do not fit into it."""


class ModelPages:
    """The pages of a model's files.

    Parameters
    ----------
    path : Path
        A directory, or a file; a part of a GGUF in parts stands for all.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = [file for file in find_files(str(path)) if file.stat().st_size]
        self.nbytes = sum(file.stat().st_size for file in self._files)

    def drop(self) -> None:
        """Drop them from the page cache; raise PageCacheError if they stay."""
        left = prefault.evict(self._mapped())
        if left > self.nbytes * _SMALL_SHARE:
            raise PageCacheError(
                f"{self._path}: {format_bytes(left)} of {format_bytes(self.nbytes)} stay in the "
                "page cache: its file system is one in memory, another process has it mapped, or "
                "it is another user's; --warm needs nothing dropped"
            )

    def bring_in(self) -> None:
        """Read them all into the page cache; raise PageCacheError if they do not stay there.

        They count as this process's, not as a limit's that is used later.
        """
        buffer = bytearray(_PIECE_BYTES)
        for _ in range(_TRIES):
            for file in self._files:
                with file.open("rb", buffering=0) as stream:
                    while stream.readinto(buffer):
                        pass
            if self._share() >= 1 - _SMALL_SHARE:
                return
        raise PageCacheError(
            f"{self._path}: {self._share():.1%} of {format_bytes(self.nbytes)} are in the page "
            "cache after all was read: it does not fit; leave --warm away"
        )

    def _share(self) -> float:
        found = sum(one.resident_bytes for one in prefault.residency(self._mapped()))
        return found / self.nbytes

    def _mapped(self) -> list[np.memmap]:
        return [np.memmap(file, mode="r") for file in self._files]
