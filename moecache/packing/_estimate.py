"""What a GGUF's experts in compute form would cost to write, and save: measured, in a second."""

import logging
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moecache.kernels.forms import tiler
from moecache.layout import Role
from moecache.packing._gguf import tiled
from moecache.stores import CheckpointStore, GgufStore
from moecache.units import format_bytes

logger = logging.getLogger(__name__)

# Experts of each kind of layer that are read and brought into compute form, and for how long.
_NUM_EXPERTS, _MOST_S = 6, 1.0
_WRITTEN_BYTES = 2**26
# A miss that is shorter by less is not worth a second file.
_WORTH = 0.75


@dataclass(frozen=True)
class FormEstimate:
    """What `pack(compute_form=True)` of a GGUF would take, and what a miss takes before and after.

    Parameters
    ----------
    nbytes : int
        Bytes of the packed files.
    seconds : float
        To read, convert and write them; without the writing if `is_written` is false.
    is_written : bool
        Whether it was measured how fast the disk writes.
    miss_s, packed_miss_s : float
        Seconds of an expert that is missing, as the file is and packed: its reading by one thread,
        and that it is brought into its compute form. Means over all experts.
    miss_bytes, packed_miss_bytes : float
        Bytes that are read for it.
    """

    nbytes: int
    seconds: float
    is_written: bool
    miss_s: float
    packed_miss_s: float
    miss_bytes: float
    packed_miss_bytes: float

    @property
    def pays(self) -> bool:
        """Whether a miss is shorter by a quarter at least."""
        return self.packed_miss_s < _WORTH * self.miss_s

    def describe(self) -> str:
        """Return the figures as text."""
        took = f"{'about' if self.is_written else 'at least'} {_seconds(self.seconds)}"
        return (
            f"{format_bytes(self.nbytes)}, {took}; a miss then takes "
            f"{1e3 * self.packed_miss_s:.3g} ms instead of {1e3 * self.miss_s:.3g} (reads "
            f"{format_bytes(self.packed_miss_bytes)} instead of {format_bytes(self.miss_bytes)}, "
            "and converts nothing)"
        )


def estimate_form(
    store: CheckpointStore, directory: str | os.PathLike[str] | None = None
) -> FormEstimate | None:
    """Measure what a GGUF's experts in compute form would cost to write, and what they save.

    Reads some experts of each kind of layer, wherever their bytes are now, on the disk or in the
    page cache, and brings them into compute form, as a miss does. Blocks for a second or two.

    Parameters
    ----------
    store : CheckpointStore
    directory : str or Path, optional
        A directory on the disk that would be written to: a temporary file of 64 MiB, written
        and removed, tells its speed, if it can be written.

    Returns
    -------
    FormEstimate or None
        `None` if it is no GGUF, or nothing of it can be brought into compute form, or is not
        already.

    Raises
    ------
    StoreError
        If experts cannot be read.
    """
    layout = store.layout
    formed = tiled(layout)
    if not isinstance(store, GgufStore) or formed == layout or not layout.total_experts:
        return None
    kinds: defaultdict[tuple[Role, ...], list[int]] = defaultdict(list)
    for layer, roles in enumerate(layout.layers):
        kinds[tuple(roles)].append(layer)
    rng = np.random.default_rng()
    read_s = make_s = packed_read_s = 0.0
    for roles, layers in kinds.items():
        num_experts = len(layers) * layout.num_experts
        reading, making = _measure(store, roles, layers, rng, _MOST_S / len(kinds))
        ratio = formed.expert_bytes(layers[0]) / layout.expert_bytes(layers[0])
        read_s += num_experts * reading
        make_s += num_experts * making
        packed_read_s += num_experts * reading * ratio
    nbytes = formed.total_bytes + store.trunk_bytes
    seconds = read_s * (1 + store.trunk_bytes / layout.total_bytes) + make_s
    write_rate = None if directory is None else _write_rate(Path(directory))
    if write_rate is not None:
        seconds += nbytes / write_rate
    total = layout.total_experts
    return FormEstimate(
        nbytes,
        seconds,
        is_written=write_rate is not None,
        miss_s=(read_s + make_s) / total,
        packed_miss_s=packed_read_s / total,
        miss_bytes=layout.total_bytes / total,
        packed_miss_bytes=formed.total_bytes / total,
    )


def _measure(
    store: CheckpointStore,
    roles: Sequence[Role],
    layers: Sequence[int],
    rng: np.random.Generator,
    most_s: float,
) -> tuple[float, float]:
    """Return the median seconds of reading an expert of some layers, and of converting it."""
    raw = {role.name: np.empty(role.nbytes, np.uint8) for role in roles}
    forms = {role.name: np.empty(role.form_bytes, np.uint8) for role in roles if _is_made(role)}
    tilers = {r.name: tiler(r.format, *r.matrix_shape) for r in roles if _is_made(r)}
    reading: list[float] = []
    making: list[float] = []
    began = time.perf_counter()
    while len(reading) < _NUM_EXPERTS and (not making or time.perf_counter() - began < most_s):
        layer, expert = rng.choice(layers), rng.integers(store.layout.num_experts)
        start = time.perf_counter()
        store.read_into(int(layer), int(expert), raw)
        read = time.perf_counter()
        for name, making_form in tilers.items():
            making_form.tile(raw[name], forms[name])
        reading.append(read - start)
        making.append(time.perf_counter() - read)
    # The first one made tables, maybe.
    return float(np.median(reading[1:] or reading)), float(np.median(making[1:] or making))


def _is_made(role: Role) -> bool:
    return bool(role.form_bytes) and not role.is_tiled


def _write_rate(directory: Path) -> float | None:
    """Return the bytes per second at which a file is written and flushed; `None` if it cannot."""
    # Zeros may be left out by a file system.
    block = np.random.default_rng(0).bytes(2**22)
    try:
        with tempfile.TemporaryFile(dir=directory, prefix=".moecache-", buffering=0) as file:
            start = time.perf_counter()
            for _ in range(_WRITTEN_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            return _WRITTEN_BYTES / (time.perf_counter() - start)
    except OSError as error:
        # To be written and to be refused is the packing's own matter.
        logger.info("pack.not_measured path=%s error=%s", directory, error)
        return None


def _seconds(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
