"""Ctrl-C comes at the end of a section, and whenever it comes, no expert and no slot is lost."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moecache import interrupts
from moecache.interrupts import uninterrupted
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.examples import num_examples
from tests.helpers.nightly import some

# Interrupts itself a hundred times, anywhere, while experts are asked for, once or in storms;
# after each one everything must be as if it had not been.
CHILD = """
import ctypes, faulthandler, os, random, signal, sys
import numpy as np
import moecache

faulthandler.dump_traceback_later(100, exit=True)
path, way = sys.argv[1:3]
num_rounds, storm = map(int, sys.argv[3:5])
shortest, longest = map(float, sys.argv[5:7])
raising = getattr(signal, sys.argv[7])
signal.signal(raising, signal.default_int_handler)
options = {
    "buffered": {"read": "buffered"},
    "threads": {"read": "mmap"},
    "alone": {"read": "mmap", "loader_threads": 0},
    "direct": {"read": "direct"},
    "ahead": {"read": "buffered", "prefetch": "last"},
}[way]
runtime = moecache.open(path, slots=6, prefault="off", **{"prefetch": "off", **options})
num_experts = runtime.layout.num_experts
every = np.arange(num_experts).reshape(-1, 3)
draw, left = random.Random(0), 0

# A timer of a signal that sections do not hold: CLOCK_MONOTONIC, SIGEV_SIGNAL.
libc = ctypes.CDLL(None, use_errno=True)
event = (ctypes.c_int * 16)()
event[2], event[3] = signal.SIGUSR1, 0
timer = ctypes.c_void_p()
assert libc.timer_create(1, event, ctypes.byref(timer)) == 0, ctypes.get_errno()

def start_timer(seconds):
    times = (ctypes.c_long * 4)(0, 0, 0, int(seconds * 1e9))
    assert libc.timer_settime(timer, 0, times, None) == 0, ctypes.get_errno()

def send(number, frame):
    # From a timer: at any line, where a thread would only come when it is given the GIL.
    global left
    while frame is not None and frame.f_code is not work.__code__:
        frame = frame.f_back
    left -= frame is not None
    if left:
        start_timer(draw.uniform(shortest, longest))
    if frame is not None:
        os.kill(os.getpid(), raising)

def work(number, rows):
    for layer in range(2):
        ids = rows.permutation(num_experts)[:3][None]
        if number % 3 == 1:
            with runtime.lease(layer, ids):
                pass
            continue
        waves = runtime.waves(layer, every if number % 3 else ids)
        try:
            for wave in waves:
                pass
        finally:
            waves.close()

signal.signal(signal.SIGUSR1, send)
num_interrupted = 0
for number in range(num_rounds):
    rows = np.random.default_rng(number)
    left = storm
    start_timer(draw.uniform(shortest, longest))
    while left:
        try:
            while left:
                work(number, rows)
        except KeyboardInterrupt as error:
            if number % 3 != 1:
                kept = error  # and all frames with it, as a notebook does
            num_interrupted += 1
    runtime.cache.check()
    # What was being read goes on to its end, into the cache.
    while runtime.stats().num_in_flight:
        pass
    # Every slot can be had, those for staging too.
    for layer in range(2):
        with runtime.lease(layer, rows.permutation(num_experts)[:6]):
            pass
        found = sum(len(wave.pairs) for wave in runtime.waves(layer, every))
        assert found == every.size, (number, found)
    runtime.cache.check()
