"""Several clients of one server at once beside one after the other: tokens/s, and first tokens.

    python -m bench.serve_clients MODEL                    # a directory, or a GGUF file
    python -m bench.serve_clients FILE.gguf --clients 4 --threads 2 --json FILE
    python -m bench.serve_clients FILE.gguf --memory max --limit 6GiB

`moecache serve` runs in a process of its own and keeps no prompts. In each round every client asks
its question alone, one after the other, and then all ask at once; each has a thread, and takes its
answer in parts. Answers are greedy, and each must be the same both times. Tokens are those of the
answers, over the time from the first question to the last answer; CPU time is the server's.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.limits import MemoryLimit
from bench.runs import begin, write_figures
from moecache.units import parse_bytes

ROOT = Path(__file__).parents[1]
WORDS = ("a", "model", "reads", "the", "next", "expert", "from", "disk", "into", "its", "slot")


@dataclass
class Round:
    """What the clients saw in a round, alone or together.

    Attributes
    ----------
    texts : list of str
        Answers, by client.
    first_s : list of float
        From asking to the first part of an answer, by client.
    num_tokens : int
        Of all answers.
    clock_s, cpu_s : float
        From the first question to the last answer: of the clock, and of the server's threads.
    """

    texts: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    clock_s: float = 0.0
    cpu_s: float = 0.0


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if an answer is another one beside others."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve_clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--memory", default="100%", help="for experts (100%%)")
    parser.add_argument("--limit", help="of memory; by default there is none")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="at least, in each question")
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = begin(parser, argv, rounds=5)
    questions = [question(client, arguments.prompt_tokens) for client in range(arguments.clients)]
    alone, together = [], []
    with _serving(arguments) as (port, process):
        ask(port, process, questions, arguments.new_tokens, at_once=True)  # warms up
        for _ in range(arguments.rounds):
            alone.append(ask(port, process, questions, arguments.new_tokens, at_once=False))
            together.append(ask(port, process, questions, arguments.new_tokens, at_once=True))
    figures = {"alone": figures_of(alone), "together": figures_of(together)}
    ratios = [
        one.clock_s / all_.clock_s * all_.num_tokens / one.num_tokens
        for one, all_ in zip(alone, together, strict=True)
    ]
    for name, found in figures.items():
        p50, p95 = found["first_s"]
        print(
            f"{name:9} {found['tokens_per_s']:6.1f} tokens/s, {found['tokens_per_cpu_s']:6.1f} "
            f"per CPU-s; first token p50 {p50:.3f} s, p95 {p95:.3f} s"
        )
    is_equal = all(one.texts == alone[0].texts for one in alone + together)
    print(f"together {statistics.median(ratios):.2f} times alone")
    print("answers are equal" if is_equal else "ANSWERS DIFFER")
    named = {name: getattr(arguments, name) for name in ("clients", "memory", "limit")}
    named |= {name: getattr(arguments, name) for name in ("prompt_tokens", "new_tokens")}
    write_figures(arguments, **named, figures=figures, ratios=ratios, equal=is_equal)
    return 0 if is_equal else 1


def question(client: int, num_words: int) -> str:
    """Return a text of so many words, each at least a token to any tokenizer."""
    drawn = np.random.default_rng(client).choice(WORDS, num_words)
    return " ".join(drawn)


@contextlib.contextmanager
def _serving(arguments: argparse.Namespace) -> Iterator[tuple[int, psutil.Process]]:
    """Start the server; yield its port and its process."""
    command = [sys.executable, "-m", "moecache", "serve", str(arguments.model), "--port", "0"]
    command += ["--memory", arguments.memory, "--compute", "fast", "--prefix-memory", "0"]
    command += ["--parallel", str(arguments.clients)]
    variables = {"OMP_WAIT_POLICY": "PASSIVE", "MOECACHE_THREADS": str(arguments.threads)}
    with contextlib.ExitStack() as stack:
        if arguments.limit is not None:
            group = stack.enter_context(MemoryLimit(parse_bytes(arguments.limit)))
            command = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group.join_file), *command]
        process = stack.enter_context(
            subprocess.Popen(
                command,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=os.environ | variables,  # noqa: TID251 - passed on
            )
        )
        stack.callback(process.send_signal, signal.SIGTERM)
        assert process.stderr is not None
        line = process.stderr.readline()
        port = line.partition(" at http://127.0.0.1:")[2].partition("/")[0]
        if not port.isdigit():
            process.terminate()
            raise SystemExit(line + process.stderr.read())
        yield int(port), psutil.Process(process.pid)


def ask(
    port: int, process: psutil.Process, questions: list[str], num_tokens: int, *, at_once: bool
) -> Round:
    """Have each client ask its question, all at once or one after the other."""
    found = Round()
    cpu_s, clock = _cpu_s(process), time.perf_counter()
    with ThreadPoolExecutor(len(questions) if at_once else 1) as pool:
        answers = pool.map(lambda question: _answer(port, question, num_tokens), questions)
        for text, first_s, count in answers:
            found.texts.append(text)
            found.first_s.append(first_s)
            found.num_tokens += count
    found.clock_s = time.perf_counter() - clock
    found.cpu_s = _cpu_s(process) - cpu_s
    return found


def _cpu_s(process: psutil.Process) -> float:
    """Return what a server has taken, with the processes that it began."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def _answer(port: int, question: str, num_tokens: int) -> tuple[str, float, int]:
    """Return an answer, the seconds to its first part, and how many tokens it has."""
    asked = {"prompt": question, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    asked |= {"stream_options": {"include_usage": True}}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as link:
        begun_s = time.perf_counter()
        link.request(
            "POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"}
        )
        answer = link.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise SystemExit(answer.read().decode())
        parts: list[str] = []
        first_s, usage = 0.0, 0
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk: dict[str, Any] = json.loads(line[len("data: ") :])
            if "error" in chunk:
                raise SystemExit(chunk["error"]["message"])
            if chunk["choices"]:
                first_s = first_s or time.perf_counter() - begun_s
                parts.append(chunk["choices"][0]["text"])
            if chunk.get("usage"):
                usage = chunk["usage"]["completion_tokens"]
    return "".join(parts), first_s, usage


def figures_of(rounds: list[Round]) -> dict[str, Any]:
    """Return medians over the rounds, and the percentiles of all first tokens."""
    p50, p95 = np.percentile([first_s for one in rounds for first_s in one.first_s], (50, 95))
    return {
        "tokens_per_s": statistics.median(one.num_tokens / one.clock_s for one in rounds),
        "tokens_per_cpu_s": statistics.median(one.num_tokens / one.cpu_s for one in rounds),
        "num_tokens": rounds[0].num_tokens,
        "first_s": (float(p50), float(p95)),
    }


if __name__ == "__main__":
    sys.exit(main())
