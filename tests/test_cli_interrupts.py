"""Ctrl-C in a command: exit code 130 and one line, whenever it comes and however often."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.pages import run_child

ROOT = Path(__file__).parents[1]
LINE = "moecache: interrupted\n"
# `moecache inspect` that does something else.
COMMAND = """
import atexit, os, signal, time
from moecache import __main__, cli
from moecache.commands import ctrl_c, inspect
interrupt = lambda: signal.raise_signal(signal.SIGINT)
{code}
inspect.run = run
sys.argv[1:] = ["inspect", "model"]
cli.inspect.run = run
sys.exit(__main__.main())
"""
DEMO = """
import sys
sys.path.insert(0, sys.argv[1])
sys.argv[:] = ["moecache", "demo"]
print(flush=True)
from moecache.__main__ import main
sys.exit(main())
"""
INTERRUPTED = """
def run(_):
    interrupt()
"""


def command(code: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a child whose function is `run(arguments)`."""
    return run_child(COMMAND.format(code=code))


@pytest.mark.parametrize(
    "code",
    [
        # Called before those that were registered earlier, the command's own among them.
        "start = run\ndef run(_):\n    atexit.register(interrupt)\n    start(_)",
        "threading = __import__('threading'); threading._register_atexit(interrupt)",
    ],
    ids=["atexit", "threads"],
)
def test_interrupts_as_the_interpreter_ends_are_silent(code: str) -> None:
    """Torch and others have callbacks there, where an exception is a traceback."""
    done = command(INTERRUPTED + code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def test_an_interrupt_after_the_last_callback_changes_nothing() -> None:
    """Python has taken its handlers away by then, and a signal would kill the process."""
    done = command("""
class Late:
    def __del__(self, getpid=os.getpid, kill=os.kill):
        kill(getpid(), 2)

sys.modules["late"] = Late()
def run(_):
    return 0
""")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_while_the_line_is_written_does_not_write_it_again() -> None:
    """Python calls a handler again in the middle of itself."""
    done = command("""
write = os.write
def write_and_interrupt(*arguments):
    os.write = write
    write(*arguments)
    interrupt()

os.write = write_and_interrupt
cli._parser = interrupt
def run(_):
    raise AssertionError
""")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def test_an_interrupt_in_a_finalizer_is_delivered_again() -> None:
    """Python can raise nothing there: it would be lost, and shown as ignored."""
    done = command("""
class Final:
    def __del__(self):
        interrupt()

def run(_):
    Final()
    time.sleep(30)
    print("slept")
""")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def test_repeats_do_not_come_between_what_is_closed() -> None:
    """A key that is held down, or a launcher that passes on what the terminal sends to all."""
    done = command("""
def run(_):
    try:
        interrupt()
    finally:
        for number in range(20):
            interrupt()
        print("closed")
""")
    assert (done.returncode, done.stdout, done.stderr) == (130, "closed\n", LINE)


def test_a_close_that_hangs_can_be_left_by_a_second_interrupt() -> None:
    """Later than a repeat comes."""
    done = command("""
ctrl_c._REPEAT_S = 0.0
def run(_):
    try:
        interrupt()
    finally:
        try:
            interrupt()
        finally:
            time.sleep(100)
""")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def test_an_error_that_an_interrupt_caused_is_an_interrupt() -> None:
    """Libraries have their own errors for an import, or a callback, that did not get through."""
    done = command("""
def run(_):
    try:
        interrupt()
    except KeyboardInterrupt:
        raise ImportError("cannot import half a module")
""")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def test_an_interrupt_in_code_that_is_executed_from_a_string_ends_with_the_exit_code(
    tmp_path: Path,
) -> None:
    """Data classes are made so; Python would kill a module that it runs by SIGINT at its end."""
    code = "def run(_):\n    exec('interrupt()')\n"
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{COMMAND.format(code=code)}"
    (tmp_path / "command.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "command"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def test_an_interrupt_of_a_background_job_stays_ignored() -> None:
    """A shell starts it so."""
    done = command("""
signal.signal(signal.SIGINT, signal.SIG_IGN)
def run(_):
    interrupt()
    return 0
""")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("start", ["module", "script"])
def test_an_interrupt_while_the_package_is_imported_is_no_traceback(
    tmp_path: Path, start: str
) -> None:
    """Before `main` is called; a program that merely imports it has a KeyboardInterrupt."""
    (tmp_path / "numpy.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    script = tmp_path / "moecache"
    script.write_text("from moecache.__main__ import main\nraise SystemExit(main())\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    arguments = {"module": ["-m", "moecache"], "script": [str(script)]}[start]
    done = subprocess.run(
        [sys.executable, *arguments, "--version"],
        env={**os.environ, "PYTHONPATH": path},  # noqa: TID251 - a child's
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)

    done = subprocess.run(
        [sys.executable, "-c", "import moecache"],
        env={**os.environ, "PYTHONPATH": path},  # noqa: TID251 - a child's
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "KeyboardInterrupt" in done.stderr


def test_importing_the_package_leaves_pythons_handler() -> None:
    """In a program of any name."""
    done = run_child(
        "import signal; sys.argv[0] = 'bin/moecache'; import moecache\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    assert done.stdout == "True\n"


def test_a_command_has_the_handler_after_its_package_was_imported() -> None:
    """Which released it at its end."""
    done = run_child(
        "import signal; sys.argv[0] = 'bin/moecache'; import moecache.__main__\n"
        "from moecache import cli; from moecache.commands.ctrl_c import CTRL_C\n"
        "cli.main = lambda: print(signal.getsignal(signal.SIGINT) == CTRL_C._handle) or 0\n"
        "sys.exit(moecache.__main__.main())"
    )
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_a_storm_of_interrupts_ends_a_command_cleanly() -> None:
    """At any time from the first line of the package on, ten or more, 1 to 50 ms apart."""
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", DEMO, str(ROOT)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(draw.uniform(0.05, 1.0))
        for _ in range(draw.randint(10, 20)):
            child.send_signal(signal.SIGINT)
            time.sleep(draw.uniform(0.001, 0.05))
        # The demo's figures stand there, if it came so far.
        errors = re.sub(r"(text|speed|memory|output) .*\n", "", child.communicate(timeout=60)[1])
        assert (child.returncode, errors) in {(130, LINE), (130, ""), (0, "")}, seed
