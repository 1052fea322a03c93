"""Processes that a model's experts are spread over, as torchrun would start them."""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import random
import selectors
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Self

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.helpers.ranks_imports"])
# Not seeded: processes that test side by side draw different ports.
_DICE = random.SystemRandom()


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


class Network:
    """A port that leads to another one, until packets are lost: connections stay, and are silent.

    A context manager.

    Parameters
    ----------
    port : int
        Where it leads to. Somebody must listen there.
    """

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lost = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def lose(self) -> None:
        """Let nothing through from now on."""
        self._lost.set()

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all connections."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as sockets:
            sockets.register(self._listener, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, _ in sockets.select(0.05):
                    one = key.fileobj
                    assert isinstance(one, socket.socket)
                    if self._lost.is_set():
                        self._ended.wait()
                    elif one is self._listener:
                        near, far = one.accept()[0], socket.create_connection(self._to)
                        sockets.register(near, selectors.EVENT_READ, far)
                        sockets.register(far, selectors.EVENT_READ, near)
                    elif data := one.recv(65536):
                        key.data.sendall(data)
                    else:
                        sockets.unregister(one)
                        key.data.shutdown(socket.SHUT_WR)
            for key in list(sockets.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()


def free_port() -> int:
    """Return a port that nobody listens at now, nor at the next one.

    It is below those that the kernel deals out, so that no connection is given it meanwhile.
    """
    while True:
        port = _DICE.randrange(20_000, 32_000, 2)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
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


def start_command(
    folder: Path, *arguments: str, num_ranks: int = 2, last: tuple[str, ...] | None = None
) -> list[Rank]:
    """Begin a command of moecache on as many ranks; the `last` may be given something else."""
    port, given = free_port(), [arguments] * num_ranks
    given[-1] = last or arguments
    return [Rank(folder, rank, num_ranks, port, (None, given[rank])) for rank in range(num_ranks)]


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
