"""PrefetchQueue: experts that may be wanted soon, the newest request first."""

import threading
from collections import deque
from collections.abc import Sequence

DEPTH = 8


class PrefetchQueue:
    """A short queue of layers and the experts they may want; never waits for anything but its lock.

    When it is full the oldest request is dropped. A request whose layer came meanwhile is worth
    nothing.

    Parameters
    ----------
    num_layers : int

    Attributes
    ----------
    num_requests, num_dropped, num_stale : int
        Requests so far; requests dropped from the full queue; requests out of date.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_requests = 0
        self.num_dropped = 0
        self.num_stale = 0
        self._lock = threading.Lock()
        self._requests: deque[_Request] = deque()
        self._visits = [0] * num_layers

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._requests)

    def visit(self, layer: int) -> None:
        """Note that a layer has come: requests for it are out of date."""
        self._visits[layer] += 1

    def put(self, layer: int, experts: Sequence[int], num_likely: int = 0) -> None:
        """Ask for one or more experts, the likeliest first; `num_likely` more likely than not."""
        request = _Request(layer, experts, num_likely, self._visits[layer])
        with self._lock:
            self.num_requests += 1
            self._requests.append(request)
            if len(self._requests) > DEPTH:
                self._requests.popleft()
                self.num_dropped += 1

    def take(self) -> tuple[int, int, bool] | None:
        """Return layer, expert, and whether it is likely: the newest request's best not taken."""
        with self._lock:
            while self._requests:
                request = self._requests[-1]
                if request.visit != self._visits[request.layer]:
                    self.num_stale += 1
                    self._requests.pop()
                    continue
                expert = request.experts[request.place]
                request.place += 1
                if request.place == len(request.experts):
                    self._requests.pop()
                return request.layer, expert, request.place <= request.num_likely
            return None

    def clear(self) -> None:
        """Drop everything, as out of date."""
        with self._lock:
            self.num_stale += len(self._requests)
            self._requests.clear()


class _Request:
    """Experts of a layer, before its next visit."""

    __slots__ = ("experts", "layer", "num_likely", "place", "visit")

    def __init__(self, layer: int, experts: Sequence[int], num_likely: int, visit: int) -> None:
        self.layer = layer
        self.experts = experts
        self.num_likely = num_likely
        self.place = 0
        self.visit = visit
