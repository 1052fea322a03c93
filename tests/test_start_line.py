"""How far a model has come, in one line of a terminal."""

import io
import sys
import time

import pytest
from rich.console import Console

from moecache.commands import start_line
from moecache.commands.start_line import StartLine
from moecache.telemetry.loading import Loading


def test_the_line_has_phase_bytes_rate_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes as long as some are missing, and a rate once it is more than a guess."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    loading = Loading()
    line = StartLine(Console(file=io.StringIO()), loading)
    done = 0
    assert line.line().plain == "starting, 0 s"
    loading.enter("importing torch", lambda: (done, 8 << 20))
    assert line.line().plain == "importing torch, 0 B of 8.00 MiB read, 0 s"
    now, done = 102.0, 4 << 20
    assert line.line().plain == "importing torch, 4.00 MiB of 8.00 MiB read at 2.00 MiB/s, 2 s"
    # The same bytes, whatever the phase.
    loading.enter("building the model", lambda: (done, 8 << 20))
    now, done = 103.0, 6 << 20
    assert line.line().plain == "building the model, 6.00 MiB of 8.00 MiB read at 2.00 MiB/s, 3 s"
    done = 8 << 20
    assert line.line().plain == "building the model, 3 s"
    loading.note("reading experts ahead", 1 << 20, 1 << 30)
    assert "1.00 MiB of 1.00 GiB read," in line.line().plain
    loading.enter("preparing to answer")
    assert line.line().plain == "preparing to answer, 3 s"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_it_is_on_terminals_alone_and_leaves_nothing(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is erased by who stops it first; nothing is written elsewhere."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(start_line, "_REFRESHES_PER_S", 100)
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, width=80)
    with StartLine(console, Loading()) as line:
        line.loading.enter("importing torch")
        if is_terminal:
            # Others' lines stand above this one.
            sys.stderr.write("a warning\n")
            assert "a warning\n" in written.getvalue()
        end = time.monotonic() + 10
        while is_terminal and "importing torch" not in written.getvalue():
            assert time.monotonic() < end
            time.sleep(0.01)
        line.stop()
        stopped = written.getvalue()
    assert written.getvalue() == stopped
    assert bool(stopped) == is_terminal
    if is_terminal:
        # Up to the line's beginning, and nothing on it.
        assert stopped.endswith("\x1b[2K")


def test_a_dumb_terminal_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot move its cursor."""
    monkeypatch.setenv("TERM", "dumb")
    written = io.StringIO()
    with StartLine(Console(file=written, force_terminal=True), Loading()) as line:
        line.loading.enter("importing torch")
    assert written.getvalue() == ""
