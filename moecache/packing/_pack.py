"""`pack`: a checkpoint written anew, expert by expert."""

import contextlib
import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from functools import cached_property

from moecache.errors import ConfigError, FormatError, StoreError
from moecache.formats.form import FORM_VERSION
from moecache.packing._copy import Copied, PackedFile, copy_file, hash_range, write_file
from moecache.packing._gguf import GgufSource, check_target, plan_gguf, tiled
from moecache.packing._journal import Finished, Journal, sync_directory
from moecache.packing._manifest import Progress, describe
from moecache.packing._place import Place, locked
from moecache.packing._plan import Unit, plan_experts, plan_trunk
from moecache.packing._report import Deviation, PackPlan, PackReport
from moecache.packing._source import MANIFEST_NAME, Source
from moecache.packing._target import PLAIN, find_target, packed_config, packed_layout
from moecache.stores import open_store
from moecache.stores._checkpoint import INDEX_NAME
from moecache.stores._paths import find_path
from moecache.stores.gguf._parts import is_gguf
from moecache.units import format_bytes

logger = logging.getLogger(__name__)

# A file takes whole blocks on the disk; a unit is a line in two files of JSON.
_FILE_BYTES, _UNIT_BYTES = 4096, 512


def plan(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - what it is
    compute_form: bool = False,
) -> PackPlan:
    """Return what `pack` would write. Reads headers only and writes nothing.

    Raises
    ------
    ConfigError, StoreError
        As `pack` would, but not for a lack of room.
    """
    with _open(model) as source, _told(out):
        place = Place.find(source.path, out)
        return _Work(source, find_target(format), compute_form=compute_form).plan(place)


