"""Watch against plain Python: whatever happens to what it looks at."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

NAMES = ("weight", "bias", "forward", "scaling")


class Oracle:
    """The same by copies of everything."""

    def __init__(self) -> None:
        self.looks: list[Any] = []

    def holds(self, holder: dict[str, Any], name: str, held: object) -> None:
        """Expect an object, or nothing or `None`."""
        self.looks.append(lambda: holder.get(name) is held)

    def lacks(self, holder: dict[str, Any], name: str) -> None:
        """Expect no entry."""
        self.looks.append(lambda: name not in holder)

    def keeps(self, holder: dict[str, Any]) -> None:
        """Expect the same entries."""
        before = list(holder.values())
        self.looks.append(
            lambda: (
                len(before) == len(holder)
                and all(a is b for a, b in zip(holder.values(), before, strict=True))
            )
        )

    def equals(self, holder: dict[str, Any], name: str, value: object) -> None:
        """Expect an equal value."""
        self.looks.append(lambda: name in holder and holder[name] == value)

    def are_current(self) -> bool:
        """Return whether all holds."""
        return all(look() for look in self.looks)


VALUES = [object(), object(), None, 1, 1.0, 0.5, True, (1, 2), "silu"]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_it_sees_what_plain_python_sees(data: st.DataObject) -> None:
    """Entries that come, go, change places or become equal values of other types."""
    from moecache.integrations.transformers.recipes._watch import Watch

    value = st.sampled_from(VALUES)
    dicts: list[dict[str, Any]] = [
        data.draw(st.dictionaries(st.sampled_from(NAMES), value)) for _ in range(3)
    ]
    watch, oracle = Watch(), Oracle()
    for _ in range(data.draw(st.integers(0, 6))):
        holder = data.draw(st.sampled_from(dicts))
        kind = data.draw(st.sampled_from(["holds", "lacks", "keeps", "equals"]))
        name = data.draw(st.sampled_from(NAMES))
        given: list[Any] = [holder] if kind == "keeps" else [holder, name]
        if kind in ("holds", "equals"):
            given.append(holder.get(name) if data.draw(st.booleans()) else data.draw(value))
        for one in (watch, oracle):
            getattr(one, kind)(*given)
    assert watch.are_current() == oracle.are_current()
    for _ in range(data.draw(st.integers(0, 8))):
        holder, name = data.draw(st.sampled_from(dicts)), data.draw(st.sampled_from(NAMES))
        if data.draw(st.booleans()):
            holder[name] = data.draw(value)
        elif name in holder:
            gone = holder.pop(name)
            if data.draw(st.booleans()):
                holder[name] = gone
        assert watch.are_current() == oracle.are_current()


def test_tensors_may_not_move_or_change() -> None:
    """Other memory, also of the same size, and values written in place."""
    from moecache.integrations.transformers.recipes._watch import Watch

    tensor = torch.nn.Parameter(torch.ones(8, 4), requires_grad=False)
    where, values = Watch(), Watch()
    where.lies(tensor)
    values.stays(tensor)
    tensor.mul_(2)
    assert where.are_current()
    assert not values.are_current()
    before = tensor.data
    tensor.data = tensor.data.clone()
    assert not where.are_current()
    tensor.data = before
    assert where.are_current()


def test_an_error_of_a_comparison_is_the_callers() -> None:
    """And no dictionary is none."""
    from moecache.integrations.transformers.recipes._watch import Watch

    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ValueError("no")

        __hash__ = None  # type: ignore[assignment]

    holder: dict[str, Any] = {"a": Odd()}
    watch = Watch()
    watch.equals(holder, "a", Odd())
    with pytest.raises(ValueError, match="no"):
        watch.are_current()
    with pytest.raises(TypeError, match="list is no dictionary"):
        watch.holds([], "a", None)  # type: ignore[arg-type]
