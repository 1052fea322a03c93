"""The contestants of `moecache bench`, each run in a process of its own."""

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moecache.errors import ConfigError, MoeCacheError
from moecache.settings import ranks_environ

# Runs so far: the n-th is the n-th on all ranks.
_GROUPS = itertools.count(1)
_MODULE = "moecache.integrations.transformers._contestant"
# Figures of which the median over all runs is shown.
_FIGURES = (
    "load_s",
    "imports_rss_bytes",
    "peak_rss_bytes",
    "prefill_s",
    "prefill_tokens_per_s",
    "decode_s",
    "decode_tokens_per_s",
    "slot_bytes",
    "prefill_hit_rate",
    "prefill_bytes_read",
    "hit_rate",
    "bytes_per_token",
    "stall_ms_per_token",
)


@dataclass
class Contestant:
    """A way to run the model, and what came of it.

    Attributes
    ----------
    name : str
        The name that is shown.
    task : dict
        The part of the task that sets it apart.
    runs : list of dict
        The measurements of each run.
    left_out : str
        Why it was not run: it has no room, or no kernel.
    error : str
        Why it failed; it is not run again then.
    """

    name: str
    task: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    left_out: str = ""
    error: str = ""

    @property
    def over(self) -> bool:
        """Whether it is not to be run again."""
        return bool(self.left_out or self.error)

    def run(self, task: dict[str, Any]) -> None:
        """Run it once more, with the task that all contestants share."""
        try:
            group = next(_GROUPS) if task.get("ranks", 1) > 1 else None
            found = run_process({**task, **self.task, "group": group})
        except MoeCacheError as error:
            if isinstance(error, ConfigError) and "cannot be computed with compute=" in str(error):
                # No kernel for this model's experts, or none of that kind.
                self.left_out = str(error)
            else:
                self.error = str(error)
            return
        self.left_out = found.get("left_out", "")
        if not self.left_out:
            self.runs.append(found)

    def median(self) -> dict[str, float]:
        """Return the median of each figure that it has."""
        return {
            name: statistics.median(run[name] for run in self.runs)
            for name in _FIGURES
            if self.runs and name in self.runs[0]
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {
            "name": self.name,
            **self.task,
            "median": self.median(),
            "runs": self.runs,
            "left_out": self.left_out or None,
            "error": self.error or None,
        }


def chosen(
    memories: list[str],
    policies: list[str],
    compute: list[str],
    options: Mapping[str, Any],
    *,
    all_: bool,
) -> list[Contestant]:
    """Return what is compared; with `all_` also what one would do without moecache."""
    others = {
        "resident": "all resident",
        "disk_offload": "accelerate disk_offload",
        "experts_on_disk": "device_map, experts on disk",
    }
    return [
        *(Contestant(name, {"kind": kind}) for kind, name in others.items() if all_),
        *(
            Contestant(
                f"moecache {memory} {policy}{'' if way == 'torch' else f' {way}'}",
                {
                    "kind": "moecache",
                    "memory": memory,
                    "policy": policy,
                    "compute": way,
                    **options,
                },
            )
            for memory in memories
            for policy in policies
            for way in compute
        ),
    ]


def differing(contestants: list[Contestant]) -> list[str]:
    """Return the contestants that generated other tokens, in any run, than the first of its kind.

    The kernels round otherwise than torch.
    """
    names: list[str] = []
    firsts: dict[str, Any] = {}
    for contestant in contestants:
        for run in contestant.runs:
            first = firsts.setdefault(contestant.task.get("compute", "torch"), run["tokens"])
            if run["tokens"] != first and contestant.name not in names:
                names.append(contestant.name)
    return names


def run_process(task: dict[str, Any]) -> dict[str, Any]:
    """Run a task in a process of its own, and return what it found.

    A task with a `group` is a rank as this process is one, with those of the other processes.
    The process ends with this one, even if this one is killed.

    Raises
    ------
    ConfigError
        If the process says that the task is wrong.
    MoeCacheError
        If the process failed.
    """
    group = task.get("group")
    with tempfile.TemporaryFile("w+") as noise:
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", _MODULE, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if task["verbose"] else noise,
            text=True,
            env=None if group is None else ranks_environ(group),
        )
        try:
            output, _ = process.communicate(json.dumps(task))
        finally:
            # Ctrl-C: it got the signal as well, but may be busy.
            if process.poll() is None:
                process.kill()
                process.wait()
        noise.seek(0)
        said = noise.read()
    found: Any = None
    with contextlib.suppress(ValueError, IndexError):
        found = json.loads(output.splitlines()[-1])
    if not isinstance(found, dict):
        raise MoeCacheError(_death(process.returncode, said))
    if "error" in found:
        raise (ConfigError if found["usage"] else MoeCacheError)(found["error"])
    return found


def _death(code: int, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if code == -signal.SIGKILL:
        return "was killed: the machine ran out of memory, most likely"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return lines[-1] if lines else f"ended with exit code {code} and said nothing"
