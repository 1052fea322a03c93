"""Whether simulated ranks take the time that ranks take: measured on one machine, and compared.

Writes a small random checkpoint, and measures what the model of `simulate_ranks` is given: what a
token computes where all is resident, what one read and several take, and what a layer's exchange
takes from when the slowest rank has its rows, in a run that is not compared. Each with as many
processes at once as there are ranks, which share this machine. Then ranks decode with slots for a
part of the experts, from cold, and are compared with the simulation of the same routing.

Each rank has a disk of its own, as machines have: a read ends no sooner than a disk of --disk bytes
a second has come to it, though its bytes are in the page cache. This machine's disk is one for all
ranks, and what it reads takes the cores that they compute with. Figures of a busy machine are
noise: the load is printed, and stands in the file.

    python -m bench.ranks_model [--ranks 1 2 4] [--disk 300MB] [--json OUT]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import describe_machine
from moecache.study import Network, Trace, simulate_ranks
from moecache.study.ranks import AGREE_BYTES
from moecache.units import format_bytes_per_s, format_ns, parse_bytes

SEED = 7
LOAD = {"prefetch": "off", "read": "mmap", "prefault": "off"}
COMPUTE = {"compute": "fast"}
# Of each read from the disk that ranks are given.
LATENCY_S = 100e-6
LIMIT = 0.20
TIMEOUT_S = 600
# How many experts are read at once for the bandwidth, beside one.
MANY = 8
ROUNDS = 3


def main(argv: list[str] | None = None) -> int:
    """Measure, simulate, compare; return 1 if they are further apart than a fifth."""
    arguments = _parser().parse_args(argv)
    if arguments.child is not None:
        role, given = json.loads(arguments.child)
        _use_disk(given.pop("disk"))
        print(json.dumps(CHILDREN[role](**given)))
        return 0
    print(describe_machine(), flush=True)
    found: dict[str, Any] = {"machine": describe_machine(), "rows": []}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        model = _write(Path(folder) / "model", arguments)
        trace_path = str(Path(folder) / "run.npz")
        for num_ranks in arguments.ranks:
            row = _compare(model, trace_path, num_ranks, arguments)
            found["rows"].append(row)
            print(_line(row), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(abs(row["apart"]) > LIMIT for row in found["rows"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4])
    add("--tokens", type=int, default=96, help="decoded by each run")
    add("--layers", type=int, default=6)
    add("--experts", type=int, default=64, help="of each layer")
    add("--hidden", type=int, default=512)
    add("--width", type=int, default=512)
    add("--share", type=float, default=0.125, help="of all experts: each rank's slots")
    add("--disk", type=parse_bytes, default="300MB", help="bytes a second of each rank's (300MB)")
    add("--directory", type=Path, help="where the checkpoint is written: on the disk to measure")
    add("--json", type=Path, metavar="OUT")
    add("--child", help=argparse.SUPPRESS)
    return parser


def _compare(
    model: str, trace_path: str, num_ranks: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return what so many ranks took, and what was simulated."""
    slots = int(arguments.share * arguments.layers * arguments.experts)
    given = {"model": model, "slots": slots, "tokens": arguments.tokens, "disk": arguments.disk}
    alone = _run("alone", num_ranks, spread=False, trace=trace_path, **given)
    measured = _run("ranks", num_ranks, spread=num_ranks > 1, **given)
    trace = Trace.load(trace_path)
    one_s = statistics.mean(one["one_s"] for one in alone)
    many_s = statistics.mean(one["many_s"] for one in alone)
    nbytes = alone[0]["expert_bytes"]
    rate = (MANY - 1) * nbytes / max(many_s - one_s, 1e-9)
    layer_s = statistics.mean(one["token_s"] for one in alone) / arguments.layers
    few_s = _exchange_s(measured)
    dt_s = max(*(one["exchanged_s"] - one["few_s"] for one in measured), 0.0, 1e-9)
    machine = {
        "bandwidth": rate,
        "latency_ns": max(0, round((one_s - nbytes / rate) * 1e9)),
        "compute_ns": round(layer_s * 1e9),
        "expert_share": statistics.mean(one["expert_share"] for one in alone),
    }
    rate_of_rows = measured[0]["exchanged_bytes"] / dt_s
    # Exchanges of this run had rows of their own, which are simulated beside the latency.
    sent = statistics.mean(one["sent_bytes"] for one in measured)
    few_s -= sent / arguments.tokens / arguments.layers / rate_of_rows
    network = Network("measured", rate_of_rows, max(0, round(few_s * 1e9)), 0)
    simulated = simulate_ranks(
        trace,
        num_ranks,
        network=network,
        row_bytes=measured[0]["row_bytes"],
        capacity=slots,
        expert_bytes=nbytes,
        **machine,
    )
    took_s = statistics.mean(one["total_s"] for one in measured)
    misses = sum(one["num_misses"] for one in measured)
    return {
        "ranks": num_ranks,
        "slots": slots,
        "measured_tokens_per_s": arguments.tokens / took_s,
        "simulated_tokens_per_s": simulated.tokens_per_s,
        "apart": simulated.tokens_per_s * took_s / arguments.tokens - 1,
        "measured_misses": misses,
        "simulated_misses": sum(one.num_misses for one in simulated.ranks),
        "measured_sent_bytes": sum(one["sent_bytes"] for one in measured),
        # Of rows: what ranks compare before each step is not counted live.
        "simulated_sent_bytes": simulated.network_bytes - _agreed_bytes(trace, num_ranks),
        "network_bandwidth": network.bandwidth,
        "network_latency_ns": network.latency_ns,
        "load": os.getloadavg()[0],
        "disk_bytes_per_s": arguments.disk,
        **machine,
    }


