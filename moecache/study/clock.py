"""VirtualClock: time that passes only when it is made to."""

import math
from typing import Protocol


class Timeline(Protocol):
    """A source of events at times of its own."""

    def prepare(self) -> None:
        """Begin what can be begun now; called before any time passes."""

    @property
    def next_ns(self) -> float:
        """When something happens next; infinity if nothing does."""

    def deliver(self) -> None:
        """Let happen what is due."""


class VirtualClock:
    """Nanoseconds that pass only when they are made to.

    Calling it returns the time. For one thread: code that computes calls `advance`,
    and code that waits for a device makes it go to what happens next.

    Attributes
    ----------
    now_ns : int
        From 0.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._timelines: list[Timeline] = []

    def __call__(self) -> int:
        """Return the time in nanoseconds."""
        return self.now_ns

    def follow(self, timeline: Timeline) -> None:
        """Let a timeline's events happen when their time comes."""
        self._timelines.append(timeline)

    def advance(self, ns: int) -> None:
        """Let time pass. Events that are due meanwhile happen in order, each at its time."""
        if ns < 0:
            raise ValueError(f"time cannot go back by {-ns} ns")
        until = self.now_ns + ns
        while self.skip(until):
            pass
        self.now_ns = until

    def skip(self, until: float = math.inf) -> bool:
        """Go to the next event and let it happen; False if there is none until then."""
        for timeline in self._timelines:
            timeline.prepare()
        due = min((timeline.next_ns for timeline in self._timelines), default=math.inf)
        if due > until or due == math.inf:
            return False
        self.now_ns = max(self.now_ns, int(due))
        for timeline in self._timelines:
            if timeline.next_ns <= self.now_ns:
                timeline.deliver()
        return True
