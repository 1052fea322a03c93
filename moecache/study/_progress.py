"""How far a sweep or a simulation is, told to the caller."""

from collections.abc import Callable
from typing import Any, Self

Progress = Callable[[int, int], None]


class Reporter:
    """Tells how far something is: by a bar on standard error, a function, or not at all."""

    def __init__(self, progress: bool | Progress, total: int, label: str = "replaying") -> None:
        self._total = total
        self._bar: Any = None
        self._tell = progress if callable(progress) else None
        if progress is True:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = TextColumn(label), BarColumn(), MofNCompleteColumn()
            console = Console(stderr=True)
            self._bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True)
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int) -> None:
        """Tell how many are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif self._tell is not None:
            self._tell(done, self._total)
