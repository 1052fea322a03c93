"""The place where a packed directory grows: beside its final name, one process at a time."""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moecache.errors import ConfigError, StoreError
from moecache.packing._journal import sync_directory
from moecache.stores._paths import check_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """The directory to make, `out`, and the one that it grows in, `OUT.partial`.

    The future `out` is a directory in `OUT.partial`, beside journal and lock:
    one rename finishes it, and a kill before or after loses nothing.
    """

    out: Path

    @property
    def partial(self) -> Path:
        """The directory of everything until it is complete."""
        return self.out.with_name(f"{self.out.name}.partial")

    @property
    def files(self) -> Path:
        """The directory that becomes `out`."""
        return self.partial / "files"

    @property
    def journal(self) -> Path:
        """The journal of the units that are finished."""
        return self.partial / "moecache-pack.jsonl"

    @property
    def lock(self) -> Path:
        """The file that the process at work keeps locked."""
        return self.partial / "moecache-pack.lock"

    @classmethod
    def find(cls, model: Path, out: str | os.PathLike[str]) -> "Place":
        """Return the place for a model.

        Raises
        ------
        ConfigError
            If something is there already, or would be mixed with the model.
        """
        target = Path(os.path.realpath(check_name(out)))
        source, place = Path(os.path.realpath(model)), cls(target)
        if place.out == source or (source.is_dir() and source in place.out.parents):
            raise ConfigError(
                f"{place.out} is in the model's own directory {source}; choose another place"
            )
        if source == place.partial or place.partial in source.parents:
            raise ConfigError(
                f"{place.partial}, where the files grow, has the model in it; choose another name"
            )
        place.check_free()
        return place

    def check_free(self) -> None:
        """Raise ConfigError unless `out` is free, and `OUT.partial` free or an earlier run's.

        StoreError if that cannot be told.
        """
        try:
            self._check_free()
        except OSError as error:
            raise StoreError(
                f"{str(error.filename)[:200]}: cannot be read: {error.strerror}; choose another "
                "name"
            ) from error

    def free_bytes(self) -> int:
        """Return the room on the disk; files of an earlier run count as room."""
        parent = next(path for path in (self.out, *self.out.parents) if path.exists())
        taken = 0
        for directory, _, leaves in os.walk(self.partial):
            for leaf in leaves:
                with contextlib.suppress(OSError):
                    taken += os.lstat(os.path.join(directory, leaf)).st_blocks * 512
        return shutil.disk_usage(parent).free + taken

    def finish(self) -> None:
        """Give the directory its name; it is complete and on the disk then."""
        try:
            for directory, _, _ in os.walk(self.files):
                sync_directory(Path(directory))
            self.files.rename(self.out)
        except OSError as error:
            raise StoreError(
                f"{self.files}: cannot be renamed to {self.out}: {error.strerror}; see to that "
                "and pack again: what is finished stays"
            ) from error
        try:
            sync_directory(self.partial.parent)
        except OSError as error:
            raise StoreError(
                f"{self.out}: is complete, but a power cut may take its name from it: "
                f"{error.strerror}; compare it with moecache pack --verify"
            ) from error
        finally:
            # With `out` in its place no run goes on from the journal.
            with _left_behind(self.journal):
                self.journal.unlink()

    def _check_free(self) -> None:
        if _is_there(self.out):
            if not self.out.is_dir():
                raise ConfigError(f"{self.out} exists and is no directory; choose another name")
            if any(self.out.iterdir()):
                raise ConfigError(
                    f"{self.out} exists and is not empty; remove it, or choose another name"
                )
            if os.path.ismount(self.out):
                raise ConfigError(
                    f"{self.out} is a mount point, which no directory can replace; name one in it"
                )
        if _is_there(self.partial):
            if not self.partial.is_dir():
                raise ConfigError(
                    f"{self.partial} exists and is no directory, but the files are to grow there; "
                    "remove it"
                )
            # Later steps remove what is in it: it must be of an earlier run.
            if any(self.partial.iterdir()) and not self.lock.exists():
                raise ConfigError(
                    f"{self.partial} exists and is not of moecache, but the files are to grow "
                    "there; remove it"
                )
            kinds = {self.files: stat.S_ISDIR, self.journal: stat.S_ISREG, self.lock: stat.S_ISREG}
            for path, is_ours in kinds.items():
                if _is_there(path) and not is_ours(path.lstat().st_mode):
                    raise ConfigError(f"{path} is not of moecache, but a link or device; remove it")


def _is_there(path: Path) -> bool:
    """Return whether something has the name, if only a broken link."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextlib.contextmanager
def _left_behind(path: Path) -> Iterator[None]:
    """Log what cannot be removed, and go on."""
    try:
        yield
    except OSError as error:
        # A directory that has others' files stays.
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            logger.warning("pack.left_behind path=%s error=%s: remove it", path, error)


@contextlib.contextmanager
def locked(place: Place) -> Iterator[None]:
    """Keep other processes out of `OUT.partial`, which is made if it is not there.

    Raises
    ------
    StoreError
        If another process is at work there, or it cannot be made.
    """
    try:
        place.partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StoreError(f"{place.partial}: cannot be made: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that had the lock may just have finished, and removed the file.
            ours = os.path.samestat(os.fstat(descriptor), place.lock.stat())
        except (BlockingIOError, FileNotFoundError):
            ours = False
        except OSError as error:
            raise StoreError(f"{place.lock}: cannot be locked: {error.strerror}") from error
        if not ours:
            raise StoreError(
                f"{place.partial}: another process is packing into it; wait for it to end"
            )
        try:
            place.check_free()
            yield
        finally:
            with _left_behind(place.partial):
                if not _is_there(place.files) and not _is_there(place.journal):
                    place.lock.unlink()
                    place.partial.rmdir()
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
