"""Advice: the best of what was tried, with figures that can be checked; and tables."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from moecache.errors import CapacityError, ConfigError, MissingDependencyError, StoreError
from moecache.study import Table, Trace, miss_ratio_curve, recommend, replay, sweep
from moecache.study.table import COLUMNS
from tests.helpers.routing import ScriptedLru, random_trace

POLICIES = ("lru", "lfu", "echo")


def second_half(trace: Trace, policy: str, slots: int, scope: str) -> float:
    """Return the hit rate of the later steps after the earlier ones."""
    done = replay(trace, policy, slots, scope=scope)
    half = len(done.hits) // 2
    hits, misses = int(done.hits[half:].sum()), int(done.misses[half:].sum())
    return hits / (hits + misses)


def test_the_best_of_all_that_were_tried_is_recommended() -> None:
    """By the second half of the steps, of all policies and scopes."""
    trace = random_trace()

    advice = recommend(trace, 24 * 1000, expert_bytes=1000, policies=POLICIES)

    rates = {
        (policy, scope): second_half(trace, policy, 24, scope)
        for policy in POLICIES
        for scope in ("global", "layer")
    }
    assert {(policy, scope): rate for policy, scope, rate in advice.candidates} == rates
    assert advice.hit_rate == max(rates.values()) == rates[advice.policy, advice.scope]
    assert advice.slots == 24
    done = replay(trace, advice.policy, 24, scope=advice.scope)
    assert advice.bytes_per_token == done.misses[100:].sum() * 1000 / 100
    assert advice.whole_hit_rate == done.hit_rate
    assert advice.whole_optimum == replay(trace, "belady", 24, scope=advice.scope).hit_rate
    assert advice.whole_optimum > advice.whole_hit_rate


@pytest.mark.parametrize("scopes", [("global",), ("layer",), ("global", "layer")])
def test_the_optimum_is_of_what_it_is_compared_with(scopes: tuple[str, ...]) -> None:
    """Both of the whole trace of single rows, where nothing exceeds it; 150 traces."""
    for seed in range(150):
        shape = (12, 1 + seed % 3, 1 + seed % 2)
        trace = random_trace(seed, shape, 6)
        least = shape[1] * shape[2]
        slots = least + seed % (6 * shape[1] - least + 1)

        advice = recommend(trace, slots, expert_bytes=1, scopes=scopes)

        assert advice.whole_hit_rate <= advice.whole_optimum
        text = advice.describe()
        assert (
            f"Belady's optimum, which knows the future, {advice.whole_optimum:.1%} of the whole "
            f"trace, where this policy had {advice.whole_hit_rate:.1%}"
        ) in text
        assert "at best" not in text


def test_in_the_second_half_alone_a_policy_may_be_ahead_of_belady() -> None:
    """The optimum over a whole trace is no bound on a part of it."""
    trace = random_trace(69, (12, 1, 1), 6)
    advice = recommend(trace, 2, expert_bytes=1, scopes=("global",))
    assert advice.hit_rate == 1
    assert second_half(trace, "belady", 2, "global") == 5 / 6
    assert advice.whole_hit_rate == advice.whole_optimum == 8 / 12


def test_below_the_cliff_the_policy_is_measured_at_it() -> None:
    """Not every policy gains there: the chosen one's figures are given."""
    trace = random_trace()

    advice = recommend(trace, 8, expert_bytes=1)
    beyond = recommend(trace, 12, expert_bytes=1)

    at_cycle = second_half(trace, advice.policy, 12, advice.scope)
    assert advice.hit_rate_at_cycle == at_cycle
    text = advice.describe()
    assert f"with 12 B for experts {advice.policy} found {at_cycle:.1%}, not " in text
    assert "every policy" not in text
    assert beyond.hit_rate_at_cycle is None
    assert "note" not in beyond.describe()


def test_the_cliff_is_where_one_token_fits() -> None:
    """LRU has no hits if there is room for all that a token uses but one layer's choices."""
    rows = np.tile(np.arange(3), (200, 4, 1))
    trace = Trace(rows, num_experts=24, expert_bytes=10)

    advice = recommend(trace, 960)

    assert advice.cycle_slots == 12
    assert advice.lru_below_cycle == 0
    assert advice.lru_above_cycle == miss_ratio_curve(trace).hit_rate(12) == 1 - 12 / 2400


def test_twice_the_memory_is_looked_at_as_well() -> None:
    """With twice the slots, unless everything fits already."""
    trace = random_trace()
    advice = recommend(trace, 24000, expert_bytes=1000, policies=POLICIES)
    again = recommend(trace, 48000, expert_bytes="1000", policies=POLICIES)
    everything = recommend(trace, "100%", expert_bytes=1000, policies=POLICIES)

    assert advice.doubled is not None
    assert advice.doubled.slots == 48
    assert advice.doubled.hit_rate == again.hit_rate
    assert everything.slots == 96
    assert everything.doubled is None
    assert "every expert fits" in everything.describe()


def test_a_person_can_act_on_it() -> None:
    """Policy, scope, slots, bytes, the cliff and the bound are in the text."""
    trace = Trace(random_trace().experts, num_experts=24, expert_bytes=2**20)
    text = recommend(trace, "8MiB").describe()
    for part in (
        "use        policy ",
        "8 of 96 experts (8.3%), 8.00 MiB",
        "read per token (second half of the trace, warmed on the first)",
        "Belady's optimum",
        "a token uses 12 experts over all layers (12.0 MiB)",
        "this is below the cliff",
        "twice that 16.0 MiB (16 slots)",
    ):
        assert part in text
    assert "<caption>Recommendation" in recommend(trace, "8MiB")._repr_html_()


