"""vLLM with moecache's plug-in in a limit of memory, beside vLLM alone and `moecache serve`.

    python -m bench.qwen3_moe DIR                    # a model of 3.2 GB
    python -m bench.vllm_clients DIR --vllm build/vllm/bin/python --limit 3584MiB --memory 1GiB

Each server runs in a memory cgroup of its own, one after the other in each round. One client asks
questions one after the other, then as many as `--clients` ask at once; answers are greedy and take
`--new-tokens` each. CPU time is that of the server's processes. A server that is killed, or does
not start, is said to be.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.limits import MemoryLimit
from bench.runs import begin, write_figures
from bench.serve_clients import ROOT, Round, ask, figures_of, question
from moecache.units import parse_bytes

VLLM, PLUGIN, SERVE = "vLLM", "vLLM with moecache", "moecache serve"
_START_S = 300


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.vllm_clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm", required=True, help="a Python that has vLLM and the plug-in")
    parser.add_argument("--limit", default="3584MiB", help="of a server's memory (3584MiB)")
    parser.add_argument("--memory", default="1GiB", help="for experts (1GiB)")
    parser.add_argument("--cache", default="128MiB", help="vLLM's KV cache (128MiB)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    arguments = begin(parser, argv, rounds=3)
    questions = [question(client, 16) for client in range(arguments.clients)]
    rounds: dict[tuple[str, str], list[Round]] = {}
    ended: dict[str, str] = {}
    for _ in range(arguments.rounds):
        for name in (VLLM, PLUGIN, SERVE):
            if name in ended:
                continue
            with _serving(name, arguments) as (port, process, why):
                if port is None:
                    ended[name] = why
                    print(f"{name}: {why}", flush=True)
                    continue
                ask(port, process, questions[:1], 8, at_once=False)  # warms up
                for way, asked, at_once in (
                    ("one client", questions[:3], False),
                    (f"{arguments.clients} clients", questions, True),
                ):
                    found = ask(port, process, asked, arguments.new_tokens, at_once=at_once)
                    rounds.setdefault((name, way), []).append(found)
    figures = {f"{name}, {way}": figures_of(found) for (name, way), found in rounds.items()}
    for name, found in figures.items():
        print(
            f"{name:32} {found['tokens_per_s']:6.1f} tokens/s, {found['tokens_per_cpu_s']:6.1f} "
            f"per CPU-s; first token p50 {found['first_s'][0]:.2f} s"
        )
    named = {name: getattr(arguments, name) for name in ("limit", "memory", "cache", "clients")}
    write_figures(arguments, **named, figures=figures, ended=ended)
    return 0


@contextlib.contextmanager
def _serving(
    name: str, arguments: argparse.Namespace
) -> Iterator[tuple[int | None, psutil.Process, str]]:
    """Start a server; yield its port, or `None` and why there is none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MOECACHE_THREADS": str(arguments.threads), "VLLM_LOGGING_LEVEL": "WARNING"}
    if name == SERVE:
        command = [sys.executable, "-m", "moecache", "serve", str(arguments.model)]
        command += ["--port", str(port), "--memory", arguments.memory, "--compute", "fast"]
        command += ["--prefix-memory", "0", "--parallel", str(arguments.clients)]
    else:
        command = [arguments.vllm, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(arguments.model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager"]
        command += ["--max-num-seqs", str(arguments.clients)]
        command += ["--kv-cache-memory-bytes", str(parse_bytes(arguments.cache))]
        if name == PLUGIN:
            options = json.dumps({"memory": arguments.memory})
            command += ["--load-format", "moecache", "--model-loader-extra-config", options]
    with MemoryLimit(parse_bytes(arguments.limit)) as group:
        inside = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group.join_file), *command]
        process = subprocess.Popen(
            inside,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | variables,  # noqa: TID251 - passed on
        )
        try:
            is_up = _waited(process, port, group)
            kills = group.facts()["num_oom_kills"]
            why = f"killed, as {arguments.limit} were too little" if kills else "did not start"
            yield port if is_up else None, psutil.Process(process.pid), why
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for number in group.join_file.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)


def _waited(process: subprocess.Popen[bytes], port: int, group: MemoryLimit) -> bool:
    """Return whether the server answers; False once it has ended, or lost a process."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        if group.facts()["num_oom_kills"]:
            return False
        with (
            contextlib.suppress(OSError),
            contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, 5)) as link,
        ):
            link.request("GET", "/health")
            if link.getresponse().status == http.HTTPStatus.OK:
                return True
        time.sleep(0.5)
    return False


if __name__ == "__main__":
    sys.exit(main())
