"""Pictures show what was computed, and leave matplotlib as it was."""

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from moecache.errors import ConfigError, MissingDependencyError
from moecache.study import Table, Trace, miss_ratio_curve, plots, replay, sweep
from tests.helpers.routing import ScriptedLru, random_trace

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def untouched_defaults() -> Iterator[None]:
    """Close what was drawn, and fail if a default was changed."""
    from matplotlib import pyplot as plt

    before = dict(matplotlib.rcParams)
    yield
    plt.close("all")
    assert dict(matplotlib.rcParams) == before


def lines(ax: object) -> dict[str, np.ndarray]:
    """Return the points of the lines that have a name, [n, 2]."""
    return {
        line.get_label(): line.get_xydata()
        for line in ax.get_lines()  # type: ignore[attr-defined]
        if not line.get_label().startswith("_")
    }


def test_miss_ratio_curves_are_those_of_the_replays() -> None:
    """LRU wherever a step fits, the others at the fractions; the line is one token's cycle."""
    trace = random_trace()

    ax = plots.miss_ratio_curves(trace, ("lru", "echo", "belady"), fractions=(0.25, 0.5))

    drawn = lines(ax)
    curve = miss_ratio_curve(trace)
    assert list(drawn) == ["lru", "echo", "belady"]
    assert drawn["lru"][:, 0].tolist() == (100 * curve.capacities[2:] / 96).tolist()
    assert drawn["lru"][:, 1].tolist() == curve.miss_ratios[2:].tolist()
    for name in ("echo", "belady"):
        rates = [1 - replay(trace, name, share).hit_rate for share in (0.25, 0.5)]
        assert drawn[name].tolist() == [[25, rates[0]], [50, rates[1]]]
    cycle = next(line for line in ax.get_lines() if line.get_label().startswith("_"))
    assert set(cycle.get_xdata()) == {12.5}
    assert ax.get_xlabel() == "share of all 96 experts in memory, %"
    assert ax.get_ylabel() == "miss ratio"
    assert ax.get_title("left") == "random 0"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(drawn)


def test_a_second_axis_is_in_bytes_if_they_are_known() -> None:
    """From the metadata or the argument; without either there is none."""
    trace = Trace(random_trace().experts, num_experts=24, expert_bytes=2**30)
    for given, unit, top in ((None, "GiB", 96), (2**20, "MiB", 96)):
        ax = plots.miss_ratio_curves(trace, ("lru",), expert_bytes=given)
        (second,) = ax.child_axes
        ax.figure.canvas.draw()
        assert second.get_xlabel() == unit
        assert second.get_xlim() == (0, pytest.approx(top))
    assert not plots.miss_ratio_curves(random_trace(), ("lru",)).child_axes


@pytest.mark.parametrize("size", [10**400, 2**50 + 1])
def test_a_size_that_no_expert_has_is_refused(size: int) -> None:
    """The trace's or the argument, before anything is replayed."""
    message = r"expert_bytes must be from 1 to 2\*\*50 \(1.00 PiB\), got "
    trace = Trace(random_trace().experts, num_experts=24, expert_bytes=size)
    for given, argument in ((trace, None), (random_trace(), size)):
        with pytest.raises(ConfigError, match=message):
            plots.miss_ratio_curves(given, ("no policy",), expert_bytes=argument)


@pytest.mark.parametrize("fractions", [None, (0.5,)])
def test_curves_of_a_file_that_was_not_read_are_refused(fractions: tuple[float] | None) -> None:
    """As replays are."""
    with pytest.raises(ConfigError, match=r"'run.npz' is no Trace; read a file's with"):
        plots.miss_ratio_curves("run.npz", ("lru",), fractions=fractions)  # type: ignore[arg-type]


def test_curves_of_scope_layer_leave_out_what_cannot_be_split() -> None:
    """The default fractions begin where each layer has a slot."""
    ax = plots.miss_ratio_curves(random_trace(), ("echo",), scope="layer")
    assert lines(ax)["echo"][0, 0] == pytest.approx(100 * 6 / 96)


def test_below_a_steps_experts_lru_is_replayed() -> None:
    """There stack distances do not hold: a layer with two slots still finds some of three."""
    trace = random_trace()
    drawn = lines(plots.miss_ratio_curves(trace, ("lru",), scope="layer"))["lru"]
    slots = np.rint(drawn[:, 0] * 96 / 100).astype(int).tolist()
    assert slots == [6, 9, 12, *range(16, 97, 4)]
    for place in range(2):
        done = replay(trace, "lru", slots[place], scope="layer")
        assert drawn[place, 1] == 1 - done.hit_rate


def test_where_a_step_has_several_rows_lru_is_replayed() -> None:
    """A replay admits a fair share of such a step: one line for it and the others."""
    single = random_trace()
    trace = Trace(single.experts, num_experts=24, step=[0, 0, 0, *range(1, 198)])

    drawn = lines(plots.miss_ratio_curves(trace, ("lru", ScriptedLru), fractions=(0.25, 0.5)))

    rates = [1 - replay(trace, "lru", share).hit_rate for share in (0.25, 0.5)]
    assert (
        drawn["lru"].tolist() == drawn["ScriptedLru"].tolist() == [[25, rates[0]], [50, rates[1]]]
    )


