"""Switch: tries something on and off in turns, and keeps what is faster."""

import statistics
from collections.abc import Callable

# Tokens in a row with it or without; the first of them still feels what was before.
WINDOW = 8
_SETTLING = 2
# Pairs of windows, after which it is decided; a clear loss is one after two.
_PAIRS = 4
# Tokens until it is tried again; twice as many whenever the answer is the same.
_FIRST_HOLD = 256
_LONGEST_HOLD = 8192
# What is gained must be more than noise, and a loss is given up early.
_WORTH_IT = 0.99
_CLEAR_LOSS = 1.05
# Of the times of tokens, those in the middle count: a host pauses, a machine has neighbours.
_TRIMMED = 0.125


class Switch:
    """Decides between on and off by comparing the time that tokens take.

    Windows of 8 tokens alternate, off first, four times each. Then it stays with what was
    faster by the trimmed mean, on only if that gained more than 1 %, for 256 tokens; for
    twice as many each time the answer is confirmed, up to 8,192. A trial in which on is
    slower by 5 % after two pairs of windows is given up. Trying what makes tokens up to
    5 % slower costs less than 0.1 % of 10,000 tokens; what triples their time, 1.92 %.

    Parameters
    ----------
    clock : callable () -> int
        Nanoseconds.
    stall_ns, num_bytes : callable () -> int
        What else the reason names: time waited, and bytes read, so far.

    Attributes
    ----------
    on : bool
        What to do now.
    reason : str
        What was found out.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        stall_ns: Callable[[], int],
        num_bytes: Callable[[], int],
    ) -> None:
        self.on = False
        self.reason = "not tried yet"
        self.num_trials = 0
        self._clock = clock
        self._counters = (stall_ns, num_bytes)
        self._started: int | None = None  # the current token's
        self._before = (0, 0)
        self._hold = _FIRST_HOLD
        self._left = 0  # tokens until the next trial
        self._place = 0  # in the trial
        self._decision: bool | None = None
        self._samples: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}

    @property
    def settled_off(self) -> bool:
        """Whether it is off, and not about to be tried."""
        return not self.on and self._left > 1

    def begin_token(self) -> None:
        """Say that a token begins, and thereby that the last one is over."""
        now = self._clock()
        counters = (self._counters[0](), self._counters[1]())
        if self._started is not None:
            stalls, read = (new - old for new, old in zip(counters, self._before, strict=True))
            self._note(now - self._started, stalls, read)
        self._started = now
        self._before = counters

    def skip(self) -> None:
        """Do not count the current token: it is many, or the host pauses."""
        self._started = None

    def _note(self, time_ns: int, stall_ns: int, num_bytes: int) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self.on = False
            return
        if self._place % WINDOW >= _SETTLING:
            self._samples[self.on].append((time_ns, stall_ns, num_bytes))
        self._place += 1
        if self._place % WINDOW:
            return
        pairs, half = divmod(self._place // WINDOW, 2)
        # Off, on, on, off: what drifts counts for both alike.
        self.on = bool((self._place // WINDOW + 1) // 2 % 2)
        if not half and pairs:
            off, on = (_trimmed_mean(self._samples[state]) for state in (False, True))
            if pairs == _PAIRS or (pairs > 1 and on > off * _CLEAR_LOSS):
                self._decide(off, on)

    def _decide(self, off: float, on: float) -> None:
        self.on = on < off * _WORTH_IT
        self.num_trials += 1
        self._hold = (
            min(2 * self._hold, _LONGEST_HOLD) if self.on == self._decision else _FIRST_HOLD
        )
        self._decision = self.on
        self._left, self._place = self._hold, 0
        stalls, read = zip(
            *(
                (
                    statistics.fmean(sample[1] for sample in samples) / 1e6,
                    statistics.fmean(sample[2] for sample in samples) / 2**20,
                )
                for samples in (self._samples[True], self._samples[False])
            ),
            strict=True,
        )
        self.reason = (
            f"with it a token took {on / off:.3f} of the time without: {stalls[0]:.2f} instead "
            f"of {stalls[1]:.2f} ms waiting, {read[0]:.1f} instead of {read[1]:.1f} MiB read"
        )
        self._samples = {False: [], True: []}


def _trimmed_mean(samples: list[tuple[int, int, int]]) -> float:
    times = sorted(sample[0] for sample in samples)
    cut = int(len(times) * _TRIMMED)
    return statistics.fmean(times[cut : len(times) - cut])
