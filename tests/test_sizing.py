"""From bytes to slots, and the room that memory cgroups leave."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecache.layout import ExpertLayout
from moecache.sizing import (
    RESERVE_BYTES,
    SizingPlan,
    SizingStatus,
    cgroup_room,
    free_host_bytes,
    plan,
)

GIB = 2**30


def _layout(
    num_layers: int = 4, num_experts: int = 16, top_k: int = 2, expert_bytes: int = 1000
) -> ExpertLayout:
    return ExpertLayout.uniform(
        num_layers=num_layers, num_experts=num_experts, top_k=top_k, expert_bytes=expert_bytes
    )


def _plan(free_bytes: int, *, staging_slots: int = 0, top_k: int = 2) -> SizingPlan:
    return plan(_layout(top_k=top_k), free_bytes, reserve_bytes=0, staging_slots=staging_slots)


@pytest.mark.parametrize(("num_layers", "num_experts"), [(0, 0), (0, 8), (3, 0)])
def test_a_model_without_experts_gets_an_empty_plan(num_layers: int, num_experts: int) -> None:
    """Every figure is zero, whatever is free."""
    result = plan(_layout(num_layers, num_experts, top_k=0), 100 * GIB)

    assert result.status is SizingStatus.EMPTY
    assert (result.slots, result.budget_slots, result.total_slots) == (0, 0, 0)
    assert (result.recommended_slots, result.cycle_slots) == (0, 0)


def test_experts_of_unknown_size_all_get_slots() -> None:
    """Nothing can be divided, so the plan is everything."""
    result = plan(_layout(expert_bytes=0), 0)

    assert result.status is SizingStatus.UNKNOWN_EXPERT_SIZE
    assert result.slots == result.total_slots == 64


@pytest.mark.parametrize("free", [0, 999])
def test_a_budget_below_one_slot_is_exhausted_but_gives_one(free: int) -> None:
    """A single slot always exists, so that a plan can be acted upon."""
    result = _plan(free)

    assert result.status is SizingStatus.BUDGET_EXHAUSTED
    assert (result.slots, result.budget_slots) == (1, 0)


def test_one_slot_exactly_is_not_exhausted() -> None:
    """The budget that pays for one slot is merely small."""
    result = _plan(1000)

    assert result.status is SizingStatus.BELOW_RECOMMENDED
    assert (result.slots, result.budget_slots) == (1, 1)


def test_equality_with_the_recommendation_is_ok() -> None:
    """One slot less is below."""
    enough, short = _plan(16_000), _plan(15_999)

    assert (enough.slots, enough.status) == (16, SizingStatus.OK)
    assert (short.slots, short.status) == (15, SizingStatus.BELOW_RECOMMENDED)


def test_there_are_never_more_slots_than_experts() -> None:
    """What the budget would pay for is still reported."""
    result = _plan(1_000_000)

    assert (result.slots, result.total_slots, result.budget_slots) == (64, 64, 1000)
    assert result.status is SizingStatus.OK


@pytest.mark.parametrize(
    ("top_k", "recommended", "cycle"), [(0, 0, 0), (2, 16, 8), (8, 64, 32), (9, 64, 36)]
)
def test_recommendation_and_cycle_follow_from_top_k(
    top_k: int, recommended: int, cycle: int
) -> None:
    """Twice a token's experts per layer, at most all; a cycle is once."""
    result = _plan(10**6, top_k=top_k)

    assert (result.recommended_slots, result.cycle_slots) == (recommended, cycle)


def test_the_reserve_stays_free() -> None:
    """By default half a GiB."""
    assert RESERVE_BYTES == 512 * 2**20
    assert plan(_layout(), RESERVE_BYTES + 5999).budget_slots == 5
    assert plan(_layout(), RESERVE_BYTES - 1).status is SizingStatus.BUDGET_EXHAUSTED
    assert plan(_layout(), 5999, reserve_bytes=1000).budget_slots == 4


def test_staging_slots_come_out_of_the_budget() -> None:
    """What they take is not left for the cache."""
    assert _plan(20_000, staging_slots=6).slots == 14


def test_staging_costs_nothing_where_everything_fits() -> None:
    """A full cache never stages; one byte less and it does."""
    assert _plan(64_000, staging_slots=6).slots == 64
    assert _plan(63_999, staging_slots=6).slots == 57


def test_staging_beyond_the_budget_exhausts_it() -> None:
    """The figures never become negative."""
    result = _plan(5000, staging_slots=6)

    assert result.status is SizingStatus.BUDGET_EXHAUSTED
    assert (result.slots, result.budget_slots) == (1, 0)


def test_the_bytes_really_allocated_count() -> None:
    """Padded slots are fewer than the raw bytes suggest."""
    result = plan(_layout(), 10_240, reserve_bytes=0, slot_bytes=1024)

    assert (result.slots, result.slot_bytes) == (10, 1024)


@given(st.integers(-(2**40), 2**40), st.integers(0, 2**31), st.integers(0, 40))
def test_slots_are_always_within_bounds(free: int, reserve: int, staging: int) -> None:
    """At least one, at most all, and never more than the free bytes hold."""
    result = plan(_layout(), free, reserve_bytes=reserve, staging_slots=staging)

    assert 1 <= result.slots <= result.total_slots
    if result.status is not SizingStatus.BUDGET_EXHAUSTED:
        assert result.slots * result.slot_bytes <= free - reserve


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (0, ["1 of 64", "smaller than one slot of 1000 B"]),
        (4000, ["4 of 64", "16 (15.6 KiB) are recommended", "below 8"]),
        (9000, ["9 of 64", "are recommended"]),
        (64_000, ["64 of 64 experts (62.5 KiB)"]),
    ],
)
def test_the_description_has_the_figures(free: int, words: list[str]) -> None:
    """One line says what there is and what would be enough."""
    text = _plan(free).describe()

    assert all(word in text for word in words)
    assert "\n" not in text


def test_the_description_of_special_plans_says_so() -> None:
    """No experts and unknown sizes have words of their own."""
    assert plan(_layout(0, 0, 0), 0).describe() == "no experts"
    assert "not known" in plan(_layout(expert_bytes=0), 0).describe()


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

    def room(self) -> int | None:
        """Read it as if it were this machine."""
        for name, lines in (("mountinfo", self.mounts), ("cgroup", self.membership)):
            (self.proc / "self" / name).write_text("".join(f"{line}\n" for line in lines))
        return cgroup_room(self.proc)


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
    assert cgroup_room(tmp_path / "nowhere") is None


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


def test_this_machine_has_free_memory() -> None:
    """The real files are understood: something positive, at most the cgroup's room."""
    room, free = cgroup_room(), free_host_bytes()

    assert free > 0
    assert room is None or room > 0
