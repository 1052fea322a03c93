"""StartLine: how far a model has come before it can answer, in one line of a terminal."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from moecache.telemetry.loading import Loading
from moecache.units import format_bytes

_REFRESHES_PER_S = 8
# A rate over a shorter time is a guess.
_LEAST_RATE_S = 0.3


class StartLine:
    """The phase of a load with its bytes and their rate; the line is erased at the end.

    Nothing is written where the console is no terminal that can move its cursor. What others write
    to `sys.stderr` meanwhile stands above the line.

    Parameters
    ----------
    console : Console
    loading : Loading
        Entered and noted by the thread that loads.

    Attributes
    ----------
    loading : Loading
    """

    def __init__(self, console: Console, loading: Loading) -> None:
        self.loading = loading
        # Where the bytes stood when they were first seen: of what total, when, how many.
        self._since: tuple[int, float, int] | None = None
        self._is_shown = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(
            console=console,
            get_renderable=self.line,
            refresh_per_second=_REFRESHES_PER_S,
            redirect_stdout=False,
            transient=True,
        )

    def line(self) -> Text:
        """Return the line, such as "building the model, 1.00 GiB of 1.10 GiB read, 4 s"."""
        figures = self.loading.figures()
        parts = [figures["phase"]]
        done, total = figures["done_bytes"], figures["total_bytes"]
        if total and done < total:
            rate = self._rate(done, total)
            parts.append(f"{format_bytes(done)} of {format_bytes(total)} read{rate}")
        parts.append(f"{figures['seconds']:.0f} s")
        return Text(", ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")

    def _rate(self, done: int, total: int) -> str:
        now = time.monotonic()
        if self._since is None or self._since[0] != total:
            self._since = total, now, done
        _, begun, before = self._since
        if now - begun < _LEAST_RATE_S or done == before:
            return ""
        return f" at {format_bytes(round((done - before) / (now - begun)))}/s"

    def __enter__(self) -> Self:
        """Begin to show the line, by a thread of its own."""
        if self._is_shown:
            self._live.start()
        return self

    def stop(self) -> None:
        """Erase the line; a second call does nothing."""
        self._live.stop()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Erase the line."""
        self.stop()
