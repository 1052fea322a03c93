"""What torch.compile gains in decode: the same model eager and compiled, in one process.

    python -m bench.qwen3_moe DIR               # a model of 3.2 GB
    python -m bench.compiled DIR --json FILE

For each `compute` and memory one model is loaded and decodes the same tokens after the same prompt
in three ways, which take turns: with transformers' default cache, with a static cache, and compiled
(`torch.compile(model, fullgraph=True)`) with a static cache. Figures are medians of tokens per
second of CPU time of the process; ratios are medians of rounds' ratios to the first way.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import describe_machine
from moecache import kernels

PROMPT = 16
WAYS = ("default cache", "static cache", "compiled")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    import torch

    from moecache.integrations.transformers import load

    parser = argparse.ArgumentParser(
        prog="python -m bench.compiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--memories", nargs="*", default=["100%", "25%"])
    parser.add_argument("--compute", nargs="*", default=["torch", "fast"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    kernels.use_threads(arguments.threads)
    print(f"{describe_machine()}, torch {torch.__version__}, {arguments.threads} threads")
    figures = []
    for compute in arguments.compute:
        for memory in arguments.memories:
            model = load(arguments.checkpoint, memory, compute=compute, dtype=torch.bfloat16)
            with model.moecache:
                measured = measure(model, arguments.rounds, arguments.new_tokens)
            for figure in measured:
                print(
                    f"{compute:6} {memory:5} {figure['way']:14} "
                    f"{figure['decode_tokens_per_cpu_s']:7.2f} tokens/CPU-s, "
                    f"{figure['of_first']:5.2f} of the default",
                    flush=True,
                )
                figures.append({"compute": compute, "memory": memory, **figure})
            torch.compiler.reset()
    if arguments.json is not None:
        found = {
            "machine": describe_machine(),
            "torch": torch.__version__,
            "level": kernels.level(),
            "threads": arguments.threads,
            "figures": figures,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(model: Any, rounds: int, new_tokens: int) -> list[dict[str, Any]]:
    """Return the figures of each way to decode with one model."""
    import torch
    import transformers

    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    ids = np.random.default_rng(0).integers(5, 200, PROMPT + new_tokens).tolist()
    caches = {
        way: transformers.StaticCache(config=model.config, max_cache_len=PROMPT + new_tokens)
        for way in WAYS[1:]
    }
    # The first round compiles.
    for number in range(rounds + 1):
        for way in random.Random(number).sample(WAYS, len(WAYS)):
            call = compiled if way == "compiled" else model
            rate = _decode(model, call, caches.get(way), ids)
            if number:
                rates[way].append(rate)
    return [
        {
            "way": way,
            "decode_tokens_per_cpu_s": statistics.median(rates[way]),
            "of_first": statistics.median(
                a / b for a, b in zip(rates[way], rates[WAYS[0]], strict=True)
            ),
            "rounds": rates[way],
        }
        for way in WAYS
    ]


def _decode(model: Any, call: Any, cache: Any, ids: list[int]) -> float:
    """Return the tokens per second of CPU time after the prompt."""
    import torch
    import transformers

    tokens = torch.tensor([ids])
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    cache.reset()
    with torch.no_grad():
        model(tokens[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
        begun = time.process_time()
        for place in range(PROMPT, len(ids)):
            call(tokens[:, place : place + 1], past_key_values=cache)
        return (len(ids) - PROMPT) / (time.process_time() - begun)


if __name__ == "__main__":
    raise SystemExit(main())
