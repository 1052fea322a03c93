"""A model larger than memory, beside llama.cpp that maps the same weights: tokens per second.

    python -m bench.qwen3_moe DIR                     # a model of 3.2 GB
    python -m bench.against_llama_cpp DIR GGUF ...    # writes the same model as GGUF
    python -m bench.larger_than_memory DIR GGUF --work /on/the/disk --json FILE

    python -m bench.larger_than_memory DIR --formats FP8 INT4 ...   # quantized ones beside it

    python -m bench.real_size FILE.gguf               # a model of 17 GB, the same file for both
    python -m bench.larger_than_memory FILE.gguf FILE.gguf --in-place --limits 6GiB 4GiB \
        --only "llama.cpp" "moecache fast" --prefetch off auto router --prompt-tokens 512

Each contestant is a process in a memory cgroup of its own, and nothing of its file is in memory
when it starts. It reads a prompt and is given 48 more tokens, one at a time, the same to
all; after `--seconds` it stops where it is. Shown are medians of runs, tokens per second of the
clock and of CPU time, and the bytes that it read a token. The disk's read-ahead decides what
demand paging does: each that is asked for has a disk of its own (a loop device, which needs root).
With --backed as much memory as the limit is touched by another process, which ends as a contestant
starts: a virtual machine's host may have taken it back, and whoever touches it then waits for it.
It may do so again after some 2 s, which torch's import alone takes.
"moecache file" computes a GGUF file without torch, as `moecache generate` does.
Limits are sizes, or shares of the GGUF file or, without it, of the first checkpoint. Files that are
too large to be copied stay where they are (--in-place): then their disk itself is given the
read-ahead. Checkpoints given with
--formats are computed by the kernels ("moecache fast NAME") in the same limits.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.against_llama_cpp import LLAMA, NEW_TOKENS, PROMPT, llama, ours, ours_of_file
from bench.disks import describe_read_ahead, disk_with, read_ahead_of
from bench.held_memory import back
from bench.limits import MemoryLimit
from bench.runs import begin, write_figures
from moecache import kernels
from moecache.sizing.host_memory import peak_rss_bytes
from moecache.units import format_bytes, parse_bytes

# Tokens that all keep room for: what moecache leaves beside the slots by default.
CONTEXT = 4096
ROOT = Path(__file__).parents[1]
TORCH, FAST, FILE = "moecache torch", "moecache fast", "moecache file"
CONTESTANTS = (LLAMA, TORCH, FAST, FILE)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.larger_than_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("gguf", type=Path, nargs="?")
    parser.add_argument("--formats", type=Path, nargs="*", default=[])
    parser.add_argument("--work", type=Path, help="where disks are made (beside the checkpoint)")
    parser.add_argument("--read-ahead", nargs="*", default=["8MiB", "128KiB"])
    parser.add_argument("--in-place", action="store_true", help="copy nothing")
    parser.add_argument("--limits", nargs="*", default=["0.5", "0.3333"])
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, default=CONTESTANTS[:3])
    parser.add_argument("--prefetch", nargs="*", default=["auto"], help='of "fast" and "file"')
    parser.add_argument("--backed", action="store_true", help="memory that is the guest's own")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT)
    parser.add_argument("--seconds", type=float, default=60)
    arguments = begin(parser, argv, rounds=3)
    figures: list[dict[str, Any]] = []
    paths = {TORCH: arguments.checkpoint}
    for mode in arguments.prefetch:
        paths[FAST if mode == "auto" else f"{FAST}, prefetch {mode}"] = arguments.checkpoint
    paths |= {f"{FAST} {path.name}": path for path in arguments.formats}
    if arguments.gguf is not None:
        paths[LLAMA] = arguments.gguf
        for mode in arguments.prefetch:
            paths[FILE if mode == "auto" else f"{FILE}, prefetch {mode}"] = arguments.gguf
    chosen = [name for name in paths if name.split(",")[0] in arguments.only]
    chosen += [f"{FAST} {path.name}" for path in arguments.formats]
    if not chosen:
        parser.error(f"{', '.join(arguments.only)}: give a GGUF file behind the checkpoint")
    size = _size(arguments.gguf or arguments.checkpoint)
    needed = sum(map(_size, {paths[name] for name in chosen}))
    work = arguments.work or arguments.checkpoint.parent
    for read_ahead in arguments.read_ahead:
        with contextlib.ExitStack() as undo:
            if arguments.in_place:
                there = {name: paths[name] for name in chosen}
                undo.enter_context(read_ahead_of(arguments.checkpoint, parse_bytes(read_ahead)))
            else:
                disk = undo.enter_context(disk_with(parse_bytes(read_ahead), work, needed))
                copies = {path: disk / str(number) for number, path in enumerate(paths.values())}
                for path in {paths[name] for name in chosen}:
                    (shutil.copy if path.is_file() else shutil.copytree)(path, copies[path])
                there = {name: copies[paths[name]] for name in chosen}
            print(describe_read_ahead(next(iter(there.values()))), flush=True)
            for limit in arguments.limits:
                nbytes = int(size * float(limit)) if limit[-1].isdigit() else parse_bytes(limit)
                found = compare(arguments, there, nbytes)
                for figure in found:
                    figures.append({"read_ahead": read_ahead, "limit": limit, **figure})
                    print(describe(figures[-1]), flush=True)
    write_figures(arguments, backed=arguments.backed, figures=figures)
    return 0


def compare(
    arguments: argparse.Namespace, paths: dict[str, Path], limit: int
) -> list[dict[str, Any]]:
    """Run all contestants in turns; return what each did, medians of its runs."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in paths}
    for number in range(arguments.rounds):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            task = {
                "name": name,
                "path": str(paths[name]),
                "threads": arguments.threads,
                "seconds": arguments.seconds,
                "num_prompt": arguments.prompt_tokens,
            }
            runs[name].append(run(task, limit, is_backed=arguments.backed))
    first = next(iter(runs.values()))[0]["chosen"]
    return [
        {
            "name": name,
            "limit_bytes": limit,
            "runs": found,
            "same_choice": _same(first, found[0]["chosen"]),
            **{
                key: statistics.median(run[key] for run in found)
                for key in (
                    *("tokens_per_s", "tokens_per_cpu_s", "read_bytes_per_token"),
                    *("hit_rate", "peak_bytes", "opened_s", "prompt_s"),
                )
            },
            "num_tokens": min(run["num_tokens"] for run in found),
        }
        for name, found in runs.items()
    ]