# Python drops one that comes in a finalizer, and takes two that come before its next look as one.
assert num_interrupted > num_rounds * storm / 2, num_interrupted
runtime.close()
"""


Handlers = Callable[[int, Callable[[int, object], None]], None]


@pytest.fixture(name="handlers")
def _handlers() -> Iterator[Handlers]:
    """Return what sets a handler, until the end of the test."""
    before: dict[int, Any] = {}

    def put(number: int, handler: Any) -> None:
        before.setdefault(number, signal.signal(number, handler))

    yield put
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("way", "storm", "raising"),
    some(
        itertools.product(
            ["buffered", "threads", "alone", "direct", "ahead"],
            [1, 10],
            ["SIGINT", "SIGALRM", "SIGTERM"],
        ),
        lambda case: (
            (case[2] == "SIGINT" and (case[1] == 10) == (case[0] in {"threads", "ahead"}))
            or case in {("buffered", 10, "SIGALRM"), ("ahead", 1, "SIGTERM")}
        ),
    ),
)
def test_an_interrupt_at_any_moment_loses_nothing(
    way: str, storm: int, raising: str, tmp_path: Path
) -> None:
    """Whatever a step had claimed, leased or staged can be had again; no step waits for ever."""
    model = write_checkpoint(tmp_path / "model", num_layers=2)
    rounds = num_examples(100 // storm)
    figures = (str(rounds), str(storm), "0.0001" if storm == 1 else "0.0002", "0.003")
    words = (str(model.path), way, *figures, raising)
    done = subprocess.run(
        # The very build that is tested, which need not be the one in this directory.
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{CHILD}", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_an_interrupt_in_a_section_comes_at_its_end() -> None:
    """Of nested sections, the outer one's."""
    lines = []

    def interrupted() -> None:
        with uninterrupted():
            with uninterrupted():
                os.kill(os.getpid(), signal.SIGINT)
                lines.append("inner")
            lines.append("outer")
        lines.append("after")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert lines == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_in_a_section_come_as_one_at_its_end() -> None:
    """However many there are: what is claimed in it is noted, and given back."""
    lines = []

    def interrupted() -> None:
        with uninterrupted():
            for number in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                lines.append(number)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert lines == [0, 1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM])
def test_a_timeout_in_a_section_comes_at_its_end(number: int, handlers: Handlers) -> None:
    """As Ctrl-C does; what its handler raises is what the caller gets."""
    lines = []

    def raise_timeout(number: int, frame: object) -> None:
        raise TimeoutError(number)

    def timed() -> None:
        with uninterrupted():
            os.kill(os.getpid(), number)
            lines.append("in the section")
        lines.append("after")

    handlers(number, raise_timeout)
    with pytest.raises(TimeoutError):
        timed()
    assert lines == ["in the section"]
    assert signal.getsignal(number) is raise_timeout


def test_a_timeout_and_an_interrupt_are_both_told(handlers: Handlers) -> None:
    """Ctrl-C is what the caller gets; the timeout is its context, and every handler is back."""

    def raise_timeout(number: int, frame: object) -> None:
        raise TimeoutError(number)

    handlers(signal.SIGALRM, raise_timeout)
    with pytest.raises(KeyboardInterrupt) as told, uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGALRM)
    assert isinstance(told.value.__context__, TimeoutError)
    assert signal.getsignal(signal.SIGALRM) is raise_timeout
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with uninterrupted():  # nothing is left over
        pass


def test_a_timeout_on_the_way_in_leaves_the_handlers_as_they_were(
    handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting a handler handles what is pending first; the section is not entered."""
    real = interrupts._signal.signal

    def raise_timeout(number: int, frame: object) -> None:
        raise TimeoutError(number)

    def late(number: int, handler: object) -> object:
        if number == signal.SIGALRM and handler is interrupts._note:
            os.kill(os.getpid(), signal.SIGALRM)
        return real(number, handler)

    handlers(signal.SIGALRM, raise_timeout)
    monkeypatch.setattr(interrupts._signal, "signal", late)
    with pytest.raises(TimeoutError), uninterrupted():
        pytest.fail("entered")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGALRM) is raise_timeout
    assert not interrupts._noted


@pytest.mark.parametrize("way", ["in", "out"])
def test_two_signals_at_once_leave_no_handler_behind(
    way: str, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pending where a handler is set: one raises, and the other at Python's very next look."""
    every = {signal.SIGALRM, signal.SIGINT, signal.SIGTERM}
    real = interrupts._signal.signal
    left = 1

    def raise_error(number: int, frame: object) -> None:
        raise TimeoutError(number)

    def late(number: int, handler: object) -> object:
        nonlocal left
        is_time = number == signal.SIGTERM and (handler is interrupts._note) == (way == "in")
        if is_time and left:
            left -= 1
            signal.pthread_sigmask(signal.SIG_BLOCK, every)
            for one in every:
                os.kill(os.getpid(), one)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, every)
        return real(number, handler)

    for number in every:
        handlers(number, raise_error)
    monkeypatch.setattr(interrupts._signal, "signal", late)
    with pytest.raises(TimeoutError), uninterrupted():
        pass
    monkeypatch.undo()
    with contextlib.suppress(TimeoutError), uninterrupted():
        pass  # puts back what two signals at once may have left
    for number in every:
        assert signal.getsignal(number) is raise_error
    assert not interrupts._held
    assert not interrupts._noted


