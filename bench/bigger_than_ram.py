"""A model larger than memory: demand paging against a cache of its own, in one run.

    python -m bench.bigger_than_ram --dir=/on/the/disk --trace ../shared/traces/nvmoe-olmoe.npz

Makes a random checkpoint of the trace's shape, replays the trace's routing token by token in a
process per contestant, each in a memory cgroup of its own, and prints tokens/s, hit rate, bytes
read per token and the disk's rate beside the best it gives. Each routed expert is used: a number
of every page of it is read (`--compute` multiplies instead). All contestants must give the same
numbers, and the kernel must say that the limit held, or no figure is shown.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import moecache
from bench.checkpoint import Size, write_checkpoint
from bench.contestants import BUFFERED, CONTESTANTS
from bench.limits import MemoryLimit, NoLimitError
from bench.machine import describe_machine
from bench.traces import routing_trace
from moecache import packing, prefault
from moecache.reader._reader import Reader
from moecache.study import Trace, replay
from moecache.units import format_bytes, parse_bytes

HIDDEN = 1024
DEFAULT_EXPERT = "1536KiB"
ROOT = Path(__file__).parents[1]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    arguments = parser().parse_args(argv)
    trace, num_experts, name = load_trace(arguments)
    num_tokens = arguments.warm + arguments.tokens
    trace = np.ascontiguousarray(trace[:num_tokens])
    if len(trace) < num_tokens:
        arguments.tokens = len(trace) - arguments.warm
    print(f"{describe_machine()}, moecache {moecache.__version__}")
    with tempfile.TemporaryDirectory(prefix="moecache-bench-", dir=arguments.dir) as directory:
        folder = Path(directory)
        np.save(folder / "trace.npy", trace)
        size = size_of(trace, num_experts, parse_bytes(arguments.expert_size))
        limit = int(size.expert_bytes * arguments.memory)
        (folder / "model").mkdir()
        print(f"writing {format_bytes(size.expert_bytes)} of experts ...", flush=True)
        write_checkpoint(folder / "model", size)
        packing.pack(folder / "model", folder / "packed")
        found = [disk_best(folder / "model")]
        print(
            f"{name}: {trace.shape[1]} layers x {num_experts} experts of "
            f"{format_bytes(size.expert_bytes / trace.shape[1] / num_experts)}, "
            f"top-{trace.shape[2]}; {arguments.warm} + {arguments.tokens} tokens; a limit of "
            f"{format_bytes(limit)}"
        )
        try:
            results = compare(arguments, folder, limit, found)
        except NoLimitError as error:
            print(f"bigger_than_ram: {error}", file=sys.stderr)
            return 3
    summary = summarise(arguments, results, statistics.median(found), limit)
    summary |= {
        "machine": f"{os.cpu_count()} cores, Linux {platform.release()}, {platform.machine()}",
        "trace": name,
        "shape": [trace.shape[1], num_experts, trace.shape[2]],
        "experts_bytes": size.expert_bytes,
        "num_warm": arguments.warm,
        "num_tokens": arguments.tokens,
        "num_runs": arguments.runs,
        "computes": arguments.compute,
    }
    summary["belady_hit_rate"] = belady(trace, num_experts, summary, arguments.warm)
    for line in table(summary):
        print(line)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(summary, indent=1) + "\n")
    if arguments.plot:
        plot(
            summary,
            f"{name}, a limit of {format_bytes(limit)} for "
            f"{format_bytes(size.expert_bytes)} of experts",
            arguments.plot,
        )
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(
        prog="bigger_than_ram",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--dir", help="where to put the model; on the disk to be measured (default: TMPDIR)")
    add(
        "--trace",
        help='an .npz of routing (experts [T, L, K]), "tiny" for that of the tiny model, '
        "by default a synthetic one",
    )
    add("--expert-size", default=DEFAULT_EXPERT, metavar="SIZE")
    add("--memory", type=float, default=1 / 3, help="limit, as a share of all experts (1/3)")
    add("--reserve", default="32MiB", help="what the runtime leaves of the limit (32MiB)")
    add("--warm", type=int, default=48, help="tokens before the measured ones")
    add("--tokens", type=int, default=96, help="measured tokens")
    add("--runs", type=int, default=3, help="runs of each contestant, interleaved; medians count")
    add(
        "--policies",
        nargs="*",
        default=["lfru", "lru"],
        help='of the own cache; "echo+auto" prefetches',
    )
    add("--only", nargs="*", choices=CONTESTANTS, help="leave the others out")
    add("--compute", action="store_true", help="multiply with each expert (float32, NumPy)")
    add("--limit-is-set", action="store_true", help="this process is limited already: make none")
    add("--json", metavar="PATH", help="write the figures there")
    add("--plot", metavar="PATH", help="draw them there (PNG; needs matplotlib)")
    return found


def load_trace(arguments: argparse.Namespace) -> tuple[np.ndarray, int, str]:
    """Return routing [T, L, K], the number of experts, and a name."""
    if arguments.trace is None:
        num_tokens = arguments.warm + arguments.tokens
        trace = routing_trace(num_tokens, num_layers=8, num_experts=32, top_k=4)
        return trace, 32, "synthetic"
    if arguments.trace == "tiny":
        return tiny_trace(arguments.warm + arguments.tokens), 32, "tiny_moe"
    with np.load(arguments.trace) as file:
        meta = json.loads(str(file["meta"]))
        return (
            file["experts"].astype(np.int32),
            int(meta["num_experts"]),
            Path(arguments.trace).stem,
        )


def tiny_trace(num_tokens: int) -> np.ndarray:
    """Record what the trained tiny model routes to while it writes."""
    from examples import numpy_loop

    steps: list[np.ndarray] = []
    with moecache.open(ROOT / "examples/tiny_moe", memory="100%", prefault="off") as runtime:
        routed = numpy_loop.through_moecache(runtime)

        def recorded(layer: int, hidden: Any, ids: np.ndarray, weights: Any) -> Any:
            if len(ids) == 1:
                steps.append(ids[0].astype(np.int32))
            return routed(layer, hidden, ids, weights)

        model = numpy_loop.NumpyMoe(runtime.store, recorded)
        for _ in numpy_loop.generate(model, b"import os\n", num_tokens + 1, 0.7, 0):
            pass
        num_layers = runtime.layout.num_layers
    return np.stack(steps).reshape(-1, num_layers, len(steps[0]))


def size_of(trace: np.ndarray, num_experts: int, expert_bytes: int) -> Size:
    """Return a checkpoint of the trace's shape whose experts have about that size."""
    width = max(1, round(expert_bytes / (3 * HIDDEN * 4)))
    return Size(trace.shape[1], num_experts, trace.shape[2], HIDDEN, width)


