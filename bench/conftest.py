"""Options, fixtures and the summary of the benchmarks: the machine first, then ns per access."""

import gc
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import moecache
from bench.machine import describe_machine
from moecache import prefault
from moecache.cache import _cache

Note = Callable[..., None]

Table = Callable[[str, list[str]], None]

TABLES = pytest.StashKey[list[tuple[str, list[str]]]]()
ROWS = pytest.StashKey[list[tuple[str, str, float, float, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--bench-size`."""
    parser.addoption(
        "--bench-size",
        choices=("small", "full"),
        default="full",
        help="small: a few seconds for the whole directory, no claims about speed",
    )
    parser.addoption(
        "--bench-dir",
        metavar="DIR",
        help="where to put the files that are read; on the disk to be measured, not a tmpfs",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make room for the rows and tables of the summary."""
    config.stash[ROWS] = []
    config.stash[TABLES] = []


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Describe the machine and the build."""
    extension = Path(_cache.__file__)
    built = datetime.fromtimestamp(extension.stat().st_mtime, UTC)
    return [
        describe_machine(),
        f"moecache: {moecache.__version__}, {extension.name} of {built:%Y-%m-%d %H:%M} UTC",
        f"bench size: {config.getoption('--bench-size')}",
    ]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show tables, and what an access costs, with the hit rate and the like beside it."""
    for title, lines in config.stash[TABLES]:
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
    rows = config.stash[ROWS]
    if not rows:
        return
    terminalreporter.section("ns per access")
    width = max(len(name) for _, name, *_ in rows)
    shown = None
    for group, name, least, median, facts in sorted(rows, key=lambda row: (row[0], row[2])):
        if group != shown:
            terminalreporter.write_line(f"{group:{width}}       min    median")
            shown = group
        terminalreporter.write_line(f"{name:{width}} {least:9.2f} {median:9.2f}  {facts}".rstrip())


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """Leave what earlier files imported, such as torch, out of the collections between runs."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def small(request: pytest.FixtureRequest) -> bool:
    """Whether only to show that the benchmarks run."""
    return bool(request.config.getoption("--bench-size") == "small")


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Table:
    """Return a function that adds a table, a title and its lines, to the summary."""

    def add(title: str, lines: list[str]) -> None:
        request.config.stash[TABLES].append((title, lines))

    return add


@pytest.fixture
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Return an empty directory whose files can be dropped from the page cache, or skip."""
    chosen = request.config.getoption("--bench-dir")
    parent = Path(chosen) if chosen else tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(prefix="moecache-bench-", dir=parent) as name:
        probe = Path(name) / "probe"
        probe.write_bytes(bytes(2**20))
        if prefault.evict(np.memmap(probe, mode="r")):
            pytest.skip(f"{parent} keeps its files in memory; say --bench-dir=DIR on a disk")
        probe.unlink()
        yield Path(name)


@pytest.fixture
def note(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Iterator[Note]:
    """Return a function that notes what a round did: its accesses, and facts by name.

    It adds the nanoseconds per access, the median and the least over all
    rounds, to `benchmark.extra_info` and to the summary.
    """
    noted: dict[str, object] = {}

    def note_facts(num_accesses: int, **facts: object) -> None:
        noted.update(facts, num_accesses=num_accesses)

    yield note_facts
    benchmark.extra_info.update(noted)
    if benchmark.stats is None or not noted:
        return
    num_accesses = noted.pop("num_accesses")
    stats = benchmark.stats.stats
    least, median = (1e9 * seconds / num_accesses for seconds in (stats.min, stats.median))
    benchmark.extra_info.update(min_ns=round(least, 2), median_ns=round(median, 2))
    name = request.node.name.removeprefix("test_")
    facts = ", ".join(f"{key} {_shown(value)}" for key, value in noted.items())
    request.config.stash[ROWS].append((benchmark.group, name, least, median, facts))


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
