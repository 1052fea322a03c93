"""SimulatedHost: the live loader, driven by a trace under a virtual clock."""

from collections.abc import Generator
from itertools import pairwise

import numpy as np

from moecache.cache._cache import ExpertCache
from moecache.layout import ExpertLayout
from moecache.loading._loader import SlotLoader
from moecache.prefetch.modes import make_prefetcher
from moecache.runtime.steps import Wave, waves
from moecache.study._byteless import BytelessSlots, BytelessStore
from moecache.study.clock import VirtualClock
from moecache.study.device import SimulatedDevice, TakingIn
from moecache.study.replay import row_sequences, sequence_begins, step_bounds
from moecache.traces.trace import Trace


class SimulatedHost:
    """A host loop that computes nothing but lets the time pass that it would take.

    Attributes
    ----------
    clock : VirtualClock
    device : SimulatedDevice
    cache : ExpertCache
    loader : SlotLoader
        Fills that cache with experts without bytes.
    prefetcher : Prefetcher or None
        Works whenever the device has nothing to do.
    stalls_ns : list of int
        Each wait for a wave.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        slots: int,
        staging_slots: int,
        policy: str,
        scope: str,
        bandwidth: float,
        latency_ns: int,
        prefetch: str = "off",
    ) -> None:
        self.clock = VirtualClock()
        taking_in = TakingIn(self.clock)
        self.device = SimulatedDevice(
            self.clock, layout.expert_bytes, bandwidth=bandwidth, latency_ns=latency_ns
        )
        self.cache = ExpertCache(
            layout.num_layers, layout.num_experts, slots, policy=policy, scope=scope
        )
        store = BytelessStore(layout)
        pool = BytelessSlots(layout, slots + staging_slots)
        self.loader = SlotLoader(store, pool, self.cache, self.device, clock=self.clock)
        taking_in.loader = self.loader
        self.prefetcher = make_prefetcher(self.loader, store, self.cache, prefetch, threaded=False)
        if self.prefetcher is not None:
            self.device.idle = self.prefetcher.run_one
        self.stalls_ns: list[int] = []

    def run(self, trace: Trace, compute_ns: int, expert_share: float) -> Generator[int, None, None]:
        """Compute a trace's steps one after the other; yield how many are done."""
        for step, layer in self.layers(trace, compute_ns, expert_share):
            if layer == trace.num_layers - 1:
                yield step + 1

    def layers(
        self,
        trace: Trace,
        compute_ns: int,
        expert_share: float,
        mine: np.ndarray | None = None,
    ) -> Generator[tuple[int, int], None, None]:
        """Compute a trace layer by layer; yield the step and the layer that are done.

        Parameters
        ----------
        trace : Trace
        compute_ns : int
            Time of one row's computation in one layer.
        expert_share : float
            How much of that is the routed experts' work.
        mine : array of bool, shape [num_tokens, num_layers, top_k], optional
            The pairs that this host computes; the others take it no time. By default all.
        """
        expert_ns = round(compute_ns * expert_share)
        bounds = step_bounds(trace)
        begins = sequence_begins(trace, bounds).tolist()
        bulk = trace.bulk[bounds[:-1]].tolist()
        experts = np.ascontiguousarray(trace.experts, np.int32)
        told_apart = (trace.sequence != trace.sequence[:1]).any()
        num_chosen = np.count_nonzero(experts >= 0, axis=2)
        num_mine = num_chosen
        if mine is not None:
            experts = np.where(mine, experts, -1)
            num_mine = np.count_nonzero(experts >= 0, axis=2)
        for step, (start, stop) in enumerate(pairwise(bounds.tolist())):
            if begins[step]:
                self.cache.begin_sequence()
                if self.prefetcher is not None:
                    self.prefetcher.begin_sequence()
            rows = stop - start
            rest_ns = rows * (compute_ns - expert_ns)
            of_all = num_chosen[start:stop].sum(0).tolist()
            for layer, num_pairs in enumerate(num_mine[start:stop].sum(0).tolist()):
                self.clock.advance(rest_ns)
                if num_pairs:
                    # A row of one token, as a host that decodes has it.
                    ids = experts[start, layer] if rows == 1 else experts[start:stop, layer]
                    time_ns = rows * expert_ns * num_pairs // of_all[layer]
                    sequences = row_sequences(trace, start, stop) if told_apart else None
                    self._compute_experts(
                        layer, ids, num_pairs, time_ns, bulk=bool(bulk[step]), sequences=sequences
                    )
                yield step, layer

    def _compute_experts(
        self,
        layer: int,
        ids: np.ndarray,
        num_pairs: int,
        time_ns: int,
        *,
        bulk: bool,
        sequences: np.ndarray | None,
    ) -> None:
        clock = self.clock
        done = spent_ns = 0
        asked_ns = clock.now_ns
        parts: Generator[Wave, None, None] = waves(
            self.loader,
            self.cache,
            layer,
            ids,
            observe=None if self.prefetcher is None else self.prefetcher.step,
            # The trace says what it admitted, which need not go by the number of rows.
            bulk=bulk,
            ignore_out_of_range=True,
            sequences=sequences,
        )
        for wave in parts:
            if clock.now_ns > asked_ns:
                self.stalls_ns.append(clock.now_ns - asked_ns)
            done += len(wave.pairs)
            # Each time from the whole, so that nothing is lost by rounding.
            until_ns = time_ns * done // num_pairs
            clock.advance(until_ns - spent_ns)
            spent_ns = until_ns
            asked_ns = clock.now_ns
