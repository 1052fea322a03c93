"""The workers of a sweep's cells: this process, others, or a Dask cluster."""

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moecache.errors import ConfigError, MissingDependencyError, MoeCacheError
from moecache.interrupts import end_with
from moecache.study.replay import replay
from moecache.traces.trace import Trace

Figures = dict[str, Any]
Outcome = Figures | Exception

_ANSWER_SECONDS = 10.0
_SCHEMES = ("tcp", "tls", "ws", "wss", "ucx")
_MAX_GREETING_BYTES = 2**24


@dataclass(frozen=True)
class Cell:
    """One replay of a sweep."""

    trace: str
    policy: Any
    scope: str
    slots: int


def run_cell(trace: Trace, policy: Any, scope: str, slots: int) -> Outcome:
    """Return the figures of a replay, or what it raised."""
    try:
        done = replay(trace, policy, slots, scope=scope)
    except Exception as error:  # noqa: BLE001 - reported with its cell when all are done
        return error
    except SystemExit as error:
        # It would end the caller, or a process that has other cells to do.
        return _told(error)
    return {
        "num_accesses": done.num_accesses,
        "num_hits": done.num_hits,
        "prefill_hit_rate": done.per_phase.get("prefill"),
        "decode_hit_rate": done.per_phase.get("decode"),
        "layer_hits": done.hits.sum(0, dtype=np.int64).tolist(),
        "layer_misses": done.misses.sum(0, dtype=np.int64).tolist(),
        "seconds": done.seconds,
    }


def run_apart(trace: Trace, policy: Any, scope: str, slots: int) -> Outcome:
    """Return what `run_cell` does, such that another process can read it."""
    return _sendable(run_cell(trace, policy, scope, slots))


