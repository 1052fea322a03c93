"""Cgroups of one's own (v1 or v2) that limit memory or a disk, and what happened in them."""

import contextlib
import os
import time
from pathlib import Path
from typing import Self


class NoLimitError(RuntimeError):
    """The system does not let a benchmark limit its memory, or its disk."""


class _Group:
    """A cgroup below this process's own, of one controller of version 1, or of version 2."""

    def __init__(self, controller: str) -> None:
        self.parent, self.version = _own_group(controller)
        self.path = self.parent / f"moecache-bench-{os.getpid()}-{time.monotonic_ns()}"

    @property
    def join_file(self) -> Path:
        """Where a process writes its number to be limited."""
        return self.path / "cgroup.procs"

    def __enter__(self) -> Self:
        """Return the limit."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the cgroup; its processes have ended."""
        for _ in range(50):
            try:
                self.path.rmdir()
            except OSError:
                time.sleep(0.1)
            else:
                return


class MemoryLimit(_Group):
    """A cgroup below this process's own, with a limit; a context manager.

    Parameters
    ----------
    nbytes : int

    Raises
    ------
    NoLimitError
        If no such cgroup can be made.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        super().__init__("memory")
        try:
            self.path.mkdir()
            if self.version == 1:
                (self.path / "memory.limit_in_bytes").write_text(str(nbytes))
                with contextlib.suppress(OSError):  # no swap accounting
                    (self.path / "memory.memsw.limit_in_bytes").write_text(str(nbytes))
            else:
                (self.path / "memory.max").write_text(str(nbytes))
                with contextlib.suppress(OSError):
                    (self.path / "memory.swap.max").write_text("0")
        except OSError as error:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            raise NoLimitError(
                f"no memory cgroup can be made in {self.parent}: {error.strerror}. Run as root, or "
                f"inside a limit: systemd-run --scope -p MemoryMax={nbytes} "
                "-p MemorySwapMax=0 COMMAND --limit-is-set"
            ) from error

    def facts(self) -> dict[str, int]:
        """Return the kernel's counters: peak_bytes, swap_bytes, num_oom_kills, num_limited."""
        if self.version == 1:
            kills = _fields(self.path / "memory.oom_control").get("oom_kill", 0)
            stat = _fields(self.path / "memory.stat")
            return {
                "peak_bytes": _number(self.path / "memory.max_usage_in_bytes"),
                "swap_bytes": stat.get("total_swap", stat.get("swap", 0)),
                "num_oom_kills": kills,
                "num_limited": _number(self.path / "memory.failcnt"),
            }
        events = _fields(self.path / "memory.events")
        return {
            "peak_bytes": _number(self.path / "memory.peak"),
            "swap_bytes": _number(self.path / "memory.swap.current"),
            "num_oom_kills": events.get("oom_kill", 0),
            "num_limited": events.get("max", 0),
        }


class DiskLimit(_Group):
    """A cgroup that reads from one disk at so many bytes a second; a context manager.

    Parameters
    ----------
    bytes_per_s : int
    path : path-like
        A file or folder on the disk.

    Raises
    ------
    NoLimitError
        If no such cgroup can be made.
    """

    def __init__(self, bytes_per_s: int, path: str | os.PathLike[str]) -> None:
        super().__init__("blkio")
        device = os.stat(path).st_dev
        disk = f"{os.major(device)}:{os.minor(device)}"
        try:
            self.path.mkdir()
            if self.version == 1:
                limit = self.path / "blkio.throttle.read_bps_device"
                limit.write_text(f"{disk} {bytes_per_s}")
            else:
                (self.path / "io.max").write_text(f"{disk} rbps={bytes_per_s}")
        except OSError as error:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            raise NoLimitError(
                f"no cgroup in {self.parent} can limit disk {disk}: {error.strerror}. Run as root, "
                "with a folder on a disk of its own (no partition, no overlay)"
            ) from error


def _own_group(controller: str) -> tuple[Path, int]:
    """Return this process's group of a version 1 controller, or of version 2; and the version."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controller in controllers.split(","):
            for left, right in mounts:
                if right.split()[0] == "cgroup" and controller in right.split()[-1].split(","):
                    return _below(left, inside), 1
    for line in lines:
        hierarchy, controllers, inside = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            for left, right in mounts:
                if right.split()[0] == "cgroup2":
                    return _below(left, inside), 2
    raise NoLimitError(f"this system has no cgroups of {controller}")


def _below(mount: str, inside: str) -> Path:
    fields = mount.split()
    root, point = fields[3], Path(fields[4])
    relative = inside.removeprefix(root) if root != "/" else inside
    return point / relative.lstrip("/")


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _fields(path: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
