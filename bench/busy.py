"""Decoding beside busy processes: which share of its part of the cores it keeps.

    python -m bench.busy DIR GGUF --threads 2 --busy 2 --json FILE

Each contestant decodes alone and beside processes that only count, in turns. With as many threads
as cores, and as many busy processes, half of the cores is its part: that share of the rate that it
has alone. Threads that spin while they wait for one another use their part up for nothing.
"""

import argparse
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.against_llama_cpp import NEW_TOKENS, PROMPT, Contestant, llama, ours
from bench.runs import begin, write_figures
from moecache.kernels import usable_cores


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.busy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--busy", type=int, default=2, help="busy processes (2)")
    parser.add_argument("--ways", nargs="+", choices=("torch", "fast"), default=("torch", "fast"))
    arguments = begin(parser, argv, rounds=5)
    tokens = np.random.default_rng(0).integers(5, 200, PROMPT + NEW_TOKENS).tolist()
    part = usable_cores() / (arguments.threads + arguments.busy)
    part /= min(1, usable_cores() / arguments.threads)
    rates: dict[tuple[str, bool], list[float]] = {}
    with ExitStack() as opened:
        contestants = [
            opened.enter_context(llama(arguments.gguf, arguments.threads)),
            *(
                opened.enter_context(ours(arguments.checkpoint, "100%", way, arguments.threads))
                for way in arguments.ways
            ),
        ]
        for one in contestants:
            rate(one, tokens)  # warms up
        for _ in range(arguments.rounds):
            for is_busy in (False, True):
                with busy(arguments.busy if is_busy else 0):
                    for one in contestants:
                        rates.setdefault((one.name, is_busy), []).append(rate(one, tokens))
    figures = []
    for one in contestants:
        alone, beside = (rates[one.name, is_busy] for is_busy in (False, True))
        kept = statistics.median(b / a for a, b in zip(alone, beside, strict=True)) / part
        figures.append(
            {
                "name": one.name,
                "alone_tokens_per_s": statistics.median(alone),
                "beside_tokens_per_s": statistics.median(beside),
                "of_fair_share": kept,
            }
        )
        print(
            f"{one.name:22} alone {figures[-1]['alone_tokens_per_s']:6.1f} tokens/s, beside "
            f"{arguments.busy} busy processes {figures[-1]['beside_tokens_per_s']:6.1f}: "
            f"{kept:.2f} of its fair share"
        )
    write_figures(arguments, num_busy=arguments.busy, fair_share=part, figures=figures)
    return 0


def rate(one: Contestant, tokens: list[int]) -> float:
    """Return the tokens per second of decoding."""
    one.prompt(tokens[:PROMPT])
    start = time.perf_counter()
    for token in tokens[PROMPT:]:
        one.token(token)
    return NEW_TOKENS / (time.perf_counter() - start)


def busy(number: int) -> ExitStack:
    """Return what ends so many processes that only count, once they are under way."""
    stack = ExitStack()
    for _ in range(number):
        counting = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(counting.wait)
        stack.callback(counting.kill)
    time.sleep(0.5)
    return stack


if __name__ == "__main__":
    raise SystemExit(main())
