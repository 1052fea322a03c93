"""MissSplit: which misses of a step are computed by the CPU, and which come over the link."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from moecache.cache._cache import ExpertCache
from moecache.loading.loader import SlotLoader

# Experts over which the times are averaged.
_AVERAGED = 16
# From this value of ECHO's on an expert takes the link, whatever is faster now: it will be used
# again, and soon. Lower ones cost up to a third of the tokens per second where caches are small.
_LIKELY = 0.5
# Misses in a row that none of the CPU's is among, after which one is: what it takes may have
# been measured while something else was going on.
_RETRY_AFTER = 512


class Trial(Protocol):
    """What decides whether the CPU takes part; see `prefetch.switch.Switch`."""

    on: bool

    def begin_token(self) -> None:
        """Say that a token begins."""

    def skip(self) -> None:
        """Do not count the current token."""


class MissSplit:
    """Divides the misses of a step between the link and the CPU, so that both end together.

    Of m misses the CPU computes round(m t_link / (t_cpu + t_link)), where t_link is what the link
    needs to bring an expert into its slot, and t_cpu what the CPU needs to compute one: averages
    over the last experts of each kind, about 16. Experts that are more likely to be used again
    take the link, since that fills the cache: by ECHO's values, and always where that is above a
    half; by counts of use with a policy that has none. The CPU tries one expert once it is known
    what the link takes, and one after each 512 misses that it had no part of.

    For one thread at a time; with several, one of them is enough to measure.

    Parameters
    ----------
    loader : SlotLoader
    cache : ExpertCache
    trial : Trial, optional
        Whether the CPU takes part at all; by default always.
    is_busy : callable () -> bool, optional
        Whether something else is being tried, which would disturb the trial.

    Attributes
    ----------
    link_ns, cpu_ns : float
        Averages per expert; 0.0 until measured.
    num_cpu, num_link : int
        Misses that the CPU computed, and that the link was to bring.
    """

    def __init__(
        self,
        loader: SlotLoader,
        cache: ExpertCache,
        trial: Trial | None = None,
        is_busy: Callable[[], bool] | None = None,
    ) -> None:
        self.link_ns = 0.0
        self.cpu_ns = 0.0
        self.num_cpu = 0
        self.num_link = 0
        self.trial = trial
        self._loader = loader
        self._cache = cache
        self._is_busy = is_busy
        self._last_layer = cache.num_layers
        self._left_out = 0  # misses since the CPU had one
        self._before = (0, 0, 0, 0)

    @property
    def active(self) -> bool:
        """Whether the CPU takes part now."""
        return self.trial is None or self.trial.on

    def skip(self) -> None:
        """Say that a step is a prompt's, of which the CPU computes nothing."""
        if self.trial is not None:
            self.trial.skip()

    def choose(self, layer: int, ids: np.ndarray) -> list[int]:
        """Return the experts of a step that the CPU shall compute if they are missing.

        Parameters
        ----------
        layer : int
        ids : ndarray of int
            Of the few tokens of a step; those out of range are not looked at.
        """
        if layer <= self._last_layer:
            self._begin_token()
        self._last_layer = layer
        self._measure_link()
        if not self.active:
            return []
        slots = self._cache.slot_table[layer]
        missing = [e for e in dict.fromkeys(ids.reshape(-1).tolist()) if 0 <= e < len(slots)]
        missing = [expert for expert in missing if slots[expert] < 0]
        if not missing:
            return []
        chosen = self._least_likely(layer, missing)[: self._share(len(missing))]
        self.num_link += len(missing) - len(chosen)
        self._left_out = 0 if chosen else self._left_out + len(missing)
        return chosen

    def note_cpu(self, ns: int, num_experts: int) -> None:
        """Say how long the CPU took for some experts."""
        self.cpu_ns = averaged(self.cpu_ns, ns, num_experts)
        self.num_cpu += num_experts

    def describe(self) -> str:
        """Return what was found as a line."""
        trial = getattr(self.trial, "reason", "always on")
        return (
            f"{self.num_cpu} misses computed by the CPU, {self.num_link} copied; "
            f"{self.cpu_ns / 1e3:.0f} us and {self.link_ns / 1e3:.0f} us each; "
            f"{'on' if self.active else 'off'}: {trial}"
        )

    def _share(self, num_missing: int) -> int:
        if not self.link_ns:
            return 0
        if not self.cpu_ns:
            return 1
        count = cpu_share(num_missing, self.link_ns, self.cpu_ns)
        return max(count, int(self._left_out + num_missing > _RETRY_AFTER))

    def _least_likely(self, layer: int, experts: list[int]) -> list[int]:
        """Return experts that may not be used again soon, the least likely first."""
        echo = self._cache.echo
        if echo is None:
            counts = self._cache.profiler.counts[layer]
            return sorted(experts, key=lambda expert: (counts[expert], expert))
        values = echo.reuse_of(layer)
        some = (expert for expert in experts if values[expert] <= _LIKELY)
        return sorted(some, key=lambda expert: (values[expert], expert))

    def _begin_token(self) -> None:
        if self.trial is None:
            return
        # Free slots are filled first: what is measured meanwhile says little of later.
        if self._cache.num_evictions and not (self._is_busy is not None and self._is_busy()):
            self.trial.begin_token()
        else:
            self.trial.skip()

    def _measure_link(self) -> None:
        counts, uploads = self._loader.counts, self._loader.pool.uploads
        now = (counts.urgent_ns, counts.num_urgent_reads, uploads.busy_ns, uploads.num_uploads)
        read_ns, num_reads, copy_ns, num_copies = (
            new - old for new, old in zip(now, self._before, strict=True)
        )
        if num_reads <= 0:
            return
        self._before = now
        # While one expert is copied, the next is read: the slower of both counts.
        per_copy = copy_ns / num_copies if num_copies else 0.0
        self.link_ns = averaged(self.link_ns, max(read_ns, per_copy * num_reads), num_reads)


def cpu_share(num_missing: int, link_ns: float, cpu_ns: float) -> int:
    """Return how many of some misses the CPU computes, so that it ends when the link does.

    Parameters
    ----------
    num_missing : int
    link_ns, cpu_ns : float
        What each takes for an expert; both positive.
    """
    return round(num_missing * link_ns / (cpu_ns + link_ns))


def averaged(average: float, total: float, count: int) -> float:
    """Return a moving average after `count` more values that are `total` together."""
    if not average or count >= _AVERAGED:
        return total / count
    return average + (total / count - average) * (count / _AVERAGED)
