"""How fast this machine's memory can be read: measured once, and kept in a profile."""

import logging
import math
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moecache import kernels
from moecache.errors import MoeCacheError
from moecache.kernels._processor import read_all
from moecache.profiles.file import read_profile, update_profile
from moecache.sizing.host_memory import free_host_bytes
from moecache.slots._memory import aligned_rows

logger = logging.getLogger(__name__)

# More than caches hold; and less than that says nothing.
_BYTES, _LEAST_BYTES = 256 * 2**20, 64 * 2**20
_MAX_S, _MAX_ROUNDS = 0.12, 8
_measured: dict[str, float] = {}
_repeated: set[str] = set()


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def machine() -> str:
    """Return what tells this machine, and the way in which the kernels read, from others."""
    threads = f"{kernels.level()}, {kernels.num_threads()} threads"
    return f"{platform.node()}, {cpu_model()}, {os.cpu_count()} cores, {threads}"


def measure_bandwidth() -> float | None:
    """Read memory with the kernels' threads, in huge pages; return bytes per second.

    Takes a quarter of a second, and up to 256 MiB meanwhile.

    Returns
    -------
    float or None
        The best of some rounds; `None` where too little memory is free.
    """
    nbytes = min(_BYTES, free_host_bytes() // 4)
    if nbytes < _LEAST_BYTES:
        return None
    number = kernels.num_threads()
    parts = aligned_rows(number, nbytes // number // 4096 * 4096)
    with ThreadPoolExecutor(number) as pool:
        # Pages that were never written are all the same zeros.
        list(pool.map(lambda part: part.fill(1), parts))
        best, began = math.inf, time.perf_counter()
        for _ in range(_MAX_ROUNDS):
            start = time.perf_counter()
            list(pool.map(lambda part: read_all(part.ctypes.data, part.nbytes), parts))
            now = time.perf_counter()
            best = min(best, now - start)
            if now - began > _MAX_S:
                break
    return float(parts.nbytes / best)


def bandwidth(
    path: str | os.PathLike[str] | None = None, *, measures: bool = True, at_least: float = 0.0
) -> float | None:
    """Return how many bytes per second this machine reads from memory.

    Parameters
    ----------
    path : str or Path, optional
        A profile that has what was measured before, or is given it. One that cannot be used is
        a warning.
    measures : bool, default True
        Whether to measure where nobody has yet.
    at_least : float, default 0
        Bytes per second that were seen: a slower measurement was disturbed, and is made again.

    Returns
    -------
    float or None
        `None` if it is not known.
    """
    name = machine()
    found = _measured.get(name)
    if found is None and path is not None:
        profile = read_profile(path)
        found = None if profile is None else _kept(profile.machines, name)
    if measures and (found is None or found < at_least):
        before, measured = found or 0.0, None
        # Once more at most: data that fits into a processor's cache is faster than its memory.
        if found is None or name not in _repeated:
            measured = measure_bandwidth()
            if found is not None:
                _repeated.add(name)
        if measured is not None and measured > before:
            found = measured
            if path is not None:
                _keep(path, name, found)
    if found is not None:
        _measured[name] = found
    return found


def _kept(machines: dict[str, Any], name: str) -> float | None:
    entry = machines.get(name)
    if entry is None:
        return None
    value = entry.get("bytes_per_s")
    if type(value) is float and 0 < value < 2**60:
        return value
    logger.warning("bandwidth.ignored of the profile: %s is no rate", str(entry)[:200])
    return None


def _keep(path: str | os.PathLike[str], name: str, found: float) -> None:
    try:
        update_profile(path, machines={name: {"bytes_per_s": found}})
    except MoeCacheError as error:
        logger.warning("profile.not_written %s", error)
