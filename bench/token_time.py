"""Where a token's time goes while the file is in memory: kernels, what is around them, and misses.

    python -m bench.real_size FILE.gguf --layers 8      # a GGUF of 3.2 GiB
    python -m bench.token_time FILE.gguf --threads 1 --json FILE

Two questions, each by contestants in turns in one run:

- What a token takes outside of the program's compiled calls (`begin`, `begin_together`, `run`,
  `logits_of`) with all experts in slots, by the model's forward and by `Decoder.step_together`,
  which `serve` uses. A clock is read around those calls.
- How much slower a token is with fewer slots than experts where what misses is in the page cache:
  the first round, which is not counted, reads the file. Beside the clock's time is that of the
  processors, of all threads; and what a layer with misses takes of it more than one without. With
  small experts there is next to nothing to read or to multiply in that:

    python -m bench.qwen3_moe DIR --layers 48 --hidden 64 --width 32 --vocabulary 512
    python -m bench.token_time DIR --threads 1
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.runs import begin, write_figures

PROMPT = 37
COMPILED = ("begin", "begin_together", "run", "logits_of")


class Clocked:
    """A program whose compiled calls are timed."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._program, name)
        return self._timed(found) if name in COMPILED else found

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


class Contestant:
    """A model with some of its experts in slots, which decodes the same tokens as the others."""

    def __init__(self, model: Any, memory: str) -> None:
        self._model, self.memory, self.offload = model, memory, model.moecache
        self._cache: Any = None
        self.num_layers = self.offload.runtime.cache.num_layers
        self.vocabulary = model.config.get_text_config().vocab_size

    def prompt(self, tokens: list[int]) -> None:
        """Read a prompt."""
        self._cache = None
        self.forward(tokens)

    def forward(self, tokens: list[int]) -> None:
        """Read tokens by the model's forward."""
        import torch

        with torch.inference_mode():
            out = self._model(
                torch.tensor([tokens]),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self._cache = out.past_key_values

    def token(self, token: int) -> None:
        """Read a token by the model's forward."""
        self.forward([token])

    def row(self, token: int) -> None:
        """Read a token as a server does."""
        assert self.offload.decoder.step_together([token], [self._cache]) is not None

    def decode(self, step: Callable[[int], None], tokens: list[int]) -> dict[str, float]:
        """Return milliseconds per token of the clock and of processors, and the hit rate."""
        before = self.offload.stats()
        cpu, clock = time.process_time(), time.perf_counter()
        for token in tokens:
            step(token)
        clock = time.perf_counter() - clock
        cpu = time.process_time() - cpu
        done = self.offload.stats() - before
        num = len(tokens) / 1e3
        missing = (done.num_steps - done.num_resident_steps) / len(tokens)
        return {
            "ms": clock / num,
            "cpu_ms": cpu / num,
            "hit_rate": done.hit_rate,
            "layers_with_misses": missing,
        }

    @contextmanager
    def clocked(self) -> Iterator[Clocked]:
        """Have the program's compiled calls timed."""
        held = vars(self.offload.decoder)
        program = held["_program"]
        held["_program"] = clocked = Clocked(program)
        try:
            yield clocked
        finally:
            held["_program"] = program


def outside(one: Contestant, tokens: list[int]) -> dict[str, float]:
    """Return microseconds per token outside of compiled calls, by the forward and by rows."""
    found = {}
    for name, step in (("forward", one.token), ("step_together", one.row)):
        one.prompt(tokens[:PROMPT])
        for token in tokens[PROMPT : PROMPT + 20]:
            step(token)
        with one.clocked() as clocked:
            taken = one.decode(step, tokens[PROMPT + 20 :])
        num = len(tokens) - PROMPT - 20
        found[name] = 1e3 * taken["ms"] - 1e6 * clocked.seconds / num
        assert taken["hit_rate"] == 1, f"{one.memory} are not all experts"
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.token_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--memories", nargs="*", default=["25%"], help="fewer slots (25%%)")
    parser.add_argument("--tokens", type=int, default=120, help="per round and contestant (120)")
    arguments = begin(parser, argv, rounds=5)
    if min(arguments.rounds, arguments.tokens) < 1:
        parser.error("--rounds and --tokens must be 1 or more")
    if {"100%", *arguments.memories} - {"100%"} != set(arguments.memories):
        parser.error("--memories are less than 100%, which is always measured")
    import torch

    from moecache.integrations.transformers import load

    torch.set_num_threads(arguments.threads)

    def opened(memory: str) -> Contestant:
        model = load(arguments.model, memory, compute="fast", dtype=torch.bfloat16, prefetch="off")
        return Contestant(model, memory)

    full = opened("100%")
    full.offload.runtime.usage.fill().wait()
    num = PROMPT + 20 + arguments.tokens
    tokens = np.random.default_rng(0).integers(5, min(200, full.vocabulary), num).tolist()
    fewer = [opened(memory) for memory in dict.fromkeys(arguments.memories)]
    around: list[dict[str, float]] = []
    taken: dict[str, list[dict[str, float]]] = {one.memory: [] for one in (full, *fewer)}
    for number in range(arguments.rounds + 1):
        found = outside(full, tokens)
        if number:
            around.append(found)
        for one in (full, *fewer) if number % 2 else (*fewer[::-1], full):
            one.prompt(tokens[:PROMPT])
            for token in tokens[PROMPT : PROMPT + 20]:
                one.token(token)
            spent = one.decode(one.token, tokens[PROMPT + 20 :])
            if number:
                taken[one.memory].append(spent)
    for one in (full, *fewer):
        one.offload.close()
    figures = compare(around, taken, full.num_layers)
    for line in describe(figures, full.num_layers):
        print(line)
    write_figures(arguments, layers=full.num_layers, figures=figures, rounds=taken, around=around)
    return 0


def compare(
    around: list[dict[str, float]], taken: dict[str, list[dict[str, float]]], num_layers: int
) -> dict[str, Any]:
    """Return medians, and medians of rounds' ratios to all experts in slots."""
    first = next(iter(taken.values()))
    found: dict[str, Any] = {
        f"outside_{name}_us": statistics.median(one[name] for one in around)
        for name in ("forward", "step_together")
    }
    for name in ("forward", "step_together"):
        found[f"outside_{name}_us_per_layer"] = found[f"outside_{name}_us"] / num_layers
    for memory, rounds in taken.items():
        found[memory] = {
            name: statistics.median(one[name] for one in rounds)
            for name in ("ms", "cpu_ms", "hit_rate", "layers_with_misses")
        }
        pairs = list(zip(first, rounds, strict=True))
        found[memory]["speed_of_all"] = statistics.median(a["ms"] / b["ms"] for a, b in pairs)
        if any(one["layers_with_misses"] for one in rounds):
            found[memory]["us_per_layer_with_misses"] = statistics.median(
                1e3 * (b["cpu_ms"] - a["cpu_ms"]) / b["layers_with_misses"]
                for a, b in pairs
                if b["layers_with_misses"]
            )
    return found


def describe(figures: dict[str, Any], num_layers: int) -> list[str]:
    """Return the figures as lines."""
    lines = [
        f"outside of compiled calls, {num_layers} layers, all resident: "
        f"{figures[f'outside_{name}_us']:.0f} us a token by {name}, "
        f"{figures[f'outside_{name}_us_per_layer']:.1f} a layer"
        for name in ("forward", "step_together")
    ]
    title = f"{'slots':>8} {'ms a token':>11} {'of processors':>14} {'hit rate':>9}"
    lines.append(f"{title} {'speed of all':>13}")
    lines += [
        f"{name:>8} {one['ms']:>11.2f} {one['cpu_ms']:>14.2f} {one['hit_rate']:>9.3f} "
        f"{one['speed_of_all']:>13.2f}"
        for name, one in figures.items()
        if isinstance(one, dict)
    ]
    lines += [
        f"with {name}, a token has {one['layers_with_misses']:.1f} layers with misses; each takes "
        f"{one['us_per_layer_with_misses']:.0f} us of the processors more than one without"
        for name, one in figures.items()
        if isinstance(one, dict) and "us_per_layer_with_misses" in one
    ]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
