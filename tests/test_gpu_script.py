"""bench/gpu.sh with stand-ins for python and for the sanitizer: which stages run, and how."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench" / "gpu.sh"
# Says that every package is there and that there is a GPU, notes what it is asked to run, and
# leaves what the real thing would. The report is made by Python itself.
PYTHON = f"""#!{sys.executable} -IS
import json, os, runpy, sys, time
arguments = sys.argv[1:]
if arguments[0] == "-c":
    code = arguments[1]
    if "find_spec" in code:
        sys.exit(any(repr(name) in code for name in os.environ.get("LACKS", "").split()))
    if "getDeviceProperties" in code:
        print("NVIDIA Stand-In 1")
    elif "EXT_SUFFIX" in code:
        print(os.environ.get("SUFFIX", ".none"))
    else:
        print("3.11 13000 13000 14.0 2.0 none none")
    sys.exit()
if arguments[:2] == ["bench/gpu.py", "report"]:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
with open(os.environ["NOTES"], "a") as notes:
    notes.write(json.dumps(arguments) + "\\n")
name = arguments[2] if arguments[0] == "-m" else "build"
name = arguments[3] if name == "bench.gpu" else name
if "CLOCK" in os.environ:
    with open(os.environ["CLOCK"]) as clock:
        now = int(clock.read())
    with open(os.environ["CLOCK"], "w") as clock:
        clock.write(str(now + int(os.environ["TAKES"])))
try:
    if name in os.environ.get("SLOW", "").split():
        print("slow", flush=True)
        for _ in range(600):
            time.sleep(0.1)
except KeyboardInterrupt:
    print("interrupted, written")
    sys.exit(2)
for argument in arguments:
    key, _, path = argument.partition("=")
    if key == "--junitxml":
        with open(path, "w") as xml:
            xml.write('<testsuite tests="3" failures="0" errors="0" skipped="0"/>')
if "--json" in arguments:
    with open(arguments[arguments.index("--json") + 1], "w") as figures:
        json.dump({{"bounds": []}}, figures)
"""
SANITIZER = f"""#!{sys.executable} -IS
import os, sys
with open(os.environ["NOTES"], "a") as notes:
    notes.write('["sanitizer", "' + sys.argv[2] + '"]\\n')
