"""Prefetcher: reads the experts that the next layer will use, if that pays."""

import contextlib
import logging
import threading
import weakref
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt

from moecache.cache._cache import ExpertCache
from moecache.interrupts import uninterrupted
from moecache.loading._load import Load
from moecache.loading._loader import CLOSE_TIMEOUT_S, SlotLoader
from moecache.loading.load import Cause
from moecache.policies._echo import Echo
from moecache.prefetch._foresight import Foresight
from moecache.prefetch.break_even import BreakEven
from moecache.prefetch.predict import Predictor
from moecache.prefetch.queue import PrefetchQueue
from moecache.prefetch.switch import Switch
from moecache.stores.base import ExpertStore

logger = logging.getLogger(__name__)

# More would only queue behind each other, and before a demand.
MAX_BYTES_IN_FLIGHT = 16 * 2**20
# How long nothing is tried after a failure.
_FAILED_S = 0.1
# How often what has arrived is taken in, while the host computes.
_LOOK_S = 0.0005
# A step of this many rows uses most experts: nothing is left to foresee.
MAX_ROWS = 16


class Prefetcher:
    """Predicts the next layer's experts after every step, and reads those that are missing.

    Requests wait in a `PrefetchQueue`. Slots are claimed when a read begins, never before,
    and only free ones or those of experts that the policy values less, or, for a guess that is
    more likely than not, would evict; no more than 16 MiB, or an expert, are on their way at once.
    A read ahead is right with some likelihood, which is
    measured (`Foresight`), and it is begun if that is enough to pay (`BreakEven`). The loader
    takes back a read that still goes on when its layer has come without it.

    Parameters
    ----------
    loader : SlotLoader
    store : ExpertStore
    cache : ExpertCache
    predictor : Predictor or None
        `None`: only `hint` names experts.
    mode : str
        The mode that was asked for, for the report.
    switch : Switch, optional
        Says when to fetch. By default always.
    threaded : bool, default True
        Work in a thread of its own. Otherwise the caller calls `run_one`.
    reads_ahead : bool, default False
        Advise the system to read experts that get no slot into the page cache.
    held : ndarray of bool, shape [num_layers, num_experts], optional
        Experts that may be read; by default all.
    """

    def __init__(
        self,
        loader: SlotLoader,
        store: ExpertStore,
        cache: ExpertCache,
        predictor: Predictor | None,
        *,
        mode: str,
        switch: Switch | None = None,
        threaded: bool = True,
        reads_ahead: bool = False,
        held: np.ndarray | None = None,
    ) -> None:
        self._wake: SimpleQueue[None] = SimpleQueue()
        layout = store.layout
        self.mode = mode
        self.foresight = Foresight(cache)
        self.switch = switch
        self.queue = PrefetchQueue(layout.num_layers)
        self.num_advised = 0
        self.num_predictor_errors = 0
        self._loader = loader
        self._store = store
        self.cache = cache
        self.counts = loader.counts
        self.predictor = predictor
        self._num_layers = layout.num_layers
        self._held = held
        self._total = layout.total_experts if held is None else int(held.sum())
        widths = [layout.expert_bytes(layer) for layer in range(layout.num_layers)]
        # An expert that is converted, or copied to a GPU, takes memory beside its slot.
        widest, most = max(widths), loader.pool.max_buffers_ahead
        limit = MAX_BYTES_IN_FLIGHT if most is None else most * widest
        self._max_bytes = max(widest, min(MAX_BYTES_IN_FLIGHT, limit))
        self._hinted: set[int] = set()  # layers whose prediction came from outside
        self._advised = np.zeros(layout.total_experts if reads_ahead else 0, bool)
        self._failed: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._last_layer = layout.num_layers
        self._counting = threading.Lock()
        self._break_even = BreakEven(loader, widest)
        self.closed = False
        self._threaded = threaded
        self._idle = False  # the thread waits for requests
        self._thread: threading.Thread | None = None
        on_done = weakref.WeakMethod(self._on_done)

        def tell(load: Load) -> None:
            # No cycle: a runtime that is dropped goes at once, and its thread with it.
            method = on_done()
            if method is not None:
                method(load)

        loader.prefetch_done = tell

    @property
    def active(self) -> bool:
        """Whether predictions are fetched now."""
        return self.switch is None or self.switch.on

    @property
    def num_issued(self) -> int:
        """Experts whose read ahead was begun."""
        return self.counts.num_prefetches

    def use(self, predictor: Predictor, mode: str | None) -> None:
        """Take another predictor, and mode; one that `is_likely` is used before it is tried."""
        self.predictor = predictor
        self.mode = mode or self.mode
        if self.switch is not None and getattr(predictor, "is_likely", False):
            self.switch.presume()

    def step(self, layer: int, ids: np.ndarray, sequences: npt.ArrayLike | None = None) -> None:
        """Learn from a step, and ask for what the next layer will use; never waits.

        Parameters
        ----------
        layer : int
        ids : ndarray of int32 or int64, shape [..., top_k]
            The experts that were just looked up.
        sequences : array of int, shape [rows], optional
            Which sequence each row is of. A token of each of up to 16 is foreseen as one token is.
        """
        if self.cache.num_resident == self._total:
            # All experts are resident, and none leaves any more.
            return
        top_k = ids.shape[-1] if ids.ndim else 1
        rows = ids.size // max(1, top_k)
        one_each = rows == 1 or (rows <= MAX_ROWS and _differ(sequences))
        self.queue.visit(layer)
        if layer <= self._last_layer and self._counting.acquire(blocking=False):
            # One of several threads is enough: their tokens are mixed all the same.
            try:
                self._begin_token()
            finally:
                self._counting.release()
        self._last_layer = layer
        self._hinted.discard(layer)
        if one_each:
            self.foresight.score(layer, ids)
        else:
            self.foresight.drop(layer)
            if self.switch is not None:
                self.switch.skip()
        predictor = self.predictor
        if predictor is None:
            return
        # A predictor may not change the ids that the step goes on with.
        seen = ids.view()
        seen.flags.writeable = False
        guesses = 2 * top_k * (rows if one_each else 1) if rows <= MAX_ROWS and ids.size else 0
        if isinstance(predictor, Echo):
            self._follow(predictor, layer, seen, guesses, sequences)
            return
        # What a signal's handler raises in a predictor of Python is none of its failures.
        with uninterrupted():
            self._follow(predictor, layer, seen, guesses, sequences)

    def _follow(
        self,
        predictor: Predictor,
        layer: int,
        seen: np.ndarray,
        num_guesses: int,
        sequences: npt.ArrayLike | None,
    ) -> None:
        """Have a predictor learn from a step, and foresee so many of the next layer's experts."""
        following = layer + 1 if layer + 1 < self._num_layers else 0
        try:
            if sequences is not None and isinstance(predictor, Echo):
                predictor.observe(layer, seen, sequences=sequences)
            else:
                predictor.observe(layer, seen)
            if following in self._hinted or not num_guesses:
                return
            if self.switch is not None and self.switch.settled_off:
                return
            guess, scores = predictor.predict(following, num_guesses)
            self._expect(following, guess, scores)
        except Exception as error:  # noqa: BLE001 - a user's own predictor may fail
            self._note_failure(error)

    def hint(self, layer: int, ids: npt.ArrayLike, scores: npt.ArrayLike | None = None) -> None:
        """Take a prediction from outside, for the layer's next step; never waits.

        Raises
        ------
        ValueError
            If the layer or an id is out of range, or scores do not fit.
        TypeError
            If ids are no integers.
        """
        chosen = np.asarray(ids)
        if chosen.size and chosen.dtype.kind not in "iu":
            raise TypeError(
                f"ids must be whole numbers, got an array of {chosen.dtype}; "
                "convert them with astype(numpy.int64)"
            )
        if scores is not None:
            scores = _as_scores(scores)
        self._store.layout.check(layer)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.cache.num_experts:
            wrong = chosen.min() if chosen.min() < 0 else chosen.max()
            raise ValueError(f"expert {wrong} is not in [0, {self.cache.num_experts})")
        self._expect(layer, chosen, scores)
        self._hinted.add(layer)

    def begin_sequence(self) -> None:
        """Say that the next tokens do not continue the last ones."""
        if self.predictor is not None:
            try:
                self.predictor.begin_sequence()
            except Exception as error:  # noqa: BLE001 - as in a step
                self._note_failure(error)
        if self.switch is not None:
            self.switch.skip()
        for layer in range(self._num_layers):
            self.foresight.drop(layer)
        self.queue.clear()

    def run_one(self) -> bool:
        """Begin to read one expert, the newest request's likeliest; False if there is none now."""
        while True:
            if self.closed or self._bytes_in_flight() >= self._max_bytes:
                return False
            taken = self.queue.take()
            if taken is None:
                return False
            layer, expert, is_likely = taken
            if (layer, expert) in self._failed:
                continue
            if self._loader.prefetch(layer, expert, likely=is_likely):
                return True
            if len(self._advised) and self._advise(layer, expert):
                return True

    def turn(self) -> float | None:
        """Do what there is to do; return the seconds to the next look; `None`: when woken."""
        while self.run_one():
            pass
        if self._bytes_in_flight():
            self._loader.look()
            return _LOOK_S
        self._idle = True
        # A request that came before `_idle` was set did not wake this thread.
        return 0.0 if len(self.queue) else None

    def stop(self) -> None:
        """Begin no more reads; waits for nothing."""
        with self._lock:
            self.closed = True
        self.queue.clear()
        self._wake.put(None)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop, and wait for the thread: so long at most, if a read hangs."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("prefetch.stuck a read does not return")

    def _bytes_in_flight(self) -> int:
        # Copies to a GPU as well, of demands too: those go first.
        reading = self.counts.prefetch_bytes_in_flight
        return reading + self._loader.pool.uploads.in_flight_bytes

    def _expect(self, layer: int, ids: np.ndarray, scores: npt.ArrayLike | None) -> None:
        if self._held is not None and len(ids):
            mine = self._held[layer][ids]
            ids, scores = ids[mine], None if scores is None else np.asarray(scores)[mine]
        wanted = self.foresight.expect(
            layer, ids, scores, min_likelihood=self._break_even.likelihood
        )
        if wanted is None or not self.active or self.closed:
            return
        experts, num_likely = wanted
        self.queue.put(layer, experts.tolist(), num_likely)
        if self._idle:
            self._idle = False
            self._wake.put(None)
        elif self._threaded and self._thread is None:
            self._start()

    def _start(self) -> None:
        # With the first request: where all is resident there is none.
        with self._lock:
            if self._thread is not None or self.closed:
                return
            thread = threading.Thread(
                target=_work,
                args=(weakref.ref(self), self._wake),
                name="moecache-prefetch",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:
                # The system has no more threads. What is demanded is read all the same.
                self.closed = True
                logger.warning("prefetch.no_thread error=%s", error)
                return
            self._thread = thread

    def _note_failure(self, error: Exception) -> None:
        self.num_predictor_errors += 1
        if self.num_predictor_errors == 1:
            logger.warning("prefetch.predictor_failed error=%r", error)

    def _begin_token(self) -> None:
        if self.switch is not None:
            # Free slots are filled first: times measured meanwhile say little about later ones.
            if self.cache.num_evictions:
                self.switch.begin_token()
            else:
                self.switch.skip()
        self._break_even.begin_token()

    def _advise(self, layer: int, expert: int) -> bool:
        """Have the system read an expert into the page cache, once; return whether it was."""
        number = layer * self.cache.num_experts + expert
        if (
            self._advised[number]
            or self.cache.slot_table[layer, expert] >= 0
            or self._loader.num_in_flight
        ):
            return False
        self._advised[number] = True
        self._store.prefetch(layer, [expert])
        self.num_advised += 1
        return True

    def _on_done(self, load: Load) -> None:
        if load.error is not None and not load.is_cancelled and load.cause is Cause.PREFETCH:
            # A demand may read it all the same; a guess is not worth a second try.
            self._failed.add((load.layer, load.expert))
        if self._thread is not None and not self._idle:
            self._wake.put(None)

    def __del__(self) -> None:
        """End the thread of a runtime that was dropped without `close`."""
        # Weak references still give this object while this runs, and the thread may take one: it
        # must find the end then, as nothing wakes it a second time.
        self.closed = True
        self._wake.put(None)


def _differ(sequences: npt.ArrayLike | None) -> bool:
    numbers = [] if sequences is None else np.asarray(sequences).tolist()
    return len(set(numbers)) == len(numbers) > 0


def _as_scores(scores: npt.ArrayLike) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):  # infinity is refused later, with its value
            return np.asarray(scores, np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"scores must be numbers: {error}") from error


def _work(reference: "weakref.ref[Prefetcher]", wake: "SimpleQueue[None]") -> None:
    # Holds the prefetcher only while it works, so that a dropped runtime can go.
    told: set[str] = set()
    while (prefetcher := reference()) is not None and not prefetcher.closed:
        try:
            timeout = prefetcher.turn()
        except Exception as error:  # noqa: BLE001 - a guess that fails is no harm
            # Once per cause: a store that is broken for good fails every time.
            if repr(error) not in told:
                told.add(repr(error))
                logger.warning("prefetch.failed error=%r", error)
            timeout = _FAILED_S
        del prefetcher
        with contextlib.suppress(Empty):
            wake.get(timeout=timeout)
