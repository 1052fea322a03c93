"""Switch: tries something on and off in turns, and keeps what is faster."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Before the first trial: predictors learn, and the cache finds its residents.
WARM_UP = 32
# The same, of a predictor that is presumed to be right.
PRESUMED = 128
# Tokens in a row with it or without; the first of them still feels what was before.
WINDOW = 16
_SETTLING = 2
# Pairs of windows before the decision; a clear difference decides after two.
_PAIRS = 4
_CLEAR = 0.03
# A glaring difference decides after one pair; after a glaring loss the next trial waits longer.
_GLARING = 0.2
_GLARING_HOLD = 1024
# Tokens until it is tried again; twice as many whenever the answer is the same.
_FIRST_HOLD = 256
_LONGEST_HOLD = 8192
# The gain must exceed the noise, and the unseen misses that its evictions cause.
_WORTH_IT = 0.01
# Share of a state's tokens left out, the worst fits: a host pauses, a machine has neighbours.
_TRIMMED = 0.125


class Switch:
    """Decides between on and off by comparing the time that tokens take.

    After 32 tokens windows of 16 alternate, off, on, on, off, until there were four of each.
    Then it stays with what was faster: on only if that gained more than 1 % and more than
    twice the gain's standard error, for 256 tokens; for twice as many each time the answer is
    confirmed, up to 8,192. A difference of 3 %, and of three standard errors, decides after two
    pairs of windows, one of 20 % after one; a loss of 20 % is not tried again for 1,024 tokens.
    If it does not pay, 384 of 10,000 tokens or fewer are tried with it: reading ahead that makes
    tokens 2 % slower costs less than 0.1 %, and 0.64 % if it doubles their time.

    Tokens differ far more from each other than on from off: by what they miss. So times are
    compared at equal misses: by an analysis of covariance, in which time rises with the number
    of misses by one slope in both states (Fisher 1932, Statistical Methods for Research
    Workers, 4th edition, section 49.1). Misses that on itself adds, by what it evicts, are not
    seen there: so tokens may not be slower by the plain means either, beyond three standard errors.

    What is presumed to pay is on until the first trial (`presume`): most conversations end before.

    Parameters
    ----------
    clock : callable () -> int
        Nanoseconds.
    misses, stall_ns, num_bytes : callable () -> int
        So far: experts that were not there, or would not have been if it had been off; and
        what else the reason names, time waited and bytes read.

    Attributes
    ----------
    on : bool
        Whether to read ahead now.
    reason : str
        The finding behind it.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        misses: Callable[[], int],
        stall_ns: Callable[[], int],
        num_bytes: Callable[[], int],
    ) -> None:
        self.on = False
        self.reason = "not tried yet"
        self._counters = (clock, misses, stall_ns, num_bytes)
        self._before: tuple[int, ...] | None = None  # the current token's beginning
        self._hold = _FIRST_HOLD
        self._left = WARM_UP  # tokens until the next trial
        self._place = 0  # in the trial
        self._decision: bool | None = None
        self._samples: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}

    def presume(self) -> None:
        """Be on until the first trial, after 128 tokens; does nothing once there was one."""
        if self._decision is None and self._left and not self.on:
            self.on, self._left = True, self._left + PRESUMED - WARM_UP
            self.reason = "presumed to pay, not tried yet"

    @property
    def settled_off(self) -> bool:
        """Whether it is off, and not about to be tried."""
        return not self.on and self._left > 1

    def begin_token(self) -> None:
        """Say that a token begins, and thereby that the last one is over."""
        now = tuple(counter() for counter in self._counters)
        if self._before is not None:
            self._note(tuple(new - old for new, old in zip(now, self._before, strict=True)))
        self._before = now

    def skip(self) -> None:
        """Do not count the current token: it is many, or the host pauses."""
        self._before = None

    def _note(self, sample: tuple[int, ...]) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self.on = False
            return
        if self._place % WINDOW >= _SETTLING:
            self._samples[self.on].append(sample)
        self._place += 1
        if self._place % WINDOW:
            return
        pairs, half = divmod(self._place // WINDOW, 2)
        # Off, on, on, off: a drift counts for both alike.
        self.on = bool((self._place // WINDOW + 1) // 2 % 2)
        if not half and pairs:
            found = gained(self._samples[False], self._samples[True])
            clear = _CLEAR if pairs > 1 else _GLARING
            if pairs == _PAIRS or abs(found.share) > max(clear, 3 * found.error):
                self._decide(found)

    def _decide(self, found: "Gain") -> None:
        gain = found.share
        self.on = gain > max(_WORTH_IT, 2 * found.error) and not found.is_slower
        same = self.on == self._decision
        first = _FIRST_HOLD if gain > -_GLARING else _GLARING_HOLD
        self._hold = min(2 * self._hold, _LONGEST_HOLD) if same else first
        self._decision = self.on
        self._left, self._place = self._hold, 0
        (_, _, off_stall, off_read), (_, _, on_stall, on_read) = (
            np.mean(self._samples[state], axis=0) for state in (False, True)
        )
        self.reason = (
            f"with it a token takes {1 - gain:.3f} of the time at equal misses; it waited "
            f"{on_stall / 1e6:.2f} ms and read {on_read / 2**20:.1f} MiB, without "
            f"{off_stall / 1e6:.2f} ms and {off_read / 2**20:.1f} MiB"
        )
        self._samples = {False: [], True: []}


@dataclass(frozen=True)
class Gain:
    """The time per token that on saves.

    Parameters
    ----------
    share : float
        Saved at equal misses; negative if it costs.
    error : float
        Standard error of that.
    is_slower : bool
        Whether the plain mean is worse, by more than three standard errors.
    """

    share: float
    error: float
    is_slower: bool


def gained(off: list[tuple[int, ...]], on: list[tuple[int, ...]]) -> Gain:
    """Return what on saves.

    Parameters
    ----------
    off, on : list of (time, misses, ...)
        At least one sample each.
    """
    groups = [np.array(samples, np.float64)[:, :2] for samples in (off, on)]
    slope, _ = _common_slope(groups)
    groups = [_trimmed(group, slope) for group in groups]
    slope, spread = _common_slope(groups)
    (off_time, off_misses), (on_time, on_misses) = (group.mean(0) for group in groups)
    if not off_time:
        return Gain(0.0, 0.0, is_slower=False)
    apart = off_misses - on_misses
    saved = off_time - on_time - slope * apart
    sizes = [len(group) for group in groups]
    inverse = sum(1 / size for size in sizes)
    errors = np.concatenate(
        [
            (group[:, 0] - slope * group[:, 1]) - np.mean(group[:, 0] - slope * group[:, 1])
            for group in groups
        ]
    )
    variance = float(errors @ errors) / max(1, sum(sizes) - 3)
    error = math.sqrt(variance * (inverse + (apart * apart / spread if spread else 0.0)))
    plain = math.sqrt(
        sum(float(group[:, 0].var()) / size for group, size in zip(groups, sizes, strict=True))
    )
    return Gain(
        share=float(saved / off_time),
        error=float(error / off_time),
        is_slower=bool(on_time - off_time > 3 * plain and on_time > off_time),
    )


def _trimmed(group: np.ndarray, slope: float) -> np.ndarray:
    """Return the samples that are nearest to their line."""
    errors = group[:, 0] - slope * group[:, 1]
    distance = np.abs(errors - np.median(errors))
    kept = len(group) - int(len(group) * _TRIMMED)
    nearest: np.ndarray = group[np.sort(np.argsort(distance, kind="stable")[:kept])]
    return nearest


def _common_slope(groups: list[np.ndarray]) -> tuple[float, float]:
    """Return time per miss within the groups, and the squared spread of the misses."""
    centred = np.concatenate([group - group.mean(0) for group in groups])
    spread = float(centred[:, 1] @ centred[:, 1])
    return max(0.0, float(centred[:, 0] @ centred[:, 1]) / spread) if spread else 0.0, spread