os.execv(sys.argv[7], sys.argv[7:])
"""


class Stand:
    """The script beside its stand-ins, and what it leaves."""

    def __init__(self, directory: Path) -> None:
        self.out = directory / "out"
        self.out.mkdir()
        self.python = directory / "python"
        sanitizer = directory / "compute-sanitizer"
        for path, text in ((self.python, PYTHON), (sanitizer, SANITIZER)):
            path.write_text(text)
            path.chmod(0o755)
        self._directory = directory
        self._notes = directory / "notes"

    def run(self, *options: str, out: Path | None = None, **variables: str) -> Any:
        """Run the script; return what it printed, and its exit code."""
        path = f"{self._directory}:{os.defpath}"
        environment = {"PATH": path, "NOTES": str(self._notes), **variables}
        environment["OUT"] = str(out or self.out)
        return subprocess.run(
            [SCRIPT, "--python", str(self.python), *options],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=60,
        )

    def start(self, *options: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start the script in a group of processes of its own."""
        path = f"{self._directory}:{os.defpath}"
        return subprocess.Popen(
            [SCRIPT, "--python", str(self.python), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": path, "NOTES": str(self._notes), "OUT": str(self.out), **variables},
            start_new_session=True,
        )

    def notes(self) -> list[list[str]]:
        """Return what was asked of python and of the sanitizer, in order."""
        if not self._notes.exists():
            return []
        return [json.loads(line) for line in self._notes.read_text().splitlines()]

    def logs(self) -> dict[str, str]:
        """Return the files of the archive by their names."""
        with tarfile.open(self.out / "gpu-logs.tar.gz") as archive:
            found = {}
            for member in archive:
                if member.isfile():
                    text: Any = archive.extractfile(member)
                    found[member.name.removeprefix("./")] = text.read().decode()
        return found

    def report(self) -> dict[str, Any]:
        """Return the JSON."""
        (path,) = self.out.glob("*.json")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    """Return the script beside its stand-ins."""
    return Stand(tmp_path)


def test_the_script_says_what_it_does() -> None:
    """Also without a GPU; what it does not know it refuses."""
    script = ROOT / "bench" / "gpu.sh"
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: bench/gpu.sh [--quick]")
    for wrong, problem in (
        (["--only", "tests,nonsense"], "unknown stage nonsense"),
        (["--fast"], "unknown option --fast"),
        (["--python"], "needs a value"),
        (["a.json", "b.json"], "more than one output"),
    ):
        failed = subprocess.run(
            [script, *wrong], capture_output=True, text=True, check=False, cwd="/"
        )
        assert failed.returncode == 2
        assert problem in failed.stderr


def test_everything_is_written_below_out(stand: Stand) -> None:
    """The report, and the log of every stage beside it; nothing in the checkout."""
    before = sorted((ROOT / "bench" / "results").iterdir())
    done = stand.run(SUFFIX=".none")
    assert done.returncode == 0, done.stdout + done.stderr
    report = stand.report()
    names = ["build", "tests", "upload", "decode", "resident", "mxfp4", "formats", "model"]
    names += ["memory", "memcheck", "initcheck", "synccheck", "racecheck"]
    assert list(report["stages"]) == names
    assert report["ok"]
    assert {stage["status"] for stage in report["stages"].values()} == {"ok"}
    assert report["gpu"] == "NVIDIA Stand-In 1"
    assert {f"{name}.log" for name in names} <= stand.logs().keys()
    # As many files come back from a machine that is lent.
    assert len([path for path in stand.out.rglob("*") if path.is_file()]) <= 8
    assert sorted((ROOT / "bench" / "results").iterdir()) == before


def test_a_sanitizer_runs_each_of_its_tools(stand: Stand) -> None:
    """Over the tests of the kernels, each with a result of its own."""
    stand.run("--only", "memcheck,initcheck,synccheck,racecheck")
    notes = stand.notes()
    tools = [note[1] for note in notes if note[0] == "sanitizer"]
    assert tools == ["memcheck", "initcheck", "synccheck", "racecheck"]
    tests = [note for note in notes if note[0] == "-m"]
    assert len(tests) == 4
    assert all(note[-1] == "tests/test_cuda_experts.py" for note in tests)


def test_what_the_sanitizers_check_is_there() -> None:
    """A selection of no test would be a failure on the day that a GPU is there."""
    (line,) = (one for one in SCRIPT.read_text().splitlines() if one.startswith("checked="))
    source = (ROOT / "tests" / "test_cuda_experts.py").read_text()
    parts = line.partition("=")[2].strip('"').split(" or ")
    assert len(parts) == 3
    names = [one for one in source.splitlines() if one.startswith("def test_")]
    for part in parts:
        assert any(part in name for name in names), part


def test_quick_leaves_sanitizers_but_one_out(stand: Stand) -> None:
    """And takes fewer runs."""
    stand.run("--quick", SUFFIX=".none")
    report = stand.report()
    assert list(report["stages"])[-1] == "memcheck"
    assert any("gpu and not nightly" in note for note in stand.notes())
    assert "--runs" in next(note for note in stand.notes() if "resident" in note)
    assert report["quick"] == "1"


def test_a_slow_stage_is_interrupted_and_the_next_runs(stand: Stand) -> None:
    """By SIGINT: what it has so far is written."""
    done = stand.run("--only", "upload,memory", "--limit", "4", SLOW="upload")
    report = stand.report()
    assert done.returncode == 1
    assert [stage["status"] for stage in report["stages"].values()] == ["timed out", "ok"]
    assert report["stages"]["upload"]["limit_s"] == 4
    assert "interrupted, written" in stand.logs()["upload.log"]


DATE = """#!/bin/sh
if [ "$*" = +%s ]; then cat "$CLOCK"; else exec /bin/date "$@"; fi
"""


def test_a_budget_cuts_each_stage_to_what_is_left(stand: Stand, tmp_path: Path) -> None:
    """By a clock of the test's: what has no time left is left out, with the reason."""
    date, clock = tmp_path / "date", tmp_path / "clock"
    date.write_text(DATE)
    date.chmod(0o755)
    clock.write_text("1000")
    done = stand.run(
        *("--quick", "--budget", "550", "--only", "upload,decode,resident,mxfp4,memory"),
        SUFFIX=".none",
        CLOCK=str(clock),
        TAKES="150",
    )
    stages = stand.report()["stages"]
    assert done.returncode == 0, done.stdout + done.stderr
    # 550 - 25 - 150 times the stages before it, and at most what the stage may take by itself.
    assert [stage.get("limit_s") for stage in stages.values()] == [70, 70, 100, 75, None]
    assert stages["memory"]["note"] == "no time is left of 550 s"
    wrong = stand.run("--budget", "soon", CLOCK=str(clock))
    assert (wrong.returncode, "--budget soon is no number" in wrong.stderr) == (2, True)


@pytest.mark.parametrize("name", ["decode", "memory"])
def test_there_is_a_report_of_the_stages_before_one_that_is_killed(stand: Stand, name: str) -> None:
    """Whenever the script ends: the report is written anew after every stage."""
    stages = ["upload", "decode", "resident", "mxfp4", "memory"]
    before = stages[: stages.index(name)]
    process = stand.start("--quick", "--budget", "550", "--only", ",".join(stages), SLOW=name)
    try:
        until = time.monotonic() + 30
        while not any(name in note for note in stand.notes()) and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = stand.report()["stages"]
    assert [one for one in stages if found[one]["status"] == "ok"] == before
    assert f"{before[-1]}.log" in stand.logs()


def test_modules_that_are_there_are_not_built(stand: Stand) -> None:
    """With `--prebuilt` whatever their age; a missing one is an error then, and else built."""
    suffix = next(ROOT.glob("moecache/_slru.*.so")).name.removeprefix("_slru")
    done = stand.run("--only", "build", "--prebuilt", SUFFIX=suffix, LACKS="Cython setuptools")
    assert done.returncode == 0, done.stderr
    stage = stand.report()["stages"]["build"]
    assert (stage["status"], stage["note"]) == ("left out", "the extension modules are there")

    for stage in ("build", "tests"):
        done = stand.run("--only", stage, "--prebuilt")
        assert done.returncode == 2
        assert "an extension module is missing" in done.stderr
    done = stand.run("--only", "build", LACKS="Cython")
    assert done.returncode == 2
    assert "lacks: Cython" in done.stderr
    stand.run("--only", "build")
    assert stand.notes()[-1][:2] == ["setup.py", "-q"]


def test_traces_that_are_given_are_used(stand: Stand, tmp_path: Path) -> None:
    """By the benchmarks that replay routing; a folder without any is an error."""
    traces = tmp_path / "traces"
    traces.mkdir()
    done = stand.run("--traces", str(traces))
    assert done.returncode == 2
    assert "has no bigmoe-qwen.npz" in done.stderr
    (traces / "bigmoe-qwen.npz").touch()
    stand.run("--only", "decode,resident,upload", "--traces", str(traces))
    given = [note[1:3] for note in stand.notes() if str(traces / "bigmoe-qwen.npz") in note]
    assert given == [["bench.gpu", "decode"], ["bench.gpu", "resident"]]


def test_a_package_or_a_gpu_that_lacks_is_said(stand: Stand) -> None:
    """Before anything runs; exit code 2."""
    done = stand.run("--only", "upload", LACKS="cupy psutil")
    assert done.returncode == 2
    assert "lacks: cupy psutil" in done.stderr
    assert not list(stand.out.iterdir())
