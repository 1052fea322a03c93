"""ExpertRuntime: store, slots and cache behind one object."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Generator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from moecache.cache._cache import ExpertCache
from moecache.cache._profiler import AccessProfiler
from moecache.cache.warmpin import WarmPin
from moecache.cuda import CpuMisses, CudaExperts
from moecache.errors import ConfigError, MoeCacheError
from moecache.files import Kind, write_whole
from moecache.kernels.startup import usable_cores
from moecache.layout import ExpertLayout
from moecache.loading.loader import CLOSE_TIMEOUT_S, SlotLoader
from moecache.loading.reader_engine import ReaderEngine
from moecache.loading.store_engine import StoreEngine
from moecache.prefault.warming import BackgroundSweep
from moecache.prefetch.modes import check_predictor, check_prefetch, make_prefetcher
from moecache.prefetch.predict import Predictor
from moecache.profiles.file import Profile
from moecache.profiles.usage import KeptUsage
from moecache.profiles.warm_start import WarmStart
from moecache.ranks import Share
from moecache.reader._reader import Reader
from moecache.reader.disk import DiskSpeed, disk_of
from moecache.runtime import steps
from moecache.runtime.batch import Batch
from moecache.runtime.splitting import make_split
from moecache.runtime.steps import Lease, Wave, reading
from moecache.settings import DEFAULT_LOADER_THREADS, DEFAULT_WARMPIN_AFTER
from moecache.slots import SlotPool
from moecache.stores import ExpertStore, FileStore
from moecache.telemetry import PrefetchStats, ReadingStats, RuntimeStats, UploadStats
from moecache.units import parse_bytes

if TYPE_CHECKING:
    from moecache.traces.recording import Recording

logger = logging.getLogger(__name__)

MAX_LOADER_THREADS = 999
_REPORT_FILE = Kind("a report of experts", lambda data: data.startswith(b"experts "))


class ExpertRuntime:
    """Hands a host loop the experts of each layer, resident or read on demand.

    Made by `moecache.open`, or from parts: any store and a pool with at least
    `cache.capacity` slots; what it has beyond are staging slots. Methods may be
    called from several threads, but not in a forked child.

    Parameters
    ----------
    store : ExpertStore
        Closed with the runtime.
    pool : SlotPool
        Closed with the runtime.
    cache : ExpertCache
    loader_threads : int, default 2
        Threads that read experts while the host computes; 0 reads only in the
        thread that waits.
    expert_stats : str or Path, optional
        Write `report()` there on `close`, whole or not at all.
    reader : Reader, optional
        Reads the store's files, many experts at once; closed with the runtime.
        Without one, `store.read_into` reads one expert at a time in each thread.
    prefetch : str or Predictor, default "off"
        Which experts are read before their layer asks, see `moecache.open`; or an object
        that predicts them.
    warmpin : int or "auto", default 0
        Experts of each layer to pin after `warmpin_after` accesses; see `WarmPin`.
    warmpin_after : int, default 512
    disk : DiskSpeed, optional
        What is known about the disk, if reads go around the page cache.
    prefault : BackgroundSweep, optional
        What backs the slots and brings the file into the page cache; cancelled on
        `close`.
    share : Share, optional
        The experts that come from here; a step's other ids are dropped, as they are computed
        elsewhere. By default all do.

    Attributes
    ----------
    warm_start : WarmStart or None
        What fills free slots by a profile; cancelled on `close`.
    """

    def __init__(
        self,
        store: ExpertStore,
        pool: SlotPool,
        cache: ExpertCache,
        *,
        loader_threads: int = DEFAULT_LOADER_THREADS,
        expert_stats: str | os.PathLike[str] | None = None,
        reader: Reader | None = None,
        prefetch: str | Predictor = "off",
        warmpin: int | str = 0,
        warmpin_after: int = DEFAULT_WARMPIN_AFTER,
        disk: DiskSpeed | None = None,
        prefault: BackgroundSweep | None = None,
        share: Share | None = None,
    ) -> None:
        layout = store.layout
        if (cache.num_layers, cache.num_experts) != (layout.num_layers, layout.num_experts):
            raise ConfigError(
                f"the cache is for {cache.num_layers} x {cache.num_experts} experts, "
                f"the store has {layout.num_layers} x {layout.num_experts}"
            )
        if share is not None:
            share.check(layout)
        total = layout.total_experts if share is None else share.num_experts
        if pool.num_slots < cache.capacity:
            raise ConfigError(
                f"the pool has {pool.num_slots} slots, the cache needs {cache.capacity}"
            )
        if pool.num_slots == cache.capacity < total:
            raise ConfigError(
                f"the pool needs at least {cache.capacity + 1} slots: one for staging, "
                "as not all experts fit"
            )
        if loader_threads < 0:
            raise ConfigError(f"loader_threads must not be negative, got {loader_threads}")
        if loader_threads > MAX_LOADER_THREADS:
            raise ConfigError(
                f"loader_threads must be at most {MAX_LOADER_THREADS}, got {loader_threads}"
            )
        check_prefetch(prefetch)
        self._share = share
        self._num_experts = total
        self._store = store
        self._pool = pool
        self._cache = cache
        self._expert_stats = expert_stats
        self._process = os.getpid()
        self._closed = False
        self._pool_bytes = pool.nbytes
        self.prefault = prefault
        self.disk = disk
        self._recording: "Recording | None" = None
        # Reads so far were not for requests.
        self._reading_before = None if reader is None else ReadingStats.of(reader, None)
        self.warm_start: WarmStart | None = None
        held = None if share is None else share.held
        self._usage = KeptUsage(layout, cache, held)
        pin = WarmPin(cache, layout.top_k, warmpin, warmpin_after)
        self._warm_pin = pin if pin.n else None
        self._reader = reader
        self._num_sequences = 0
        self._batch = Batch()
        self._opened_ns = time.monotonic_ns()
        self._all_resident = False
        self._on_device: dict[tuple[Any, ...], CudaExperts] = {}
        self._freezing = threading.Lock()
        self._num_frozen = 0
        self._loader = SlotLoader(
            store,
            pool,
            cache,
            StoreEngine(store, loader_threads)
            if reader is None
            else ReaderEngine(reader, store, loader_threads),
        )
        if pool.converts and loader_threads and usable_cores() > 1:
            self._loader.start_filler()
        if prefault is not None:
            prefault.yield_to(reading(self._loader))
        # What is read around the page cache is not to be brought into it.
        cached = isinstance(store, FileStore) and (reader is None or not reader.direct)
        self._prefetcher = make_prefetcher(
            *(self._loader, store, cache, prefetch), reads_ahead=cached, held=held
        )
        self._observe = None if self._prefetcher is None else self._prefetcher.step
        logger.info(
            "runtime.opened experts=%d slots=%d slot_bytes=%d policy=%s scope=%s",
            layout.total_experts,
            cache.capacity,
            pool.nbytes // pool.num_slots,
            cache.policy,
            cache.scope,
        )

    @property
    def layout(self) -> ExpertLayout:
        """What the experts look like."""
        return self._store.layout

    @property
    def store(self) -> ExpertStore:
        """Where experts come from."""
        return self._store

    @property
    def cache(self) -> ExpertCache:
        """Which expert is in which slot."""
        return self._cache

    @property
    def pool(self) -> SlotPool:
        """Where the slots are."""
        return self._pool

    @property
    def share(self) -> Share | None:
        """The experts that come from here, if not all do."""
        return self._share

    @property
    def profiler(self) -> AccessProfiler:
        """Which expert is used how often."""
        return self._cache.profiler

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def waves(
        self,
        layer: int,
        ids: npt.ArrayLike,
        *,
        ignore_out_of_range: bool = False,
        sequences: npt.ArrayLike | None = None,
        elsewhere: npt.ArrayLike | None = None,
        take: steps.Take | None = None,
    ) -> Generator[Wave, None, None]:
        """Yield the experts of a step in parts, what is resident first.

        While the host computes a wave, misses are read; each later wave is what
        has arrived by then. A wave's slots are leased until the next one is
        asked for. Works for any number of experts, also more than there are
        slots. Close the iterator (or run it to its end) to end the leases.

        Parameters
        ----------
        layer : int
            Number of the MoE layer, from 0.
        ids : ndarray of int32 or int64, shape [..., top_k]
            What the router chose for each token. More than one token is a bulk
            step: it admits no more experts than the layer's fair share.
        ignore_out_of_range : bool, default False
            Drop ids outside [0, num_experts): pairs of experts elsewhere.
        sequences : array of int, shape [num_tokens], optional
            Which sequence each token is of, where they are of several: a number that it keeps
            as long as it goes on, from 0 to 2**31 - 1, at most 64 different ones in a step.
            By default as `begin_sequence` said.
        elsewhere : array of int, optional
            Experts that the caller computes itself if they are missing: they get no slot and are
            in no wave, but count as misses.
        take : callable (experts), optional
            Told which these are, before the first wave, unless there are none.

        Raises
        ------
        ValueError
            If the layer or an id is out of range, or `sequences` does not fit. Raised by the
            first `next`.
        StoreError
            If an expert cannot be read. All leases are ended; call again.
        """
        self._check_usable()
        chosen = self._chosen(layer, ids, ignore_out_of_range)
        # A share may have more experts of a layer than the fair part of a cache that holds all.
        is_whole = self._share is not None and self._cache.capacity >= self._num_experts
        try:
            yield from steps.waves(
                self._loader,
                self._cache,
                layer,
                chosen,
                observe=self._observe,
                bulk=False if is_whole and self._cache.scope == "global" else None,
                ignore_out_of_range=ignore_out_of_range or self._share is not None,
                sequences=self._batch.of(chosen) if sequences is None else sequences,
                elsewhere=elsewhere,
                take=take,
            )
        finally:
            # After a step that is closed at its last wave, too.
            if not self._closed:
                self._look_at_pins()

    def lease(
        self,
        layer: int,
        ids: npt.ArrayLike,
        *,
        ignore_out_of_range: bool = False,
        sequences: npt.ArrayLike | None = None,
    ) -> Lease:
        """Return all experts of a step at once, when the last one has arrived.

        Parameters
        ----------
        layer : int
        ids : ndarray of int32 or int64, any shape
        ignore_out_of_range : bool, default False
        sequences : array of int, shape [rows], optional
            As for `waves`.

        Returns
        -------
        Lease
            A context manager; `slots` has the shape of `ids`.

        Raises
        ------
        CapacityError
            If the cache has too few slots for them; use `waves`.
        ValueError
            If the layer or an id is out of range.
        StoreError
            If an expert cannot be read. Nothing stays leased; call again.
        """
        self._check_usable()
        self._look_at_pins()
        chosen = self._chosen(layer, ids, ignore_out_of_range)
        return steps.lease(
            self._loader,
            self._cache,
            layer,
            chosen,
            observe=self._observe,
            ignore_out_of_range=ignore_out_of_range or self._share is not None,
            sequences=self._batch.of(chosen) if sequences is None else sequences,
        )

    def slab(self, role: str) -> Any:
        """Return all slots of a role, an array [num_slots, *shape], indexed by slot."""
        return self._pool.slab(role)

    def expert(self, slot: int, layer: int) -> Any:
        """Return the weights in a leased slot, per role, in the shapes of `layer`."""
        return self._pool.expert(slot, layer)

    def on_device(
        self, activation: str = "silu", *, cpu_misses: bool = False, **options: Any
    ) -> CudaExperts:
        """Return what computes routed experts on the GPU that has the slots.

        Parameters
        ----------
        activation : str, default "silu"
        cpu_misses : bool, default False
            Have the CPU compute some missing experts of steps of up to 4 tokens, as many as it can
            while the others are copied, where that is found to be faster. Results are then not
            the same bits from run to run: the CPU adds up in another order than the GPU.
        **options
            Others of `CudaExperts`: is_interleaved, alpha, limit, dtype.

        Raises
        ------
        ConfigError
            If the slots are in RAM, or there are no kernels for these experts; with `cpu_misses`
            also if they are quantised or have biases, or are a rank's share.
        """
        self._check_usable()
        if not isinstance(activation, str):
            raise ConfigError(f"activation must be a name, got {activation!r}")
        known = (activation, bool(cpu_misses), *sorted(options.items()))
        made = self._on_device.get(known)
        if made is None:
            cpu = None
            if cpu_misses:
                if self._share is not None:
                    raise ConfigError("cpu_misses is for a whole model, not for a rank's share")
                split = make_split(self._loader, self._cache, self._prefetcher)
                cpu = CpuMisses(self._store, activation, split)
            made = self._on_device[known] = CudaExperts(self, activation, cpu=cpu, **options)
        return made

    def begin_resident_step(self, *, look: bool = True) -> bool:
        """Return whether every expert of the model is in its slot for good, and count a step.

        Then a step needs neither a lease nor the ids on the host: `cache.slot_table` says where
        each expert is. Never waits; once it is so, this is a test of one bit.

        Parameters
        ----------
        look : bool, default True
            Find out whether it is so, if it was not before. A device may not be asked while a
            graph is captured.
        """
        if not self._all_resident:
            self._check_usable()
            if not look:
                return False
            total = self._num_experts
            if self._cache.capacity < total or self._cache.num_resident < total:
                return False
            if self._pool.uploads.in_flight_bytes:
                return False
            self._all_resident = True
        self._loader.count_resident_steps()
        return True

    def freeze(self) -> None:
        """Evict nothing until `thaw`: what is in a slot stays there.

        Steps go on meanwhile. Their misses take free slots, and then those for staging; a lease
        that needs more is a `CapacityError`. Calls nest; each needs a `thaw`.
        """
        self._check_usable()
        with self._freezing:
            self._num_frozen += 1
            self._cache.evicts = False

    @property
    def is_frozen(self) -> bool:
        """Whether nothing is evicted now."""
        return self._num_frozen > 0

    def thaw(self) -> None:
        """Let experts be evicted again."""
        with self._freezing:
            if not self._num_frozen:
                raise MoeCacheError("the cache is not frozen; was it thawed twice?")
            self._num_frozen -= 1
            self._cache.evicts = not self._num_frozen

    def count_hits(self, first: int, ids: np.ndarray) -> None:
        """Count steps that a device took by itself, and tell the policy what was chosen.

        Parameters
        ----------
        first : int
            Layer of the first step.
        ids : ndarray of int32 or int64, shape [num_steps, num_tokens, top_k]
            Of steps of layer after layer, all of whose experts were in their slots.
        """
        self._loader.count_resident_steps(len(ids))
        sequences = self._batch.of(ids[0]) if len(ids) else None
        self._cache.count_hits(first, ids, sequences=sequences)
        self._look_at_pins()

    def fill_slots(self) -> WarmStart:
        """Begin to bring experts into slots that are free, from the first layer on.

        Runs in the background; `wait` for it before a CUDA graph of resident steps is captured.
        These experts do not count as accesses. A warm start that still goes on is cancelled.
        """
        self._check_usable()
        if self.warm_start is not None:
            self.warm_start.cancel()
        is_missing = self._cache.slot_table < 0
        if self._share is not None:
            is_missing &= self._share.held
        missing = np.flatnonzero(is_missing.reshape(-1))
        self.warm_start = WarmStart(self._loader, self._cache, missing.tolist())
        return self.warm_start

    def begin_sequence(self, batch: int = 1) -> None:
        """Say that the next tokens do not continue the last ones.

        Parameters
        ----------
        batch : int, default 1
            How many sequences begin side by side. Steps are then taken for a batch where they
            have as many rows, or that many times more: the rows of each sequence are next to
            each other, and a sequence keeps its place. Batches of more than 64 are not told
            apart.

        Raises
        ------
        ConfigError
            If `batch` is below 1.
        """
        self._batch = self._batch.following(batch)
        self._num_sequences += batch
        self._cache.begin_sequence()
        if self._prefetcher is not None:
            self._prefetcher.begin_sequence()

    def hint(self, layer: int, ids: npt.ArrayLike, scores: npt.ArrayLike | None = None) -> None:
        """Say which experts a layer will probably use at its next step.

        For host loops that know more than the past: one that applied the next layer's router
        to the hidden state already, say. Takes the place of the runtime's own prediction.
        Does nothing with prefetch="off". Never waits.

        Parameters
        ----------
        layer : int
        ids : array of int, any shape
            The likeliest first; more than 128 are not looked at.
        scores : array of float, as many, optional
            Probabilities of use, such as the router's. Without, places count.

        Raises
        ------
        ValueError
            If the layer or an id is out of range, ids are no whole numbers, or scores do not fit.
        """
        self._check_usable()
        if self._prefetcher is None:
            return
        self._prefetcher.hint(layer, np.asarray(ids), scores)

    @property
    def predictor(self) -> Predictor | None:
        """What names the experts to read ahead; `None` with prefetch="off" or "hints"."""
        return None if self._prefetcher is None else self._prefetcher.predictor

    def use_predictor(self, predictor: Predictor, mode: str | None = None) -> None:
        """Have another predictor name the experts to read ahead.

        "auto" goes on to measure whether that pays. Does nothing with prefetch="off".

        Parameters
        ----------
        predictor : Predictor
        mode : str, optional
            What `stats().prefetch.mode` is from now on; by default as it was.

        Raises
        ------
        ConfigError
            If it is no predictor.
        """
        self._check_usable()
        check_predictor(predictor)
        if self._prefetcher is not None:
            self._prefetcher.predictor = predictor
            self._prefetcher.mode = mode or self._prefetcher.mode

    def record_trace(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | str = "256MiB",
        force: bool = False,
    ) -> "Recording":
        """Note what the router chooses from now on, to be written to a file at the end.

        Costs some nanoseconds per id. The end is that of the recording, a context
        manager with `close`, or that of the runtime. See `moecache.study.Trace`.

        Parameters
        ----------
        path : str or Path
            An .npz file; a trace that is there is replaced when the recording ends.
        max_bytes : int or str, default "256MiB"
            Bytes of memory after which nothing more is noted: a step takes 12, and 2 per
            id.
        force : bool, default False
            Replace whatever is there.

        Returns
        -------
        Recording
            To be closed; has the `trace` then.

        Raises
        ------
        ConfigError
            If nothing can be written there, as far as that can be known now, if
            something else is there, or max_bytes is no size.
        MoeCacheError
            If a recording goes on already.
        """
        # Not with the package: a runtime that records nothing needs none of it.
        from moecache.traces.recording import record

        self._check_usable()
        model = getattr(self._store, "path", None)
        self._recording = record(
            self._cache,
            self.layout,
            path,
            model=model,
            max_bytes=parse_bytes(max_bytes),
            force=force,
        )
        return self._recording

    def use_profile(self, path: str | os.PathLike[str], profile: Profile | None = None) -> None:
        """Go on from what earlier runs kept in a profile, and keep this one there on `close`.

        ECHO's state is restored if it has seen nothing yet, and free slots are filled in
        the background: see `warm_start`. These experts do not count as accesses. A warm
        start that still goes on is cancelled.

        Parameters
        ----------
        path : str or Path
            A profile that cannot be used, or has other models only, is a warning.
        profile : Profile, optional
            What was read from there already.

        Raises
        ------
        ConfigError
            If this is not a path.
        """
        self._check_usable()
        self.warm_start = self._usage.use(path, profile, self._loader)

    @property
    def profile_path(self) -> str | os.PathLike[str] | None:
        """The profile that is written on `close`, if one is."""
        return self._usage.path

    def save_profile(self, path: str | os.PathLike[str]) -> None:
        """Note how experts were used, and what is known of the disk, for `open(profile=)`.

        Other models and disks that the file has are kept.

        Raises
        ------
        StoreError
            If it cannot be written, or is no profile. What was there before still is.
        """
        self._check_usable()
        self._usage.save(path, self._disks())

    def stats(self) -> RuntimeStats:
        """Return the counters as they are now; `later - earlier` is what happened between."""
        self._loader.look()
        device = getattr(self._pool, "device", None)
        return RuntimeStats.of(
            self._cache,
            self._loader,
            num_sequences=self._num_sequences,
            total_experts=self.layout.total_experts,
            pool_bytes=self._pool_bytes,
            opened_ns=self._opened_ns,
            reading=self._reading(),
            prefetch=None if self._prefetcher is None else PrefetchStats.of(self._prefetcher),
            uploads=None
            if device is None
            else UploadStats.of(device.description, self._pool.uploads),
        )

    def report(self) -> str:
        """Return the counters as text, with a line per layer."""
        return f"{self.stats().describe()}\n{self._cache.profiler.report()}"

    def _repr_html_(self) -> str:
        """Return the counters as a notebook shows them."""
        return self.stats()._repr_html_()

    def close(self) -> None:
        """Stop the threads, write the report if asked for, free slots and file.

        A second call does nothing. Never fails because of the report.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            # A forked child: the threads and the report are the parent's.
            return
        until = time.monotonic() + CLOSE_TIMEOUT_S
        with contextlib.ExitStack() as stack:
            # In reverse: an interrupt leaves none of it out.
            stack.callback(self._store.close)
            stack.callback(self._pool.close)
            for experts in self._on_device.values():
                stack.callback(experts.close)
            stack.callback(self._usage.keep, self._disks())
            stack.callback(self._write_report)
            if self._recording is not None:
                stack.callback(self._recording.close)
            if self._prefetcher is not None:
                prefetcher = self._prefetcher
                prefetcher.stop()
                stack.callback(lambda: prefetcher.close(max(0.0, until - time.monotonic())))
            stack.callback(self._loader.close)
            if self.warm_start is not None:
                stack.callback(self.warm_start.cancel, 0)
            if self.prefault is not None:
                stack.callback(self.prefault.cancel, 0)
        # The sweep holds what it reads, so a read that hangs need not be waited for.
        if self.prefault is not None and not self.prefault.cancel(CLOSE_TIMEOUT_S):
            logger.warning("runtime.prefault_hangs after=%d s", CLOSE_TIMEOUT_S)
        logger.info("runtime.closed hit_rate=%.3f", self._cache.profiler.hit_rate)

    def _reading(self) -> ReadingStats | None:
        if self._reader is None:
            return None
        now = ReadingStats.of(self._reader, None if self.disk is None else self.disk.bytes_per_s)
        return now if self._reading_before is None else now - self._reading_before

    def _disks(self) -> dict[str, Any]:
        if self.disk is None or not isinstance(self._store, FileStore):
            return {}
        return {disk_of(self._store): asdict(self.disk)}

    def _chosen(self, layer: int, ids: npt.ArrayLike, ignore_out_of_range: bool) -> np.ndarray:
        """Return ids on the host, -1 in the place of those that come from elsewhere."""
        chosen = self._pool.to_host(ids)
        if self._share is None:
            return chosen
        return self._share.of(layer, chosen, ignore_out_of_range=ignore_out_of_range)

    def _look_at_pins(self) -> None:
        pin = self._warm_pin  # another thread may be done with it
        if pin is not None and pin.look():
            self._warm_pin = None

    def _write_report(self) -> None:
        if self._expert_stats is not None:
            try:
                text = f"{self.report()}\n".encode(errors="backslashreplace")
                write_whole(self._expert_stats, text, _REPORT_FILE)
            except MoeCacheError as error:
                logger.warning("runtime.no_report %s", error)

    def __enter__(self) -> Self:
        """Return the runtime."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the runtime."""
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise MoeCacheError("the runtime is closed")
        if os.getpid() != self._process:
            raise MoeCacheError(
                "this runtime was opened by the parent process, and its threads did not survive "
                "the fork; open one in the child"
            )
