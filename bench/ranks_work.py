"""What a rank of `bench.ranks` does: a task from a file, a result into another, by rank."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Prompts of 1 and 300 tokens and a batch of 3, whose logits are compared.
SHAPES = {"prompt of 1": (1, 1), "prompt of 300": (1, 300), "batch of 3": (3, 7)}


def main() -> int:
    """Do the task of the file that is named; return the exit code."""
    task = json.loads(Path(sys.argv[1]).read_text())
    # By torchrun's variables, or the only one.
    rank = int(os.environ.get("RANK", "0"))  # noqa: TID251 - what a rank is told
    if task.get("groups"):
        # Before torch: all of the process is limited.
        for group in task["groups"][rank]:
            Path(group).write_text(str(os.getpid()))
    import torch

    torch.set_num_threads(task["threads"])
    found = TASKS[task["do"]](task)
    torch.save(found, f"{task['out']}.{rank}")
    return 0


def open_model(task: dict[str, Any], **changed: Any) -> Any:
    """Return the model with its experts spread over the ranks that there are."""
    from moecache.integrations.transformers import load

    return load(task["model"], expert_parallel=True, **{**task["load"], **changed})


def exact(task: dict[str, Any]) -> dict[str, Any]:
    """Return logits and tokens, for each part of the experts."""
    import torch

    found: dict[str, Any] = {}
    for memory in task["memories"]:
        model = open_model(task, memory=memory)
        torch.manual_seed(5)
        with model.moecache as offload, torch.no_grad():
            one = found[memory] = {}
            for name, shape in SHAPES.items():
                ids = torch.randint(0, task["vocabulary"], shape)
                one[name] = model(input_ids=ids, use_cache=False).logits
            prompt = torch.randint(0, task["vocabulary"], (1, 5))
            before = offload.ranks.sent_bytes
            one["64 tokens"] = model.generate(
                prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False
            )
            one["sent"] = offload.ranks.sent_bytes - before
            one["num_evictions"] = offload.stats().num_evictions
    return found


def speed(task: dict[str, Any]) -> dict[str, Any]:
    """Return how many tokens a second come, and what was read and sent for one."""
    model = open_model(task)
    with model.moecache as offload:
        # Slots are full before anything is measured.
        decode(model, task["vocabulary"], task["warm_up"], seed=3)
        stats, sent, waited = offload.stats(), offload.ranks.sent_bytes, offload.ranks.waited_ns
        began, cpu = time.perf_counter(), time.process_time()
        tokens = decode(model, task["vocabulary"], task["tokens"], seed=4)
        seconds, after = time.perf_counter() - began, offload.stats() - stats
        return {
            "tokens": tokens,
            "tokens_per_s": task["tokens"] / seconds,
            "cpu_s_per_token": (time.process_time() - cpu) / task["tokens"],
            "hit_rate": after.hit_rate,
            "bytes_read_per_token": after.bytes_read / task["tokens"],
            "sent_bytes": offload.ranks.sent_bytes - sent,
            "waited_s_per_token": (offload.ranks.waited_ns - waited) / task["tokens"] / 1e9,
            "capacity": after.capacity,
        }


def decode(model: Any, vocabulary: int, num_tokens: int, *, seed: int) -> list[int]:
    """Put tokens through a model, one after the other; return the likeliest next of each.

    The tokens are random: what a model of random weights would go on with is a short circle, whose
    experts fit anywhere.
    """
    import torch
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(seed)
    given = torch.randint(0, vocabulary, (num_tokens, 1, 1), generator=generator)
    cache, found = DynamicCache(config=model.config), []
    with torch.no_grad():
        for token in given:
            logits = model(input_ids=token, past_key_values=cache).logits
            found.append(int(logits[0, -1].argmax()))
    return found


def overhead(task: dict[str, Any]) -> dict[str, float]:
    """Return seconds per token of one rank, and of what it does for ranks there are none of.

    Timed on their own: where memory happens to lie and what else a machine does makes two models of
    one kind differ by more.
    """
    import torch

    model = open_model(task)
    [beats] = [one for one in threading.enumerate() if one.name == "moecache-heartbeat"]
    clock = time.pthread_getcpuclockid(beats.ident or 0)
    ours_ns = 0

    def timed(hook: Callable[..., object]) -> Callable[..., object]:
        def call(*given: Any, **named: Any) -> object:
            nonlocal ours_ns
            began = time.perf_counter_ns()
            found = hook(*given, **named)
            ours_ns += time.perf_counter_ns() - began
            return found

        return call

    for hooks in (model._forward_pre_hooks, model._forward_hooks):  # noqa: SLF001 - torch's
        hooks.update({number: timed(hook) for number, hook in hooks.items()})
    prompt = torch.arange(8)[None]
    with torch.no_grad():
        model.generate(prompt, max_new_tokens=task["tokens"], do_sample=False)
        ours_ns, beaten = 0, time.clock_gettime(clock)
        began = time.perf_counter()
        for _ in range(task["rounds"]):
            model.generate(prompt, max_new_tokens=task["tokens"], do_sample=False)
        seconds = time.perf_counter() - began
    num_tokens = task["tokens"] * task["rounds"]
    beaten = time.clock_gettime(clock) - beaten
    return {
        "s_per_token": seconds / num_tokens,
        "hooks_s_per_token": ours_ns / 1e9 / num_tokens,
        "heartbeat_cpu_s_per_token": beaten / num_tokens,
    }


def forever(task: dict[str, Any]) -> dict[str, Any]:
    """Generate until that fails; return how, and when."""
    import torch

    from moecache.errors import MoeCacheError

    ready = False
    try:
        model = open_model(task)
        ready = True
        Path(f"{task['out']}.ready.{os.getpid()}").touch()
        prompt = torch.arange(40)[None]
        until = time.monotonic() + 120
        while time.monotonic() < until:
            model.generate(prompt, max_new_tokens=16, do_sample=False)
    except MoeCacheError as error:
        return {"error": str(error), "at": time.time(), "ready": ready}
    return {"error": "", "at": time.time(), "ready": ready}


def run_forked(told: dict[str, str], task: dict[str, Any]) -> None:
    """Do a task in a process that was forked, and has all imports."""
    import torch

    from moecache.integrations.transformers import _groups, _joining

    os.environ.update(told)  # noqa: TID251 - as torchrun would
    # What torch and its store write about a peer that is gone.
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    # Nobody knows of a rank that ends before it was there: that alone is waited for so long.
    _groups.START_S = _joining.START_S = task["start_s"]
    Path(f"{task['out']}.{told['RANK']}").write_text(json.dumps(TASKS[task["do"]](task)))


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "exact": exact,
    "speed": speed,
    "overhead": overhead,
    "forever": forever,
}

if __name__ == "__main__":
    sys.exit(main())
