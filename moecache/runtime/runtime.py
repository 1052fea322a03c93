"""ExpertRuntime: store, slots and cache behind one object."""

import contextlib
import logging
import os
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from moecache.cache._cache import ExpertCache
from moecache.cache.warmpin import WarmPin
from moecache.interrupts import uninterrupted
from moecache.layout import ExpertLayout
from moecache.prefault.background import BackgroundSweep
from moecache.prefetch.modes import check_predictor, check_prefetch, make_prefetcher
from moecache.prefetch.predict import Predictor
from moecache.profiles.usage import KeptUsage
from moecache.profiles.warm_start import WarmStart
from moecache.ranks import Share
from moecache.reader._reader import Reader
from moecache.reader.disk import DiskSpeed
from moecache.runtime._closing import close_parts, wait_for_sweep
from moecache.runtime._parts import check_parts, make_loader
from moecache.runtime.borrowed import Borrowed
from moecache.runtime.figures import Figures
from moecache.runtime.source import StepSource
from moecache.runtime.steps import Lease, Wave, reading
from moecache.settings import DEFAULT_LOADER_THREADS, DEFAULT_WARMPIN_AFTER
from moecache.slots import SlotPool
from moecache.stores import ExpertStore, FileStore
from moecache.telemetry import RuntimeStats
from moecache.units import parse_bytes

if TYPE_CHECKING:
    from moecache.traces.recording import Recording

logger = logging.getLogger(__name__)