def _exchange_s(measured: list[dict[str, Any]]) -> float:
    """Return what an exchange takes beside rows: to begin, and once the slowest rank has its own.

    The ranks are processes of one machine, and so have one clock.
    """
    if not measured[0]["exchanges"]:
        return 0.0
    begun, ready, done = np.array([one["exchanges"] for one in measured]).transpose(2, 0, 1)
    return float(np.median(begun.max(0) + done.max(0) - ready.max(0)))


def _agreed_bytes(trace: Trace, num_ranks: int) -> int:
    return trace.num_steps * AGREE_BYTES * num_ranks * (num_ranks - 1)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['ranks']} ranks: measured {row['measured_tokens_per_s']:.1f} tokens/s, simulated "
        f"{row['simulated_tokens_per_s']:.1f} ({row['apart']:+.1%}); {row['measured_misses']} and "
        f"{row['simulated_misses']} misses; {row['measured_sent_bytes']} and "
        f"{row['simulated_sent_bytes']} bytes sent. Given: {format_bytes_per_s(row['bandwidth'])} "
        f"after {format_ns(row['latency_ns'])}, {format_ns(row['compute_ns'])} a layer of which "
        f"{row['expert_share']:.0%} experts, an exchange {format_ns(row['network_latency_ns'])} + "
        f"{format_bytes_per_s(row['network_bandwidth'])}; load {row['load']:.1f}"
    )


def _write(directory: Path, arguments: argparse.Namespace) -> str:
    from bench.qwen3_moe import make_config, write_checkpoint

    config = make_config(
        num_layers=arguments.layers,
        num_experts=arguments.experts,
        top_k=8,
        hidden=arguments.hidden,
        width=arguments.width,
        vocabulary=512,
    )
    write_checkpoint(directory, config, seed=SEED)
    return str(directory)


