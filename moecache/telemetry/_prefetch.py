"""PrefetchStats: the reads ahead of the router, and their worth."""

from dataclasses import dataclass
from typing import Final, Self

from moecache.prefetch.prefetcher import Prefetcher
from moecache.telemetry._difference import subtracted

_COUNTERS: Final = (
    *("num_requests", "num_dropped", "num_stale", "num_issued", "num_useful", "num_late"),
    *("num_wrong", "num_failed", "num_cancelled", "num_advised", "num_used"),
    *("num_predicted_k", "num_found_k", "num_predicted_2k", "num_found_2k"),
    "num_predictor_errors",
)


@dataclass(frozen=True)
class PrefetchStats:
    """Counters of reading ahead at one moment, or over an interval.

    Attributes
    ----------
    mode : str
        "auto", "echo", "last" or "hints", as was asked for; or the name of a predictor's class.
    active : bool
        Whether experts are read ahead now.
    reason : str
        Why, in words.
    num_requests : int
        Calls that named experts to be read ahead.
    num_dropped, num_stale : int
        Requests that a full queue dropped, and those whose layer came first.
    num_issued : int
        Experts read ahead, or being so.
    num_useful, num_late, num_wrong, num_failed : int
        Fates of those: used from their slot; asked for while they were being read; evicted
        unused; not read.
    num_cancelled : int
        Those taken back before they were read, as their layer came without them.
    num_advised : int
        Experts without a slot, whose pages alone the kernel was asked to read.
    in_flight : int
        Experts being read ahead.
    num_used : int
        Experts that steps used and that had been predicted about: the base of recall.
    num_predicted_k, num_found_k : int
        Experts predicted, as many as a step uses, and how many of them were used.
    num_predicted_2k, num_found_2k : int
        The same among twice as many.
    num_predictor_errors : int
        Predictions that raised, or made no sense.
    """

    mode: str
    active: bool
    reason: str
    num_requests: int = 0
    num_dropped: int = 0
    num_stale: int = 0
    num_issued: int = 0
    num_useful: int = 0
    num_late: int = 0
    num_wrong: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_advised: int = 0
    in_flight: int = 0
    num_used: int = 0
    num_predicted_k: int = 0
    num_found_k: int = 0
    num_predicted_2k: int = 0
    num_found_2k: int = 0
    num_predictor_errors: int = 0

    @classmethod
    def of(cls, prefetcher: Prefetcher) -> Self:
        """Return the counters as they are now."""
        found = prefetcher.foresight
        counts, cache, switch = prefetcher.counts, prefetcher.cache, prefetcher.switch
        return cls(
            mode=prefetcher.mode,
            active=prefetcher.active and not prefetcher.closed,
            reason="as it was asked to" if switch is None else switch.reason,
            num_requests=prefetcher.queue.num_requests,
            num_dropped=prefetcher.queue.num_dropped,
            num_stale=prefetcher.queue.num_stale,
            num_issued=counts.num_prefetches,
            num_useful=cache.num_foreseen_hits,
            num_late=cache.num_foreseen_late,
            num_wrong=cache.num_foreseen_unused,
            num_failed=counts.num_failed_prefetches,
            num_cancelled=counts.num_cancelled_prefetches,
            num_advised=prefetcher.num_advised,
            in_flight=counts.num_prefetches_in_flight,
            num_used=found.num_used,
            num_predicted_k=found.num_predicted_k,
            num_found_k=found.num_found_k,
            num_predicted_2k=found.num_predicted_2k,
            num_found_2k=found.num_found_2k,
            num_predictor_errors=prefetcher.num_predictor_errors,
        )

    @property
    def recall_at_k(self) -> float:
        """Share of the used experts that were predicted; 0.0 before the first."""
        return _share(self.num_found_k, self.num_used)

    @property
    def recall_at_2k(self) -> float:
        """Share of the used experts among twice as many predicted; 0.0 before the first."""
        return _share(self.num_found_2k, self.num_used)

    @property
    def precision_at_k(self) -> float:
        """Share of the predicted experts that were used; 0.0 before the first."""
        return _share(self.num_found_k, self.num_predicted_k)

    @property
    def precision_at_2k(self) -> float:
        """Share of twice as many predicted experts that were used; 0.0 before the first."""
        return _share(self.num_found_2k, self.num_predicted_2k)

    @property
    def precision(self) -> float:
        """Share of the experts read ahead that were asked for, of those whose fate is known.

        0.0 before the first.
        """
        asked_for = self.num_useful + self.num_late
        return _share(asked_for, asked_for + self.num_wrong + self.num_cancelled)

    def __sub__(self, earlier: "PrefetchStats") -> "PrefetchStats":
        """Return what was counted since an earlier snapshot; the rest is as it is now."""
        if not isinstance(earlier, PrefetchStats):
            return NotImplemented
        return subtracted(self, earlier, _COUNTERS)

    def describe(self) -> str:
        """Return it as lines of text."""
        lines = [f"prefetch {self.mode}, {'on' if self.active else 'off'}: {self.reason}"]
        if self.num_requests or self.num_issued:
            lines.append(
                f"  {self.num_requests} requests, {self.num_dropped} dropped, {self.num_stale} "
                f"stale; {self.num_issued} experts read ahead: {self.num_useful} useful, "
                f"{self.num_late} late, {self.num_wrong} wrong, {self.num_cancelled} cancelled, "
                f"{self.num_failed} failed, "
                f"{self.in_flight} in flight"
            )
        if self.num_advised:
            lines.append(f"  {self.num_advised} experts advised to the page cache")
        if self.num_predictor_errors:
            lines.append(f"  {self.num_predictor_errors} predictions failed: the log has the first")
        if self.num_used:
            lines.append(
                f"  foresight at k: recall {self.recall_at_k:.2f}, precision "
                f"{self.precision_at_k:.2f}; at 2k: recall {self.recall_at_2k:.2f}, precision "
                f"{self.precision_at_2k:.2f}"
            )
        return "\n".join(lines)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
