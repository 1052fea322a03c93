"""What `python -m bench.gpu` prints: a table of each measurement, and the bounds."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.checkpoint import StackSize
from moecache.units import format_bytes, format_bytes_per_s


def show_bounds(bounds: Iterable[Mapping[str, Any]], console: Console) -> bool:
    """Print each bound; return whether all hold."""
    holds = True
    for one in bounds:
        holds &= one["holds"]
        found = "     -" if one["found"] is None else f"{one['found']:6.3f}"
        console.print(
            f"{'yes' if one['holds'] else 'NO ':3} {found} {one['relation']} {one['limit']}  "
            f"{one['name']}{'  (' + one['note'] + ')' if one['note'] else ''}"
        )
    return holds


def show_upload(found: dict[str, Any], console: Console) -> None:
    """Print a row for each size and way, and the look-ups."""
    table = Table("experts", "way", "of the link", "rate", "while copying", "link", "pinned")
    for row in found["uploads"]:
        if row["refused"]:
            table.add_row(row["size"], row["way"], "refused")
            continue
        table.add_row(
            row["size"],
            row["way"],
            f"{row['share']:.3f}",
            format_bytes_per_s(statistics.median(row["bytes_per_s"])),
            format_bytes_per_s(row["busy_bytes_per_s"]),
            format_bytes_per_s(statistics.median(row["link_bytes_per_s"])),
            format_bytes(row["pinned_bytes"]),
        )
    console.print(table)
    storm = found["look_ups"]
    quiet, stormy = (statistics.median(storm[f"{kind}_p99_ns"]) for kind in ("quiet", "storm"))
    console.print(
        f"look-up p99: quiet {quiet / 1e3:.1f} us, in a storm of "
        f"{format_bytes_per_s(storm['storm_bytes_per_s'])} {stormy / 1e3:.1f} us"
    )


def show_decode(found: dict[str, Any], console: Console) -> None:
    """Print a row for each way."""
    _show_stack(found, console)
    if found["scaled"]:
        console.print(found["scaled"])
    table = Table(
        "", "tokens/s", "of resident", "of the link", "copied/token", "waited/token", "hit rate"
    )
    for name, way in found["ways"].items():
        table.add_row(
            name,
            f"{way['tokens_per_s']:.2f}",
            f"{way['of_resident']:.3f}",
            f"{way['of_link']:.3f}",
            format_bytes(round(way["bytes_per_token"])),
            f"{way['stall_ns_per_token'] / 1e6:.3f} ms",
            f"{way['hit_rate']:.3f}",
        )
    console.print(table)
    rate = found["ways"]["all resident"]["link_bytes_per_s"]
    console.print(f"one large copy from pinned memory: {format_bytes_per_s(rate)}")
    _show_refused(found, console)


def show_resident(found: dict[str, Any], console: Console) -> None:
    """Print a row for each way."""
    _show_stack(found, console)
    table = Table(
        "slots",
        "tokens/s",
        "of resident",
        "device us/layer",
        "host us/layer",
        "hits",
        "stalls/token",
        "waited/token",
    )
    for name, way in found["ways"].items():
        table.add_row(
            name,
            f"{way['tokens_per_s']:.2f}",
            f"{way['of_resident']:.3f}",
            f"{way['device_us_per_layer']:.1f}",
            f"{way['host_us_per_layer']:.1f}",
            f"{way['hit_rate']:.3f}",
            f"{way['stalls_per_token']:.2f}",
            f"{way['stall_ns_per_token'] / 1e6:.3f} ms",
        )
    console.print(table)
    _show_copy(found, console)
    _show_refused(found, console)


def _show_copy(found: dict[str, Any], console: Console) -> None:
    """Print what shares are of."""
    rate = format_bytes_per_s(found["copy_bytes_per_s"])
    console.print(f"one large copy inside the device, read and written: {rate}")


def _show_stack(found: dict[str, Any], console: Console) -> None:
    """Print what was decoded."""
    stack = {key: value for key, value in found["stack"].items() if key != "bytes"}
    console.print(f"{StackSize(**stack).describe()}; routing of {found['routing']}", markup=False)


def _show_refused(found: dict[str, Any], console: Console) -> None:
    """Print the ways that could not be opened, and why."""
    for name, reason in found["refused"].items():
        console.print(f"{name} was refused: {reason}", markup=False)


def show_formats(found: dict[str, Any], console: Console) -> None:
    """Print a row for each format."""
    table = Table("format", "a layer reads", "us/layer", "weights read", "of a copy")
    for name, row in found["formats"].items():
        if "refused" in row:
            table.add_row(name, row["refused"])
            continue
        table.add_row(
            name,
            format_bytes(row["layer_bytes"]),
            f"{row['device_us_per_layer']:.1f}",
            format_bytes_per_s(row["weight_bytes_per_s"]),
            f"{row['of_copy']:.3f}",
        )
    console.print(table)
    _show_copy(found, console)


def show_model(found: dict[str, Any], console: Console) -> None:
    """Print a row for each way."""
    table = Table("slots", "tokens/s", "hits", "prompt of 512", "loaded", "captured")
    for name, way in found["ways"].items():
        if "refused" in way:
            table.add_row(name, way["refused"])
            continue
        table.add_row(
            name,
            f"{way['tokens_per_s']:.2f}",
            f"{way['hit_rate']:.3f}",
            f"{way['prompt_s']:.3f} s",
            f"{way['loaded_s']:.1f} s",
            f"{way['captured_s']:.2f} s" if "captured_s" in way else "",
        )
    console.print(table)


def show_memory(found: dict[str, Any], console: Console) -> None:
    """Print what was lost."""
    for name in ("evictions", "rounds"):
        part = found[name]
        console.print(
            f"{name}: {part[f'num_{name}']}, device bytes lost {part['device_bytes_lost']}, "
            f"RAM grown by {part['rss_bytes_grown']} bytes"
        )


def show_host(found: dict[str, Any], console: Console) -> None:
    """Print a row for each policy and way."""
    for policy in ("echo", "lru"):
        for way, value in found[policy].items():
            console.print(f"{policy:5} {way:22} {value:8.3f}")


SHOWN: dict[str, Callable[[dict[str, Any], Console], None]] = {
    "upload": show_upload,
    "decode": show_decode,
    "resident": show_resident,
    "mxfp4": show_resident,
    "formats": show_formats,
    "model": show_model,
    "memory": show_memory,
    "host": show_host,
}
