"""Joining: how a process becomes one of the ranks, and how that ends."""

import atexit
import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from moecache.errors import ConfigError, MoeCacheError
from moecache.integrations.transformers._deadlines import call_within
from moecache.integrations.transformers._groups import START_S, within
from moecache.integrations.transformers._ranks import Ranks
from moecache.settings import launched_ranks

DEFAULT_TIMEOUT_S = 60.0
# Beyond torch's own time-out at the start, which not every call of it has.
_MORE_S = 10.0
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 1.0, 86_400.0


def join(chosen: Any, device: torch.device, timeout_s: float | None) -> Ranks:
    """Return this process's part in the ranks that `expert_parallel` names.

    Parameters
    ----------
    chosen : True or DeviceMesh
        All processes that torchrun started, or those of a mesh of one dimension.
    device : torch.device
    timeout_s : float, optional

    Raises
    ------
    ConfigError
        If it is neither, or this process was not started as one of several.
    """
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    check_timeout("rank_timeout_s", timeout_s)
    if not dist.is_available():
        raise ConfigError("this torch was built without torch.distributed; install another")
    if chosen is True:
        begin(device, timeout_s)
        return _member(dist.group.WORLD, timeout_s, device)
    if not isinstance(chosen, DeviceMesh):
        raise ConfigError(f"expert_parallel must be True or a DeviceMesh, got {chosen!r:.100}")
    if chosen.ndim != 1:
        raise ConfigError(
            f"expert_parallel takes a mesh of one dimension, got {chosen.ndim}; give mesh[name]"
        )
    return _member(chosen.get_group(), timeout_s, device)


def tell(error: Exception) -> None:
    """Tell the ranks of an error that comes before this process has joined them.

    They would wait for it as they do for one that starts late. Waits for them for as long, unless
    it is interrupted; the error itself counts, not a failure to tell of it.
    """
    if dist.is_available() and not dist.is_initialized():
        with contextlib.suppress(MoeCacheError, KeyboardInterrupt):
            join(True, torch.device("cpu"), None).fail(error)


def check_timeout(name: str, timeout_s: Any) -> None:
    """Refuse what is no time-out."""
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not (is_number and _LEAST_TIMEOUT_S <= timeout_s <= _MOST_TIMEOUT_S):
        raise ConfigError(
            f"{name} must be a number of seconds from {_LEAST_TIMEOUT_S:.0f} to "
            f"{_MOST_TIMEOUT_S:.0f} (a day), got {timeout_s!r}"
        )


def _member(group: Any, timeout_s: float, device: torch.device) -> Ranks:
    if device.type == "cuda" and device.index is None:
        # The current device is a thread's own.
        device = torch.device("cuda", torch.cuda.current_device())
    limit_s = max(timeout_s, START_S) + _MORE_S
    try:
        return call_within(lambda: Ranks(group, timeout_s, device), limit_s, "a rank or the store")
    except (RuntimeError, TimeoutError) as error:
        raise MoeCacheError(
            "a rank went away before all of them had found each other "
            f"({str(error).splitlines()[0]:.200}); start all ranks again"
        ) from error


def begin(device: torch.device, timeout_s: float, name: str = "") -> None:
    """Initialize torch.distributed, if the host has not.

    Processes that come one after the other to a store that outlives them, as torchrun's does, need
    a `name` for each set of them: without one, they would find those that have ended.
    """
    if dist.is_initialized():
        return
    limit_s = max(timeout_s, START_S)
    try:
        call_within(lambda: _initialize(device, limit_s, name), limit_s + _MORE_S, "the store")
    except ValueError as error:
        raise ConfigError(
            "expert_parallel=True needs several processes that know of each other: start the "
            "program with torchrun --nproc-per-node 2 (or set RANK, WORLD_SIZE, MASTER_ADDR and "
            f"MASTER_PORT) ({str(error).splitlines()[0]:.200})"
        ) from error
    except (RuntimeError, TimeoutError) as error:
        raise MoeCacheError(
            f"the ranks did not find each other: {str(error).splitlines()[0]:.300}; check that "
            "all were started, and reach MASTER_ADDR"
        ) from error
    atexit.register(_end, os.getpid())


def _initialize(device: torch.device, limit_s: float, name: str) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=limit_s)
    named: dict[str, Any] = {}
    if name:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        named = {"store": PrefixStore(name, store), "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=limit, **named)


def _end(process: int) -> None:
    """End what `begin` began; in the same process, as a forked one has no part in it."""
    if os.getpid() == process and dist.is_initialized():
        within(_destroy)


def _destroy() -> None:
    with contextlib.suppress(ValueError, RuntimeError):
        dist.destroy_process_group()


def local_device(device: str) -> str:
    """Return the GPU of this process where each has its own."""
    rank = launched_ranks().local_rank if device == "cuda" else None
    return device if rank is None else f"cuda:{rank}"
