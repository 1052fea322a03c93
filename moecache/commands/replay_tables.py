"""The tables of `moecache replay`: hit rates by policy and capacity, and by layer."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from moecache.commands.paths import printable
from moecache.study._arguments import BELADY, cycle_slots, total_experts
from moecache.study.table import Table, best_of, groups
from moecache.traces.trace import Trace
from moecache.units import format_bytes


def print_table(
    console: Console, table: Table, traces: Mapping[str, Trace], sizes: Mapping[str, int]
) -> None:
    """Print a table of hit rates per trace and scope, the best in bold, the bound last."""
    for (name, scope), (capacities, policies, rates) in groups(table):
        console.print(_heading(name, scope, traces[name]), style="bold")
        shown = RichTable("policy")
        for slots, share in capacities:
            label = f"{share:.3g}%\n{slots} slots"
            if name in sizes:
                label += f"\n{format_bytes(slots * sizes[name])}"
            shown.add_column(label, justify="right")
        bests = best_of(policies, [slots for slots, _ in capacities], rates)
        for policy in policies:
            is_bound = policy == BELADY
            if is_bound and len(policies) > 1:
                shown.add_section()
            cells = []
            for slots, _ in capacities:
                rate = rates.get((policy, slots))
                best = rate is not None and rate == bests[slots] and not is_bound
                text = "-" if rate is None else f"{rate:.1%}"
                cells.append(Text(text, style="bold green" if best else ""))
            shown.add_row("belady (the optimum)" if is_bound else policy, *cells)
        console.print(shown)


def print_layers(console: Console, table: Table, traces: Mapping[str, Trace]) -> None:
    """Print a table of the layers' hit rates per trace, scope and capacity."""
    blocks: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    for row, rates in zip(table, table.per_layer, strict=True):
        place = row["trace"], row["scope"], row["capacity"]
        blocks.setdefault(place, {})[row["policy"]] = rates or []
    for (name, scope, slots), columns in blocks.items():
        trace = traces[name]
        share = slots / total_experts(trace)
        title = f"{printable(name)}, scope {scope}, {slots} slots ({share:.1%}), by layer"
        console.print(title, style="bold")
        shown = RichTable("layer")
        for policy in columns:
            shown.add_column(policy, justify="right")
        for index, layer in enumerate(trace.layers):
            cells = [f"{column[index]:.1%}" for column in columns.values()]
            shown.add_row(str(layer), *cells)
        console.print(shown)


def _heading(name: str, scope: str, trace: Trace) -> str:
    cycle = cycle_slots(trace)
    return (
        f"{printable(name)}, scope {scope}: hit rates (a token uses {cycle} of "
        f"{total_experts(trace)} experts, {cycle / total_experts(trace):.1%})"
    )
