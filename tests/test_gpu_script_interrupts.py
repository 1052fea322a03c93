"""bench/gpu.sh, interrupted in each of its stages: a report is left, and what was done."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.nightly import some
from tests.test_gpu_script import PYTHON, Stand

ALL = ["build", "tests", "upload", "decode", "resident", "mxfp4", "formats", "model", "memory"]
ALL += ["memcheck", "initcheck", "synccheck", "racecheck"]
BENCHMARKS = ALL[2:9]
# The stage of that name is what it is, on a device made for tests.
REAL = """
real = os.environ["REAL"]
if name == real or any(argument.endswith("/" + real + ".xml") for argument in arguments):
    words = ["-m", "tests.helpers.gpu_stage", os.environ["MARK"], *arguments]
    os.execv(sys.executable, [sys.executable, *words])
"""


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    """Return the script beside its stand-ins, one of whose stages is real."""
    stand = Stand(tmp_path)
    before, slow, rest = PYTHON.partition("try:\n    if name in")
    stand.python.write_text(before + REAL.lstrip() + slow + rest)
    return stand


def interrupt(stand: Stand, name: str, directory: Path, *, script: bool) -> Any:
    """Run a stage and the next one; interrupt the script, or the stage, and return the exit code.

    By real signals, when a part of the stage is done.
    """
    mark = directory / "mark"
    both = ALL[ALL.index(name) :][:2]
    process = stand.start(
        *("--only", ",".join(both)), REAL=name, MARK=os.fspath(mark), TMPDIR=os.fspath(directory)
    )
    try:
        until = time.monotonic() + 60
        while not mark.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert mark.exists(), stand.notes()
        # The stage's parent is `timeout`, which passes the signal on as it does at the limit.
        os.kill(process.pid if script else int(mark.read_text()), signal.SIGINT)
        return process.wait(30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if mark.exists():
                os.killpg(int(mark.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "script"),
    some(
        [(name, script) for name in ALL for script in (False, True)],
        lambda case: case in {("build", False), ("tests", True), ("upload", False)},
    ),
)
def test_an_interrupt_in_a_stage_leaves_a_report_and_its_files(
    stand: Stand, tmp_path: Path, name: str, script: bool
) -> None:
    """The ways or the tests that are done; behind a stage's own interrupt the next one runs."""
    if name == "model":
        pytest.importorskip("greenlet")
        pytest.importorskip("torch")
    code = interrupt(stand, name, tmp_path, script=script)
    stages = stand.report()["stages"]
    stage, *others = (stages[one] for one in stages)
    assert stage["status"] == "failed"
    assert stage["log_tail"]
    if name in BENCHMARKS:
        assert stage["exit_code"] == 130
        assert stage["result"]["partial"]
        parts = {"upload": "uploads", "memory": "evictions", "formats": "formats"}
        assert stage["result"][parts.get(name, "ways")]
        assert "interrupted; done: " in stand.logs()[f"{name}.log"]
    elif name != "build":
        assert stage["tests"]["tests"] >= 1
        assert stage["tests"]["passed"] >= 1
        assert "KeyboardInterrupt" in stand.logs()[f"{name}.log"]
    assert code == (130 if script else 1)
    if others:
        (following,) = others
        assert following["status"] == ("left out" if script else "ok")
        assert following.get("note", "interrupted") == "interrupted"
    assert {f"{one}.log" for one in stages} <= stand.logs().keys()
    assert len([path for path in stand.out.rglob("*") if path.is_file()]) == 2


def test_the_last_of_the_parts_is_not_lost_to_a_second_interrupt(tmp_path: Path) -> None:
    """`timeout` sends two: to the stage, and to its group. What is done is written all the same."""
    mark, result = tmp_path / "mark", tmp_path / "result.json"
    stage = ["-m", "tests.helpers.gpu_stage", str(mark), "-m", "bench.gpu", "memory"]
    process = subprocess.Popen(
        [sys.executable, *stage, "--json", str(result)], stdout=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 60
        while not mark.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            if process.poll() is not None:
                break
            time.sleep(0.0005)
        process.wait(30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert json.loads(result.read_text())["evictions"]
