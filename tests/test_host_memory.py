"""How much memory this process may use: the machine's, or its cgroups' if that is less."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from moecache.sizing import host_memory
from moecache.sizing.host_memory import (
    CgroupLimit,
    cgroup_limits,
    free_host_bytes,
    total_host_bytes,
)

GIB = 2**30


class FakeCgroups:
    """A /proc and cgroup trees of a machine that is not this one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        (self.proc / "self").mkdir(parents=True)
        self.mounts = ["22 1 0:5 / /proc rw,nosuid - proc proc rw"]
        self.membership: list[str] = []

    def join(self, version: int, path: str, *, mount_root: str = "/") -> None:
        """Put the process into a group of the unified (2) or the memory (1) hierarchy."""
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,memory")
        point = self.root / f"v{version}"
        self.mounts.append(f"3 1 0:2 {mount_root} {point} rw shared:9 - {kind} x {options}")
        self.membership.append(f"0::{path}" if version == 2 else f"4:memory:{path}")

    def group(self, version: int, path: str, **values: object) -> None:
        """Write the files of a group; `memory_max=5` becomes memory.max."""
        directory = self.root / f"v{version}" / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (directory / name.replace("memory_", "memory.")).write_text(f"{value}\n")

    def limits(self) -> list[CgroupLimit]:
        """Read it as if it were this machine."""
        for name, lines in (("mountinfo", self.mounts), ("cgroup", self.membership)):
            (self.proc / "self" / name).write_text("".join(f"{line}\n" for line in lines))
        return cgroup_limits(self.proc)

    def room(self) -> int | None:
        """Return what the tightest group leaves, None without a limit."""
        return min((group.room_bytes for group in self.limits()), default=None)

    def limit(self) -> int | None:
        """Return the smallest limit, None without one."""
        return min((group.limit_bytes for group in self.limits()), default=None)


@pytest.fixture(name="fake")
def _fake(tmp_path: Path) -> FakeCgroups:
    return FakeCgroups(tmp_path)


def test_the_room_of_a_v2_group_is_limit_less_usage_plus_page_cache(fake: FakeCgroups) -> None:
    """Pages of files can be dropped, so they count as free."""
    fake.join(2, "/job")
    stat = "anon 5000\ninactive_file 300\nactive_file 20\nslab 9"
    fake.group(2, "job", memory_max=10_000, memory_current=6000, memory_stat=stat)

    assert fake.room() == 4320


def test_the_tightest_parent_decides(fake: FakeCgroups) -> None:
    """A group can never use more than any of its parents leaves."""
    fake.join(2, "/slice/job/step")
    fake.group(2, "", memory_max="max", memory_current=0)
    fake.group(2, "slice", memory_max=5000, memory_current=4000, memory_stat="inactive_file 100")
    fake.group(2, "slice/job", memory_max=9000, memory_current=1000)
    fake.group(2, "slice/job/step", memory_max="max", memory_current=500)

    assert fake.room() == 1100


def test_memory_high_limits_like_memory_max(fake: FakeCgroups) -> None:
    """Above it the kernel throttles the process."""
    fake.join(2, "/job")
    fake.group(2, "job", memory_max=10_000, memory_high=7000, memory_current=6000)

    assert fake.room() == 1000


def test_max_is_no_limit(fake: FakeCgroups) -> None:
    """Without any limit there is no room to speak of."""
    fake.join(2, "/job")
    fake.group(2, "job", memory_max="max", memory_high="max", memory_current=6000)

    assert fake.room() is None


def test_a_group_over_its_limit_leaves_nothing(fake: FakeCgroups) -> None:
    """The room is zero, not negative."""
    fake.join(2, "/job")
    fake.group(2, "job", memory_max=1000, memory_current=6000)

    assert fake.room() == 0


def test_a_v1_group_counts_the_page_cache_of_its_children(fake: FakeCgroups) -> None:
    """Plain inactive_file is the group alone; total_inactive_file covers all of it."""
    fake.join(1, "/job")
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 300\ntotal_active_file 20"
    fake.group(1, "job", memory_limit_in_bytes=10_000, memory_usage_in_bytes=6000, memory_stat=stat)

    assert fake.room() == 4320


def test_the_huge_number_of_v1_is_no_limit(fake: FakeCgroups) -> None:
    """The kernel writes the largest page-aligned int64 where nothing limits."""
    fake.join(1, "/job")
    limit = 2**63 - 4096
    fake.group(1, "job", memory_limit_in_bytes=limit, memory_usage_in_bytes=6000)

    assert fake.room() is None


def test_a_parent_limits_a_v1_group(fake: FakeCgroups) -> None:
    """The hierarchy is walked in v1 too."""
    fake.join(1, "/pod/box")
    fake.group(1, "pod", memory_limit_in_bytes=5000, memory_usage_in_bytes=1000)
    fake.group(1, "pod/box", memory_limit_in_bytes=2**63 - 4096, memory_usage_in_bytes=900)

    assert fake.room() == 4000


def test_a_hybrid_machine_is_limited_by_either_hierarchy(fake: FakeCgroups) -> None:
    """Memory is controlled by v1 where v2 is mounted without controllers."""
    fake.join(2, "/job")
    fake.join(1, "/job")
    fake.group(2, "job")
    fake.group(1, "job", memory_limit_in_bytes=5000, memory_usage_in_bytes=1000)

    assert fake.room() == 4000


