"""Experts spread over ranks: the same bits, what it gains, what it costs, and ranks that die.

    python -m bench.ranks                            # all of it, in a quarter of an hour
    python -m bench.ranks --small                    # minutes, and no speed that means anything
    python -m bench.ranks --parts speed overhead     # on a quiet machine
    python -m bench.ranks --parts kills --kills 50

Ranks are processes of this machine, started by torchrun, over loopback.

exact: logits of prompts of 1 and 300 tokens and a batch of 3, and 64 tokens, of 2 and 4 ranks, each
in a memory cgroup where the system lets one be made, against one rank; two families in bfloat16 and
one in q8_0, with a quarter of the experts and with all. The bytes sent are those computed.
speed: a model of twice a rank's memory, by one rank and by two, with the same limit each; with
the disk that they share, and with one of --disk bytes a second for each, by a cgroup.
overhead: what one rank does for others that are not there, beside the time of a token.
kills: a rank is killed (SIGKILL) at a random moment; the others must name it within the time-out.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import qwen3_moe
from bench.limits import DiskLimit, MemoryLimit, NoLimitError
from bench.machine import describe_machine
from bench.ranks_kills import kill_often
from moecache.packing import pack
from moecache.units import format_bytes

PARTS = ("exact", "speed", "overhead", "kills")
VOCABULARY = 512
HEADER_BYTES = 16
# What Python, torch and transformers take, and what their products do.
PROCESS_BYTES = 1200 * 2**20


def main(argv: list[str] | None = None) -> int:
    """Run the parts; return 1 if something is not as it must be."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("ranks", description=__doc__, formatter_class=form)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--small", action="store_true", help="small models, one of each")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3, help="runs of speed")
    parser.add_argument("--directory", help="where checkpoints are written; a real disk")
    parser.add_argument("--disk", type=int, default=500 * 10**6, help="bytes a second of a rank's")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    print(describe_machine(), flush=True)
    found: dict[str, Any] = {"machine": describe_machine()}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        for part in arguments.parts:
            found[part] = _PARTS[part](Path(name), arguments)
            print(f"{part}: {json.dumps(found[part], indent=1)}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(found[part].get("wrong") for part in arguments.parts) else 0


def _exact(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    models = {"Qwen3-MoE, bf16": _qwen3(folder / "qwen3", 4, 32, 128, 64)}
    models["Mixtral, bf16"] = _mixtral(folder / "mixtral")
    packed = folder / "q8_0"
    pack(models["Qwen3-MoE, bf16"], packed, format="q8_0")
    models["Qwen3-MoE, q8_0"] = packed
    wrong: list[str] = []
    limited = True
    rows = []
    for name, model in models.items():
        task = {"do": "exact", "model": str(model), "vocabulary": VOCABULARY, "load": {}}
        task |= {"memories": ["25%", "100%"], "threads": 1}
        [whole] = _run(folder, 1, task)[0]
        for num_ranks in (2,) if arguments.small else (2, 4):
            ranks, is_limited = _run(folder, num_ranks, task, PROCESS_BYTES)
            limited &= is_limited
            for memory in task["memories"]:
                for rank, found in enumerate(ranks):
                    wrong += [
                        f"{name}, {memory}, rank {rank} of {num_ranks}: {what}"
                        for what, value in whole[memory].items()
                        if isinstance(value, torch.Tensor)
                        and not torch.equal(value, found[memory][what])
                    ]
                sent = sum(found[memory]["sent"] for found in ranks)
                # Kernels compute rows in float32.
                number_bytes = 4 if "q8_0" in name else 2
                computed = _sent_bytes(model, num_ranks, 5, 64, number_bytes=number_bytes)
                rows.append([name, memory, num_ranks, sent, computed])
                if sent != computed:
                    wrong.append(f"{name}, {memory}, {num_ranks} ranks: {sent} bytes were sent")
    columns = ["model", "memory", "ranks", "bytes sent for 64 tokens", "bytes computed"]
    return {"wrong": wrong, "in_cgroups": limited, "columns": columns, "rows": rows}


def _sent_bytes(
    model: Path, num_ranks: int, prompt_tokens: int, new_tokens: int, *, number_bytes: int
) -> int:
    """Return what all ranks together send: each row to every other rank, and a header a message.

    Of a prompt that is not large; the last token is not put through the model.
    """
    config = json.loads((model / "config.json").read_text())
    row_bytes = config["hidden_size"] * number_bytes
    rows = (prompt_tokens + new_tokens - 1) * config["num_experts_per_tok"]
    messages = new_tokens * num_ranks
    each = rows * row_bytes + messages * HEADER_BYTES
    return int(config["num_hidden_layers"] * each * (num_ranks - 1))


def _speed(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    layers, experts, hidden, width = (2, 16, 128, 64) if arguments.small else (8, 128, 1024, 768)
    # As many experts a token, and as few that repeat, as in models of this size.
    model = _qwen3(
        folder / "large",
        layers=layers,
        experts=experts,
        hidden=hidden,
        width=width,
        top_k=8,
        overlap=0.2,
    )
    total = layers * experts * 3 * hidden * width * 2
    # A rank may take half of what the experts do; what Python and torch leave of it has slots.
    limit = PROCESS_BYTES + total // 2 if arguments.small else total // 2
    memory = limit - PROCESS_BYTES
    task = {"do": "speed", "model": str(model), "vocabulary": VOCABULARY, "threads": 1}
    task |= {"load": {"memory": memory, "read": "direct", "prefault": "off", "compute": "fast"}}
    task |= {"tokens": 8 if arguments.small else 64, "warm_up": 8 if arguments.small else 128}
    found: dict[str, Any] = {"experts": format_bytes(total), "memory": format_bytes(memory)}
    computed = _sent_bytes(model, 2, 1, task["tokens"], number_bytes=4)
    found |= {"computed_sent_bytes_per_token": computed / task["tokens"], "wrong": []}
    repeats = 1 if arguments.small else arguments.repeats
    for name, disk in (("one disk", None), ("a disk each", arguments.disk)):
        runs: dict[int, list[Any]] = {1: [], 2: []}
        limited = True
        for _ in range(repeats):
            for num_ranks, of_ranks in runs.items():
                ranks, is_limited = _run(folder, num_ranks, task, limit, disk)
                limited &= is_limited
                of_ranks.append(ranks)
        tokens = {str(one["tokens"]) for both in runs.values() for run in both for one in run}
        found["wrong"] += [] if len(tokens) == 1 else [f"{name}: other tokens"]
        found[name] = {"disk_bytes_per_s": disk, "in_cgroups": limited}
        rates = {n: statistics.median(run[0]["tokens_per_s"] for run in runs[n]) for n in runs}
        for number, of_ranks in runs.items():
            last = of_ranks[-1]
            found[name][f"{number} ranks"] = {
                "tokens_per_s": rates[number],
                "hit_rates": [rank["hit_rate"] for rank in last],
                "cpu_s_per_token": [rank["cpu_s_per_token"] for rank in last],
                "waited_s_per_token": [rank["waited_s_per_token"] for rank in last],
                "bytes_read_per_token": sum(rank["bytes_read_per_token"] for rank in last),
                "sent_bytes_per_token": sum(rank["sent_bytes"] for rank in last) / task["tokens"],
            }
            if sum(rank["sent_bytes"] for rank in last) != (computed if number > 1 else 0):
                found["wrong"].append(f"{name}, {number} ranks: other bytes were sent")
        found[name]["ratio"] = rates[2] / rates[1]
    return found


def _overhead(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    layers, experts, hidden, width = (2, 16, 128, 64) if arguments.small else (8, 64, 512, 256)
    model = _qwen3(folder / "overhead", layers=layers, experts=experts, hidden=hidden, width=width)
    task = {"do": "overhead", "model": str(model), "threads": 1, "load": {"memory": "100%"}}
    task |= {"tokens": 8 if arguments.small else 64, "rounds": 3 if arguments.small else 10}
    [found] = _run(folder, 1, task)[0]
    ours = found["hooks_s_per_token"] + found["heartbeat_cpu_s_per_token"]
    return {**found, "overhead": ours / (found["s_per_token"] - ours)}


def _kills(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    model = _qwen3(folder / "killed", 2, 8, 64, 32)
    return kill_often(model, folder, arguments.kills)


def _run(
    folder: Path,
    num_ranks: int,
    task: dict[str, Any],
    limit_bytes: int | None = None,
    disk_bytes_per_s: int | None = None,
) -> tuple[list[Any], bool]:
    """Run a task on so many ranks; return their results, and whether each was limited as asked."""
    import torch

    out, file = folder / f"result-{num_ranks}", folder / "task.json"
    with contextlib.ExitStack() as stack:
        groups = []
        with contextlib.suppress(NoLimitError):
            for _ in range(0 if limit_bytes is None else num_ranks):
                limits: list[MemoryLimit | DiskLimit] = [MemoryLimit(limit_bytes or 0)]
                stack.enter_context(limits[0])
                if disk_bytes_per_s is not None:
                    limits.append(stack.enter_context(DiskLimit(disk_bytes_per_s, folder)))
                groups.append([str(one.join_file) for one in limits])
        limited = len(groups) == num_ranks
        file.write_text(json.dumps({**task, "out": str(out), "groups": groups * limited}))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        subprocess.run(
            [sys.executable, *launcher, str(num_ranks), "-m", "bench.ranks_work", str(file)],
            check=True,
            timeout=1800,
        )
    return [torch.load(f"{out}.{rank}") for rank in range(num_ranks)], limited


def _qwen3(
    path: Path,
    layers: int,
    experts: int,
    hidden: int,
    width: int,
    *,
    top_k: int = 4,
    overlap: float = 0.4,
) -> Path:
    config = qwen3_moe.make_config(
        layers, experts, top_k, hidden=hidden, width=width, vocabulary=VOCABULARY
    )
    qwen3_moe.write_checkpoint(path, config, overlap=overlap)
    return path


def _mixtral(path: Path) -> Path:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    make: Any = MixtralConfig
    config = make(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


_PARTS = {"exact": _exact, "speed": _speed, "overhead": _overhead, "kills": _kills}

if __name__ == "__main__":
    sys.exit(main())
