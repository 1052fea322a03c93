"""Pictures of traces and replays. Needs matplotlib (the extra `study`).

Every function draws into an Axes, its own or one that is given, and returns it. Nothing is
shown or saved, and no default of matplotlib is changed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moecache.errors import ConfigError, MissingDependencyError
from moecache.policies.making import policy_name
from moecache.study._arguments import BELADY, cycle_slots, total_experts
from moecache.study._machine import known_expert_bytes
from moecache.study.curves import miss_ratio_curve
from moecache.study.replay import Replay, replay
from moecache.study.statistics import expert_counts
from moecache.study.table import Table
from moecache.traces.trace import Trace

# Okabe and Ito's colours (2008), which the colour-blind tell apart; yellow is too pale for lines.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_BLACK = "#1A1A1A"
_GREY = "#767676"
_MARKERS = ("o", "s", "^", "D", "v", "P")
_FRACTIONS = (0.03125, 0.0625, 0.09375, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0)
_LOWEST_GAP = -100
_GIB = 2**30
_MIB = 2**20


def miss_ratio_curves(
    trace: Trace,
    policies: Sequence[Any] = ("lru", "echo", BELADY),
    *,
    fractions: Sequence[float] | None = None,
    scope: str = "global",
    expert_bytes: int | None = None,
    ax: Any = None,
) -> Any:
    """Draw the miss ratios of policies by the share of the experts that is in memory.

    A grey line stands where one token's experts over all layers would just fit. Policies are
    replayed at `fractions`. Where every step has one row, LRU is drawn by its stack
    distances instead, at every capacity that a step fits into.

    Parameters
    ----------
    trace : Trace
    policies : names, classes or functions
        As for `replay`.
    fractions : sequence of float, optional
        Capacities as shares of all experts, in (0, 1]. By default 11 of them, and the two
        sides of one token's experts.
    scope : {"global", "layer"}, default "global"
    expert_bytes : int, optional
        For a second axis in bytes; by default what the trace says.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        With a line per policy, labelled with its name.

    Raises
    ------
    ConfigError
        If an expert's size is one that no model has: above 2**50 bytes.
    """
    known_expert_bytes(trace, expert_bytes)
    sizes: Sequence[float] = curve_slots(trace, scope) if fractions is None else fractions
    points = {
        policy_name(policy): [
            (done.capacity, 1 - done.hit_rate)
            for done in (replay(trace, policy, size, scope=scope) for size in sizes)
        ]
        for policy in policies
    }
    return draw_curves(
        trace, points, lru="lru" in policies, scope=scope, expert_bytes=expert_bytes, ax=ax
    )


def curve_slots(trace: Trace, scope: str) -> list[int]:
    """Return the slots at which curves are drawn, in order.

    Shares of all experts, and both sides of the cliff: one token's experts over all
    layers, and one layer's less.
    """
    least = trace.num_layers if scope == "layer" else 1
    cycle = cycle_slots(trace)
    slots = {int(total_experts(trace) * share) for share in _FRACTIONS}
    slots |= {cycle, cycle - cycle // trace.num_layers}
    return sorted(number for number in slots if number >= least)


def draw_curves(
    trace: Trace,
    points: Mapping[str, Sequence[tuple[int, float]]],
    *,
    lru: bool,
    scope: str,
    expert_bytes: int | None,
    ax: Any,
) -> Any:
    """Draw miss ratios that are known: by policy, (slots, miss ratio).

    With `lru` the policy of that name is LRU, and drawn finer where that holds.
    """
    total = total_experts(trace)
    ax = _axes(ax)
    styles = _styles(list(points))
    widest = max((slots for known in points.values() for slots, _ in known), default=total)
    for name, known in points.items():
        style = styles[name]
        if name == "lru" and lru and trace.num_steps == trace.num_tokens:
            known, style = _refined(trace, known, scope), {**style, "marker": ""}
        places = sorted(known)
        ax.plot([100 * at / total for at, _ in places], [y for _, y in places], label=name, **style)
    cycle = 100 * cycle_slots(trace) / total
    ax.axvline(cycle, color=_GREY, linewidth=1, linestyle=(0, (2, 2)), zorder=0)
    ax.annotate(
        f"one token: {cycle_slots(trace)} experts",
        (cycle, 1),
        (4, -4),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=_GREY,
        fontsize="small",
        va="top",
    )
    ax.set(xlim=(0, 100 * widest / total), ylim=(0, 1), ylabel="miss ratio")
    ax.set_xlabel(f"share of all {total} experts in memory, %")
    if "model" in trace.metadata:
        _title(ax, str(trace.metadata["model"]))
    nbytes = known_expert_bytes(trace, expert_bytes)
    if nbytes > 0:
        _bytes_axis(ax, total * nbytes / 100)
    ax.legend(frameon=False)
    return ax


def expert_heat_map(trace: Trace, *, by_popularity: bool = False, ax: Any = None) -> Any:
    """Draw how often each expert of each layer was used.

    Parameters
    ----------
    trace : Trace
    by_popularity : bool, default False
        Sort each layer's experts, the most used first, rather than by number.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        With one image, [num_layers, num_experts]: uses of each expert.
    """
    ax = _axes(ax)
    counts = expert_counts(trace)
    if by_popularity:
        counts = -np.sort(-counts, axis=1)
    # From white to dark in every kind of sight; cells are not blended with each other.
    image = ax.imshow(counts, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0)
    ax.set_xlabel("expert, the layer's most used first" if by_popularity else "expert")
    ax.set_ylabel("layer")
    places = np.arange(0, trace.num_layers, -(-trace.num_layers // 10))
    ax.set_yticks(places, [str(layer) for layer in trace.layers[places]])
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    bar.set_label(f"uses in {trace.num_tokens} tokens")
    bar.outline.set(edgecolor=_GREY, linewidth=0.6)
    ax.spines["top"].set_visible(True)
    ax.spines["right"].set_visible(True)
    for spine in ax.spines.values():
        spine.set(color=_GREY, linewidth=0.6)
    if "model" in trace.metadata:
        _title(ax, str(trace.metadata["model"]))
    return ax


def hit_rate_over_time(
    replays: Mapping[str, Replay] | Replay, window: int = 32, *, ax: Any = None
) -> Any:
    """Draw hit rates of the last `window` steps, step by step.

    Parameters
    ----------
    replays : mapping of names to Replay, or one Replay
        Replays of one trace.
    window : int, default 32
        Steps.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        With a line per replay.
    """
    if isinstance(replays, Replay):
        replays = {replays.policy: replays}
    if not replays:
        raise ConfigError("there is no replay to draw")
    ax = _axes(ax)
    styles = _styles(list(replays), belady=[done.policy == BELADY for done in replays.values()])
    for name, done in replays.items():
        rates = done.hit_rate_over_time(window)
        style = {**styles[name], "marker": ""}
        ax.plot(np.arange(1, len(rates) + 1), rates, label=name, **style)
    longest = max(len(done.hits) for done in replays.values())
    ax.set(xlim=(0, max(1, longest)), ylim=(0, 1))
    ax.set_xlabel("step")
    ax.set_ylabel(f"hit rate of the last {window} steps")
    ax.legend(frameon=False)
    return ax


def gap_shares(table: Table, *, scope: str = "global", ax: Any = None) -> Any:
    """Draw how much of the gap from LRU to Belady's optimum each policy closes.

    A group of bars per trace and capacity. Below zero a policy is worse than LRU. Where LRU is
    all but optimal the share says little, and can be far below: bars that leave the picture
    say how far.

    Parameters
    ----------
    table : Table
        Results of a sweep with "lru" and "belady" among its policies.
    scope : {"global", "layer"}, default "global"
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        With bars per policy.

    Raises
    ------
    ConfigError
        If no row has a gap.
    """
    rows = [
        row
        for row in table.select(scope=scope)
        if row["gap_share"] is not None and row["policy"] not in {"lru", BELADY}
    ]
    if not rows:
        raise ConfigError(
            f"no row of scope {scope!r} has a gap; sweep other policies with lru and belady"
        )
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    clusters = list(dict.fromkeys((row["trace"], row["capacity"]) for row in rows))
    ax = _axes(ax, max(7, 2 + 0.7 * len(clusters)))
    shares = {(row["trace"], row["capacity"]): row["fraction"] for row in rows}
    values = {(row["policy"], row["trace"], row["capacity"]): row["gap_share"] for row in rows}
    styles = _styles(policies)
    width = 0.8 / len(policies)
    for place, policy in enumerate(policies):
        heights = [100 * values.get((policy, *cluster), np.nan) for cluster in clusters]
        middles = np.arange(len(clusters)) + (place - (len(policies) - 1) / 2) * width
        ax.bar(middles, heights, 0.92 * width, label=policy, color=styles[policy]["color"])
        for x, height in zip(middles, heights, strict=True):
            if height < _LOWEST_GAP:
                ax.annotate(
                    f"{height:.0f}",
                    (x, _LOWEST_GAP),
                    (0, 3),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    rotation=90,
                    fontsize="x-small",
                    color="white",
                )
    ax.axhline(0, color=_BLACK, linewidth=0.8)
    ax.set_xticks(range(len(clusters)), [f"{100 * shares[cluster]:.3g}%" for cluster in clusters])
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel("gap from LRU to Belady closed, %")
    ax.set_xlabel("share of all experts in memory")
    _name_groups(ax, [trace for trace, _ in clusters])
    known = [100 * row["gap_share"] for row in rows]
    low = max(min(known), _LOWEST_GAP)
    ax.set_ylim(1.08 * low if low < 0 else 0, max(10, 1.12 * max(known)))
    if low == _LOWEST_GAP:
        ax.set_ylim(bottom=_LOWEST_GAP)
    ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def blank(rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure that pyplot does not know, and its Axes as an array [rows, columns].

    For programs: nothing has to be closed, and no window can open.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _missing() from error
    figure = Figure(figsize=(7 * columns, 4.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def check_suffix(path: str) -> None:
    """Raise a ConfigError if a picture cannot be saved under such a name."""
    figure, _ = blank()
    known = sorted(figure.canvas.get_supported_filetypes())
    if path.rpartition(".")[2].lower() not in known:
        raise ConfigError(f"{path!r} does not end in one of .{', .'.join(known)}")


def _missing() -> MissingDependencyError:
    return MissingDependencyError(
        "pictures need matplotlib; install it with: pip install 'moecache[study]'"
    )


def _refined(
    trace: Trace, known: Sequence[tuple[int, float]], scope: str
) -> list[tuple[int, float]]:
    """Return LRU's slots and miss ratios: by stack distances, and as known below a step's experts.

    There they do not hold, nor where a step has several rows.
    """
    curve = miss_ratio_curve(trace, scope=scope)
    holds = curve.capacities >= trace.top_k * (trace.num_layers if scope == "layer" else 1)
    slots, ratios = curve.capacities[holds].tolist(), curve.miss_ratios[holds].tolist()
    below = [(at, ratio) for at, ratio in known if at < slots[0]]
    return below + list(zip(slots, ratios, strict=True))


def _axes(ax: Any, width: float = 7) -> Any:
    if ax is None:
        try:
            from matplotlib import pyplot as plt
        except ImportError as error:
            raise _missing() from error
        ax = plt.subplots(figsize=(width, 4.2), layout="constrained")[1]
    ax.spines["top"].set_visible(False)
    ax.spines["right"].set_visible(False)
    return ax


def _styles(names: Sequence[str], *, belady: Sequence[bool] = ()) -> dict[str, dict[str, Any]]:
    """Return colour, marker and dashes by name; Belady is black and dashed everywhere."""
    bound = belady or [name == BELADY for name in names]
    styles: dict[str, dict[str, Any]] = {}
    place = 0
    for name, is_bound in zip(names, bound, strict=True):
        if is_bound:
            styles[name] = {"color": _BLACK, "linestyle": "--", "linewidth": 1.5, "marker": ""}
            continue
        styles[name] = {
            "color": COLORS[place % len(COLORS)],
            # Beyond six colours the dashes tell.
            "linestyle": ("-", "-.", ":")[place // len(COLORS) % 3],
            "linewidth": 1.8,
            "marker": _MARKERS[place % len(_MARKERS)],
            "markersize": 4,
        }
        place += 1
    return styles


def _title(ax: Any, text: str) -> None:
    ax.set_title(text, loc="left", fontsize="medium")


def _bytes_axis(ax: Any, bytes_per_percent: float) -> None:
    unit, name = (_GIB, "GiB") if 100 * bytes_per_percent >= _GIB else (_MIB, "MiB")
    top = ax.secondary_xaxis(
        "top",
        functions=(
            lambda share: share * bytes_per_percent / unit,
            lambda size: size * unit / bytes_per_percent,
        ),
    )
    top.set_xlabel(name)


def _name_groups(ax: Any, traces: Sequence[str]) -> None:
    """Write the traces' names above their bars, where there are several."""
    names = list(dict.fromkeys(traces))
    for number, name in enumerate(names):
        places = [place for place, trace in enumerate(traces) if trace == name]
        ax.annotate(
            name,
            (sum(places) / len(places), 1),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize="small",
        )
        if number:
            ax.axvline(places[0] - 0.5, color=_GREY, linewidth=0.6)
