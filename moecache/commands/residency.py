"""`moecache warm --status`: the part in memory, as figures and as a map."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moecache import prefault
from moecache._prefault import PAGE_SIZE
from moecache.commands.paths import find_files, has_experts, map_file, open_experts, printable
from moecache.prefault import Residency
from moecache.prefault.regions import Region
from moecache.units import format_bytes

_MOST_CELLS = 48
# Characters that the other columns take, and the fewest that the name gets.
_FIGURES_WIDTH = 34
_NAME_WIDTH = 20
# Nothing, up to a third, two thirds, less than all, all: the ends are exact.
_SHADES = "·░▒▓█"
_ASCII_SHADES = ".-+*#"

# A row's name and its regions.
Row = tuple[str, list[Region]]


def print_status(
    console: Console, paths: Sequence[str], layers: list[int] | None, *, experts_only: bool
) -> int:
    """Print the resident share of each file, and of each layer of a checkpoint's experts."""
    shades = _SHADES if console.encoding.startswith("utf") else _ASCII_SHADES
    for path in paths:
        if not experts_only:
            _print(console, shades, path, "file", _file_rows(path))
        # Without --experts-only any other file will do, too.
        if experts_only or has_experts(path):
            store, chosen = open_experts(path, layers)
            with store:
                rows = [(f"layer {layer}", store.regions([layer])) for layer in chosen]
                if len(rows) > 1:
                    rows.append(("all", [region for _, part in rows for region in part]))
                _print(console, shades, f"{path}: experts", "layer", rows)
    console.print(
        f"{shades[0]} nothing  {shades[1:4]} some  {shades[4]} all in memory", style="dim"
    )
    return 0


def _file_rows(path: str) -> list[Row]:
    root = Path(path)
    regions = [(file, map_file(file)) for file in find_files(path)]
    return [
        (printable(file.relative_to(root) if root.is_dir() else file.name), [region])
        for file, region in regions
        if region is not None
    ]


def _print(console: Console, shades: str, title: str, heading: str, rows: list[Row]) -> None:
    cells = max(1, min(_MOST_CELLS, console.width - _FIGURES_WIDTH - _NAME_WIDTH))
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left")
    table.title = printable(title)
    table.add_column(heading, overflow="ellipsis", no_wrap=True)
    for name in ("bytes", "resident", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("map, in file order", no_wrap=True, min_width=cells)
    for name, regions in rows:
        parts = _measure(regions, cells)
        total = _add_up(parts)
        share = total.resident_bytes / total.num_bytes if total.num_bytes else 1.0
        table.add_row(
            name,
            format_bytes(total.num_bytes),
            format_bytes(total.resident_bytes) if total.known else "not told",
            f"{share:.1%}" if total.known else "?",
            "".join(_shade(part, shades) for part in parts),
        )
    console.print(table)


def _measure(regions: list[Region], cells: int) -> list[Residency]:
    """Return the residency of `cells` equal parts of the regions, or of fewer, of a page each."""
    ranges, owners = prefault.merge(regions)
    num_pages = sum(nbytes for _, nbytes in ranges) // PAGE_SIZE
    cells = min(cells, num_pages)
    stops = [(cell + 1) * num_pages // cells * PAGE_SIZE for cell in range(cells)]
    pieces: list[Region] = []
    numbers: list[int] = []
    done = cell = 0
    for address, nbytes in ranges:
        while nbytes:
            part = min(nbytes, stops[cell] - done)
            pieces.append(Region(address, part, owners))
            numbers.append(cell)
            address, nbytes, done = address + part, nbytes - part, done + part
            cell += done == stops[cell]
    found = prefault.residency(pieces)
    return [
        _add_up(one for one, number in zip(found, numbers, strict=True) if number == cell)
        for cell in range(cells)
    ]


def _add_up(parts: Iterable[Residency]) -> Residency:
    parts = list(parts)
    return Residency(
        sum(part.num_bytes for part in parts),
        sum(part.resident_bytes for part in parts),
        all(part.known for part in parts),
    )


def _shade(cell: Residency, shades: str) -> str:
    if not cell.known:
        return "?"
    share = cell.resident_bytes / cell.num_bytes
    if share in {0.0, 1.0}:
        return shades[-1] if share else shades[0]
    return shades[1 + int(share * 3)]
