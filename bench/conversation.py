"""A chat whose prompt grows turn by turn: seconds to each first token, with pages kept and without.

    python -m bench.conversation MODEL                     # a directory, or a GGUF file
    python -m bench.real_size FILE.gguf                    # a model of 17 GB
    python -m bench.conversation FILE.gguf --limit 6GiB --json FILE

A process for each way, in a memory cgroup of its own, and nothing of the file is in memory when it
starts: nothing kept, pages in memory, pages in files as well, and the same once more after a
restart, which finds the files. Each turn adds the last answer and `--turn-tokens` of a user to a
prompt of `--prompt-tokens`, and decodes a few tokens. All ways are given the same tokens, and every
first token's logits are compared, bit for bit.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.limits import MemoryLimit
from bench.runs import begin, write_figures
from moecache import kernels
from moecache.commands import collector
from moecache.units import parse_bytes

ROOT = Path(__file__).parents[1]
WAYS = ("nothing kept", "in memory", "in files", "after a restart")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.conversation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", help="of memory; by default there is none")
    parser.add_argument("--memory", help="for experts; by default as much as there is")
    parser.add_argument("--prefix-memory", default="512MiB")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--turn-tokens", type=int, default=150)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    arguments = begin(parser, argv, rounds=1)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in arguments.ways}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(dir=arguments.model.parent) as directory:
            for way in arguments.ways:
                runs[way].append(run(arguments, way, directory))
                print(describe(way, runs[way][-1]), flush=True)
    digests = {json.dumps(one["digests"]) for found in runs.values() for one in found}
    print("logits are equal, bit for bit" if len(digests) == 1 else "LOGITS DIFFER")
    write_figures(arguments, figures=runs, equal=len(digests) == 1)
    return 0 if len(digests) == 1 else 1


def run(arguments: argparse.Namespace, way: str, directory: str) -> dict[str, Any]:
    """Have a conversation in a process of its own."""
    path = arguments.model
    for file in [path] if path.is_file() else path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    task = {
        "model": str(path),
        "way": way,
        "directory": directory,
        "threads": arguments.threads,
        **{
            name: getattr(arguments, name)
            for name in (
                *("memory", "prefix_memory", "prompt_tokens", "turns", "turn_tokens"),
                "new_tokens",
            )
        },
    }
    program = "import sys, bench.conversation as b; b.child(sys.argv[1])"
    command = [sys.executable, "-c", program]
    if arguments.limit is None:
        return _run([*command, json.dumps(task)], way)
    with MemoryLimit(parse_bytes(arguments.limit)) as group:
        return _run([*command, json.dumps(task | {"join": str(group.join_file)})], way)


def _run(command: list[str], way: str) -> dict[str, Any]:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},  # noqa: TID251 - passed on
    )
    if done.returncode:
        raise SystemExit(f"{way} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(text: str) -> None:
    """Have the conversation, and print what was measured."""
    task = json.loads(text)
    if "join" in task:
        Path(task["join"]).write_text(str(os.getpid()))
    kernels.use_threads(task["threads"])
    with collector.waiting():  # as in `moecache chat`
        import torch

        from moecache.decoding.sampler import Sampler, Sampling
        from moecache.decoding.streams import TokenTimes
        from moecache.integrations.transformers import generation, load
        from moecache.integrations.transformers.reading import open_prefixes

    class Given(Sampler):
        """Takes the tokens that an answer is given, and keeps the logits after the prompt."""

        def __init__(self, answer: list[int]) -> None:
            super().__init__(Sampling())
            self.answer, self.first = iter(answer), np.zeros(0, np.float32)

        def draw(self, logits: np.ndarray, _mask: np.ndarray | None = None) -> int:
            if not self.first.size:
                self.first = logits.copy()
            return next(self.answer)

    torch.set_num_threads(task["threads"])
    kept = 0 if task["way"] == WAYS[0] else task["prefix_memory"]
    model = load(task["model"], task["memory"], compute="fast", prefix_memory=kept)
    with model.moecache, torch.no_grad():
        # An answer ends where it is told to.
        model.generation_config.eos_token_id = None
        prefixes = None
        if task["way"] != WAYS[0]:
            in_files = task["way"] in WAYS[2:]
            prefixes = open_prefixes(
                model,
                parse_bytes(task["prefix_memory"]),
                directory=Path(task["directory"]) / "pages" if in_files else None,
                max_disk_bytes=2**40 if in_files else 0,
            )
        tokens = _tokens(task["prompt_tokens"], 0)
        found: dict[str, Any] = {"turns": [], "digests": []}
        for turn in range(task["turns"]):
            answer = _tokens(task["new_tokens"], 1000 + turn)
            sampler, before, read = Given(answer), model.moecache.stats(), []
            times = TokenTimes(
                lambda before=before, read=read: read.append(
                    (model.moecache.stats() - before).bytes_read
                )
            )
            generation.continue_tokens(
                model,
                torch.tensor([tokens]),
                times,
                max_new_tokens=len(answer),
                prefixes=prefixes,
                make_sampler=lambda *_, sampler=sampler: sampler,
            )
            digest = hashlib.blake2b(sampler.first.tobytes(), digest_size=16)
            found["digests"].append(digest.hexdigest())
            found["turns"].append(
                {
                    "tokens": len(tokens),
                    "known": times.cached_tokens,
                    "seconds": times.prefill_s,
                    "bytes_read": read[0],
                }
            )
            tokens = [*tokens, *answer, *_tokens(task["turn_tokens"], 1 + turn)]
        if prefixes is not None:
            prefixes.close()
    print(json.dumps(found))


def _tokens(num: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, 200, num)]


def describe(way: str, found: dict[str, Any]) -> str:
    """Return a run as a line."""
    turns = ", ".join(
        f"{turn['seconds']:.2f} s ({turn['known']} of {turn['tokens']})" for turn in found["turns"]
    )
    return f"{way:16} first token after {turns}"


if __name__ == "__main__":
    raise SystemExit(main())
