"""Processes that a model's experts are spread over, as torchrun would start them."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Imports take most of a rank's time, so that one start checks many things.
START = """
import pickle, sys, warnings
warnings.filterwarnings("ignore")
name, arguments, result = sys.argv[1:]
module, function = name.split(":")
with open(arguments, "rb") as file:
    given = pickle.load(file)
found = getattr(__import__(module, fromlist=[function]), function)(**given)
with open(result, "wb") as file:
    pickle.dump(found, file)
"""


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a rank."""
    return {
        **os.environ,  # noqa: TID251
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


def start(
    function: str,
    num_ranks: int,
    folder: Path,
    each: list[dict[str, Any]] | None = None,
    **given: Any,
) -> list[subprocess.Popen[str]]:
    """Begin to call "module:function" in as many processes; `each` has what ranks differ in."""
    port = free_port()
    processes = []
    for rank in range(num_ranks):
        arguments = folder / f"arguments{rank}"
        arguments.write_bytes(pickle.dumps({**given, **(each[rank] if each else {})}))
        command = [
            sys.executable,
            "-c",
            START,
            function,
            str(arguments),
            str(folder / f"result{rank}"),
        ]
        processes.append(
            subprocess.Popen(
                command,
                env=environment(rank, num_ranks, port),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def call(
    function: str, num_ranks: int, folder: Path, timeout_s: float = 120, **given: Any
) -> list[Any]:
    """Return what "module:function" returns in each of as many processes."""
    folder.mkdir(exist_ok=True)
    processes = start(function, num_ranks, folder, **given)
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank}:\n{output[-4000:]}"
    return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(num_ranks)]
