"""transformers models with experts in slots, beside the same model in memory and on disk.

Each contestant runs in a process of its own, with the page cache warm: a prompt of 512 tokens,
then tokens drawn one by one. All must draw the same tokens. Then the same with reads around the
page cache, looking ahead and not. Last, in one process, what a prompt does to the hit rate of the
tokens after it, and how long one takes, in turns with the model in memory.

DIR is what `python -m bench.qwen3_moe DIR` wrote, whose routing repeats itself as real ones do.

    python -m bench.transformers_speed DIR [--repeats 3] [--threads N] [--json OUT]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import describe_machine
from moecache import prefault
from moecache.commands.contestants import Contestant, run_process
from moecache.commands.paths import map_file
from moecache.stores import open_store
from moecache.units import format_bytes

# (what, least or most, bound): of "all resident", but for the resident set.
BOUNDS = {
    "decode, all experts in slots": (">=", 0.95),
    "decode, a quarter": (">=", 0.80),
    "decode, a quarter, of disk_offload's": (">=", 3.0),
    "prefill, a quarter": (">=", 0.90),
    "load time, a quarter": ("<=", 0.50),
    "peak RSS, a quarter, of imports + trunk + slots": ("<=", 1.10),
    "decode after a prompt, hit rate of that without": (">=", 1.0),
    "decode around the page cache, auto, of off": (">=", 0.98),
}


def moecache(memory: str, prefetch: str = "auto", read: str = "buffered") -> Contestant:
    """Return a contestant with experts in slots."""
    task = {"memory": memory, "policy": "echo", "prefetch": prefetch, "read": read}
    return Contestant(f"{memory}, {read}, {prefetch}", {"kind": "moecache", **task})


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run everything; return ratios, medians and runs."""
    task: dict[str, Any] = {
        "model": arguments.directory,
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "warm_up": arguments.warm_up,
        "sample": True,
        "seed": 0,
        "threads": arguments.threads,
        "dtype": None,
        "cold": False,
        "verbose": False,
    }
    task |= run_process({**task, "kind": "prepare"})
    # Prose in bytes has few kinds of tokens: draw from all of the vocabulary, as in other text.
    draw = np.random.default_rng(0)
    with open_store(arguments.directory) as store:
        vocab_size, trunk_bytes = store.config["vocab_size"], store.trunk_bytes
    for name in ("prompt", "warm_up_prompt"):
        task[name] = draw.integers(0, vocab_size, len(task[name])).tolist()
    files = [Path(file) for file in task["files"]]
    task["checkpoint_bytes"] = sum(file.stat().st_size for file in files)
    resident = Contestant("all resident", {"kind": "resident"})
    # It reads all weights for each token: a few tokens tell.
    few_tokens = {"new_tokens": min(8, arguments.new_tokens), "warm_up": 1}
    offload = Contestant("accelerate disk_offload", {"kind": "disk_offload", **few_tokens})
    whole, quarter = moecache("100%"), moecache("25%")
    direct = {mode: moecache("25%", mode, "direct") for mode in ("off", "router", "auto")}
    # A long prompt's activations are the model's, wherever its experts are.
    short = moecache("25%")
    short.name = "25%, prompt of 16"
    short.task |= {name: task[name][:16] for name in ("prompt", "warm_up_prompt")}
    for repeat in range(arguments.repeats):
        # The slowest runs once: it is not close.
        for one in (
            resident,
            whole,
            quarter,
            *direct.values(),
            *((offload, short) * (repeat == 0)),
        ):
            with console.status(f"{one.name}, run {repeat + 1} of {arguments.repeats}"):
                regions = [region for file in files if (region := map_file(file)) is not None]
                report = prefault.warm(regions, keep_mapped=False)
                if not report.ran and report.reason != "resident":
                    console.print(report.message)
                del regions
                one.run(task)
                if one.over:
                    raise SystemExit(f"{one.name}: {one.left_out or one.error}")
    contestants = [resident, whole, quarter, offload, *direct.values()]
    medians = {one.name: one.median() for one in (*contestants, short)}
    drawn = resident.runs[0]["tokens"]
    others = [
        one.name
        for one in contestants
        if any(run["tokens"] != drawn[: len(run["tokens"])] for run in one.runs)
    ]
    if others:
        raise SystemExit(f"other tokens than {resident.name}: {', '.join(others)}")
    after, without = hit_rates(arguments.directory, arguments)
    prefill = prefill_ratio(arguments.directory, arguments)
    base, few = resident.median(), quarter.median()
    rate = "decode_tokens_per_s"
    small = short.median()
    expected = small["imports_rss_bytes"] + trunk_bytes + small["slot_bytes"]
    ratios = {
        "decode, all experts in slots": whole.median()[rate] / base[rate],
        "decode, a quarter": few[rate] / base[rate],
        "decode, a quarter, of disk_offload's": few[rate] / offload.median()[rate],
        "prefill, a quarter": prefill,
        "load time, a quarter": few["load_s"] / base["load_s"],
        "peak RSS, a quarter, of imports + trunk + slots": small["peak_rss_bytes"] / expected,
        "decode after a prompt, hit rate of that without": after / without,
        "decode around the page cache, auto, of off": (
            direct["auto"].median()[rate] / direct["off"].median()[rate]
        ),
    }
    return {
        "machine": describe_machine(),
        "threads": resident.runs[0]["threads"],
        "settings": {key: task[key] for key in ("prompt_tokens", "new_tokens", "warm_up")},
        "ratios": ratios,
        "hit_rate_after_prompt": after,
        "hit_rate_without_prompt": without,
        "medians": medians,
        "prefetch": {mode: _prefetch(one) for mode, one in direct.items()},
    }


