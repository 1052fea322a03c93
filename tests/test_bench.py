"""Benchmarks can be run: here one, small; `make bench-small` runs them all."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(path.name for path in (ROOT / "bench").glob("bench_*.py"))


@pytest.fixture(autouse=True)
def hide_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children measure, which pytest-benchmark does not in a worker of pytest-xdist."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def run_bench(*arguments: str) -> str:
    """Run pytest over benchmarks in a child; return what it wrote, or fail with it."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--bench-size=small",
        *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_is_a_benchmark_of_each_hot_class() -> None:
    """The policies, the cache, the profiler and the sweep are measured."""
    names = {"bench_cache.py", "bench_policies.py", "bench_profiler.py", "bench_prefault.py"}
    assert names <= set(MODULES)


def test_all_benchmarks_are_found() -> None:
    """Each module is imported and has something to run."""
    output = run_bench("bench", "--collect-only")

    assert all(f"bench/{module}::" in output for module in MODULES)


def test_a_benchmark_runs_small_and_shows_hit_rates() -> None:
    """`.ci/run` runs all of them; the summary has what an access takes, and hit rates."""
    output = run_bench("bench/bench_policies.py", "-k", "slru")

    assert "ns per access" in output
    assert re.search(r"moecache-slru\b.* hit_rate 0\.\d+", output)
