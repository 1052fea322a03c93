"""StopText: text up to where a client wants it to end."""

from collections.abc import Callable, Sequence


class StopText:
    """Hands text on, until one of some strings has come; neither it nor what follows is.

    Parameters
    ----------
    stops : sequence of str
        None of them empty.
    write : callable (str)
        Is given all text that can be no part of a stop string.

    Attributes
    ----------
    found : bool
    stop : str or None
        The one that has come.
    """

    def __init__(self, stops: Sequence[str], write: Callable[[str], None]) -> None:
        self._stops = stops
        self._write = write
        self._held = ""
        self.found = False
        self.stop: str | None = None

    def feed(self, text: str) -> None:
        """Take text that follows the last."""
        if self.found:
            return
        self._held += text
        places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.found = bool(places)
        keep = len(self._held) - self._beginning()
        if places:
            keep, self.stop = min(places)
        shown, self._held = self._held[:keep], "" if places else self._held[keep:]
        if shown:
            self._write(shown)

    def end(self) -> None:
        """Hand on what is held: no more text comes."""
        if self._held:
            self._write(self._held)
        self._held = ""

    def _beginning(self) -> int:
        """Return how much of the text's end may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