class ExpertRuntime:
    """Hands a host loop the experts of each layer, resident or read on demand.

    Made by `moecache.open`, or from parts: any store and a pool with at least
    `cache.capacity` slots; any more are staging slots, of which there is one at least unless
    all experts fit. Methods may be called from several threads, but not in a forked child.

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
        The speed of the disk, if reads go around the page cache.
    prefault : BackgroundSweep, optional
        The sweep that backs the slots and brings the file into the page cache; cancelled on
        `close`.
    share : Share, optional
        The experts that come from here; a step's other ids are dropped, as they are computed
        elsewhere. By default all do.

    Attributes
    ----------
    borrowed : Borrowed
        Memory that slots have until the host needs it.
    usage : KeptUsage
        How experts are used from one run to the next: profiles, and slots filled with them.
    steps : StepSource
        The steps' source, for code that computes in the slots by itself and counts its steps.
    profiler : AccessProfiler
        That of the cache, which says how often each expert is used.
    store, pool, cache, prefault, disk, share
        As given.
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
        check_parts(layout, pool, cache, share, loader_threads)
        check_prefetch(prefetch)
        pin = WarmPin(cache, layout.top_k, warmpin, warmpin_after)
        held = None if share is None else share.held
        self.share = share
        self.store = store
        self.pool = pool
        self.cache = cache
        self.profiler = cache.profiler
        self.borrowed = Borrowed(cache, pool)
        self._expert_stats = expert_stats
        self.prefault = prefault
        self.disk = disk
        self._recording: "Recording | None" = None
        self._closing: list[Callable[[], object]] = []
        self._loader = make_loader(store, pool, cache, reader, loader_threads)
        if prefault is not None:
            prefault.yield_to(reading(self._loader))
        # Direct reads go around the page cache, which a read-ahead would fill.
        cached = isinstance(store, FileStore) and (reader is None or not reader.direct)
        self._prefetcher = make_prefetcher(
            self._loader, store, cache, prefetch, reads_ahead=cached, held=held
        )
        observe = None if self._prefetcher is None else self._prefetcher.step
        self.steps = StepSource(self._loader, cache, share, observe, pin)
        self.usage = KeptUsage(store, cache, self._loader, self.steps.check_usable, disk, held)
        self._figures = Figures(layout, cache, self._loader, self._prefetcher, reader, disk)
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
        """The layout of the experts."""
        return self.store.layout

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.steps.closed

    def waves(
        self,
        layer: int,
        ids: npt.ArrayLike,
        *,
        ignore_out_of_range: bool = False,
        sequences: npt.ArrayLike | None = None,
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
            The router's choice for each token. More than one token is a bulk
            step: it admits no more experts than the layer's fair share.
        ignore_out_of_range : bool, default False
            Drop ids outside [0, num_experts): pairs of experts elsewhere.
        sequences : array of int, shape [num_tokens], optional
            Which sequence each token is of, where they are of several: a number that it keeps
            as long as it goes on, from 0 to 2**31 - 1, at most 64 different ones in a step.
            By default as `begin_sequence` said.

        Raises
        ------
        ValueError
            If the layer or an id is out of range, or `sequences` does not fit. Raised by the
            first `next`.
        StoreError
            If an expert cannot be read. All leases are ended; call again.
        """
        return self.steps.waves(
            layer, ids, ignore_out_of_range=ignore_out_of_range, sequences=sequences
        )

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
        layer, ids, ignore_out_of_range, sequences
            As for `waves`; the ids may have any shape.

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
        return self.steps.lease(
            layer, ids, ignore_out_of_range=ignore_out_of_range, sequences=sequences
        )

    def slab(self, role: str) -> Any:
        """Return all slots of a role, an array [num_slots, *shape], indexed by slot."""
        return self.pool.slab(role)

    def expert(self, slot: int, layer: int) -> Any:
        """Return the weights in a leased slot, per role, in the shapes of `layer`."""
        return self.pool.expert(slot, layer)

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
        self.steps.begin_batch(batch)
        self._figures.num_sequences += batch
        self.cache.begin_sequence()
        if self._prefetcher is not None:
            self._prefetcher.begin_sequence()

    def hint(self, layer: int, ids: npt.ArrayLike, scores: npt.ArrayLike | None = None) -> None:
        """Say which experts a layer will probably use at its next step.

        For host loops that know more than the past, as of the next layer's router. Takes the place
        of the runtime's own prediction. Does nothing with prefetch="off". Never waits.

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
            If the layer or an id is out of range, or scores do not fit.
        TypeError
            If ids are no integers.
        """
        self.steps.check_usable()
        if self._prefetcher is not None:
            self._prefetcher.hint(layer, np.asarray(ids), scores)

    @property
    def predictor(self) -> Predictor | None:
        """The predictor of experts to read ahead; `None` with prefetch="off" or "hints"."""
        return None if self._prefetcher is None else self._prefetcher.predictor

    def use_predictor(self, predictor: Predictor, mode: str | None = None) -> None:
        """Have another predictor name the experts to read ahead.

        "auto" goes on to measure whether that pays. Does nothing with prefetch="off".

        Parameters
        ----------
        predictor : Predictor
        mode : str, optional
            The new `stats().prefetch.mode`; by default it stays.

        Raises
        ------
        ConfigError
            If it is no predictor.
        """
        self.steps.check_usable()
        check_predictor(predictor)
        if self._prefetcher is not None:
            self._prefetcher.use(predictor, mode)

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
            Replace a file of any kind.

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

        self.steps.check_usable()
        model, most = getattr(self.store, "path", None), parse_bytes(max_bytes)
        self._recording = record(
            self.cache, self.layout, path, model=model, max_bytes=most, force=force
        )
        return self._recording

    @property
    def warm_start(self) -> WarmStart | None:
        """The thread that fills free slots, by a profile or `usage.fill`; cancelled on `close`."""
        return self.usage.warm_start

    def stats(self) -> RuntimeStats:
        """Return the counters as they are now; `later - earlier` is what happened between."""
        return self._figures.stats()

    def report(self) -> str:
        """Return the counters as text, with a line per layer."""
        return self._figures.report()

    def _repr_html_(self) -> str:
        """Return the counters as a notebook shows them."""
        return self.stats()._repr_html_()

    def closing(self, callback: Callable[[], object]) -> None:
        """Call `callback` on `close`, before the slots are freed, the latest one first.

        For code that works in the slots. It is called once the threads that fill them have ended.
        """
        self.steps.check_usable()
        self._closing.append(callback)

    def close(self) -> None:
        """Stop the threads, write a report if asked for, free slots and file; once."""
        with contextlib.ExitStack() as stack, uninterrupted():
            if self.closed:
                return
            self.steps.closed = True
            if self.steps.is_forked:
                return
            callbacks = [self.store.close, self.pool.close, *self._closing, self.usage.keep]
            if self._expert_stats is not None:
                callbacks.append(partial(self._figures.write_report, self._expert_stats))
            if self._recording is not None:
                callbacks.append(self._recording.close)
            parts = (self._loader, self._prefetcher, self.warm_start, self.prefault)
            close_parts(stack, *parts, callbacks)
        wait_for_sweep(self.prefault)
        logger.info("runtime.closed hit_rate=%.3f", self.profiler.hit_rate)

    def __enter__(self) -> Self:
        """Return the runtime."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the runtime."""
        self.close()
