"""Budgets of test files: what fails is a file that grew, and no slow machine."""

from tests.helpers.budgets import BUDGETS, FACTOR, MIN_FILES, Budgets


def test_a_slow_machine_is_told_from_a_file_that_grew() -> None:
    """By the other files of the run; of few, or on a fast machine, the budget is what it says."""
    names = list(BUDGETS)[: MIN_FILES + 1]
    for slowness in (0.5, 1.0, 10.0):
        budgets = Budgets()
        for name in names:
            budgets.files[name] = BUDGETS[name] * slowness
        assert budgets.over_budget() == []
        budgets.files[names[0]] = BUDGETS[names[0]] * max(1, slowness) * FACTOR * 1.01
        assert [line.split()[0] for line in budgets.over_budget()] == names[:1]
    alone = Budgets()
    alone.files[names[0]] = BUDGETS[names[0]] * FACTOR * 1.01
    assert len(alone.over_budget()) == 1
