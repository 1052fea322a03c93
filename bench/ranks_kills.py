"""Kill a rank at a random moment, again and again, and look what the others do."""

import json
import multiprocessing
import random
import socket
import time
from pathlib import Path
from typing import Any

from bench.ranks_work import run_forked

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["bench.ranks_imports"])
TIMEOUT_S = 10.0
# In the place of the 300 seconds that ranks wait for each other at the start.
START_S = 30.0


def kill_often(model: Path, folder: Path, num_kills: int, seed: int = 0) -> dict[str, Any]:
    """Return what became of so many starts, in each of which a rank was killed.

    One in five is killed while models are loaded, when ranks may not know of each other yet.
    """
    rng = random.Random(seed)
    found: dict[str, Any] = {"kills": num_kills, "named": 0, "while_loading": 0, "wrong": []}
    took: list[float] = []
    loading: list[float] = []
    for number in range(num_kills):
        num_ranks, early = rng.choice((2, 3)), number % 5 == 4
        victim = rng.randrange(num_ranks)
        out = folder / f"kill{number}"
        others = _one(model, out, num_ranks, victim, rng.uniform(0, 1.5), early=early)
        found["while_loading"] += early
        for rank, (code, said) in others.items():
            what = f"kill {number}: rank {rank} of {num_ranks} without {victim}"
            if said["seconds"] > 0 and not said["ready"]:
                loading.append(said["seconds"])
            if code != 0 or not said.get("error"):
                found["wrong"].append(f"{what}: ended with {code} and {said}")
            elif f"rank {victim}" in said["error"]:
                took.append(said["seconds"])
            elif not early or said["ready"]:
                found["wrong"].append(f"{what}: {said['error']}")
        found["named"] += all(
            f"rank {victim}" in said.get("error", "") for _, said in others.values()
        )
        print(f"\r{number + 1} of {num_kills}, {len(found['wrong'])} wrong", end="", flush=True)
    print()
    found |= {"timeout_s": TIMEOUT_S, "longest_s": max(took, default=0.0)}
    return {**found, "start_timeout_s": START_S, "longest_loading_s": max(loading, default=0.0)}


def _one(
    model: Path, out: Path, num_ranks: int, victim: int, after_s: float, *, early: bool
) -> dict[int, tuple[int | None, dict[str, Any]]]:
    """Start ranks, kill one, and return how the others ended and what they said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    task = {
        "do": "forever",
        "model": str(model),
        "out": str(out),
        "start_s": START_S,
        "load": {"memory": "50%", "rank_timeout_s": TIMEOUT_S},
    }
    told = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        _CONTEXT.Process(target=run_forked, args=({**told, "RANK": str(rank)}, task))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        until = time.monotonic() + 120
        while not early and len(list(out.parent.glob(f"{out.name}.ready.*"))) < num_ranks:
            if time.monotonic() > until:
                raise TimeoutError("ranks did not start within two minutes")
            time.sleep(0.01)
        time.sleep(after_s)
        ranks[victim].kill()
        killed = time.time()
        found: dict[int, tuple[int | None, dict[str, Any]]] = {}
        for number, rank in enumerate(ranks):
            if number == victim:
                continue
            rank.join(START_S + 60)
            result = Path(f"{out}.{number}")
            said = json.loads(result.read_text()) if result.exists() else {}
            found[number] = rank.exitcode, {**said, "seconds": said.get("at", 0.0) - killed}
        return found
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