def pack(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - what it is
    compute_form: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Write a checkpoint anew so that each expert is one aligned, contiguous read.

    Blocks until all is on the disk. Copies in chunks of 4 MiB, for any size
    of the model. Everything grows in `OUT.partial`, and gets its final name only
    when it is complete. After an interruption of any kind, a second call continues
    where the first one stopped. The same model gives the same files, byte by byte.

    Parameters
    ----------
    model : str or Path
        A checkpoint that `open_store` reads.
    out : str or Path
        The directory to make; it does not exist yet, or is empty.
    format : {"q8_0", "q4_0", "mxfp4", "fp8", "int4", "bf16"} or str, optional
        Quantize the experts' matrices to a format, in its compute form: a direct read then
        lands in its slot ready to be computed. Rounded values stay rounded. "fp8" is short
        for "fp8[128x128,f32]", "int4" for "int4[1x32,bf16]"; full names of other formats that have
        a compute form are taken, too. "bf16": dequantize what a publisher quantized, trunk and
        experts, under the names that the model's own tensors have; stacks of experts stay stacks.
        By default no bit of any tensor changes.
    compute_form : bool, default False
        Write the experts of a GGUF in their compute form, with the same values: a direct read then
        lands in its slot ready to be computed. A type without one stays as it is. Others see bytes.
    progress : callable (done_bytes, total_bytes), optional
        Called after every few MiB. If it raises, the call ends as if interrupted.

    Returns
    -------
    PackReport

    Raises
    ------
    ConfigError
        If `model` has no experts, `out` cannot be used, the experts cannot be quantized to
        `format`, or `compute_form` is asked for what is no GGUF.
    StoreError
        If there is not enough room on the disk, if something cannot be read or
        written (a file system whose files may not be so large says so here), if
        the model is changed meanwhile, or if another process packs into `out`.
    """
    begun = time.perf_counter()
    with _open(model) as source, _told(out):
        place = Place.find(source.path, out)
        work = _Work(source, find_target(format), compute_form=compute_form)
        with locked(place):
            planned = work.plan(place)
            if planned.disk_bytes > planned.free_bytes:
                raise StoreError(
                    f"{place.out}: {format_bytes(planned.disk_bytes)} are needed, but only "
                    f"{format_bytes(planned.free_bytes)} are free on that disk; free some space, "
                    "or write to another disk"
                )
            with _told(place.partial):
                resumed_bytes = work.write(place, progress)
            place.finish()
    seconds = time.perf_counter() - begun
    report = PackReport(place.out, planned, resumed_bytes, seconds, work.deviations)
    logger.info("pack.finished path=%s %s", report.path, report.describe())
    return report


class _Work:
    """All that is to be written for a source, and the writing of it."""

    def __init__(
        self, source: Source | GgufSource, target: str, *, compute_form: bool = False
    ) -> None:
        self._source = source
        self._target = target
        if isinstance(source, GgufSource):
            check_target(target)
            self._layout = tiled(source.layout) if compute_form else source.layout
            self._files = plan_gguf(source, compute_form=compute_form)
            self._beside = source.others()
        elif compute_form:
            raise ConfigError(
                f"{source.path}: the compute form is for a GGUF; of a checkpoint in safetensors "
                "--format quantizes experts, and writes them so"
            )
        else:
            self._layout = packed_layout(source, target)
            self._files = (plan_experts(source, target), plan_trunk(source, target))
            self._beside = source.others(packed_config(source.config, target) if target else None)
        # One for each layer; empty if nothing is quantized.
        self.deviations: tuple[Deviation | None, ...] = ()
        self._others = self._beside.files
        self._total_bytes = sum(file.nbytes for file in self._files) + sum(
            other.nbytes for other in self._others
        )
        seen: set[str] = set()
        for name in itertools.chain.from_iterable(file.tensor_names for file in self._files):
            if name in seen:
                raise FormatError(f"{source.path}: two tensors would both be {name[:200]!r}")
            seen.add(name)

    def plan(self, place: Place) -> PackPlan:
        """Return the figures."""
        layout, (experts, trunk) = self._source.layout, self._files
        num_files = len(self._files) + len(self._others) + 4
        overhead = num_files * _FILE_BYTES + len(self._units) * _UNIT_BYTES + len(self._index)
        return PackPlan(
            num_layers=layout.num_layers,
            num_experts=layout.num_experts,
            expert_bytes=experts.tensor_bytes,
            trunk_bytes=trunk.tensor_bytes,
            padding_bytes=experts.padding_bytes + trunk.padding_bytes,
            other_bytes=sum(other.nbytes for other in self._others),
            total_bytes=self._total_bytes,
            disk_bytes=self._total_bytes + overhead,
            free_bytes=place.free_bytes(),
            linked=tuple(self._source.linked(self._beside)),
            left_behind=tuple(self._beside.left_behind),
        )

    def write(self, place: Place, progress: Progress | None) -> int:
        """Write what is not there yet; return the bytes that were there already."""
        done = 0

        def copied(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, self._total_bytes)

        # The source's config.json decides how it is packed.
        formats = {e.recipe.format for unit in self._units for e in unit.extents if e.recipe}
        made = [self._target, *sorted(formats), *([f"form {FORM_VERSION}"] if formats else [])]
        identity = " ".join([self._source.identity(), *made]).rstrip()
        journal = Journal(place.journal, identity)
        finished = self._resume(place, journal)
        try:
            journal.begin(self._units, finished)
            resumed = sum(unit.nbytes for unit in self._units[: len(finished)])
            copied(resumed)
            self._write_units(place, journal, finished, copied)
        finally:
            journal.close()
        if self._target not in ("", PLAIN):
            # The first unit is the header.
            num_layers = self._source.layout.num_layers
            self.deviations = tuple(unit.deviation for unit in finished[1 : 1 + num_layers])
        others = {
            other.name: copy_file(other, place.files / other.name, copied) for other in self._others
        }
        if self._index:
            others[INDEX_NAME] = write_file(place.files / INDEX_NAME, iter([self._index]))
        checksums = [unit.checksum for unit in finished]
        manifest = describe(self._files, checksums, others).encode()
        write_file(place.files / MANIFEST_NAME, iter([manifest]))
        with open_store(place.files) as packed:
            if packed.layout != self._layout:
                raise FormatError(
                    f"{place.files}: its experts are not read like those of {self._source.path}; "
                    "this is a fault of moecache, please report it"
                )
        return resumed

    @cached_property
    def _units(self) -> list[Unit]:
        return [unit for file in self._files for unit in file.units]

    @cached_property
    def _index(self) -> bytes:
        if isinstance(self._source, GgufSource):
            return b""
        # Padding is left out: readers that go by the index never see it.
        weight_map = {name: file.name for file in self._files for name in file.tensor_names}
        size = sum(file.tensor_bytes for file in self._files)
        document = {"metadata": {"total_size": size}, "weight_map": weight_map}
        return json.dumps(document, indent=1).encode() + b"\n"

    def _resume(self, place: Place, journal: Journal) -> list[Finished]:
        """Return what is noted of the units on the disk, and remove everything else."""
        finished = journal.load(self._units)
        if finished is None:
            if place.files.exists():
                shutil.rmtree(place.files)
            finished = []
        place.files.mkdir(exist_ok=True)
        for path in place.files.iterdir():
            if path.is_symlink():  # its target must not be written to
                path.unlink()
        del finished[self._count_intact(place, finished) :]
        kept = self._units[: len(finished)]
        for file in self._files:
            path = place.files / file.name
            path.touch()
            os.truncate(path, max((unit.end for unit in kept if unit.file == file.name), default=0))
        names = {file.name for file in self._files}
        for path in place.files.iterdir():
            if path.name not in names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        sync_directory(place.files)
        return finished

    def _count_intact(self, place: Place, finished: list[Finished]) -> int:
        """Return how many of the noted units, from the first on, are what they should be."""
        sizes = {}
        for file in self._files:
            path = place.files / file.name
            sizes[file.name] = path.stat().st_size if path.exists() else 0
        noted = [(unit, one.checksum) for unit, one in zip(self._units, finished, strict=False)]
        long_enough = list(
            itertools.takewhile(lambda pair: pair[0].end <= sizes[pair[0].file], noted)
        )
        num_intact = len(long_enough)
        if long_enough and not _is_intact(place, *long_enough[-1]):
            # If the last is wrong, nothing can be taken for granted.
            num_intact = sum(
                1 for _ in itertools.takewhile(lambda p: _is_intact(place, *p), long_enough)
            )
        if num_intact < len(noted):
            unit = noted[num_intact][0]
            logger.warning(
                "pack.damaged file=%s unit=%s: differs from the journal; written again from there",
                place.files / unit.file,
                unit.name,
            )
        return num_intact

    def _write_units(
        self, place: Place, journal: Journal, finished: list[Finished], copied: Copied
    ) -> None:
        left = self._units[len(finished) :]
        for file, units in itertools.groupby(left, lambda unit: unit.file):
            with PackedFile(place.files / file) as packed:
                for unit in units:
                    finished.append(packed.write(unit, self._source, copied))
                    self._source.check_unchanged(f"{unit.name}, byte {unit.offset} of {file},")
                    journal.add(unit, finished[-1])


@contextlib.contextmanager
def _told(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise StoreError where the system fails, with what is packed to if it names no path."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            path = os.fsdecode(error.filename)
        raise StoreError(
            f"{path}: cannot be written or looked at: {error.strerror or error}; see to that and "
            "pack again: what is finished stays"
        ) from error


def _open(model: str | os.PathLike[str]) -> Source | GgufSource:
    found = find_path(model)
    return GgufSource(found) if is_gguf(found) else Source(found)


def _is_intact(place: Place, unit: Unit, checksum: str) -> bool:
    found = hash_range(place.files / unit.file, unit.offset, unit.nbytes, lambda _: None)
    return found == checksum
