"""io_uring really refused, as in many containers: by a seccomp filter, in a child process."""

import ctypes
import errno
import os
import platform
from pathlib import Path

import pytest

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.pages import run_child

# What the filter does with io_uring_setup (425 on every machine), then the program.
_REFUSE = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | int(sys.argv[1])),
        (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
filter = Program(len(code), ctypes.cast(program, ctypes.c_void_p))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(filter), 0, 0):
    print("no seccomp")
    sys.exit(77)
"""

_RUNTIME = """
import logging, threading
import numpy as np
import moecache
from moecache.reader._reader import Reader
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
with moecache.open(sys.argv[2], slots=4, read=sys.argv[3], prefault="off") as runtime:
    reading = runtime.stats().reading
    threads = [t.name for t in threading.enumerate() if t.name.startswith("moecache-loader")]
    print("engine", reading.engine, reading.way, len(threads))
    for layer in range(runtime.layout.num_layers):
        for expert in range(runtime.layout.num_experts):
            with runtime.lease(layer, [expert]) as lease:
                parts = runtime.expert(int(lease.slots[0]), layer)
                roles = runtime.layout.role_names
                print("expert", b"".join(parts[role].tobytes() for role in roles).hex())
    runtime.cache.check()
print("threads", threading.active_count())
try:
    Reader([0], engine="io_uring")
except OSError as error:
    print("refused", error.errno, error)
"""


@pytest.mark.parametrize("read", ["direct", "buffered"])
@pytest.mark.parametrize("name", ["EPERM", "ENOSYS"])
def test_a_runtime_reads_by_threads_where_the_kernel_refuses_io_uring(
    tmp_path: Path, read: str, name: str
) -> None:
    """With the same bytes, one line in the log that says why, and threads that end."""
    if platform.system() != "Linux" or not hasattr(ctypes.CDLL(None), "prctl"):
        pytest.skip("seccomp is Linux's")
    model = write_checkpoint(tmp_path / "model", num_layers=2)
    error = getattr(errno, name)

    done = run_child(_REFUSE + _RUNTIME, error, model.path, read)
    if done.returncode == 77:
        pytest.skip("this system takes no seccomp filter")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    reason = f"INFO reading.threads the kernel refuses io_uring: {os.strerror(error)}"
    assert lines.count(reason) == 1
    assert not any(line.startswith(("WARNING", "ERROR")) for line in lines)
    (engine,) = (line.split() for line in lines if line.startswith("engine"))
    assert engine[1] == "threads"
    assert int(engine[3]) == (8 if engine[2] == "direct" else 2)
    found = [line.split()[1] for line in lines if line.startswith("expert ")]
    wanted = [
        b"".join(parts[role].tobytes() for role in ("gate_up", "down")).hex()
        for layer in model.experts
        for parts in layer
    ]
    assert found == wanted
    assert f"refused {error} " in done.stdout
    assert "threads 1" in lines
