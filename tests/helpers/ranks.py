"""Processes that a model's experts are spread over, as torchrun would start them."""

import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.helpers.ranks_imports"])


class Rank:
    """A process that is told which rank it is.

    Parameters
    ----------
    folder : Path
        For what it writes.
    rank, num_ranks, port : int
    what : tuple
        "module:function" and its arguments, or None and a command's arguments.
    """

    def __init__(self, folder: Path, rank: int, num_ranks: int, port: int, what: Any) -> None:
        folder.mkdir(exist_ok=True)
        self._files = [folder / f"{name}{rank}" for name in ("out", "err", "result")]
        told = {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        self.process = _CONTEXT.Process(
            target=_run, args=(told, [str(file) for file in self._files], what)
        )
        self.process.start()

    @property
    def out(self) -> str:
        """What it has written to standard output."""
        return self._files[0].read_text() if self._files[0].exists() else ""

    @property
    def err(self) -> str:
        """What it has written to standard error."""
        return self._files[1].read_text() if self._files[1].exists() else ""

    @property
    def result(self) -> Any:
        """What its function has returned."""
        return pickle.loads(self._files[2].read_bytes())

    def wait(self, timeout_s: float = 120) -> int | None:
        """Return its exit code, or `None` if it does not end; then it is killed."""
        self.process.join(timeout_s)
        code = self.process.exitcode
        self.kill()
        return code

    def wait_for(self, text: str, timeout_s: float = 120) -> None:
        """Return once it has written this, to standard output or standard error."""
        until = time.monotonic() + timeout_s
        while text not in self.out + self.err:
            assert self.process.is_alive(), self.err
            assert time.monotonic() < until, self.err
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it, if it goes on."""
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self.process.kill()
            self.process.join()


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def start(
    function: str,
    num_ranks: int,
    folder: Path,
    each: list[dict[str, Any]] | None = None,
    **given: Any,
) -> list[Rank]:
    """Begin to call "module:function" in as many processes; `each` has what ranks differ in."""
    port, own = free_port(), each or [{}] * num_ranks
    return [
        Rank(folder, rank, num_ranks, port, (function, {**given, **own[rank]}))
        for rank in range(num_ranks)
    ]


def start_command(folder: Path, *arguments: str, num_ranks: int = 2) -> list[Rank]:
    """Begin a command of moecache on as many ranks."""
    port = free_port()
    return [Rank(folder, rank, num_ranks, port, (None, arguments)) for rank in range(num_ranks)]


def call(
    function: str, num_ranks: int, folder: Path, timeout_s: float = 240, **given: Any
) -> list[Any]:
    """Return what "module:function" returns in each of as many processes."""
    ranks = start(function, num_ranks, folder, **given)
    codes = [rank.wait(timeout_s) for rank in ranks]
    for code, rank in zip(codes, ranks, strict=True):
        assert code == 0, f"{codes}\n{rank.err[-4000:]}"
    return [rank.result for rank in ranks]


def _run(told: dict[str, str], files: list[str], what: Any) -> None:
    os.environ.update(told)  # noqa: TID251
    for number, file in enumerate(files[:2], 1):
        opened = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    name, given = what
    if name is None:
        from moecache import cli

        code = cli.main(given)
        sys.stdout.flush()
        sys.exit(code)
    module, function = name.split(":")
    found = getattr(importlib.import_module(module), function)(**given)
    Path(files[2]).write_bytes(pickle.dumps(found))
