"""BreakEven: from how likely on a read ahead saves more than it costs."""

from moecache.loading._loader import SlotLoader

# Tokens over which the time of a read and the time between reads are averaged.
_AVERAGED = 16
# Used until it is known what a read costs.
_FIRST_LIKELIHOOD = 0.3
# A wrong read replaced an expert that some later token may have wanted.
_MIN_LIKELIHOOD = 0.25
_MAX_LIKELIHOOD = 0.98


class BreakEven:
    """Measures what being right saves, and what being wrong costs.

    Being right saves as much of a read as fits into the time in which nothing else is read;
    being wrong delays a demand by the rest of the read, or by as much of it as cannot be
    overtaken. A read of likelihood p pays if p * saved > (1 - p) * delay.

    Parameters
    ----------
    loader : SlotLoader
    expert_bytes : int
        Bytes of the largest expert.

    Attributes
    ----------
    likelihood : float
        Likelihood from which on a read ahead pays.
    """

    def __init__(self, loader: SlotLoader, expert_bytes: int) -> None:
        self.likelihood = _FIRST_LIKELIHOOD
        self._loader = loader
        self._expert_bytes = max(1, expert_bytes)
        self._num_tokens = 0
        self._before = (loader.clock(), 0, 0, 0, 0, 0)

    def begin_token(self) -> None:
        """Count a token, and measure after some."""
        self._num_tokens += 1
        if self._num_tokens % _AVERAGED == 0:
            self._measure()

    def _measure(self) -> None:
        counts = self._loader.counts
        uploads = self._loader.pool.uploads
        now = (
            self._loader.clock(),
            counts.urgent_ns,
            counts.num_urgent_reads,
            counts.num_steps,
            uploads.busy_ns,
            uploads.num_uploads,
        )
        total_ns, urgent_ns, num_reads, num_steps, upload_ns, num_uploads = (
            new - old for new, old in zip(now, self._before, strict=True)
        )
        if num_reads == 0 or num_steps == 0 or urgent_ns <= 0:
            return
        self._before = now
        # An expert is there when it is copied to its device, too.
        read_ns = urgent_ns / num_reads + upload_ns / max(1, num_uploads)
        idle_ns = max(0.0, total_ns - urgent_ns) / num_steps
        saved = min(idle_ns, read_ns)
        delay = max(0.0, read_ns - idle_ns)
        if self._loader.engine.quantum_bytes is not None:
            delay = min(delay, read_ns * self._loader.engine.quantum_bytes / self._expert_bytes)
        needed = delay / (delay + saved) if delay + saved else 1.0
        self.likelihood = min(max(needed, _MIN_LIKELIHOOD), _MAX_LIKELIHOOD)
