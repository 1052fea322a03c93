"""Decode and prompts beside llama.cpp: the same model from the same weights, in one process.

    pip install '.[transformers,bench-llama]'   # builds llama.cpp for this machine, ten minutes
    python -m bench.qwen3_moe DIR               # a model of 3.2 GB
    python -m bench.against_llama_cpp DIR GGUF --convert LLAMA_CPP --json FILE

    python -m bench.against_llama_cpp FILE.gguf FILE.gguf    # the same file for both

GGUF is the model in bfloat16; --convert writes it if it is not there, by the converter in the
sources of llama.cpp (vendor/llama.cpp in that of llama-cpp-python: pip download --no-binary :all:).

All contestants are given the same tokens, one at a time after a prompt, so that they use the same
experts; how often they would have chosen the same next token is shown. They take turns, in another
order each round. Figures are medians: tokens per second of CPU time of all threads, which other
work on the machine changes least, and of the clock; ratios are medians of rounds' ratios.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench.runs import begin, write_figures

LLAMA = "llama.cpp"
PROMPT, NEW_TOKENS, LONG_PROMPT = 16, 48, 512


@dataclass
class Contestant:
    """One way to run the model: functions that read a prompt, and then a token each."""

    name: str
    prompt: Callable[[list[int]], np.ndarray]
    token: Callable[[int], np.ndarray]
    decode_cpu: list[float] = field(default_factory=list)
    decode_clock: list[float] = field(default_factory=list)
    prompt_cpu: list[float] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    offload: Any = None


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.against_llama_cpp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--convert", type=Path, metavar="LLAMA_CPP")
    parser.add_argument("--memories", nargs="*", default=["100%", "25%"])
    arguments = begin(parser, argv, rounds=7)
    if not arguments.gguf.exists():
        if arguments.convert is None:
            parser.error(f"{arguments.gguf} is not there; --convert writes it")
        convert(arguments.convert, arguments.checkpoint, arguments.gguf)
    tokens = np.random.default_rng(0).integers(5, 200, LONG_PROMPT + NEW_TOKENS).tolist()
    with ExitStack() as opened:
        contestants = [opened.enter_context(llama(arguments.gguf, arguments.threads))]
        contestants += [
            opened.enter_context(ours(arguments.checkpoint, memory, compute, arguments.threads))
            for memory in arguments.memories
            for compute in ("torch", "fast")
        ]
        for number in range(arguments.rounds + 1):
            order = list(contestants)
            random.Random(number).shuffle(order)
            for one in order:
                run(one, tokens, counted=number > 0)
    figures = compare(contestants)
    for line in describe(figures):
        print(line)
    rounds = [
        {k: v for k, v in vars(one).items() if isinstance(v, list | str)} for one in contestants
    ]
    write_figures(arguments, figures=figures, rounds=rounds)
    return 0


def run(one: Contestant, tokens: list[int], *, counted: bool) -> None:
    """Time a long prompt, and the decode of tokens after a short one."""
    cpu = time.process_time()
    one.prompt(tokens[:LONG_PROMPT])
    prompt_cpu = time.process_time() - cpu
    logits = one.prompt(tokens[:PROMPT])
    chosen = [int(logits.argmax())]
    cpu, clock = time.process_time(), time.perf_counter()
    decoded = tokens[PROMPT : PROMPT + NEW_TOKENS]
    chosen.extend(int(one.token(token).argmax()) for token in decoded)
    if counted:
        one.decode_cpu.append(NEW_TOKENS / (time.process_time() - cpu))
        one.decode_clock.append(NEW_TOKENS / (time.perf_counter() - clock))
        one.prompt_cpu.append(LONG_PROMPT / prompt_cpu)
        one.chosen = chosen


def compare(contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Return medians, and medians of rounds' ratios to llama.cpp."""
    first = contestants[0]

    def ratio(values: list[float], others: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(values, others, strict=True))

    return [
        {
            "name": one.name,
            "decode_tokens_per_cpu_s": statistics.median(one.decode_cpu),
            "decode_tokens_per_s": statistics.median(one.decode_clock),
            "prompt_tokens_per_cpu_s": statistics.median(one.prompt_cpu),
            "decode_of_llama": ratio(one.decode_cpu, first.decode_cpu),
            "prompt_of_llama": ratio(one.prompt_cpu, first.prompt_cpu),
            "same_choice": float(np.mean(np.array(one.chosen) == np.array(first.chosen))),
        }
        for one in contestants
    ]