def said(error: BaseException) -> str:
    """Return the name of an error and its text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - whatever its own __str__ raises
        return f"{type(error).__name__} (its text cannot be had)"


def run_here(cells: Sequence[Cell], traces: Mapping[str, Trace]) -> Iterator[tuple[int, Outcome]]:
    """Yield number and outcome of each cell, one after the other."""
    for number, cell in enumerate(cells):
        yield number, run_cell(traces[cell.trace], cell.policy, cell.scope, cell.slots)


def can_be_sent(policies: Sequence[Any]) -> bool:
    """Return whether other processes can be started, and have the policies."""
    main = sys.modules["__main__"]
    # A new process imports the program, which it cannot if that came from a pipe.
    file = None if getattr(main, "__spec__", None) else getattr(main, "__file__", None)
    return (file is None or os.path.isfile(file)) and all(
        _pickled(policy) is not None for policy in policies
    )


def run_processes(
    cells: Sequence[Cell], traces: Mapping[str, Trace], processes: int
) -> Iterator[tuple[int, Outcome]]:
    """Yield number and outcome of each cell as it is done in one of several processes.

    Raises
    ------
    ConfigError
        If a policy cannot be sent to another process.
    MoeCacheError
        If a process died.
    """
    # Here, because they take a tenth of the time of `import moecache`.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    packed: dict[int, bytes] = {}
    for cell in cells:
        data = _pickled(cell.policy)
        if data is not None:
            packed[id(cell.policy)] = data
        else:
            raise ConfigError(
                f"policy {cell.policy!r} cannot be sent to other processes; define it at the top "
                "of a module, or use processes=1"
            )
    # Not fork: other threads, Dask's and NumPy's among them, may hold locks.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _set_up, (dict(traces), os.getpid()))
    try:
        with _interrupts_wait():
            futures = {
                pool.submit(
                    _work, cell.trace, packed[id(cell.policy)], cell.scope, cell.slots
                ): number
                for number, cell in enumerate(cells)
            }
        for future in as_completed(futures):
            outcome = future.result()
            if outcome is None:
                raise KeyboardInterrupt
            yield futures[future], outcome
    except BrokenProcessPool as error:
        raise MoeCacheError(
            "a process of the sweep died. Was it short of memory? Use fewer processes. In a "
            'script, such a sweep must stand below `if __name__ == "__main__":`'
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def run_cluster(
    cells: Sequence[Cell], traces: Mapping[str, Trace], cluster: Any
) -> Iterator[tuple[int, Outcome]]:
    """Yield number and outcome of each cell as a Dask cluster returns it.

    Parameters
    ----------
    cluster : str or dask.distributed.Client
        The scheduler's address, or a client, which stays open.

    Raises
    ------
    MissingDependencyError
        If Dask is not installed.
    ConfigError
        If no scheduler answers at the address.
    """
    distributed = import_distributed()
    with contextlib.ExitStack() as stack:
        if isinstance(cluster, distributed.Client):
            client = cluster
        else:
            _check_scheduler(cluster)
            try:
                client = stack.enter_context(distributed.Client(cluster, set_as_default=False))
            except (OSError, ValueError) as error:
                raise ConfigError(f"cluster {cluster!r}: no scheduler answers: {error}") from error
        there = {
            name: client.scatter(trace, hash=False)
            for name, trace in traces.items()
            if any(cell.trace == name for cell in cells)
        }
        futures = {
            client.submit(
                run_apart, there[cell.trace], cell.policy, cell.scope, cell.slots, pure=False
            ): number
            for number, cell in enumerate(cells)
        }
        try:
            for future in distributed.as_completed(list(futures), loop=client.loop):
                failed = future.exception()
                yield futures[future], future.result() if failed is None else failed
        finally:
            client.cancel([future for future in futures if not future.done()])


def import_distributed() -> Any:
    """Return `dask.distributed`, or raise a MissingDependencyError."""
    try:
        from dask import distributed
    except ImportError as error:
        raise MissingDependencyError(
            "sweep(cluster=...) needs Dask; install it with: pip install 'moecache[study]'"
        ) from error
    return distributed


def _check_scheduler(address: str) -> None:
    """Ask before Dask does: its client hangs on what is no address, and on other servers."""
    try:
        parts = urllib.parse.urlsplit(address if "://" in address else f"tcp://{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"cluster {address!r}: {error}; write tcp://HOST:PORT") from error
    if parts.scheme == "inproc":
        return
    if parts.scheme not in _SCHEMES or not host or not port:
        raise ConfigError(f"cluster {address!r} is not an address such as tcp://HOST:PORT")
    if parts.scheme != "tcp":
        return
    try:
        with socket.create_connection((host, port), timeout=_ANSWER_SECONDS) as connection:
            # A scheduler speaks first: the number of frames, then their sizes, 8 bytes each.
            data = connection.recv(8)
    except OSError as error:
        raise ConfigError(f"cluster {address!r}: no scheduler answers: {error}") from error
    if len(data) < 8 or int.from_bytes(data, "little") > _MAX_GREETING_BYTES:
        raise ConfigError(
            f"cluster {address!r}: what answers is no Dask scheduler; is it the dashboard's port?"
        )


_traces: dict[str, Trace] = {}


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Keep Ctrl-C for later, also in the processes that are started: until `_set_up`."""
    from multiprocessing import resource_tracker

    # Starting this one would let Ctrl-C through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _set_up(traces: dict[str, Trace], parent: int) -> None:
    # A pool's process waits for work for ever if its parent was killed. Before Ctrl-C is let
    # through, so that it never comes to this thread.
    end_with(parent)
    # Ctrl-C reaches every process of the terminal: idle ones leave it to the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _traces.update(traces)


def _work(trace: str, policy: bytes, scope: str, slots: int) -> Outcome | None:
    """Return the outcome of a cell, or None if it was interrupted."""
    try:
        with _interruptible():
            return run_apart(_traces[trace], pickle.loads(policy), scope, slots)  # noqa: S301 - its own
    except KeyboardInterrupt:
        return None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the policy cannot be unpickled
        return _told(error)


def _sendable(outcome: Outcome) -> Outcome:
    """Return the text of an error that another process could not make again."""
    if not isinstance(outcome, Exception):
        return outcome
    try:
        # An error may be written and not be read: if its class takes more than it passes on.
        again = pickle.loads(pickle.dumps(outcome))  # noqa: S301 - its own
    except Exception:  # noqa: BLE001 - whatever its own methods raise
        return _told(outcome)
    return outcome if type(again) is type(outcome) else _told(outcome)


def _told(error: BaseException) -> Exception:
    return MoeCacheError(f"the replay raised {said(error)}")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _pickled(policy: Any) -> bytes | None:
    try:
        return pickle.dumps(policy)
    except Exception:  # noqa: BLE001 - whatever its own methods raise
        return None
