"""Who is compared by `bench.first_token`, and one run of each."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench.held_memory import back
from bench.limits import MemoryLimit
from bench.page_cache import ModelPages
from bench.prompt_text import PromptText, prompt_text
from bench.timed_process import TimedProcess, time_process

ROOT = Path(__file__).parents[1]
OURS, PROFILE, LLAMA = "moecache", "moecache, profile", "llama.cpp"
# What a process takes beside a model.
_OTHERS_BYTES = 2 * 2**30
# What the installed script `moecache` does, which knows one checkout alone.
_SCRIPT = (
    "import sys; sys.argv[0] = 'moecache'; from moecache.__main__ import main; sys.exit(main())"
)
# Tokens that the run decodes whose profile is used.
_PROFILE_TOKENS = "32"


class Kind(NamedTuple):
    """What a run begins with: a limit, the model's pages, and free memory that is the guest's."""

    limit: int | None
    is_warm: bool
    is_backed: bool


@dataclass
class Contestant:
    """A command that continues the prompt, and how its runs went.

    Attributes
    ----------
    name : str
    directory : Path
        The checkout that it is of, and runs in.
    command : list of str
    commit : str
        The checkout's; "" if git does not know it, or it is none.
    profiles : dict of int or None to Path
        The profile that a run gets a copy of, by limit; else it gets none.
    runs : dict of Kind to list of TimedProcess
    """

    name: str
    directory: Path
    command: list[str]
    commit: str = ""
    profiles: dict[int | None, Path] = field(default_factory=dict)
    runs: dict[Kind, list[TimedProcess]] = field(default_factory=dict)

    def run(
        self, kind: Kind, pages: ModelPages, *, threads: int, pause_s: float = 0.0
    ) -> TimedProcess:
        """Run once from what a kind says, and return how it went; SystemExit if it fails.

        Parameters
        ----------
        kind : Kind
        pages : ModelPages
            The model's.
        threads : int
        pause_s : float, default 0.0
            To wait before it where free memory is to be the host's.
        """
        command = self.command
        with ExitStack() as stack:
            if kind.limit in self.profiles:
                # A copy: a run writes its own use of experts into it.
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                copy = shutil.copy(self.profiles[kind.limit], folder)
                command = [*command, "--profile", copy]
            join = None
            if kind.limit is not None:
                join = stack.enter_context(MemoryLimit(kind.limit)).join_file
            _prepare(kind, pages, pause_s)
            return time_process(
                command,
                directory=self.directory,
                variables={
                    "PYTHONPATH": str(self.directory),
                    "MOECACHE_THREADS": str(threads),
                    "OMP_NUM_THREADS": str(threads),
                },
                join=join,
            )


def _prepare(kind: Kind, pages: ModelPages, pause_s: float) -> None:
    if kind.is_warm:
        pages.bring_in()
    else:
        pages.drop()
    if not kind.is_backed:
        time.sleep(pause_s)
        return
    back(kind.limit or pages.nbytes + _OTHERS_BYTES, kind.is_warm * pages.nbytes)
    if kind.is_warm:
        # That may have taken some of them.
        pages.bring_in()


def find_contestants(
    arguments: argparse.Namespace, prompt: PromptText
) -> tuple[list[Contestant], list[str]]:
    """Return those that can run, and why others are left out."""
    command = _generate(arguments, prompt.text, str(arguments.max_new_tokens))
    found = [Contestant(OURS, ROOT, command, _commit(ROOT))]
    for directory in map(Path.resolve, arguments.also):
        _check_checkout(directory)
        name = f"{OURS} {directory.name}"
        if name in {one.name for one in found}:
            name = f"{OURS} {directory}"
        found.append(Contestant(name, directory, command, _commit(directory)))
    if arguments.profile:
        found.append(Contestant(PROFILE, ROOT, command, _commit(ROOT)))
    left_out = []
    if arguments.model.suffix != ".gguf":
        left_out.append(f"{LLAMA}: it reads GGUF files alone")
    elif subprocess.run(
        [sys.executable, "-c", "import llama_cpp"], check=False, capture_output=True
    ).returncode:
        left_out.append(f"{LLAMA}: install it with: pip install '.[bench-llama]'")
    else:
        task = {"path": str(arguments.model), "tokens": prompt.tokens}
        task |= {"new_tokens": arguments.max_new_tokens, "threads": arguments.threads}
        command = [sys.executable, "-m", "bench.llama_first_token", json.dumps(task)]
        found.append(Contestant(LLAMA, ROOT, command))
    return found, left_out


def write_profiles(
    arguments: argparse.Namespace,
    one: Contestant,
    limits: list[int | None],
    pages: ModelPages,
    folder: Path,
) -> None:
    """Give a contestant profiles of earlier use, one for each limit: a run of another prompt."""
    other = prompt_text(arguments.model, arguments.prompt_tokens, seed=1)
    command = _generate(arguments, other.text, _PROFILE_TOKENS)
    for number, limit in enumerate(limits):
        path = folder / f"profile-{number}"
        earlier = Contestant(one.name, one.directory, [*command, "--profile", str(path)])
        earlier.run(Kind(limit, is_warm=False, is_backed=False), pages, threads=arguments.threads)
        one.profiles[limit] = path


def _generate(arguments: argparse.Namespace, prompt: str, num_tokens: str) -> list[str]:
    command = [sys.executable, "-c", _SCRIPT, "generate", str(arguments.model), prompt]
    command += ["--max-new-tokens", num_tokens, "--temperature", "0"]
    for option in ("memory", "compute"):
        if getattr(arguments, option) is not None:
            command += [f"--{option}", getattr(arguments, option)]
    return command


def _check_checkout(directory: Path) -> None:
    """Raise SystemExit unless a directory's own package, compiled, is the one that runs in it."""
    program = "import moecache, moecache.kernels; print(moecache.__file__)"
    said = "there is no such directory"
    if directory.is_dir():
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(directory)},  # noqa: TID251 - passed on
        )
        if done.stdout.strip() == str(directory / "moecache" / "__init__.py"):
            return
        said = done.stdout + done.stderr[-1000:]
    raise SystemExit(
        f"--also {directory}: no checkout with moecache built in place for {sys.executable} "
        f"(python setup.py build_ext --inplace): {said}"
    )


def _commit(directory: Path) -> str:
    """Return a checkout's commit, with a "+" if files are changed; "" if git does not know."""
    done = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"],  # noqa: S607 - the user's git
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
    )
    return done.stdout.strip()
