"""Which level computes, and with how many threads, before anybody says otherwise."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from moecache.kernels import _processor
from moecache.settings import Settings

logger = logging.getLogger(__name__)


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use: by its affinity, and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min([cores or 1, *_quotas(root)]))


def _quotas(root: Path) -> list[int]:
    """Return the whole cores that cgroups (v2) of this process leave it."""
    quotas = []
    # Without cgroups of version 2 there is no such line.
    with suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        inside = next(line[3:] for line in lines if line.startswith("0::"))
        group = root / "sys/fs/cgroup" / inside.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):
                quota, period = (folder / "cpu.max").read_text().split()
                if quota != "max":
                    quotas.append(-(-int(quota) // int(period)))
    return quotas


def _start() -> None:
    settings = Settings.from_environ(only=("kernels", "threads"))
    _processor.use_threads(settings.threads or min(256, usable_cores()))
    if settings.kernels is None:
        return
    if settings.kernels in _processor.levels():
        _processor.use_level(settings.kernels)
    else:
        logger.warning(
            "settings.unsupported MOECACHE_KERNELS=%r: this processor has %s; using %s",
            settings.kernels,
            ", ".join(_processor.levels()),
            _processor.level(),
        )


_start()