def _run(role: str, num_ranks: int, *, spread: bool = True, **given: Any) -> list[dict[str, Any]]:
    """Return what as many processes find, each one rank of them, or all alone at the same time."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    children = []
    for rank in range(num_ranks):
        inherited = os.environ  # noqa: TID251 - a child has what this process has
        environment = {**inherited, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": port, "LOCAL_RANK": str(rank)}
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        text = json.dumps([role, {**given, "rank": rank, "spread": spread}])
        command = [sys.executable, "-m", "bench.ranks_model", "--child", text]
        children.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        outputs = [child.communicate(timeout=TIMEOUT_S) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for child, (_, complaint) in zip(children, outputs, strict=True):
        if child.returncode:
            raise SystemExit(f"{role}: {complaint[-3000:]}")
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def _use_disk(bytes_per_s: int) -> None:
    """Have reads of this process take as long as from a disk that reads so many bytes a second."""
    from moecache.stores import SafetensorsStore

    read_into, lock = SafetensorsStore.read_into, threading.Lock()
    free_s = 0.0

    def read(self: SafetensorsStore, layer: int, expert: int, out: Any) -> None:
        nonlocal free_s
        nbytes = self.layout.expert_bytes(layer)
        with lock:
            free_s = max(free_s, time.perf_counter()) + LATENCY_S + nbytes / bytes_per_s
            until = free_s
        read_into(self, layer, expert, out)
        time.sleep(max(0.0, until - time.perf_counter()))

    SafetensorsStore.read_into = read  # type: ignore[method-assign]


def _load(model: str, *, spread: bool, **options: Any) -> Any:
    import torch

    from moecache.integrations.transformers import load

    torch.set_num_threads(1)
    extra = {"expert_parallel": True} if spread else {}
    return load(model, **{**LOAD, **COMPUTE, **extra, **options})


def _decode(model: Any, tokens: int) -> float:
    """Decode greedily from one token, each a step of one row; return the seconds."""
    import torch

    ids, past = torch.tensor([[SEED]]), None
    begin = time.perf_counter()
    with torch.no_grad():
        for _ in range(tokens):
            out = model(input_ids=ids, past_key_values=past, use_cache=True)
            past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
    return time.perf_counter() - begin


def _alone(
    model: str, tokens: int, slots: int, trace: str, rank: int, *, spread: bool
) -> dict[str, Any]:
    """Measure a token where all is resident, how much of it is the experts', and reads."""
    import torch.distributed as dist

    # Only to begin together: what one measures while the others rest is not what ranks have.
    dist.init_process_group("gloo")
    loaded = _load(model, spread=spread, memory="100%")
    with loaded.moecache as offload:
        # Only what one of them chose: all choose alike.
        path = trace if rank == 0 else f"{trace}.{rank}"
        with offload.runtime.record_trace(path):
            _decode(loaded, tokens)
        # The quickest of several: what else runs on the machine only ever takes time away.
        rounds = []
        for _ in range(ROUNDS):
            dist.barrier()
            rounds.append(_decode(loaded, tokens))
        token_s = min(rounds) / tokens
        spent = [0.0]
        for name, module in loaded.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(_clock(spent, -1.0))
                module.register_forward_hook(_clock(spent, 1.0))
        total_s = _decode(loaded, tokens)
        dist.barrier()
    expert_share = min(1.0, spent[0] / total_s)
    found = {"token_s": token_s, "expert_share": expert_share, **_reads(model, slots, rank)}
    dist.destroy_process_group()
    return found


def _clock(spent: list[float], sign: float) -> Callable[..., None]:
    def note(*_: object) -> None:
        spent[0] += sign * time.perf_counter()

    return note