def disk_best(path: Path) -> float:
    """Return the rate of direct reads, bytes per second, of the best size and depth."""
    files = sorted(path.glob("layer-*.safetensors"))
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    part = 4 * 2**20
    target = moecache.HostSlots(
        moecache.ExpertLayout.uniform(num_layers=1, num_experts=64, top_k=1, expert_bytes=part), 64
    ).slab("expert")
    queues = ((4, 2**20), (16, 2**19), (32, 2**19), (16, 2**20), (32, 2**18))
    rates: dict[tuple[int, int], list[float]] = {queue: [] for queue in queues}
    for depth, piece_bytes in queues * 3:
        reader = Reader(descriptors, direct=True, depth=depth, piece_bytes=piece_bytes)
        places = [
            (number, offset)
            for number, file in enumerate(files)
            for offset in range(0, file.stat().st_size - part, part)
        ][:64]
        loads: list[Any] = [
            (0, ((number, offset, (("x", 0, part),)),), {"x": target[index]})
            for index, (number, offset) in enumerate(places)
        ]
        done: list[Any] = []
        start = time.perf_counter()
        reader.submit(loads)
        while len(done) < len(places):
            reader.wait(reader.epoch)
            reader.take(done)
        rates[depth, piece_bytes].append(len(places) * part / (time.perf_counter() - start))
        reader.close()
    for descriptor in descriptors:
        os.close(descriptor)
    return max(statistics.median(found) for found in rates.values())