def test_the_cliff_is_drawn_as_one() -> None:
    """Also where LRU is replayed: with one token's experts, and with one layer's less."""
    rows = np.tile(np.arange(3), (40, 5, 1))
    trace = Trace(rows, num_experts=24, step=[0, 0, *range(1, 39)])

    drawn = lines(plots.miss_ratio_curves(trace, ("lru",)))["lru"]

    ratios = dict(zip(np.rint(drawn[:, 0] * 120 / 100).tolist(), drawn[:, 1], strict=True))
    assert ratios[12] > 0.98
    assert ratios[15] == pytest.approx(1 / 39)


def test_a_given_axes_is_drawn_into() -> None:
    """And returned; of a figure that pyplot does not know, too."""
    figure, axes = plots.blank(2, 2)
    assert plots.expert_heat_map(random_trace(), ax=axes[0, 0]) is axes[0, 0]
    assert plots.miss_ratio_curves(random_trace(), ("lru",), ax=axes[1, 0]) is axes[1, 0]
    done = {"lru": replay(random_trace(), "lru", "25%")}
    assert plots.hit_rate_over_time(done, ax=axes[0, 1]) is axes[0, 1]
    figure.canvas.draw()
    from matplotlib import pyplot as plt

    assert not plt.get_fignums()


def test_the_heat_map_has_the_uses() -> None:
    """Layer by expert, or each layer's most used first; padding is no expert."""
    trace = Trace([[[0, 2], [1, -1]], [[2, 1], [1, 0]]], num_experts=3, layers=[4, 9])

    ax = plots.expert_heat_map(trace)
    (image,) = ax.get_images()
    assert image.get_array().tolist() == [[1, 1, 2], [1, 2, 0]]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["4", "9"]
    (by_use,) = plots.expert_heat_map(trace, by_popularity=True).get_images()
    assert by_use.get_array().tolist() == [[2, 1, 1], [2, 1, 0]]


def test_hit_rates_over_time_are_those_of_the_replays() -> None:
    """A line per name; Belady's is dashed whatever it is called."""
    trace = random_trace()
    replays = {"LRU": replay(trace, "lru", "25%"), "bound": replay(trace, "belady", "25%")}

    ax = plots.hit_rate_over_time(replays, window=16)

    for name, points in lines(ax).items():
        assert points[:, 1].tolist() == replays[name].hit_rate_over_time(16).tolist()
        assert points[:, 0].tolist() == list(range(1, 201))
    styles = {line.get_label(): line.get_linestyle() for line in ax.get_lines()}
    assert styles == {"LRU": "-", "bound": "--"}
    assert ax.get_ylabel() == "hit rate of the last 16 steps"
    assert list(lines(plots.hit_rate_over_time(replays["LRU"]))) == ["lru"]
    with pytest.raises(ConfigError, match="no replay to draw"):
        plots.hit_rate_over_time({})


def test_gap_shares_are_the_tables() -> None:
    """A bar per policy in each group; LRU and Belady, 0 and 100, are not drawn."""
    table = sweep(
        {"one": random_trace(1), "two": random_trace(2)},
        ("lru", "lfu", "echo", "belady"),
        ("25%", "50%"),
    )

    ax = plots.gap_shares(table)

    drawn = {bars.get_label(): [bar.get_height() for bar in bars] for bars in ax.containers}
    for policy in ("lfu", "echo"):
        expected = [100 * share for share in table.select(policy=policy)["gap_share"]]
        assert drawn.pop(policy) == pytest.approx(expected)
    assert not drawn
    assert [label.get_text() for label in ax.get_xticklabels()] == ["25%", "50%"] * 2
    assert {"one", "two"} <= {text.get_text() for text in ax.texts}
    with pytest.raises(ConfigError, match="with lru and belady"):
        plots.gap_shares(table.select(policy="lfu", scope="layer"))


def test_a_gap_that_leaves_the_picture_is_written() -> None:
    """Where LRU is nearly optimal, a policy can be hundreds of percent below."""
    rows = sweep(random_trace(1), ("lru", "lfu", "belady"), "25%").rows
    rows[1]["gap_share"] = -4.56
    ax = plots.gap_shares(Table(rows))
    assert ax.get_ylim()[0] == -100
    assert "-456" in {text.get_text() for text in ax.texts}


def test_colours_are_told_apart() -> None:
    """Six colours, then other dashes: no two policies look alike."""
    names = [f"policy {number}" for number in range(15)]
    styles = plots._styles(names)
    assert len({(style["color"], style["linestyle"]) for style in styles.values()}) == 15


def test_names_of_pictures_are_checked() -> None:
    """Before anything is computed."""
    plots.check_suffix("a/b.PNG")
    with pytest.raises(ConfigError, match=r"'picture.doc' does not end in one of .*\.png"):
        plots.check_suffix("picture.doc")


def test_without_matplotlib_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An extra is named, not a stack trace."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'moecache\[study\]'"):
        plots.expert_heat_map(random_trace())
    with pytest.raises(MissingDependencyError, match=r"pip install 'moecache\[study\]'"):
        plots.blank()