def _reads(model: str, slots: int, rank: int) -> dict[str, Any]:
    """Measure one miss, and several at once, as a step waits for them."""
    import moecache

    options = {**LOAD, "slots": slots}
    with moecache.open(model, policy=moecache.FifoCache, **options) as runtime:
        layout = runtime.layout
        order = np.random.default_rng(rank).permutation(layout.num_experts)
        spans: dict[int, list[float]] = {1: [], MANY: []}
        for turn in range(12):
            for number, found in spans.items():
                for layer in range(layout.num_layers):
                    first = turn * (MANY + 1) + (number > 1)
                    ids = np.take(order, first + np.arange(number), mode="wrap")
                    before = runtime.stats().num_misses
                    begin = time.perf_counter()
                    for _ in runtime.waves(layer, ids.astype(np.int32)):
                        pass
                    if runtime.stats().num_misses - before == number:
                        found.append(time.perf_counter() - begin)
        one_s, many_s = (statistics.median(found) for found in spans.values())
        return {"one_s": one_s, "many_s": many_s, "expert_bytes": layout.expert_bytes(0)}


def _ranks(model: str, tokens: int, slots: int, *, spread: bool, **_: Any) -> dict[str, Any]:
    """Decode from cold, several times; then measure exchanges of few rows and of many."""
    totals = []
    for _ in range(ROUNDS - 1):
        loaded = _load(model, spread=spread, slots=slots)
        with loaded.moecache:
            totals.append(_decode(loaded, tokens))
    loaded = _load(model, spread=spread, slots=slots)
    with loaded.moecache as offload:
        totals.append(_decode(loaded, tokens))
        found = {"total_s": min(totals), "num_misses": offload.stats().num_misses}
        if not spread:
            none = {"few_s": 0.0, "exchanged_s": 0.0, "exchanged_bytes": 1, "row_bytes": 1}
            return {**found, "sent_bytes": 0, "exchanges": [], **none}
        found["sent_bytes"] = offload.ranks.sent_bytes
        found |= _exchange(offload.ranks, loaded.config)
    loaded = _load(model, spread=spread, slots=slots)
    with loaded.moecache:
        return {**found, "exchanges": _exchanges(loaded, tokens)}


def _exchanges(loaded: Any, tokens: int) -> list[tuple[float, float, float]]:
    """Return of each exchange what its begin took, when this rank had its rows, and its end."""
    from moecache.integrations.transformers._exchange import Exchange

    begin, finish = Exchange.__init__, Exchange._finish  # noqa: SLF001 - no call of its own
    found: list[tuple[float, float, float]] = []
    took = 0.0

    def timed_begin(self: Exchange, *given: Any) -> None:
        nonlocal took
        began = time.perf_counter()
        begin(self, *given)
        took = time.perf_counter() - began

    def timed_finish(self: Exchange, status: int) -> None:
        ready = time.perf_counter()
        finish(self, status)
        found.append((took, ready, time.perf_counter()))

    Exchange.__init__, Exchange._finish = timed_begin, timed_finish  # type: ignore[assignment, method-assign]  # noqa: SLF001
    try:
        _decode(loaded, tokens)
    finally:
        Exchange.__init__, Exchange._finish = begin, finish  # type: ignore[method-assign]  # noqa: SLF001
    return found


def _exchange(ranks: Any, config: Any) -> dict[str, Any]:
    """Measure exchanges, all of the engine's work on them included."""
    import torch

    from moecache.integrations.transformers._exchange import Exchange

    width, spans = config.hidden_size, []
    # One row of each rank, and eight: below what is sent early.
    for each in (1, 8):
        ids = (np.arange(each * ranks.num_ranks) % config.num_experts).reshape(1, -1)
        found = []
        for _ in range(100):
            begin = time.perf_counter()
            with Exchange(ranks, 0, ids, width, torch.float32, torch.device("cpu")):
                pass
            found.append(time.perf_counter() - begin)
        spans.append(statistics.median(found))
    return {
        "few_s": spans[0],
        "exchanged_s": spans[1],
        "exchanged_bytes": 7 * 4 * width * (ranks.num_ranks - 1),
        "row_bytes": 4 * width,
    }


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "alone": _alone,
    "ranks": _ranks,
}


if __name__ == "__main__":
    sys.exit(main())
