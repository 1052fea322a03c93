"""Under a real memory limit: what is planned holds, and nothing is killed or swapped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.checkpoint import Size, write_checkpoint
from bench.limits import DiskLimit, MemoryLimit, NoLimitError
from tests.helpers.pages import evict

SIZE = Size(num_layers=4, num_experts=24, top_k=4, hidden=256, width=256)

# Joins the limit, then says what it plans, decodes, and says what it took and what came out.
DECODE = """
import hashlib, json, os, sys
path, join, slots, read = sys.argv[1:]
if join:
    open(join, "w").write(str(os.getpid()))
import numpy as np
import moecache
from examples import numpy_loop
from moecache.sizing.host_memory import peak_rss_bytes
imports = peak_rss_bytes()
with moecache.open_store(path) as store, moecache.open(
    path, slots=int(slots), read=read, policy="lru", prefault="off"
) as runtime:
    model = numpy_loop.NumpyMoe(store, numpy_loop.through_moecache(runtime))
    reading = runtime.stats().reading
    planned = imports + model.nbytes + runtime.stats().pool_bytes
    planned += reading.staging_bytes
    logits = [scores for _, scores in numpy_loop.generate(model, b"import", 12, 0.7, 0)]
    digest = hashlib.blake2b(b"".join(s.tobytes() for s in logits)).hexdigest()
    print(json.dumps({"planned": planned, "digest": digest, "way": reading.way}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model of 72 MiB."""
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, SIZE)
    return path


@pytest.fixture
def cold(checkpoint: Path) -> Path:
    """Return the model, none of it in memory: cached pages are charged to another cgroup."""
    for file in checkpoint.glob("*.safetensors"):
        evict(file)
    return checkpoint


def decode(path: Path, join: Path | None, slots: int, read: str) -> dict[str, object]:
    """Run the child; fails the test if it does not end well."""
    done = subprocess.run(
        [sys.executable, "-c", DECODE, str(path), str(join or ""), str(slots), read],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("slots", [1, 24])
def test_a_fifth_more_than_planned_is_enough(cold: Path, slots: int) -> None:
    """Direct reads need no memory that the plan does not name; the output is the same."""
    free = decode(cold, None, slots, "direct")
    for file in cold.glob("*.safetensors"):
        evict(file)
    limit = int(free["planned"]) * 6 // 5  # type: ignore[call-overload]
    try:
        with MemoryLimit(limit) as group:
            limited = decode(cold, group.join_file, slots, "direct")
            facts = group.facts()
    except NoLimitError as error:
        pytest.skip(str(error))

    assert limited["digest"] == free["digest"]
    assert limited["way"] == "direct"
    assert 0 < facts["peak_bytes"] <= limit
    assert (facts["swap_bytes"], facts["num_oom_kills"]) == (0, 0)


def test_a_plan_larger_than_the_limit_is_refused(cold: Path) -> None:
    """With the limit in the message, and not by the kernel."""
    code = """
import os, sys
open(sys.argv[2], "w").write(str(os.getpid()))
import moecache
try:
    moecache.open(sys.argv[1], memory="100%", dtype="float64")
except moecache.CapacityError as error:
    print(error)
"""
    try:
        with MemoryLimit(96 * 2**20) as group:
            done = subprocess.run(
                [sys.executable, "-c", code, str(cold), str(group.join_file)],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                cwd=Path(__file__).parents[1],
            )
            name = group.path.name
    except NoLimitError as error:
        pytest.skip(str(error))

    assert done.returncode == 0, done.stderr[-2000:]
    assert "144.0 MiB" in done.stdout
    assert name in done.stdout
    assert "lower memory" in done.stdout


@pytest.mark.parametrize("reserve", ["None", "'24MiB'"])
def test_by_itself_open_takes_what_the_limit_leaves(cold: Path, reserve: str) -> None:
    """Neither the machine's memory nor the limit alone: what is free in it."""
    code = """
import os, sys
open(sys.argv[2], "w").write(str(os.getpid()))
import moecache
with moecache.open(sys.argv[1], reserve=RESERVE, prefault="force") as runtime:
    stats = runtime.stats()
    print(stats.pool_bytes, stats.reading.way)
"""
    code = code.replace("RESERVE", reserve)
    limit = 120 * 2**20
    try:
        with MemoryLimit(limit) as group:
            done = subprocess.run(
                [sys.executable, "-c", code, str(cold), str(group.join_file)],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                cwd=Path(__file__).parents[1],
            )
            facts = group.facts()
    except NoLimitError as error:
        pytest.skip(str(error))

    assert done.returncode == 0, done.stderr[-2000:]
    pool_bytes, way = done.stdout.split()
    assert 8 * 2**20 < int(pool_bytes) < limit - 24 * 2**20
    assert way == "direct"
    assert facts["peak_bytes"] <= limit
    assert facts["num_oom_kills"] == 0


def test_a_disk_gets_a_limit_that_ends_with_it(tmp_path: Path) -> None:
    """The kernel names the disk and the rate."""
    try:
        with DiskLimit(10**9, tmp_path) as group:
            path, version = group.path, group.version
            name = "blkio.throttle.read_bps_device" if version == 1 else "io.max"
            said = (path / name).read_text()
    except NoLimitError as error:
        pytest.skip(str(error))

    assert "1000000000" in said
    assert not path.exists()
