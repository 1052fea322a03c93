"""Loading: how far a model has come before it can answer."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A client that is told to come back much later may find a server that has been idle for long.
_MOST_RETRY_S = 60


def _unknown() -> None:
    return None


@dataclass(frozen=True)
class _Phase:
    words: str
    begun_s: float
    progress: Callable[[], tuple[int, int] | None] = _unknown


class Loading:
    """The phases of a load, each with its bytes where they are known.

    One thread enters the phases; any other may look.
    """

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._phase = _Phase("starting", self._begun_s)

    def enter(self, words: str, progress: Callable[[], tuple[int, int] | None] = _unknown) -> None:
        """Begin a phase.

        Parameters
        ----------
        words : str
            Name of the phase, such as "importing torch".
        progress : callable () -> (done_bytes, total_bytes) or None, optional
            Called by whoever looks, in a thread of theirs; `None` if nothing is known.
        """
        self._phase = _Phase(words, time.monotonic(), progress)

    def note(self, words: str, done_bytes: int, total_bytes: int) -> None:
        """Note how far a phase has come; begin it if it has not begun."""
        phase = self._phase
        begun_s = phase.begun_s if phase.words == words else time.monotonic()
        self._phase = _Phase(words, begun_s, lambda: (done_bytes, total_bytes))

    def figures(self) -> dict[str, Any]:
        """Return the phase, the seconds since the start, and the phase's bytes, as JSON has them.

        Returns
        -------
        dict
            "phase", "seconds"; "done_bytes" and "total_bytes", `None` where they are not known.
        """
        phase = self._phase
        done, total = phase.progress() or (None, None)
        return {
            "phase": phase.words,
            "seconds": round(time.monotonic() - self._begun_s, 1),
            "done_bytes": done,
            "total_bytes": total,
        }

    def retry_s(self) -> int:
        """Return after how many seconds a client should ask again.

        The rest of the phase's bytes at the rate of those that are done; 1 if none are known.
        """
        phase = self._phase
        done, total = phase.progress() or (0, 0)
        if not done:
            return 1
        rest_s = (time.monotonic() - phase.begun_s) * (total - done) / done
        return min(_MOST_RETRY_S, max(1, math.ceil(rest_s)))