def entrants(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return (contestant, policy) in the order they run; policy is empty where there is none."""
    chosen = arguments.only or list(CONTESTANTS)
    found = []
    for contestant in chosen:
        if contestant.startswith("mmap"):
            found.append((contestant, ""))
        elif contestant in {"own-direct", "own-packed"}:
            found += [(contestant, policy) for policy in arguments.policies]
        else:
            found.append((contestant, arguments.policies[0]))
    return found


def compare(
    arguments: argparse.Namespace, folder: Path, limit: int, best: list[float]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Run all `runs` times, interleaved, and the disk's best, which drifts, after each round."""
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in range(arguments.runs):
        for contestant, policy in entrants(arguments):
            print(f"run {run + 1}: {contestant} {policy}", file=sys.stderr, flush=True)
            one = run_one(arguments, folder, limit, contestant, policy)
            results.setdefault((contestant, policy), []).append(one)
        best.append(disk_best(folder / "model"))
    return results


def run_one(
    arguments: argparse.Namespace, folder: Path, limit: int, contestant: str, policy: str
) -> dict[str, Any]:
    """Run one contestant in a process and a limit of its own; nothing is in the page cache."""
    path = folder / ("packed" if contestant == "own-packed" else "model")
    drop_from_page_cache(path)
    task = {
        "path": str(path),
        "trace": str(folder / "trace.npy"),
        "contestant": contestant,
        "policy": policy,
        "reserve": arguments.reserve,
        "num_warm": arguments.warm,
        "compute": arguments.compute,
        "join": None,
    }
    if arguments.limit_is_set:
        return {**run_child(task), "facts": {}}
    with MemoryLimit(limit) as group:
        result = run_child({**task, "join": str(group.join_file)})
        result["facts"] = group.facts()
    facts = result["facts"]
    if facts["num_oom_kills"] or facts["swap_bytes"] or facts["peak_bytes"] > limit:
        raise SystemExit(f"{contestant}: the limit did not hold: {facts}")
    return result


def drop_from_page_cache(path: Path) -> None:
    """Drop a checkpoint from memory, or exit where that does not work."""
    for file in path.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with moecache.open_store(path) as store:
        left = sum(part.resident_bytes for part in prefault.residency(store.regions()))
    if left > store.layout.total_bytes // 100:
        raise SystemExit(
            f"{path}: {format_bytes(left)} stay in the page cache; use --dir on a disk"
        )


def run_child(task: dict[str, Any]) -> dict[str, Any]:
    """Start a process and return what it measured."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.contestants", json.dumps(task)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # noqa: TID251 - passed on
    )
    if done.returncode:
        raise SystemExit(f"{task['contestant']} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def summarise(
    arguments: argparse.Namespace,
    results: dict[tuple[str, str], list[dict[str, Any]]],
    best: float,
    limit: int,
) -> dict[str, Any]:
    """Return the medians; refuses results of different work."""
    if len({run["digest"] for runs in results.values() for run in runs}) != 1:
        raise SystemExit("the contestants did not compute the same")
    rows = []
    for (contestant, policy), runs in results.items():
        times = np.concatenate([run["times_ns"] for run in runs]) / 1e6
        before, after = runs[0]["before"], runs[0]["after"]
        accesses = sum(after.get(k, 0) - before.get(k, 0) for k in ("num_hits", "num_misses"))
        row = {
            "contestant": contestant,
            "policy": policy,
            "tokens_per_s": arguments.tokens / statistics.median(run["seconds"] for run in runs),
            "bytes_per_token": statistics.median(r["bytes_read"] for r in runs) / arguments.tokens,
            "disk_bytes_per_s": statistics.median(r["bytes_read"] / r["seconds"] for r in runs),
            "p50_ms": float(np.percentile(times, 50)),
            "p99_ms": float(np.percentile(times, 99)),
            "peak_bytes": max((run["facts"].get("peak_bytes", 0) for run in runs), default=0),
            "spread": [round(arguments.tokens / run["seconds"], 2) for run in runs],
        }
        if accesses:
            row["hit_rate"] = (after["num_hits"] - before["num_hits"]) / accesses
            row["slots"] = after["capacity"]
        if "busy_ns" in after:
            row["busy_bytes_per_s"] = statistics.median(
                (run["after"]["reader_bytes"] - run["before"]["reader_bytes"])
                / (run["after"]["busy_ns"] - run["before"]["busy_ns"])
                * 1e9
                for run in runs
            )
        rows.append(row)
    return {"disk_best_bytes_per_s": best, "limit_bytes": limit, "rows": rows}


def belady(
    trace: np.ndarray, num_experts: int, summary: dict[str, Any], num_warm: int
) -> float | None:
    """Return the hit rate of the optimum with as many slots as the runtime had, or None."""
    slots = max((row.get("slots", 0) for row in summary["rows"]), default=0)
    if not slots:
        return None
    found = replay(Trace(trace, num_experts=num_experts), "belady", slots)
    hits, misses = found.hits[num_warm:].sum(), found.misses[num_warm:].sum()
    return float(hits / (hits + misses))


def table(summary: dict[str, Any]) -> list[str]:
    """Return the figures as lines."""
    rows, best = summary["rows"], summary["disk_best_bytes_per_s"]
    rate = {row["contestant"]: row["tokens_per_s"] for row in rows}
    base = rate.get("mmap")
    lines = [f"{'':42} tokens/s  x mmap  hit rate  GiB/token  disk GiB/s  of best  p50 ms  p99 ms"]
    for row in rows:
        label = f"{CONTESTANTS[row['contestant']]} {row['policy']}".strip()
        times = f"{row['tokens_per_s'] / base:7.1f}" if base else f"{'':7}"
        hits = f"{row['hit_rate']:8.3f}" if "hit_rate" in row else f"{'':8}"
        busy = row.get("busy_bytes_per_s")
        lines.append(
            f"{label:42} {row['tokens_per_s']:8.2f} {times}  {hits}  "
            f"{row['bytes_per_token'] / 2**30:9.4f}  {row['disk_bytes_per_s'] / 2**30:10.2f}  "
            + (f"{busy / best:7.2f}" if busy else f"{'':7}")
            + f"  {row['p50_ms']:6.1f}  {row['p99_ms']:6.1f}"
        )
    if summary.get("belady_hit_rate") is not None:
        lines.append(
            f"{'Belady, the optimum of any policy':42} {'':8} {'':7}  "
            f"{summary['belady_hit_rate']:8.3f}"
        )
    buffered = max((rate[name] for name in BUFFERED if name in rate), default=0)
    for name, label in (("own-direct", "direct reads"), ("own-packed", "packed")):
        own = max((row["tokens_per_s"] for row in rows if row["contestant"] == name), default=0)
        if own and buffered:
            lines.append(f"{label}: {own / buffered:.1f} x the best way through the page cache")
    lines.append(
        f"of best: bytes read while any read was outstanding, against {best / 2**30:.2f} GiB/s"
    )
    peak = max(row["peak_bytes"] for row in rows)
    if peak:
        lines.append(
            f"the limit held in every run: peak {format_bytes(peak)}, nothing swapped or killed"
        )
    return lines


def plot(summary: dict[str, Any], title: str, path: str) -> None:
    """Draw tokens/s as bars."""
    from matplotlib.figure import Figure

    rows = summary["rows"][::-1]
    labels = [f"{CONTESTANTS[row['contestant']]} {row['policy']}".strip() for row in rows]
    values = [row["tokens_per_s"] for row in rows]
    own = [row["contestant"].startswith(("own-direct", "own-packed")) for row in rows]
    figure = Figure(figsize=(9, 0.5 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(labels, values, color=["#1b7837" if good else "#9e9e9e" for good in own])
    axes.bar_label(bars, [f"{value:.1f}" for value in values], padding=4)
    axes.set_xlim(0, max(values) * 1.12)
    axes.set_xlabel("tokens per second")
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
