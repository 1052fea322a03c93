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

from moecache.errors import StoreError
from moecache.kernels.forms import tiler
from moecache.layout import ExpertLayout, Role
from moecache.packing._copy import PackedFile
from moecache.packing._gguf import GgufSource, form_extents, tiled
from moecache.packing._plan import Extent, Unit
from moecache.stores import CheckpointStore, GgufStore
from moecache.units import format_bytes

logger = logging.getLogger(__name__)

# Mixes may have a kind for each layer: those of most layers stand for all.
_MOST_KINDS = 4
# Experts of a kind that are read and brought into compute form; those that are packed, and their
# bytes; seconds for all of either.
_NUM_EXPERTS, _MOST_EXPERTS, _MOST_BYTES, _MOST_S = 6, 16, 2**26, 1.0
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

    Reads some experts of the four commonest kinds of layer, wherever their bytes are now, on the
    disk or in the page cache, and brings them into compute form, as a miss does; then packs some
    into a temporary file of 64 MiB, or two experts of each kind. Blocks for a second or two.

    Parameters
    ----------
    store : CheckpointStore
    directory : str or Path, optional
        A directory on the disk that would be written to, for the temporary file, which is removed;
        by default it is in memory. It is there as well if the directory cannot be written to.

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
    kinds = _kinds(layout)
    num_layers = sum(map(len, kinds))
    rng = np.random.default_rng()
    miss_s = packed_miss_s = seconds = 0.0
    is_written = directory is not None
    with GgufSource(store.path) as source:
        numbers = {name: layer for layer, name in enumerate(source.layout.layer_names)}
        for layers in kinds:
            share = len(layers) / num_layers
            old, new = (one.expert_bytes(layers[0]) for one in (layout, formed))
            reading, making = _measure(store, layers, rng, _MOST_S / len(kinds))
            miss_s += share * (reading + making)
            packed_miss_s += share * reading * new / old
            most = (_MOST_EXPERTS, _MOST_BYTES / new, _MOST_S / (reading + making))
            number = max(2, int(min(most) / len(kinds)))
            extents: list[Extent] = []
            for _ in range(number):
                name = layout.layer_names[rng.choice(layers)]
                expert = int(rng.integers(layout.num_experts))
                extents += form_extents(source, numbers[name], expert)
            took, is_there = _pack(source, extents, directory)
            seconds += share * layout.total_experts * took / number
            is_written &= is_there
    nbytes = formed.total_bytes + store.trunk_bytes
    total = layout.total_experts
    return FormEstimate(
        nbytes,
        seconds * nbytes / formed.total_bytes,
        is_written=is_written,
        miss_s=miss_s,
        packed_miss_s=packed_miss_s,
        miss_bytes=layout.total_bytes / total,
        packed_miss_bytes=formed.total_bytes / total,
    )


def _kinds(layout: ExpertLayout) -> list[list[int]]:
    """Return the layers that are alike, those of the commonest kinds."""
    kinds: defaultdict[tuple[Role, ...], list[int]] = defaultdict(list)
    for layer, roles in enumerate(layout.layers):
        kinds[tuple(roles)].append(layer)
    return sorted(kinds.values(), key=len, reverse=True)[:_MOST_KINDS]


def _measure(
    store: CheckpointStore, layers: Sequence[int], rng: np.random.Generator, most_s: float
) -> tuple[float, float]:
    """Return the median seconds of reading an expert of like layers, and of converting it."""
    roles = store.layout.layers[layers[0]]
    raw = {role.name: np.empty(role.nbytes, np.uint8) for role in roles}
    made = [role for role in roles if role.form_bytes and not role.is_tiled]
    forms = {role.name: np.empty(role.form_bytes, np.uint8) for role in made}
    tilers = {role.name: tiler(role.format, *role.matrix_shape) for role in made}
    reading: list[float] = []
    making: list[float] = []
    began = time.perf_counter()
    while len(reading) < _NUM_EXPERTS and (not making or time.perf_counter() - began < most_s):
        layer, expert = int(rng.choice(layers)), int(rng.integers(store.layout.num_experts))
        start = time.perf_counter()
        store.read_into(layer, expert, raw)
        read = time.perf_counter()
        for name, one in tilers.items():
            one.tile(raw[name], forms[name])
        reading.append(read - start)
        making.append(time.perf_counter() - read)
    # The first one made tables, maybe.
    return float(np.median(reading[1:] or reading)), float(np.median(making[1:] or making))


def _pack(
    source: GgufSource, extents: Sequence[Extent], directory: str | os.PathLike[str] | None
) -> tuple[float, bool]:
    """Return the seconds in which some extents are packed, and whether that was to the disk."""
    unit = Unit("", "a sample", 0, sum(extent.nbytes for extent in extents), extents)
    try:
        if directory is not None:
            with tempfile.TemporaryDirectory(dir=directory, prefix=".moecache-") as folder:
                return _write(Path(folder) / "sample", unit, source), True
    except (OSError, StoreError) as error:
        # To be refused is the packing's own matter; a file that cannot be read is told of below.
        logger.info("pack.not_measured path=%s error=%s", directory, error)
    descriptor = os.memfd_create("moecache-pack")
    try:
        return _write(Path(f"/proc/self/fd/{descriptor}"), unit, source), False
    finally:
        os.close(descriptor)


def _write(path: Path, unit: Unit, source: GgufSource) -> float:
    start = time.perf_counter()
    with PackedFile(path) as packed:
        packed.write(unit, source, lambda _: None)
    return time.perf_counter() - start


def _seconds(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
