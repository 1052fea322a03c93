"""Figures: the counters of a runtime, and its report."""

import logging
import os
import time

from moecache.cache._cache import ExpertCache
from moecache.errors import MoeCacheError
from moecache.files import Kind, write_whole
from moecache.layout import ExpertLayout
from moecache.loading._loader import SlotLoader
from moecache.prefetch.prefetcher import Prefetcher
from moecache.reader._reader import Reader
from moecache.reader.disk import DiskSpeed
from moecache.telemetry import PrefetchStats, ReadingStats, RuntimeStats, UploadStats

logger = logging.getLogger(__name__)

_REPORT_FILE = Kind("a report of experts", lambda data: data.startswith(b"experts "))


class Figures:
    """The counters of a runtime since this was made.

    Parameters
    ----------
    layout : ExpertLayout
    cache : ExpertCache
    loader : SlotLoader
    prefetcher : Prefetcher, optional
    reader : Reader, optional
        Its reads before do not count.
    disk : DiskSpeed, optional

    Attributes
    ----------
    num_sequences : int
        Sequences begun; counted by the runtime.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        cache: ExpertCache,
        loader: SlotLoader,
        prefetcher: Prefetcher | None,
        reader: Reader | None,
        disk: DiskSpeed | None,
    ) -> None:
        self.num_sequences = 0
        self._total_experts = layout.total_experts
        self._cache = cache
        self._loader = loader
        self._pool_bytes = loader.pool.nbytes
        self._prefetcher = prefetcher
        self._reader = reader
        self._bytes_per_s = None if disk is None else disk.bytes_per_s
        # Reads so far were not for requests.
        self._reading_before = None if reader is None else ReadingStats.of(reader, None)
        self._opened_ns = time.monotonic_ns()

    def stats(self) -> RuntimeStats:
        """Return the counters as they are now."""
        self._loader.look()
        pool = self._loader.pool
        device = getattr(pool, "device", None)
        return RuntimeStats.of(
            self._cache,
            self._loader,
            num_sequences=self.num_sequences,
            total_experts=self._total_experts,
            pool_bytes=self._pool_bytes,
            opened_ns=self._opened_ns,
            reading=self._reading(),
            prefetch=None if self._prefetcher is None else PrefetchStats.of(self._prefetcher),
            uploads=None if device is None else UploadStats.of(device.description, pool.uploads),
        )

    def report(self) -> str:
        """Return the counters as text, with a line per layer."""
        return f"{self.stats().describe()}\n{self._cache.profiler.report()}"

    def write_report(self, path: str | os.PathLike[str]) -> None:
        """Write the report, whole or not at all; that it cannot be written is a warning."""
        try:
            text = f"{self.report()}\n".encode(errors="backslashreplace")
            write_whole(path, text, _REPORT_FILE)
        except MoeCacheError as error:
            logger.warning("runtime.no_report %s", error)

    def _reading(self) -> ReadingStats | None:
        if self._reader is None or self._reading_before is None:
            return None
        return ReadingStats.of(self._reader, self._bytes_per_s) - self._reading_before
