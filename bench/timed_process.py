"""A command from its start to its end: when it wrote what, and what it took."""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# Linux counts `ru_inblock` in these, whatever the disk's own blocks are.
_BLOCK_BYTES = 512
_BYTECODE = Path(__file__).parents[1] / "build" / "bytecode"
_JOIN = ["sh", "-c", 'echo $$ > "$0"; exec "$@"']


@dataclass(frozen=True)
class TimedProcess:
    """How a command went that ended well.

    Attributes
    ----------
    first_s : float
        From its start to its first byte on standard output.
    last_s : float
        From its start to its last byte there.
    end_s : float
        From its last byte there until it had ended.
    user_s, system_s : float
        CPU time of all its threads.
    read_bytes : int
        What was read from disks for it.
    peak_bytes : int
        Most memory that was resident up to its last byte, with mapped pages of files.
    output, errors : str
        What it wrote to standard output and standard error.
    """

    first_s: float
    last_s: float
    end_s: float
    user_s: float
    system_s: float
    read_bytes: int
    peak_bytes: int
    output: str
    errors: str


def time_process(
    command: list[str], *, directory: Path, variables: dict[str, str], join: Path | None = None
) -> TimedProcess:
    """Run a command, and return how it went.

    Parameters
    ----------
    command : list of str
    directory : Path
        Where it runs.
    variables : dict of str to str
        Of the environment, beside those of this process and of `bytecode_variables`.
    join : Path, optional
        The `cgroup.procs` of a cgroup that it runs in.

    Raises
    ------
    SystemExit
        If it fails, or writes nothing.
    """
    if join is not None:
        command = [*_JOIN, str(join), *command]
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            cwd=directory,
            env=os.environ | bytecode_variables() | variables,  # noqa: TID251 - passed on
        ) as process:
            assert process.stdout is not None
            parts: list[bytes] = []
            stamps_s: list[float] = []
            peak_bytes = 0
            while part := process.stdout.read(65536):
                stamps_s.append(time.perf_counter() - start)
                parts.append(part)
                peak_bytes = max(peak_bytes, _peak_bytes(process.pid))
            # Not `wait`, which does not say what the process took.
            _, status, used = os.wait4(process.pid, 0)
            ended_s = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if process.returncode or not parts:
        raise SystemExit(
            f"{' '.join(command)}\nended with {process.returncode} and "
            f"{'some' if parts else 'no'} text:\n{said[-3000:]}"
        )
    return TimedProcess(
        first_s=stamps_s[0],
        last_s=stamps_s[-1],
        end_s=ended_s - stamps_s[-1],
        user_s=used.ru_utime,
        system_s=used.ru_stime,
        read_bytes=used.ru_inblock * _BLOCK_BYTES,
        peak_bytes=peak_bytes,
        output=b"".join(parts).decode(errors="replace"),
        errors=said,
    )


def bytecode_variables() -> dict[str, str]:
    """Return what makes Python keep bytecode, as users' does, where this process is told not to.

    Compiling torch and transformers again at each start takes longer than all else of an import.
    It is kept below build/, so that nothing else's imports are another matter afterwards.
    """
    if not sys.dont_write_bytecode:
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(_BYTECODE)}


def _peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had resident; 0 if it has ended.

    Not `ru_maxrss`, which begins with that of the process that started it.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
