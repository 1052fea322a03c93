"""Memory limits from 0.5 to 4 GiB: how much of each a model uses by default, and whether it holds.

    python -m bench.qwen3_moe DIR                   # a model of 3.2 GB
    python -m bench.reserve DIR --json FILE

A process of its own per limit (a memory cgroup) and way of reading loads the model without saying
how much memory to use, reads a prompt of 512 tokens and decodes 64. Nothing of the model is in the
page cache before. What is used: the cgroup's usage less its page cache, but with what of that is
mapped (the trunk); the most of it, seen every 20 ms, counts. Shown beside: how much it was before
the plan, slots, kills.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from bench.bigger_than_ram import drop_from_page_cache
from bench.limits import MemoryLimit
from bench.machine import describe_machine
from moecache.units import format_bytes, parse_bytes

ROOT = Path(__file__).parents[1]
LIMITS = ("0.5GiB", "0.75GiB", "1GiB", "1.5GiB", "2GiB", "3GiB", "4GiB")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if a limit killed a process."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.reserve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--limits", nargs="*", default=LIMITS)
    parser.add_argument("--reads", nargs="*", default=["direct", "buffered"])
    parser.add_argument("--compute", default="fast")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    print(describe_machine(), flush=True)
    rows = []
    for read in arguments.reads:
        for limit in arguments.limits:
            task = {"read": read, "compute": arguments.compute}
            task |= {"prompt": arguments.prompt, "tokens": arguments.tokens}
            rows.append(run_one(arguments.checkpoint, parse_bytes(limit), task))
            print(describe(rows[-1]), flush=True)
            if arguments.json is not None:
                found = {"machine": describe_machine(), "rows": rows}
                arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row["num_oom_kills"] for row in rows))


def run_one(checkpoint: Path, limit: int, task: dict[str, Any]) -> dict[str, Any]:
    """Decode below a limit, in a process of its own; nothing is in the page cache before."""
    drop_from_page_cache(checkpoint)
    with MemoryLimit(limit) as group:
        task = {**task, "path": str(checkpoint), "join": str(group.join_file)}
        done = subprocess.run(
            [sys.executable, "-m", "bench.reserve", "--child", json.dumps(task)],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        facts = group.facts()
    row = {"limit_bytes": limit, "read": task["read"], "exit_code": done.returncode, **facts}
    if done.returncode:
        return {**row, "error": done.stderr.strip().splitlines()[-1:]}
    found = json.loads(done.stdout.splitlines()[-1])
    return {**row, **found, "used_share": found["most_used_bytes"] / limit}


def describe(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    line = f"{format_bytes(row['limit_bytes'])} {row['read']:9}"
    if row["exit_code"]:
        return f"{line} exit code {row['exit_code']}: {row['error']}"
    return (
        f"{line} {row['used_share']:.0%} used, {format_bytes(row['before_bytes'])} before the "
        f"plan, {row['slots']} slots of {format_bytes(row['pool_bytes'])}, kept free "
        f"{format_bytes(row['reserve_bytes'])}; hit rate {row['hit_rate']:.2f}, "
        f"{row['tokens_per_s']:.1f} tokens/s, {row['num_oom_kills']} kills"
    )


def child(task: dict[str, Any]) -> None:
    """Join the limit, decode, and print what was used."""
    Path(task["join"]).write_text(str(os.getpid()))
    import torch

    from moecache.decoding.streams import TokenTimes
    from moecache.integrations.transformers import load
    from moecache.runtime import opening

    group = Path(task["join"]).parent
    plans: list[Any] = []
    before: list[int] = []

    def open_with(plan: Any, store: Any) -> Any:
        plans.append(plan)
        before.append(used_bytes(group))
        return opening.open_with(plan, store)

    sys.modules["moecache.runtime.open"].open_with = open_with  # type: ignore[attr-defined]
    model = load(task["path"], read=task["read"], compute=task["compute"])
    ids = torch.arange(task["prompt"])[None] * 7 % 250 + 5
    times = TokenTimes()
    number = task["tokens"]
    most: list[int] = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            most[0] = max(most[0], used_bytes(group))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with model.moecache:
        model.generate(
            ids, max_new_tokens=number, min_new_tokens=number, do_sample=False, streamer=times
        )
        done.set()
        watcher.join()
        stats = model.moecache.stats()
        gaps = [b - a for a, b in zip(times.stamps_s, times.stamps_s[1:], strict=False)]
        found = {
            "most_used_bytes": most[0],
            "used_at_the_end_bytes": used_bytes(group),
            "before_bytes": before[0],
            "reserve_bytes": plans[0].reserve_bytes,
            "reserve": plans[0].reasons["reserve_bytes"],
            "slots": stats.capacity,
            "all_experts": stats.capacity == stats.total_experts,
            "pool_bytes": stats.pool_bytes,
            "hit_rate": stats.hit_rate,
            "tokens_per_s": 1 / statistics.median(gaps),
        }
    print(json.dumps(found))


def used_bytes(group: Path) -> int:
    """Return a cgroup's usage (v1 or v2) less page cache that nobody has mapped."""
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    stat = {name: int(value) for name, value in lines}
    v1 = (group / "memory.usage_in_bytes").exists()
    usage = int((group / ("memory.usage_in_bytes" if v1 else "memory.current")).read_text())
    cache, mapped = ("total_", "total_mapped_file") if v1 else ("", "file_mapped")
    return usage - stat[cache + "active_file"] - stat[cache + "inactive_file"] + stat[mapped]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        raise SystemExit(0)
    raise SystemExit(main())