def hit_rates(directory: str, arguments: argparse.Namespace) -> tuple[float, float]:
    """Return the hit rate of 32 tokens right after a prompt, and of the same ones without it.

    Two equal caches, warmed alike. One model reads the prompt; both go on from the same keys and
    values, so that the other's cache has not seen it.
    """
    import copy

    import torch
    import transformers

    from moecache.integrations.transformers import load

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    models = [load(directory, "25%", prefetch="off", read="buffered") for _ in range(2)]
    draw = torch.Generator().manual_seed(1)
    size = models[0].config.vocab_size
    warm, prompt = (
        torch.randint(size, (1, n), generator=draw) for n in (16, arguments.prompt_tokens)
    )
    for model in models:
        torch.manual_seed(2)
        model.generate(warm, max_new_tokens=arguments.warm_up + 64, do_sample=True, top_k=0)
    with torch.no_grad():
        past = models[0](prompt).past_key_values
    rates = []
    for model in models:
        own, before = copy.deepcopy(past), model.moecache.stats()
        torch.manual_seed(3)
        token = prompt[:, -1:]
        for _ in range(32):
            with torch.no_grad():
                logits = model(token, past_key_values=own).logits[:, -1]
            token = torch.multinomial(torch.softmax(logits.float(), -1), 1)
        rates.append((model.moecache.stats() - before).hit_rate)
        model.moecache.close()
    return rates[0], rates[1]


def prefill_ratio(directory: str, arguments: argparse.Namespace) -> float:
    """Return a prompt's time with all experts in memory over that with a quarter in slots.

    The two take turns in one process; medians of five after one that is not counted.
    """
    import torch
    import transformers

    from moecache.integrations.transformers import load

    models = [
        transformers.AutoModelForCausalLM.from_pretrained(directory),
        load(directory, "25%", read="buffered"),
    ]
    prompt = torch.randint(models[0].config.vocab_size, (1, arguments.prompt_tokens))
    times: list[list[float]] = [[], []]
    outputs = []
    for _ in range(6):
        for model, taken in zip(models, times, strict=True):
            started_s = time.perf_counter()
            with torch.inference_mode():
                outputs.append(model(prompt).logits)
            taken.append(time.perf_counter() - started_s)
    if not all(torch.equal(outputs[0], output) for output in outputs):
        raise SystemExit("the logits of a prompt differ")
    models[1].moecache.close()
    whole_s, quarter_s = (statistics.median(taken[1:]) for taken in times)
    return whole_s / quarter_s


def _prefetch(contestant: Contestant) -> list[Any]:
    return [run["stats"].get("prefetch") for run in contestant.runs]


def show(found: dict[str, Any], console: Console) -> bool:
    """Print the figures; return whether every bound holds."""
    table = Table(
        "", "load s", "prefill tok/s", "decode tok/s", "hit rate", "read/token", "peak RSS"
    )
    for name, median in found["medians"].items():
        rate = f"{median['hit_rate']:.3f}" if "hit_rate" in median else ""
        read = format_bytes(round(median["bytes_per_token"])) if "bytes_per_token" in median else ""
        table.add_row(
            name,
            f"{median['load_s']:.2f}",
            f"{median['prefill_tokens_per_s']:.0f}",
            f"{median['decode_tokens_per_s']:.2f}",
            rate,
            read,
            format_bytes(round(median["peak_rss_bytes"])),
        )
    console.print(table)
    holds = True
    for name, (relation, bound) in BOUNDS.items():
        ratio = found["ratios"][name]
        kept = ratio >= bound if relation == ">=" else ratio <= bound
        holds &= kept
        console.print(f"{'yes' if kept else 'NO ':3} {ratio:6.3f} {relation} {bound}  {name}")
    return holds


def main() -> int:
    """Measure and print; 1 if a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("directory")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=64)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    console.print(describe_machine())
    found = run(arguments, Console(stderr=True))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0 if show(found, console) else 1


if __name__ == "__main__":
    sys.exit(main())
