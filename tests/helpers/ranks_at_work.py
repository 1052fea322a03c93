"""What the processes of tests/test_ranks.py do: one start for many checks."""

import os
from pathlib import Path
from typing import Any

from tests.helpers.offloading import load_in_slots


def outputs(model: Any) -> dict[str, Any]:
    """Return the logits of prompts and batches, and greedy tokens, as arrays."""
    import torch

    torch.manual_seed(5)
    found = {}
    with torch.no_grad():
        for name, shape in {"one": (1, 1), "batch": (3, 7), "long": (1, 300)}.items():
            ids = torch.randint(0, 100, shape)
            found[name] = model(input_ids=ids, use_cache=False).logits
        short = torch.randint(0, 100, (1, 5))
        found["tokens"] = model.generate(short, max_new_tokens=16, do_sample=False)
        batch = torch.randint(0, 100, (3, 5))
        found["batch tokens"] = model.generate(batch, max_new_tokens=12, do_sample=False)
    return found


def compared(path: Path, expected: Path, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare a model's outputs with those of one process, for several ways of loading it."""
    import torch

    wanted = torch.load(expected)
    report: dict[str, Any] = {}
    for name, given in options.items():
        model = load_in_slots(path, expert_parallel=True, **given)
        with model.moecache as offload:
            found = outputs(model)
            base = wanted[given.get("compute", "torch")]
            differing = [key for key in base if not torch.equal(found[key], base[key])]
            stats = offload.stats()
            ranks = offload.ranks
            table = offload.runtime.cache.slot_table >= 0
            held = offload.runtime.share.held
            report[name] = {
                "differing": differing,
                "rank": ranks.rank,
                "is_own_alone": not bool((table & ~held).any()),
                "evictions": stats.num_evictions,
                "capacity": stats.capacity,
                "exchanges": ranks.num_exchanges,
                "early": ranks.num_early,
                "sent": ranks.sent_bytes,
                "errors": 0 if stats.prefetch is None else stats.prefetch.num_predictor_errors,
            }
    return report


def whole(path: Path, expected: Path, ways: tuple[str, ...]) -> None:
    """Note what one process computes, all of it in memory of one."""
    import torch

    found = {}
    for way in ways:
        found[way] = outputs(load_in_slots(path, "100%", compute=way))
    torch.save(found, expected)


def added_up(name: str, port: int) -> int:
    """Begin under a name, by a store that outlives its processes, and add up the ranks.."""
    import torch

    from moecache.integrations.transformers._joining import begin

    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")  # noqa: TID251
    begin(torch.device("cpu"), 30.0, name)
    number = torch.tensor([1 + torch.distributed.get_rank()])
    torch.distributed.all_reduce(number)
    return int(number)