def describe(figures: list[dict[str, Any]]) -> list[str]:
    """Return the figures as lines."""
    title = f"{'':22} {'decode, tokens/CPU-s':>20} {'of llama':>8} {'tokens/s':>8}"
    lines = [f"{title} {'prompt, tokens/CPU-s':>20} {'of llama':>8} {'same choice':>11}"]
    lines += [
        f"{one['name']:22} {one['decode_tokens_per_cpu_s']:>20.1f} {one['decode_of_llama']:>8.2f} "
        f"{one['decode_tokens_per_s']:>8.1f} {one['prompt_tokens_per_cpu_s']:>20.0f} "
        f"{one['prompt_of_llama']:>8.2f} {one['same_choice']:>11.2f}"
        for one in figures
    ]
    return lines


@contextmanager
def llama(
    path: Path, threads: int, *, repacked: bool = True, context: int = 1024
) -> Iterator[Contestant]:
    """Yield llama.cpp on a mapped file; repacked weights are copies, which all have to fit."""
    import llama_cpp

    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = repacked
    with mock.patch("llama_cpp.llama_cpp.llama_model_default_params", return_value=params):
        model = llama_cpp.Llama(
            str(path),
            n_ctx=context,
            n_batch=512,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    def logits() -> np.ndarray:
        found = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return np.ctypeslib.as_array(found, (model.n_vocab(),)).copy()

    def prompt(tokens: list[int]) -> np.ndarray:
        model.reset()
        model.eval(tokens)
        return logits()

    def token(number: int) -> np.ndarray:
        model.eval([number])
        return logits()

    try:
        yield Contestant(LLAMA, prompt, token)
    finally:
        model.close()


@contextmanager
def ours(
    path: Path, memory: int | str | None, compute: str, threads: int, **options: Any
) -> Iterator[Contestant]:
    """Yield transformers with its experts in slots."""
    import torch

    from moecache.integrations.transformers import load

    torch.set_num_threads(threads)
    model = load(path, memory, compute=compute, dtype=torch.bfloat16, **options)
    cache: Any = None

    def forward(ids: list[int]) -> np.ndarray:
        nonlocal cache
        with torch.inference_mode():
            out = model(
                torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        cache = out.past_key_values
        found: np.ndarray = out.logits[0, -1].float().numpy()
        return found

    def prompt(tokens: list[int]) -> np.ndarray:
        nonlocal cache
        cache = None
        return forward(tokens)

    with model.moecache:
        name = f"moecache {memory} {compute}"
        yield Contestant(name, prompt, lambda token: forward([token]), offload=model.moecache)


@contextmanager
def ours_of_file(path: Path, memory: int | str | None, **options: Any) -> Iterator[Contestant]:
    """Yield a GGUF file's text, computed without torch."""
    from moecache.decoding.files.opening import open_text_model

    with open_text_model(path, memory, **options) as model:
        cache = model.new_cache()

        def prompt(tokens: list[int]) -> np.ndarray:
            nonlocal cache
            cache = model.new_cache((), len(tokens) + NEW_TOKENS)
            return model.read(tokens, cache)

        yield Contestant(
            "moecache file",
            prompt,
            lambda token: model.read([token], cache),
            offload=model.runtime,
        )


def convert(llama_cpp: Path, checkpoint: Path, gguf: Path) -> None:
    """Write a checkpoint as GGUF in bfloat16, by llama.cpp's own converter."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import convert_hf_to_gguf as converter

    # Its tokens are bytes: it knows no such tokenizer, and nothing here is tokenized.
    for module in (converter, sys.modules.get("conversion.base")):
        for kind in vars(module).values() if module else ():
            if isinstance(kind, type) and "get_vocab_base_pre" in vars(kind):
                kind.get_vocab_base_pre = lambda *_: "qwen2"
    sys.argv = ["convert", str(checkpoint), "--outtype", "bf16", "--outfile", str(gguf)]
    converter.main()


if __name__ == "__main__":
    raise SystemExit(main())
