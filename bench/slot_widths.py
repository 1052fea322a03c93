"""What slots as wide as their layers would be worth: misses with one pool of slots, and with two.

    python -m bench.slot_widths TRACE.npz ... --shares 20% 35% 50%

In a mix such as llama.cpp's Q4_K_M some layers have wider experts than others, and a slot that
takes any layer's is as wide as the widest: 6 % of that file's slots lie idle. With a pool of slots
for the wide layers and one for the others the same memory has that many slots more, but layers of
one pool leave nothing to those of the other. Shown is the hit rate of ECHO with one pool, with two
of as many slots together, and with two that have the gain.
"""

import argparse

from rich.console import Console
from rich.table import Table

from moecache.study.replay import Replay, replay
from moecache.traces.trace import Trace
from moecache.units import parse_budget


def is_wide(layer: int, num_layers: int) -> bool:
    """Return whether llama.cpp's Q4_K_M has Q6_K in a layer (`use_more_bits`, llama-quant.cpp)."""
    eighth = num_layers // 8
    is_within = eighth <= layer < 7 * num_layers // 8
    return not is_within or (layer - eighth) % 3 == 2


def hit_rates(trace: Trace, share: float, gain: float) -> tuple[float, float, float]:
    """Return the hit rates of one pool, of two, and of two with so many slots more."""
    layers = range(trace.num_layers)
    wide = [layer for layer in layers if is_wide(layer, trace.num_layers)]
    narrow = [layer for layer in layers if layer not in wide]
    parts = [_layers_of(trace, chosen) for chosen in (wide, narrow)]
    slots = share * trace.num_layers * trace.num_experts

    def two(more: float) -> float:
        found = [_replay(part, slots * more * part.num_layers / trace.num_layers) for part in parts]
        return sum(one.num_hits for one in found) / sum(one.num_accesses for one in found)

    return _replay(trace, slots).hit_rate, two(1), two(1 + gain)


def _replay(trace: Trace, slots: float) -> Replay:
    return replay(trace, capacity=max(1, int(slots)))


def _layers_of(trace: Trace, chosen: list[int]) -> Trace:
    return Trace(
        trace.experts[:, chosen],
        num_experts=trace.num_experts,
        phase=trace.phase,
        sequence=trace.sequence,
        step=trace.step,
    )


def main(argv: list[str] | None = None) -> int:
    """Print a table; return the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m bench.slot_widths", None, __doc__, formatter_class=form
    )
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE.npz", help="recorded routing, of 8 layers or more")
    add("--shares", nargs="+", default=["20%", "35%", "50%"], help="of the experts in slots")
    add("--gain", type=float, default=0.06, help="slots that the memory has more (0.06)")
    arguments = parser.parse_args(argv)
    table = Table("trace", "slots", "one pool", "two", "two, with the gain", "misses")
    for path in arguments.traces:
        trace = Trace.load(path)
        for share in arguments.shares:
            one, two, more = hit_rates(trace, parse_budget(share, 10**6) / 10**6, arguments.gain)
            change = (1 - more) / (1 - one) - 1 if one < 1 else 0.0
            figures = (f"{one:.4f}", f"{two:.4f}", f"{more:.4f}", f"{change:+.1%}")
            table.add_row(path.rpartition("/")[2], share, *figures)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
