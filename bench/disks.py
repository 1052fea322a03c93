"""A disk with a read-ahead of one's choice: a file on the measured disk, by a loop device."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from moecache.units import format_bytes

_ROOM = 1.1  # what a file system needs beside its files
_NEEDED = 256 * 2**20
_SECTOR = 512


def read_ahead_bytes(path: Path) -> int:
    """Return the read-ahead of the disk that a file or directory is on; 0 if unknown."""
    device = os.stat(path).st_dev
    name = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for candidate in (f"{name}/queue", f"{name}/../queue"):
        with contextlib.suppress(OSError):
            return int(Path(candidate, "read_ahead_kb").read_text()) * 1024
    return 0


def describe_read_ahead(path: Path) -> str:
    """Return the read-ahead as text: the first thing to know of a figure."""
    nbytes = read_ahead_bytes(path)
    return f"read-ahead {format_bytes(nbytes) if nbytes else 'unknown'}"


@contextlib.contextmanager
def read_ahead_of(path: Path, nbytes: int) -> Iterator[None]:
    """Give the disk of a file a read-ahead meanwhile; needs root, and is for all that it has."""
    device = os.stat(path).st_dev
    name = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    setting = next(
        found
        for part in ("queue", "../queue")
        if (found := Path(name, part, "read_ahead_kb")).exists()
    )
    before = setting.read_text()
    setting.write_text(str(nbytes // 1024))
    try:
        yield
    finally:
        setting.write_text(before)


@contextlib.contextmanager
def disk_with(read_ahead: int | None, directory: Path, num_bytes: int) -> Iterator[Path]:
    """Give a directory for `num_bytes` of files, below `directory` and on its disk.

    With a read-ahead, in bytes, that is a file system of its own in a file, which a loop device
    reads around the page cache; needs root. Nothing else's read-ahead is changed.
    """
    with contextlib.ExitStack() as undo:
        folder = directory / f"moecache-bench-{os.getpid()}"
        folder.mkdir()
        undo.callback(folder.rmdir)
        if read_ahead is None:
            files = folder / "files"
            files.mkdir()
            undo.callback(_run, "rm", "-r", files)
            yield files
            return
        image, mount = folder / "image", folder / "mounted"
        undo.callback(image.unlink, missing_ok=True)
        _run("fallocate", "-l", int(num_bytes * _ROOM) + _NEEDED, image)
        loop = _run("losetup", "--direct-io=on", "--show", "-f", image)
        undo.callback(_run, "losetup", "-d", loop)
        _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", loop)
        _run("blockdev", "--setra", read_ahead // _SECTOR, loop)
        mount.mkdir()
        undo.callback(mount.rmdir)
        _run("mount", loop, mount)
        undo.callback(_run, "umount", mount)
        files = mount / "files"
        files.mkdir()
        yield files


def _run(*command: object) -> str:
    arguments = [str(argument) for argument in command]
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.strip()