def test_a_section_that_ends_in_another_thread_is_undone_by_the_next() -> None:
    """As a generator may, which is dropped there."""

    def section() -> Iterator[None]:
        with uninterrupted():
            yield

    held = section()
    next(held)
    assert signal.getsignal(signal.SIGINT) is interrupts._note
    thread = threading.Thread(target=held.close)  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) is interrupts._note
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_may_have_a_section_of_its_own(handlers: Handlers) -> None:
    """Whenever it is called."""
    called = []

    def handler(number: int, frame: object) -> None:
        with uninterrupted():
            called.append(number)

    handlers(signal.SIGALRM, handler)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGALRM)
    assert called == [signal.SIGALRM]
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_child_of_another_thread_has_its_handlers(handlers: Handlers) -> None:
    """A fork while the main thread is in a section copies what is held."""

    def handler(number: int, frame: object) -> None:
        os._exit(7)

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
            os._exit(1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    codes: list[int] = []
    handlers(signal.SIGTERM, handler)
    with uninterrupted():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert codes == [7]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_another_signal_on_the_way_out_leaves_the_handler_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Setting a handler handles what is pending first, which may raise."""
    real = interrupts._signal.signal
    left = 1

    def terminated(number: int, handler: object) -> object:
        nonlocal left
        if handler is signal.default_int_handler and left:
            left -= 1
            raise SystemExit
        return real(number, handler)

    monkeypatch.setattr(interrupts._signal, "signal", terminated)
    with pytest.raises(SystemExit), uninterrupted():
        pass
    assert left == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_no_handler_may_be_set_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a host whose main thread is another: the section runs, the interrupt comes at once."""

    def refuse(number: int, handler: object) -> None:
        raise ValueError("signal only works in main thread of the main interpreter")

    monkeypatch.setattr(interrupts._signal, "signal", refuse)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
    assert not interrupts._noted


def test_a_handler_of_the_hosts_own_is_called_once_and_stays() -> None:
    """It need not raise."""
    called = []

    def handler(number: int, frame: object) -> None:
        called.append((number, len(lines)))

    lines = []
    before = signal.signal(signal.SIGINT, handler)
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            lines.append("in the section")
        assert called == [(signal.SIGINT, 1)]
        with uninterrupted():
            pass
        assert called == [(signal.SIGINT, 1)]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_section_that_fails_fails_as_it_would() -> None:
    """And leaves the handler as it was."""
    with pytest.raises(ValueError, match="its own"), uninterrupted():
        raise ValueError("its own")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_that_are_ignored_stay_ignored() -> None:
    """There is nothing to come at the end."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_let_alone() -> None:
    """Handlers run in the main thread, and only it may set one."""
    errors: list[BaseException] = []

    def section() -> None:
        try:
            with uninterrupted():
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        except (AssertionError, ValueError) as error:
            errors.append(error)

    thread = threading.Thread(target=section)
    thread.start()
    thread.join()
    assert not errors
