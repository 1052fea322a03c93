"""Fewer cases than all: every two values of two parameters meet in one."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases, a value of each parameter, in which every pair of values is at least once.

    A defect hardly ever takes more than two values to show. Of two parameters this is their
    product; of more it is little longer than the product of the two longest.
    """
    missing = {
        (one, two): None
        for first, second in itertools.combinations(range(len(parameters)), 2)
        for one in itertools.product([first], range(len(parameters[first])))
        for two in itertools.product([second], range(len(parameters[second])))
    }
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for number, values in enumerate(parameters):
            if number not in case:
                places = [(number, value) for value in range(len(values))]
                _, case[number] = max(
                    places,
                    key=lambda place: sum(
                        tuple(sorted((place, other))) in missing for other in case.items()
                    ),
                )
        for pair in itertools.combinations(sorted(case.items()), 2):
            missing.pop(pair, None)
        cases.append(tuple(values[case[number]] for number, values in enumerate(parameters)))
    return cases
