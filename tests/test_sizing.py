"""From bytes to slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecache.layout import ExpertLayout
from moecache.sizing import (
    RESERVE_BYTES,
    SizingPlan,
    SizingStatus,
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
    assert plan(_layout(), "512MiB").status is SizingStatus.BUDGET_EXHAUSTED
    assert plan(_layout(), "7kB", reserve_bytes="2kB").budget_slots == 5


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
