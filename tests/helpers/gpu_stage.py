"""A stage of bench/gpu.sh as it is, but on a device made for tests, which stops half-way.

Run as `python -m tests.helpers.gpu_stage MARK ARGUMENT...`, with the arguments that the script
gives to Python. Once a part is done, the parent's number is written to MARK, and nothing goes on
until an interrupt comes.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = """
from pathlib import Path
from tests.helpers.gpu_stage import stop

def test_that_is_done():
    pass

def test_that_is_interrupted():
    stop(Path({mark!r}))
"""


def stop(mark: Path) -> None:
    """Say that a part is done, and wait."""
    beside = mark.with_suffix(".new")
    beside.write_text(str(os.getppid()))
    beside.rename(mark)
    # In pieces: a signal that comes just before the system's call does not end it, and Python calls
    # its handlers between two.
    for _ in range(2400):
        time.sleep(0.05)


def main(mark: Path, arguments: list[str]) -> int:
    """Run a stage; return its exit code."""
    if arguments[:2] == ["-m", "pytest"]:
        return run_tests(mark, arguments)
    if arguments[:2] == ["-m", "bench.gpu"]:
        return run_benchmark(mark, arguments[2], arguments[arguments.index("--json") + 1])
    stop(mark)
    return 0


def stopping(mark: Path, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls something once, and stops before the second time."""
    calls = 0

    def stops(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            stop(mark)
        return call(*given)

    return stops


def run_model(mark: Path, result: str) -> int:
    """Run a whole model small, until one way is done."""
    import pytest

    from bench import gpu, gpu_model
    from tests.helpers.gpu_models import MODEL_OPTIONS, made_small

    with pytest.MonkeyPatch.context() as patched:
        device, size = made_small(patched)
        patched.setattr(gpu_model, "_ours", stopping(mark, gpu_model._ours))
        return gpu.main(["model", "--json", result, *MODEL_OPTIONS], device, size)


def run_tests(mark: Path, arguments: list[str]) -> int:
    """Run a test, and begin another, with the script's own settings."""
    import pytest

    result = next(argument for argument in arguments if argument.startswith("--junitxml="))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "test_some.py"
        file.write_text(TESTS.format(mark=os.fspath(mark)))
        settings = arguments[arguments.index("-c") + 1]
        return int(pytest.main(["-c", settings, "--rootdir", folder, result, os.fspath(file)]))


def run_benchmark(mark: Path, name: str, result: str) -> int:
    """Run a benchmark small, until one of its parts is done."""
    from bench import gpu, gpu_contest, gpu_copies, gpu_formats, gpu_memory
    from bench.checkpoint import StackSize
    from bench.gpu_copies import Shape
    from tests.helpers.fake_device import FakeDevice

    if name == "model":
        return run_model(mark, result)
    second: Any = stopping(mark, gpu_contest.Contest._run)
    gpu_contest.Contest._run = second  # type: ignore[method-assign]
    gpu_formats._row = stopping(mark, gpu_formats._row)
    gpu_copies.look_ups = gpu_memory.rounds = lambda *_, **__: stop(mark)
    options = [name, "--json", result]
    size: Any = StackSize(num_layers=2, num_experts=8, top_k=2, hidden=32, width=16)
    if name == "memory":
        options += ["--evictions", "4", "--rounds", "1"]
    elif name == "upload":
        options += ["--runs", "1", "--copy-bytes", "4KiB", "--bytes", "4KiB"]
        size = (Shape("1.5 MB", 16, 8),)
    else:
        options += ["--runs", "2", "--copy-bytes", "4KiB", "--tokens", "1"]
        if name == "formats":
            options += ["--only", "bf16"]
        if name == "mxfp4":
            size = StackSize(2, 8, 2, 64, 32, format="mxfp4", is_gpt_oss=True)
    return gpu.main(options, FakeDevice(), size)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
