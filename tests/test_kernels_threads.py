"""The kernels' threads: shared by all callers, absent after a fork, no hindrance at the end."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import moecache
from moecache import kernels
from moecache.kernels import _processor
from tests.helpers.kernels import F32, Experts, compute_pairs, computing, draw_inputs
from tests.helpers.pages import skip_fork_under_sanitizer

# A child imports the build that is tested here.
PACKAGE = Path(moecache.__file__).parents[1]
# More items than threads: an item is 128 KiB of weights.
ROWS, COLUMNS = 600, 500


def child(program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program; fails the test if it takes a minute, as one that hangs does."""
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=PACKAGE,
    )


def test_calls_at_the_same_time_give_the_bits_of_single_ones() -> None:
    """One has the workers, the others compute alone; products beside experts."""
    weights = draw_inputs(ROWS, COLUMNS, F32, 1)
    inputs = [draw_inputs(num, COLUMNS, F32, num) for num in (1, 3, 8, 17)]
    experts = Experts(F32, 64, 300, 4)
    hidden = draw_inputs(6, 64, F32, 2)
    matrix = kernels.matrix_of(weights)

    def compute(number: int) -> bytes:
        rows = np.full((6, 64), np.nan, np.float32)
        compute_pairs(experts.kernel, hidden, rows, slots=np.arange(6) % 4)
        return kernels.products(inputs[number], matrix).tobytes() + rows.tobytes()

    with computing(threads=1):
        expected = [compute(number) for number in range(4)]
    found: list[list[bytes]] = [[] for _ in range(4)]
    barrier = threading.Barrier(4)

    def caller(number: int) -> None:
        barrier.wait()
        found[number].extend(compute(number) for _ in range(40))

    with computing(threads=3):
        callers = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
        for thread in callers:
            thread.start()
        for thread in callers:
            thread.join()
    for number in range(4):
        assert found[number] == [expected[number]] * 40


def test_the_number_of_threads_may_change_between_calls() -> None:
    """Up and down; workers that are too many sleep on."""
    weights, inputs = draw_inputs(ROWS, COLUMNS, F32, 3), draw_inputs(5, COLUMNS, F32, 4)
    matrix = kernels.matrix_of(weights)
    with computing(threads=1):
        expected = kernels.products(inputs, matrix).tobytes()
    for threads in [1, 4, 2, 8, 3, 1, 5] * 10:
        with computing(threads=threads):
            assert kernels.products(inputs, matrix).tobytes() == expected


FORK = f"""
import os, threading
import numpy as np
from moecache import kernels
from moecache.kernels import _processor
kernels.use_threads(3)
kernels._processor.share_from(0, 0)
weights = np.random.default_rng(0).standard_normal(({ROWS}, {COLUMNS})).astype(np.float32)
inputs, matrix = weights[:4], kernels.matrix_of(weights)
expected = kernels.products(inputs, matrix).tobytes()
stop = threading.Event()

def compute():
    while not stop.is_set():
        assert kernels.products(inputs, matrix).tobytes() == expected

thread = threading.Thread(target=compute)
thread.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        is_equal = all(
            kernels.products(inputs, matrix).tobytes() == expected for _ in range(3)
        )
        os._exit(0 if is_equal else 3)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
thread.join()
assert kernels.products(inputs, matrix).tobytes() == expected
print("done")
"""


def test_children_of_a_fork_compute_whatever_was_under_way() -> None:
    """Locks that a thread of the parent held are free there, and workers are new ones."""
    skip_fork_under_sanitizer()
    done = child(FORK)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


FORKED_THREADS = """
import os
import numpy as np
from moecache import kernels
from moecache.kernels import _processor
weights = np.ones((2000, 500), np.float32)
tasks = lambda: len(os.listdir("/proc/self/task"))
kernels.use_threads(3)
kernels._processor.share_from(0, 0)
kernels.products(weights[:1], weights)
before = tasks()
if os.fork() == 0:
    assert tasks() == 1
    kernels.products(weights[:1], weights)
    os._exit(tasks() - 1)
print(before, os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_workers_are_started_anew_after_a_fork() -> None:
    """As many as before: two beside the calling thread."""
    done = child(FORKED_THREADS)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = map(int, done.stdout.split())
    assert before >= 3
    assert after == 2


EXIT = """
import threading
import numpy as np
from moecache import kernels
from moecache.kernels import _processor
kernels.use_threads(4)
kernels._processor.share_from(0, 0)
weights = np.ones((2000, 500), np.float32)
kernels.products(weights[:2], weights)
"""


def test_an_interpreter_ends_while_workers_sleep() -> None:
    """Without a word, with its own status."""
    done = child(EXIT + "raise SystemExit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


def test_an_interpreter_ends_while_another_thread_computes() -> None:
    """One that nobody waits for."""
    done = child(
        EXIT
        + """
def compute():
    while True:
        kernels.products(weights[:9], weights)

threading.Thread(target=compute, daemon=True).start()
kernels.products(weights[:9], weights)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


SILENCE = """
import sys, threading, time
import numpy as np
from moecache import kernels
from moecache.formats import find_format
from moecache.kernels import _processor
kernels.use_threads(2)
kernels._processor.share_from(0, 0)
# Only a call that lets it go hands the interpreter over before a minute has passed.
sys.setswitchinterval(60)
weights = np.ones((2000, 500), np.float32)
inputs = np.ones((200, 500), np.float32)
shape, values = (4000, 4096), np.zeros((4000, 4096), np.float32)
raw = np.zeros(find_format("fp8[1x32,e8m0]").nbytes(*shape), np.uint8)
form = np.zeros(find_format("fp8[1x32,e8m0]").form.nbytes(*shape), np.uint8)
count, stop = [0], threading.Event()

def other():
    while not stop.is_set():
        count[0] += 1
        time.sleep(1e-4)

thread = threading.Thread(target=other)
thread.start()
for call in range(100):
    seen = count[0]
    CALL
    if count[0] > seen:
        print("free")
        break
stop.set()
"""


@pytest.mark.parametrize(
    "call",
    [
        "kernels.products(inputs, weights)",
        'kernels.tile(raw, "fp8[1x32,e8m0]", *shape, form)',
        'kernels.expand(form, "fp8[1x32,e8m0]", *shape, values)',
    ],
)
def test_other_threads_run_during_a_call(call: str) -> None:
    """A call lets the interpreter go."""
    assert child(SILENCE.replace("CALL", call)).stdout == "free\n"


@pytest.mark.parametrize(
    ("waited_us", "own_us", "own_items", "late"),
    [
        (299, 10, 1, False),  # shorter than a processor is lost for
        (301, 60, 10, True),  # fifty items long
        (1500, 1000, 1, False),  # a prompt's items: one more may just have begun
        (2500, 1000, 1, True),
        (9000, 0, 0, False),  # nothing to compare with
    ],
)
def test_a_wait_of_two_items_is_no_sign_of_a_busy_machine(
    waited_us: int, own_us: int, own_items: int, late: bool
) -> None:
    """Else the threads of long products would be given up."""
    assert _processor.is_late(waited_us * 1000, own_us * 1000, own_items) is late