def test_a_container_sees_the_hierarchy_from_its_mount_root(fake: FakeCgroups) -> None:
    """The path of the group begins with what the mount leaves out."""
    fake.join(1, "/docker/4711/step", mount_root="/docker/4711")
    fake.group(1, "", memory_limit_in_bytes=5000, memory_usage_in_bytes=2000)
    fake.group(1, "step", memory_limit_in_bytes=9000, memory_usage_in_bytes=0)

    assert fake.room() == 3000


def test_groups_of_other_controllers_do_not_count(fake: FakeCgroups) -> None:
    """Only the hierarchy with the memory controller limits memory."""
    fake.join(1, "/job")
    fake.membership = ["3:cpu,cpuacct:/job", "1:name=systemd:/job"]
    fake.group(1, "job", memory_limit_in_bytes=5000, memory_usage_in_bytes=1000)

    assert fake.room() is None


def test_a_machine_without_cgroups_has_no_limit(fake: FakeCgroups) -> None:
    """A membership without a mount, and none at all, limit nothing."""
    assert fake.room() is None
    fake.membership = ["0::/job", "4:memory:/job"]
    assert fake.room() is None


def test_a_machine_without_proc_has_no_limit(tmp_path: Path) -> None:
    """Missing files are no error."""
    assert cgroup_limits(tmp_path / "nowhere") == []


def test_missing_files_of_a_group_limit_nothing(fake: FakeCgroups) -> None:
    """A limit without a usage cannot be used, a missing memory.stat counts as no cache."""
    fake.join(2, "/outer/inner")
    fake.group(2, "outer/inner", memory_max=50)
    fake.group(2, "outer", memory_max=5000, memory_current=1000)

    assert fake.room() == 4000


def test_unreadable_figures_limit_nothing(fake: FakeCgroups) -> None:
    """Text that is no number is passed over, in memory.stat too."""
    fake.join(2, "/a/b")
    fake.group(2, "a/b", memory_max="soon", memory_current=1)
    fake.group(2, "a", memory_max=5000, memory_current=1000, memory_stat="inactive_file many")

    assert fake.room() == 4000


@pytest.fixture(name="machine")
def _machine(fake: FakeCgroups, monkeypatch: pytest.MonkeyPatch) -> FakeCgroups:
    """Return the cgroups of a machine of 24 GiB, 20 of them available."""
    memory = SimpleNamespace(total=24 * GIB, available=20 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(host_memory, "cgroup_limits", fake.limits)
    return fake


def test_without_a_limit_the_memory_is_the_machines(machine: FakeCgroups) -> None:
    """What it has in all, and what is available of it."""
    assert total_host_bytes() == 24 * GIB
    assert free_host_bytes() == 20 * GIB


def test_a_2_gib_group_on_a_24_gib_machine_counts_as_2_gib(machine: FakeCgroups) -> None:
    """Its limit in all, less its usage when asked for what is free."""
    machine.join(2, "/job")
    machine.group(2, "job", memory_max=2 * GIB, memory_current=GIB // 2)

    assert total_host_bytes() == 2 * GIB
    assert free_host_bytes() == 3 * GIB // 2


def test_a_v1_limit_counts_in_all(machine: FakeCgroups) -> None:
    """Both versions are asked."""
    machine.join(1, "/job")
    machine.group(1, "job", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=GIB)

    assert (total_host_bytes(), free_host_bytes()) == (2 * GIB, GIB)


def test_the_smallest_limit_and_the_smallest_room_may_be_of_two_groups(
    machine: FakeCgroups,
) -> None:
    """A large parent can be full of others' memory."""
    machine.join(2, "/slice/job")
    machine.group(2, "slice", memory_max=8 * GIB, memory_current=7 * GIB)
    machine.group(2, "slice/job", memory_max=3 * GIB, memory_current=GIB)

    assert total_host_bytes() == 3 * GIB
    assert free_host_bytes() == GIB


@pytest.mark.parametrize("limit", ["max", 2**60, 2**63 - 4096])
def test_no_limit_is_written_as_max_or_as_a_huge_number(
    machine: FakeCgroups, limit: object
) -> None:
    """From 2**60 on a limit is none."""
    machine.join(2, "/job")
    machine.group(2, "job", memory_max=limit, memory_current=GIB)

    assert machine.limits() == []
    assert total_host_bytes() == 24 * GIB


def test_just_below_2_to_the_60_is_a_limit(fake: FakeCgroups) -> None:
    """The border is exact."""
    fake.join(2, "/job")
    fake.group(2, "job", memory_max=2**60 - 1, memory_current=0)

    assert fake.limit() == 2**60 - 1


def test_a_limit_above_the_machines_memory_changes_nothing(machine: FakeCgroups) -> None:
    """Memory that is not there cannot be used."""
    machine.join(2, "/job")
    machine.group(2, "job", memory_max=64 * GIB, memory_current=GIB)

    assert (total_host_bytes(), free_host_bytes()) == (24 * GIB, 20 * GIB)


def test_a_full_group_still_has_its_limit(fake: FakeCgroups) -> None:
    """No room is left, but the limit is what it was."""
    fake.join(2, "/job")
    fake.group(2, "job", memory_max=1000, memory_high=900, memory_current=6000)

    (limit,) = fake.limits()
    assert (limit.limit_bytes, limit.room_bytes) == (900, 0)
    assert limit.path.endswith("/job")


def test_this_machine_has_memory() -> None:
    """The real files are understood: something is free, and not more than there is."""
    limits = cgroup_limits()

    assert 0 < free_host_bytes() <= total_host_bytes()
    assert all(group.limit_bytes > 0 and group.room_bytes >= 0 for group in limits)
