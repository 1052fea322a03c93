"""Groups: connections among the ranks of one model, made and ended without anybody else."""

import contextlib
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from moecache.integrations.transformers._deadlines import call_within

# At the start ranks wait at least so long: another one may still read its weights.
START_S = 300.0
# One that waits looks for ranks that are gone so often.
LOOK_S = 2.0
# Ctrl-C ends a wait for a collective after so long.
_SLICE_S = 0.25
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


def wait_in_slices(work: Any, look: Callable[[], object] = bool) -> None:
    """Wait for a collective; raise, as `look` does, what that raises every `LOOK_S` meanwhile.

    torch itself would not let Ctrl-C come through before the time-out.
    """
    looked = time.monotonic()
    while not work.is_completed():
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(seconds=_SLICE_S))
        if time.monotonic() - looked > LOOK_S:
            look()
            looked = time.monotonic()
    # Raises what it failed with.
    work.wait()


def let_go(groups: list[Any]) -> None:
    """End groups, whose list must have the last references."""
    within(groups.clear)


def within(end: Callable[[], object]) -> None:
    """Call what ends a group, and wait for a while only.

    A group waits for what was begun and timed out, which nobody may ever answer.
    """
    with contextlib.suppress(TimeoutError):
        call_within(end, _END_S, "a group that ends")
