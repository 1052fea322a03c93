"""A server under clients that vanish: latency, speed, wrong answers, and what leaks.

    python -m bench.serve_soak                       # 20 clients for a quarter of a minute
    python -m bench.serve_soak --minutes 10
    python -m bench.serve_soak --model DIR --minutes 10 --clients 20

`moecache serve` runs in a process of its own, with a quarter of the experts in memory. Each client
asks again and again, by the client of OpenAI: a third of them take the answer in one, a third in
parts, and a third leave: while they wait, within the prompt, or after some parts. Every answer
that comes to its end is compared with what the model generates here from the same prompt and seed.
Resident memory, open files and threads of the server are looked at four times a minute, and once
all clients have gone. Needs pip install 'moecache[serve]' openai; nothing leaves this machine.
"""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.machine import describe_machine
from moecache.units import format_bytes

ROOT = Path(__file__).parents[1]
NUM_TOKENS = 32
QUESTIONS = ("def main(argv=None):", "class Parser:", "import os\n", "for line in file:", "why?")
MEMORY = "25%"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
# What a server may grow by once it is warm: allocators keep some of what was freed.
_MOST_GROWTH_BYTES = 48 * 2**20


@dataclass
class Found:
    """What clients saw.

    Attributes
    ----------
    outcomes : Counter
    first_s, alone_s : list of float
        From asking to the first text, with and without the time in the queue.
    rates : list of float
        Tokens per second of each answer after its first token.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if an answer was wrong or something leaks."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve_soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="a chat model (default: the tiny one)")
    parser.add_argument("--minutes", type=float, default=0.25)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="moecache-soak-") as folder:
        model = arguments.model or _with_template(ROOT / "examples" / "tiny_moe", Path(folder))
        expected = _generate(model)
        command = [sys.executable, "-m", "moecache", "serve", str(model), "--port", "0"]
        with subprocess.Popen(
            [*command, "--memory", MEMORY], stderr=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            url = line.partition(" at ")[2].partition(",")[0]
            if not url.startswith("http"):
                process.terminate()
                raise SystemExit(line + process.stderr.read())
            try:
                found, samples, state = asyncio.run(_soak(url, arguments, expected, process.pid))
            finally:
                process.send_signal(signal.SIGTERM)
                ending = process.stderr.read().strip()
                code = process.wait()
    leaks = _leaks(samples, state) + [f"the server ended with {code}"] * (code != 0)
    print(ending)
    print(_describe(found, samples))
    print("; ".join(leaks) or "nothing leaks")
    if arguments.json is not None:
        figures = {
            "machine": describe_machine(),
            "minutes": arguments.minutes,
            "clients": arguments.clients,
            "outcomes": found.outcomes,
            "first_text_s": _percentiles(found.first_s),
            "first_text_alone_s": _percentiles(found.alone_s),
            "tokens_per_s": _percentiles(found.rates),
            "samples": samples,
            "leaks": leaks,
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(bool(leaks) or found.outcomes["wrong"] > 0 or found.outcomes["failed"] > 0)


def _with_template(source: Path, directory: Path) -> Path:
    for file in source.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def _generate(path: Path) -> dict[tuple[str, int], str]:
    """Return what the model answers to each question with each seed, asked alone."""
    from moecache.decoding import streams
    from moecache.integrations.transformers import generation, load

    texts = {}
    with generation.quiet(verbose=False):
        tokenizer = generation.load_tokenizer(str(path))
        model = load(path, MEMORY)
        with model.moecache:
            for question in QUESTIONS:
                for seed in range(3):
                    ids = generation.encode(tokenizer, question, chat=True)
                    parts: list[str] = []
                    stream = streams.TextStream(tokenizer, ids, parts.append)
                    generation.continue_tokens(
                        model, ids, stream, max_new_tokens=NUM_TOKENS, temperature=0.8, seed=seed
                    )
                    texts[question, seed] = "".join(parts)
    return texts


async def _soak(
    url: str, arguments: argparse.Namespace, expected: dict[tuple[str, int], str], pid: int
) -> tuple[Found, list[dict[str, int]], dict[str, Any]]:
    import openai

    found, samples = Found(), []
    process = psutil.Process(pid)
    end_s = time.monotonic() + 60 * arguments.minutes
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        tasks = [
            asyncio.create_task(
                _ask_again(client, random.Random(arguments.seed + number), expected, found, end_s)
            )
            for number in range(arguments.clients)
        ]
        while time.monotonic() < end_s:
            await asyncio.sleep(min(15.0, max(0.1, end_s - time.monotonic())))
            samples.append(_sample(process))
            print(_line(samples[-1], found), flush=True)
        for task in tasks:
            await task
        models = await client.models.with_raw_response.list()
        assert models.status_code == 200
    await asyncio.sleep(1)
    samples.append(_sample(process))
    state = await asyncio.to_thread(_state, url)
    return found, samples, state


async def _ask_again(
    client: Any,
    draw: random.Random,
    expected: dict[tuple[str, int], str],
    found: Found,
    end_s: float,
) -> None:
    import openai

    while time.monotonic() < end_s:
        question, seed = draw.choice(list(expected))
        asked: dict[str, Any] = {"temperature": 0.8, "seed": seed, "max_tokens": NUM_TOKENS}
        asked["messages"] = [{"role": "user", "content": question}]
        kind = draw.choice(("whole", "parts", "leaves"))
        try:
            if kind == "leaves":
                await _leave(client, draw, asked)
                found.outcomes["left"] += 1
            else:
                text = await _take(client, asked, found, stream=kind == "parts")
                found.outcomes["equal" if text == expected[question, seed] else "wrong"] += 1
        except openai.APIStatusError as error:
            if error.status_code != 503:
                found.outcomes["failed"] += 1
                continue
            found.outcomes["refused"] += 1
            await asyncio.sleep(float(error.response.headers["Retry-After"]))
        except openai.APIError:
            found.outcomes["failed"] += 1


async def _take(client: Any, asked: dict[str, Any], found: Found, *, stream: bool) -> str:
    """Return an answer; note how fast it was."""
    begun_s = time.perf_counter()
    answer = await client.chat.completions.create(model=None, **asked, stream=stream)
    if not stream:
        found.rates.append(answer.moecache["tokens_per_s"])
        return str(answer.choices[0].message.content)
    parts: list[str] = []
    async for chunk in answer:
        part = chunk.choices[0].delta.content if chunk.choices else None
        if part and not any(parts):
            found.first_s.append(time.perf_counter() - begun_s)
        parts.append(part or "")
        if chunk.choices and chunk.choices[0].finish_reason:
            found.alone_s.append(chunk.moecache["prefill_s"])
            found.rates.append(chunk.moecache["tokens_per_s"])
    return "".join(parts)


async def _leave(client: Any, draw: random.Random, asked: dict[str, Any]) -> None:
    """Ask for a long answer, and vanish at some moment."""
    asked = {**asked, "max_tokens": 900}
    if draw.random() < 0.5:
        task = asyncio.create_task(client.chat.completions.create(model=None, **asked))
        await asyncio.wait((task,), timeout=draw.uniform(0.0, 3.0))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return
    answer = await client.chat.completions.create(model=None, **asked, stream=True)
    left = draw.randrange(12)
    async for _ in answer:
        if not left:
            break
        left -= 1
    await answer.close()


def _sample(process: psutil.Process) -> dict[str, int]:
    return {
        "rss_bytes": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": process.num_threads(),
    }


def _state(url: str) -> dict[str, Any]:
    import urllib.request

    address = f"{url}/moecache/state"
    with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310 - the server's own
        found: dict[str, Any] = json.load(answer)
    return found


def _leaks(samples: list[dict[str, int]], state: dict[str, Any]) -> list[str]:
    """Say what is more at the end, with all clients gone, than after the first quarter."""
    import base64

    states = np.frombuffer(base64.b64decode(state["states"]), np.uint8)
    early, last = samples[len(samples) // 4], samples[-1]
    leaks = []
    if (leases := int((states & 4).astype(bool).sum())) or state["num_in_flight"]:
        leaks.append(f"{leases} experts are leased, {state['num_in_flight']} in flight")
    if state["num_waiting"] or state["generating"]:
        leaks.append("a request is still answered")
    leaks += [
        f"{last[name]} {name}, {early[name]} before"
        for name in ("files", "threads")
        if last[name] > early[name]
    ]
    if (grown := last["rss_bytes"] - early["rss_bytes"]) > _MOST_GROWTH_BYTES:
        leaks.append(f"{format_bytes(grown)} more memory")
    return leaks


def _line(sample: dict[str, int], found: Found) -> str:
    outcomes = ", ".join(f"{number} {name}" for name, number in sorted(found.outcomes.items()))
    return (
        f"RSS {format_bytes(sample['rss_bytes'])}, {sample['files']} files, "
        f"{sample['threads']} threads; {outcomes}"
    )


def _describe(found: Found, samples: list[dict[str, int]]) -> str:
    lines = [_line(samples[-1], found)]
    for name, values, unit in (
        ("first text", found.first_s, "s"),
        ("first text, without the queue", found.alone_s, "s"),
        ("tokens/s", found.rates, ""),
    ):
        p50, p95 = _percentiles(values)
        lines.append(f"{name}: p50 {p50:.3g} {unit}, p95 {p95:.3g} {unit}".rstrip())
    return "\n".join(lines)


def _percentiles(values: list[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    p50, p95 = np.percentile(values, (50, 95))
    return float(p50), float(p95)


if __name__ == "__main__":
    sys.exit(main())
