"""Every benchmark also runs small, so that none rots."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(path.name for path in (ROOT / "bench").glob("bench_*.py"))


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


def num_done(output: str) -> int:
    """Read from pytest's last line how many tests passed, or were skipped for want of a disk."""
    return sum(map(int, re.findall(r"(\d+) (?:passed|skipped)", output)))


def test_there_is_a_benchmark_of_each_hot_class() -> None:
    """The policies, the cache, the profiler and the sweep are measured."""
    names = {"bench_cache.py", "bench_policies.py", "bench_profiler.py", "bench_prefault.py"}
    assert names <= set(MODULES)


def test_all_benchmarks_run_small_and_show_hit_rates() -> None:
    """The whole directory passes, something of each module; the summary has hit rates."""
    output = run_bench("bench", "-vv")

    assert num_done(output) > 0
    assert all(f"bench/{module}::" in output for module in MODULES)
    assert "ns per access" in output
    assert re.search(r"moecache-slru\b.* hit_rate 0\.\d+", output)
