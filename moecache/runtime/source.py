"""StepSource: steps of a runtime, from the router's ids on."""

import os
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from moecache.cache._cache import ExpertCache
from moecache.cache.warmpin import WarmPin
from moecache.errors import CapacityError, MoeCacheError
from moecache.loading._loader import SlotLoader
from moecache.ranks import Share
from moecache.runtime import steps
from moecache.runtime.batch import Batch
from moecache.runtime.steps import Lease, Observe, Wave


class StepSource:
    """Hands out steps, and counts those that a device takes by itself.

    Knows which ids come from here and which sequence a row is of, and looks between steps whether
    experts are to be pinned. Not to be used in a forked child.

    Parameters
    ----------
    loader : SlotLoader
    cache : ExpertCache
    share : Share, optional
        The experts that come from here; by default all.
    observe : callable, optional
        Told of each step; see `steps.Observe`.
    warm_pin : WarmPin

    Attributes
    ----------
    closed : bool
        Set by the runtime that ends.
    count_resident : callable (num=1)
        Count steps that found everything there, and leased nothing.
    reclaim : callable () -> bool, optional
        Called where a lease finds too few slots; returns whether there may be more now.
    """

    def __init__(
        self,
        loader: SlotLoader,
        cache: ExpertCache,
        share: Share | None,
        observe: Observe | None,
        warm_pin: WarmPin,
    ) -> None:
        self.closed = False
        self.reclaim: Callable[[], bool] | None = None
        self.count_resident = loader.count_resident_steps
        self._loader = loader
        self._cache = cache
        self._share = share
        self._observe = observe
        self._warm_pin = warm_pin if warm_pin.n else None
        self._batch = Batch()
        self._process = os.getpid()
        # A share may have more experts of a layer than the fair part of a cache that holds all.
        is_whole = share is not None and cache.capacity >= share.num_experts
        self._bulk = False if is_whole and cache.scope == "global" else None

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child, where threads, files and report are the parent's."""
        return os.getpid() != self._process

    def check_usable(self) -> None:
        """Raise `MoeCacheError` if the runtime is closed, or this is a forked child."""
        if self.closed:
            raise MoeCacheError("the runtime is closed")
        if self.is_forked:
            raise MoeCacheError(
                "this runtime was opened by the parent process, and its threads did not survive "
                "the fork; open one in the child"
            )

    def waves(
        self,
        layer: int,
        ids: npt.ArrayLike,
        *,
        ignore_out_of_range: bool = False,
        sequences: npt.ArrayLike | None = None,
    ) -> Generator[Wave, None, None]:
        """Yield the experts of a step in parts; see `ExpertRuntime.waves`."""
        self.check_usable()
        chosen = self._chosen(layer, ids, ignore_out_of_range)
        try:
            yield from steps.waves(
                self._loader,
                self._cache,
                layer,
                chosen,
                observe=self._observe,
                bulk=self._bulk,
                ignore_out_of_range=ignore_out_of_range or self._share is not None,
                sequences=self._batch.of(chosen) if sequences is None else sequences,
            )
        finally:
            # After a step that is closed at its last wave, too.
            if not self.closed:
                self._look_at_pins()

    def compute_token(
        self,
        layer: int,
        ids: np.ndarray,
        compute: Callable[[np.ndarray, list[int]], object],
        sequences: npt.ArrayLike | None = None,
    ) -> None:
        """Have a token's experts computed as they arrive; see `steps.compute_token`.

        For slots in RAM, and where all experts come from here.
        """
        self.check_usable()
        try:
            steps.compute_token(
                self._loader,
                self._cache,
                layer,
                ids,
                compute,
                observe=self._observe,
                sequences=sequences,
            )
        finally:
            if not self.closed:
                self._look_at_pins()

    def lease(
        self,
        layer: int,
        ids: npt.ArrayLike,
        *,
        ignore_out_of_range: bool = False,
        sequences: npt.ArrayLike | None = None,
    ) -> Lease:
        """Return all experts of a step at once; see `ExpertRuntime.lease`."""
        self.check_usable()
        self._look_at_pins()
        chosen = self._chosen(layer, ids, ignore_out_of_range)

        def take() -> Lease:
            return steps.lease(
                self._loader,
                self._cache,
                layer,
                chosen,
                observe=self._observe,
                ignore_out_of_range=ignore_out_of_range or self._share is not None,
                sequences=self._batch.of(chosen) if sequences is None else sequences,
            )

        try:
            return take()
        except CapacityError:
            if self.reclaim is None or not self.reclaim():
                raise
            return take()

    def count_hits(self, first: int, ids: np.ndarray) -> None:
        """Count steps that a device took by itself, and tell the policy what was chosen.

        Parameters
        ----------
        first : int
            Layer of the first step.
        ids : ndarray of int32 or int64, shape [num_steps, num_tokens, top_k]
            Ids of consecutive layers' steps, whose experts were all in their slots.
        """
        self.count_resident(len(ids))
        sequences = self._batch.of(ids[0]) if len(ids) else None
        self._cache.count_hits(first, ids, sequences=sequences)
        self._look_at_pins()

    def observer(self) -> Observe | None:
        """Return what is told of each step; `None` if it would not look, as nothing is read."""
        cache = self._cache
        if cache.num_resident == cache.num_layers * cache.num_experts:
            return None
        return self._observe

    def count_leased(self, num: int) -> None:
        """Count steps whose experts were all there, and were leased by compiled code."""
        self.count_resident(num)
        self._look_at_pins()

    def names_of(self, num_rows: int) -> np.ndarray | None:
        """Return each row's sequence, int32 [num_rows], by `begin_batch`; `None`: all are one."""
        return self._batch.names_of(num_rows)

    def begin_batch(self, size: int) -> None:
        """Say that `size` sequences begin side by side; see `ExpertRuntime.begin_sequence`."""
        self._batch = self._batch.following(size)

    def _chosen(self, layer: int, ids: Any, ignore_out_of_range: bool) -> np.ndarray:
        """Return ids on the host, -1 in the place of those that come from elsewhere."""
        chosen = self._loader.pool.to_host(ids)
        if self._share is None:
            return chosen
        return self._share.of(layer, chosen, ignore_out_of_range=ignore_out_of_range)

    def _look_at_pins(self) -> None:
        pin = self._warm_pin  # another thread may be done with it
        if pin is not None and pin.look():
            self._warm_pin = None
