"""How much memory this process may use: the machine's, or its cgroup's if that is less."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# The kernel's way to say "no limit" in cgroup v1 is the largest page-aligned int64.
_NO_LIMIT = 2**60


def total_host_bytes() -> int:
    """Return the machine's memory, or the smallest limit of this process's cgroups if less."""
    # Imported here: `import moecache` needs NumPy alone.
    import psutil

    total = int(psutil.virtual_memory().total)
    return min([total, *(group.limit_bytes for group in cgroup_limits())])


def free_host_bytes() -> int:
    """Return the memory this process can still use without swapping or being killed.

    The smaller of the machine's available memory and the room that this
    process's cgroup and each of its parents leave (v1 and v2; their page cache
    counts as free).
    """
    import psutil

    available = int(psutil.virtual_memory().available)
    return min([available, *(group.room_bytes for group in cgroup_limits())])


def peak_rss_bytes() -> int:
    """Return the most memory this process has had resident so far."""
    # Not getrusage's ru_maxrss: it starts from the peak of the process that called exec.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def tightest_limit() -> "CgroupLimit | None":
    """Return the cgroup whose room is less than the machine's available memory, if one is."""
    import psutil

    available = int(psutil.virtual_memory().available)
    tightest = min(cgroup_limits(), key=lambda group: group.room_bytes, default=None)
    return tightest if tightest is not None and tightest.room_bytes < available else None


@dataclass(frozen=True)
class CgroupLimit:
    """A memory cgroup that limits this process.

    Parameters
    ----------
    limit_bytes : int
    room_bytes : int
        The rest of its limit: page cache counts as free. Never negative.
    path : str
        Its directory.
    """

    limit_bytes: int
    room_bytes: int
    path: str = ""


def cgroup_limits(proc: Path = Path("/proc")) -> list[CgroupLimit]:
    """Return the memory limits of this process's cgroup and its parents (v1 and v2).

    Parameters
    ----------
    proc : Path
        The proc file system to read; another one in tests.
    """
    try:
        membership = (proc / "self/cgroup").read_text().splitlines()
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in membership:
        hierarchy, controllers, path = line.split(":", 2)
        unified = hierarchy == "0" and controllers == ""
        if not unified and "memory" not in controllers.split(","):
            continue
        mount = _find_mount(mounts, unified)
        if mount is None:
            continue
        root, point = mount
        inside = PurePosixPath(path)
        # In a container the mount shows only the part of the hierarchy below its root.
        if inside.is_relative_to(root):
            inside = inside.relative_to(root)
        else:
            inside = PurePosixPath(path).relative_to("/")
        for group in (inside, *inside.parents):
            limit = _group_limit(point / group, unified)
            if limit is not None:
                limits.append(limit)
    return limits


def _find_mount(mounts: list[str], unified: bool) -> tuple[PurePosixPath, Path] | None:
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields = before.split()
        kind, *_, options = after.split(" ") if after else ("", "")
        if len(fields) < 5:
            continue
        if unified and kind == "cgroup2":
            return PurePosixPath(fields[3]), Path(fields[4])
        if not unified and kind == "cgroup" and "memory" in options.split(","):
            return PurePosixPath(fields[3]), Path(fields[4])
    return None


def _group_limit(group: Path, unified: bool) -> CgroupLimit | None:
    limit_names = ("memory.max", "memory.high") if unified else ("memory.limit_in_bytes",)
    usage_name = "memory.current" if unified else "memory.usage_in_bytes"
    limits = [limit for name in limit_names if (limit := _read_bytes(group / name)) is not None]
    limits = [limit for limit in limits if limit < _NO_LIMIT]
    usage = _read_bytes(group / usage_name)
    if not limits or usage is None:
        return None
    # v1's plain "cache" is this group alone; only the total_ lines cover its children.
    names = (
        ("active_file", "inactive_file")
        if unified
        else (
            "total_active_file",
            "total_inactive_file",
        )
    )
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        stat = dict(line.split() for line in lines)
        reclaimable = sum(int(stat.get(name, 0)) for name in names)
    except (OSError, ValueError):
        reclaimable = 0
    return CgroupLimit(min(limits), max(0, min(limits) - usage + reclaimable), str(group))


def _read_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