@pytest.mark.parametrize(
    ("memory", "arguments", "error", "message"),
    [
        ("1MiB", {}, ConfigError, "does not say how large an expert is; give expert_bytes"),
        (10, {"expert_bytes": 100}, CapacityError, "10 B holds no expert of 100 B"),
        ("much", {"expert_bytes": 100}, ConfigError, "'much' is not a size"),
        ("1MiB", {"expert_bytes": 0}, ConfigError, "at least 1 byte"),
        ("1MiB", {"expert_bytes": 1, "policies": ("belady",)}, ConfigError, "knows the future"),
        ("1MiB", {"expert_bytes": 1, "policies": ()}, ConfigError, "at least one policy"),
        ("1MiB", {"expert_bytes": 1, "scopes": ("x",)}, ConfigError, "scope 'x'"),
        (300, {"expert_bytes": 100, "scopes": ("layer",)}, CapacityError, "fewer than 4 layers"),
        (
            2400,
            {"expert_bytes": 100, "policies": (ScriptedLru(24, num_keys=96),)},
            ConfigError,
            "advice makes a policy anew for each replay, and ScriptedLru is one object",
        ),
    ],
)
def test_what_cannot_be_advised_is_an_error(
    memory: str | int, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    """The message says what is missing."""
    with pytest.raises(error, match=message):
        recommend(random_trace(), memory, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs at least 2"):
        recommend(random_trace()[:1], 1, expert_bytes=1)


def test_too_few_slots_for_the_layers_leave_scope_global() -> None:
    """Scope "layer" is passed over, not an error, where another one is left."""
    advice = recommend(random_trace(), 300, expert_bytes=100, policies=("lru", ScriptedLru))
    assert [scope for _, scope, _ in advice.candidates] == ["global", "global"]


@pytest.fixture(scope="module")
def table() -> Table:
    """Return a sweep's table of one trace."""
    return sweep({"a,b": random_trace()}, (*POLICIES, "belady"), ("25%", "50%"))


def test_a_table_is_rows_columns_and_parts(table: Table) -> None:
    """Index by number, slice or column; select by value; pick the best."""
    assert len(table) == len(list(table)) == 8
    assert list(table[0]) == list(COLUMNS)
    assert len(table[2:4]) == 2
    assert table["capacity"] == [24] * 4 + [48] * 4
    assert table.select(policy="lru", capacity="25%")["capacity"] == [24]
    best = table.best(capacity=0.5)
    assert best["hit_rate"] == max(table.select(capacity=48)["hit_rate"][:3])
    assert best["policy"] != "belady"
    with pytest.raises(ConfigError, match="column 'x' is not one of"):
        table["x"]
    with pytest.raises(ConfigError, match="column 'size' is not one of"):
        table.select(size=3)
    with pytest.raises(ConfigError, match="no policy's row with policy='arc'"):
        table.best(policy="arc")


def test_a_table_is_written_whole(table: Table, tmp_path: Path) -> None:
    """CSV and JSON have every row; a directory that is not there is an error."""
    table.to_csv(tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [float(row["hit_rate"]) for row in read] == table["hit_rate"]
    assert read[0]["trace"] == "a,b"
    assert read[0]["prefill_hit_rate"] == ""
    table.to_json(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text()) == table.rows
    with pytest.raises(StoreError, match="cannot be written: No such file"):
        table.to_csv(tmp_path / "nowhere" / "t.csv")
    assert {path.name for path in tmp_path.iterdir()} == {"t.csv", "t.json"}


def test_a_table_goes_to_pandas_and_parquet(table: Table, tmp_path: Path) -> None:
    """Column for column, and back."""
    pandas = pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert list(frame.columns) == list(COLUMNS)
    assert frame["num_hits"].tolist() == table["num_hits"]
    pytest.importorskip("pyarrow")
    table.to_parquet(tmp_path / "t.parquet")
    assert pandas.read_parquet(tmp_path / "t.parquet")["hit_rate"].tolist() == table["hit_rate"]


@pytest.mark.parametrize("missing", ["pandas", "pyarrow"])
def test_what_a_table_lacks_is_named(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """The message has the line that installs it."""
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingDependencyError, match=r"pandas and pyarrow; .*'moecache\[study\]'"):
        table.to_parquet(tmp_path / "t.parquet")
    if missing == "pandas":
        with pytest.raises(MissingDependencyError, match=r"needs pandas"):
            table.to_pandas()


def test_a_table_shows_policies_by_capacity(table: Table) -> None:
    """The best of a column has a star, Belady's, which is higher, does not."""
    lines = table.pivot().splitlines()
    assert lines[0] == "a,b, scope global"
    assert lines[1].split() == ["24", "(25%)", "48", "(50%)"]
    assert [line.split()[0] for line in lines[2:]] == [*POLICIES, "belady"]
    best = table.best(capacity=24)
    row = next(line for line in lines if line.startswith(best["policy"]))
    assert row.split()[1] == f"{best['hit_rate']:.3f}*"
    assert "*" not in lines[-1]
    page = table._repr_html_()
    assert f"<b>{best['hit_rate']:.3f}</b>" in page
    assert Table([]).pivot() == "no rows"
    assert "&lt;x&gt;" in sweep({"<x>": random_trace()}, "lru", "25%")._repr_html_()