def _same(one: list[int], other: list[int]) -> float:
    """Return how often two would have chosen the same next token."""
    return float(np.mean([a == b for a, b in zip(one, other, strict=False)]))


def run(task: dict[str, Any], limit: int, *, is_backed: bool) -> dict[str, Any]:
    """Run one contestant in a process and a limit of its own."""
    path = Path(task["path"])
    for file in [path] if path.is_file() else path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with MemoryLimit(limit) as group:
        task = {**task, "join": str(group.join_file)}
        # As the command `moecache` has it.
        waiting = {} if task["name"] == LLAMA else {"OMP_WAIT_POLICY": "PASSIVE"}
        if is_backed:
            back(limit)
        program = "import sys, bench.larger_than_memory as b; b.child(sys.argv[1])"
        done = subprocess.run(
            [sys.executable, "-c", program, json.dumps(task)],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=os.environ | waiting,  # noqa: TID251 - passed on
        )
        facts = group.facts()
    if done.returncode:
        raise SystemExit(
            f"{task['name']} failed ({done.returncode}, {facts}):\n{done.stderr[-3000:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"facts": facts}


def child(text: str) -> None:
    """Join the limit, decode, and print what was measured."""
    task = json.loads(text)
    Path(task["join"]).write_text(str(os.getpid()))
    kernels.use_threads(task["threads"])
    path, name = Path(task["path"]), task["name"]
    num_prompt = task["num_prompt"]
    tokens = np.random.default_rng(0).integers(5, 200, num_prompt + NEW_TOKENS).tolist()
    if name == LLAMA:
        opened = llama(path, task["threads"], repacked=False, context=CONTEXT)
    else:
        compute, _, prefetch = name.removeprefix("moecache ").partition(", prefetch ")
        options = {"prefetch": prefetch} if prefetch else {}
        if compute == "file":
            opened = ours_of_file(path, None, **options)
        else:
            opened = ours(path, None, compute.split()[0], task["threads"], **options)
    start = time.perf_counter()
    with opened as one:
        opened_s = time.perf_counter() - start
        one.prompt(tokens[:num_prompt])
        # From nothing, as a user waits for it: opening, and whatever is read for it, included.
        prompt_s = time.perf_counter() - start
        cpu, clock, before = time.process_time(), time.perf_counter(), _read_bytes()
        chosen = []
        offload = getattr(one, "offload", None)
        counted = offload.stats() if offload else None
        for token in tokens[num_prompt:]:
            chosen.append(int(one.token(token).argmax()))
            if time.perf_counter() - clock > task["seconds"]:
                break
        seconds, cpu_s = time.perf_counter() - clock, time.process_time() - cpu
        read = _read_bytes() - before
        hit_rate = (offload.stats() - counted).hit_rate if offload else 0.0
    found = {
        "num_tokens": len(chosen),
        "opened_s": opened_s,
        "prompt_s": prompt_s,
        "tokens_per_s": len(chosen) / seconds,
        "tokens_per_cpu_s": len(chosen) / cpu_s,
        "read_bytes_per_token": read / len(chosen),
        "chosen": chosen,
        "hit_rate": hit_rate,
        "peak_bytes": peak_rss_bytes(),
    }
    print(json.dumps(found))


def describe(figure: dict[str, Any]) -> str:
    """Return a figure as a line."""
    return (
        f"{figure['read_ahead']:>7} {format_bytes(figure['limit_bytes']):>9} {figure['name']:24} "
        f"{figure['tokens_per_s']:7.2f} tokens/s {figure['tokens_per_cpu_s']:7.1f} tokens/CPU-s "
        f"{format_bytes(figure['read_bytes_per_token']):>9} read a token, "
        f"{figure['num_tokens']} tokens, hit rate {figure['hit_rate']:.2f}, "
        f"{format_bytes(figure['peak_bytes'])} resident at most, first token after "
        f"{figure['prompt_s']:.1f} s, of which {figure['opened_s']:.1f} to open"
    )


def _size(path: Path) -> int:
    """Return the bytes of a file, or of a directory's files."""
    files = [path] if path.is_file() else path.iterdir()
    return sum(file.stat().st_size for file in files)


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


if __name__ == "__main__":
    raise SystemExit(main())
