"""Text as it is generated, and one line below it that says how fast."""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from moecache.commands.example import write_text
from moecache.commands.paths import printable
from moecache.commands.samples import Sample, sample_stats
from moecache.runtime.runtime import ExpertRuntime
from moecache.units import format_bytes

_REFRESHES_PER_S = 8
_WINDOW_S = 1.0
# Tokens that the shown rate is over: a second of a fast model, a few tokens of a slow one.
_RATE_TOKENS = 32


class LiveLine:
    """Writes text to standard output, with a line of figures on standard error.

    The line is there only if standard error is a terminal that can move its cursor. Where
    standard output is a terminal too, finished lines stand above it.

    Parameters
    ----------
    console : Console
        The console of standard error.
    runtime : ExpertRuntime
        Stays open for as long as the line is shown.

    Attributes
    ----------
    stamps_s : sequence of float
        When each token came, by `time.perf_counter`. The caller sets it, and it grows meanwhile.
    prompt : callable (), optional
        Returns how many tokens of the prompt were known, are read, and are there in all.
    """

    def __init__(self, console: Console, runtime: ExpertRuntime) -> None:
        self._console = console
        self._runtime = runtime
        self.stamps_s: Sequence[float] = ()
        self.prompt: Callable[[], tuple[int, int, int]] | None = None
        self._begun_s = time.perf_counter()
        self._recent: deque[Sample] = deque([sample_stats(runtime.stats())])
        self._pending = ""
        shown = console.is_terminal and not console.is_dumb_terminal
        # Two writers cannot share one terminal.
        self._above = shown and sys.stdout is not None and sys.stdout.isatty()
        self._ends_line = True
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._shown = shown

    def write(self, text: str) -> None:
        """Write text that follows what was written before."""
        if not text:
            return
        self._ends_line = text.endswith("\n")
        if not self._above:
            write_text(text)
            return
        *lines, pending = (self._pending + text).split("\n")
        # Full rows are printed, too: the part that is redrawn must fit on the terminal.
        *rows, last = _text(pending).wrap(self._console, self._console.width) or [Text()]
        # Set first: printing a row redraws the pending text as well.
        self._pending = last.plain if rows else pending
        for row in (*map(_text, lines), *rows):
            self._console.print(row)

    def __enter__(self) -> Self:
        """Begin to show the line."""
        if self._shown:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the line away; the text stays, and ends with a line break."""
        pending, self._pending = self._pending, ""
        if self._shown:
            self._live.stop()
        if self._above:
            if pending:
                self._console.print(_text(pending))
        elif not self._ends_line and kind is not BrokenPipeError:
            write_text("\n")

    def _render(self) -> RenderableType:
        total = sample_stats(self._runtime.stats())
        self._recent.append(total)
        while self._recent[1].taken_s < total.taken_s - _WINDOW_S:
            self._recent.popleft()
        line = Text(self._figures(total.since(self._recent[0])), "dim", no_wrap=True)
        return Group(_text(self._pending), line) if self._pending else line

    def _figures(self, recent: Sample) -> str:
        stamps_s = self.stamps_s[-_RATE_TOKENS:]
        if len(stamps_s) < 2:
            text = self._reading(time.perf_counter() - self._begun_s)
        else:
            # A stall shows before it has ended.
            elapsed_s = max(stamps_s[-1], time.perf_counter() - _WINDOW_S) - stamps_s[0]
            text = f"{len(self.stamps_s)} tokens, {(len(stamps_s) - 1) / elapsed_s:.1f} tokens/s"
        rate = "-" if recent.hit_rate is None else f"{recent.hit_rate:.1%}"
        read = sum(recent.per_s(cause) for cause in ("demand", "bulk", "prefetch", "warm_start"))
        return f"{text}, hit rate {rate}, {format_bytes(read)}/s read"

    def _reading(self, elapsed_s: float) -> str:
        """Return how far the prompt is read, and when it will be."""
        known, done, total = (0, 0, 0) if self.prompt is None else self.prompt()
        text = f"reading the prompt, {elapsed_s:.0f} s"
        if done <= known or done >= total:
            return text
        left_s = elapsed_s * (total - done) / (done - known)
        return f"{text}, {done} of {total} tokens, {left_s:.0f} s left"


def _text(text: str) -> Text:
    return Text(printable(text.expandtabs()))
