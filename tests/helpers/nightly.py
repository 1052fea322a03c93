"""Cases of a test that most runs leave out: `pytest -m nightly` has them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], is_daily: Callable[[Any], bool]) -> list[Any]:
    """Return parameters of a test, of which every run has those for which `is_daily` is true."""
    given = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = {True: (), False: pytest.mark.nightly}
    return [
        pytest.param(*one, marks=marks[is_daily(one if len(one) > 1 else one[0])]) for one in given
    ]
