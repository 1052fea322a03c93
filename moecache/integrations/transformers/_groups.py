"""Groups: connections among the ranks of one model, made and ended without anybody else."""

import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

# At the start ranks wait at least so long: another one may still read its weights.
START_S = 300.0
# Ending groups takes no time, unless somebody does not answer.
_END_S = 5.0


def make_groups(group: Any, timeout_s: float, device: torch.device) -> tuple[str, Any, Any]:
    """Return a name for a model's ranks, their group on the host, and that for rows.

    The group on the host waits for `START_S` at least, until it is told otherwise. Members alone
    take part: `new_group` would wait for all processes there are.
    """
    start = timedelta(seconds=max(timeout_s, START_S))
    name = _common_name(group, start, device)
    store = dist.distributed_c10d._get_default_store()
    member = (dist.get_rank(group), dist.get_world_size(group))
    control = dist.ProcessGroupGloo(PrefixStore(f"moecache/{name}/control", store), *member, start)
    # Another one, as a group's sends keep the time-out that it was made with.
    limit = timedelta(seconds=timeout_s)
    rows = PrefixStore(f"moecache/{name}/rows", store)
    if device.type != "cuda" or "nccl" not in str(dist.get_backend_config(group)):
        return name, control, dist.ProcessGroupGloo(rows, *member, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return name, control, dist.ProcessGroupNCCL(rows, *member, options)


def _common_name(group: Any, limit: timedelta, device: torch.device) -> str:
    """Return a name that all members have and that nobody had before.

    Drawn, not counted: members may have loaded different numbers of models by now, and a store may
    outlive processes, with all that earlier ones left there.
    """
    on_gpu = "gloo" not in str(dist.get_backend_config(group))
    number = torch.tensor([secrets.randbits(62)], device=device if on_gpu else "cpu")
    work = dist.broadcast(number, group_src=0, group=group, async_op=True)
    if work is not None:
        work.wait(limit)
    return str(int(number))


def let_go(groups: list[Any]) -> None:
    """End groups, whose list must have the last references."""
    within(groups.clear)


def within(end: Callable[[], object]) -> None:
    """Call what ends a group, and wait for a while only.

    A group waits for what was begun and timed out, which nobody may ever answer.
    """
    thread = threading.Thread(target=end, name="moecache-end", daemon=True)
    thread.start()
    thread.join(_END_S)
