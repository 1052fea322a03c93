"""What the processes of tests/test_ranks_faults.py do."""

import atexit
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.offloading import load_in_slots, prompt


def said(call: Callable[[], object]) -> str:
    """Return the error that a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - to be compared by the test
        return f"{type(error).__name__}: {error}"
    return ""


def trouble(path: Path, other: Path, rank: int) -> dict[str, str]:
    """Return what ranks say of what can go wrong without one of them ending."""
    import torch

    def load(where: Path, **options: Any) -> Any:
        return load_in_slots(where, expert_parallel=True, rank_timeout_s=20, **options)

    is_second = rank == 1
    found = {
        "compute": said(lambda: load(path, compute="fast" if is_second else "torch")),
        "checkpoint": said(lambda: load(other / "trunk" if is_second else path)),
        "expert": said(lambda: load(other / "expert" if is_second else path)),
        "dtype": said(lambda: load(path, dtype=torch.float32 if is_second else torch.bfloat16)),
        "not there": said(lambda: load(path / "none" if is_second else path)),
    }
    # One rank takes longer to begin than a step may.
    time.sleep(3 if is_second else 0)
    with load_in_slots(path, expert_parallel=True, rank_timeout_s=2).moecache:
        pass
    found["forked"] = str(_ends_well())
    model = load(path)
    runtime = model.moecache.runtime
    with torch.no_grad():
        before = model(prompt()).logits
        found["tokens"] = said(lambda: model(prompt() + rank))
        assert torch.equal(model(prompt()).logits, before)

        waves = runtime.waves

        def failing(layer: int, *given: Any, **options: Any) -> Any:
            if layer == 1 and is_second:
                raise OSError("the disk is on fire")
            return waves(layer, *given, **options)

        runtime.waves = failing
        found["read"] = said(lambda: model(prompt()))
        long = torch.arange(300)[None] % 100
        found["read of many"] = said(lambda: model(long))
        runtime.waves = waves
        assert torch.equal(model(prompt()).logits, before)
    found["training"] = said(lambda: model(prompt()).logits.sum().backward())
    if is_second:
        model.moecache.close()
        found["closed"] = said(lambda: model.generate(prompt(), max_new_tokens=2))
        time.sleep(4)
    else:
        began = time.monotonic()
        with torch.no_grad():
            found["closed"] = said(lambda: model(prompt()))
        found["seconds"] = str(time.monotonic() - began)
    return found


def _ends_well() -> int:
    """Return how a process ends that was forked from this one, and does all that an end has."""
    child = os.fork()
    if not child:
        atexit._run_exitfuncs()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def going_on(path: Path, rank: int) -> list[str]:
    """Return what becomes of texts of a command's ranks, of which some fail."""
    import torch

    from moecache.decoding import streams
    from moecache.integrations.transformers import _following, generation

    model = load_in_slots(path, expert_parallel=True, rank_timeout_s=60)
    waves, steps = model.moecache.runtime.waves, iter(range(10_000))

    def failing(*given: Any, **options: Any) -> Any:
        if next(steps) == 5:
            raise OSError("the disk is on fire")
        return waves(*given, **options)

    if rank:
        model.moecache.runtime.waves = failing
        go_on, texts = _following.continue_text, iter(range(10))

        def stumbling(*given: Any, **options: Any) -> None:
            if next(texts) == 4:
                raise OSError("no room")
            go_on(*given, **options)

        _following.continue_text = stumbling
        _following.follow(model)
        return [str(len(list(steps)) > 0)]

    class Bad(streams.TokenTimes):
        fails_at = 3

        def put(self, value: Any) -> None:
            super().put(value)
            if len(self.tokens) == self.fails_at:
                raise ValueError("nobody reads this")

    class Worse(Bad):
        fails_at = 8

    found = []
    kinds = [streams.TokenTimes, Bad, Worse, streams.TokenTimes, streams.TokenTimes]
    with _following.leading(model):
        for kind in [*kinds, streams.TokenTimes]:
            times, began = kind(), time.monotonic()
            error = said(
                lambda times=times: generation.continue_tokens(  # type: ignore[misc]
                    model, torch.arange(9)[None], times, max_new_tokens=8, temperature=0
                )
            )
            assert time.monotonic() - began < 50
            found.append(error or str(times.tokens))
        heartbeat = model.moecache.ranks._heartbeat
        posted = [heartbeat.posted(f"order/{number}") for number in range(6)]
        found.append(str([order is not None for order in posted]))
    return found


def in_a_mesh(path: Path, expected: Path, rank: int) -> list[str]:
    """Return what is wrong where each of two groups of two has the model, twice each."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "experts"))["experts"]
    wanted = torch.load(expected)
    found = []
    for _ in range(2):
        # The groups are not there at the same time.
        time.sleep(0.5 * (rank // 2))
        model = load_in_slots(path, expert_parallel=mesh, rank_timeout_s=20)
        with model.moecache as offload, torch.no_grad():
            member = (offload.ranks.rank, offload.ranks.num_ranks)
            if member != (rank % 2, 2):
                found.append(f"rank {rank} is {member}")
            # Each group has tokens of its own.
            if not torch.equal(model(prompt() + rank // 2).logits, wanted[rank // 2]):
                found.append(f"rank {rank} computed something else")
    # The first process has the store of all.
    torch.distributed.barrier()
    return found


def forever(path: Path, timeout_s: float, ready: Path) -> dict[str, Any]:
    """Generate until that fails; return how."""
    import torch

    model = load_in_slots(path, expert_parallel=True, rank_timeout_s=timeout_s)
    ready.touch()
    began = last = time.monotonic()
    with torch.no_grad():
        while True:
            try:
                model(prompt(), use_cache=False)
            except Exception as error:  # noqa: BLE001 - as above
                again = said(lambda: model(prompt()))
                took = time.monotonic() - last
                return {"error": str(error), "again": again, "seconds": took}
            last = time.monotonic()
            assert last - began < 100, "nothing went wrong"


def idle(path: Path, timeout_s: float, ready: Path, rank: int, port: int) -> dict[str, Any]:
    """Wait for orders, that never come, with a store as torchrun has it; return how that ends."""
    from moecache.integrations.transformers import _following

    os.environ.update(  # noqa: TID251
        MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    model = load_in_slots(path, expert_parallel=True, rank_timeout_s=timeout_s)
    ranks = model.moecache.ranks
    ready.touch()
    began = time.monotonic()

    def wait() -> None:
        while rank == 0 and time.monotonic() - began < 100:
            ranks.look()
            time.sleep(0.2)
        _following.follow(model)

    error = said(wait)
    return {"error": error, "again": said(wait), "closed": said(model.moecache.close)}


def stops_while_loading(path: Path, rank: int, victim: int) -> str:
    """Stop one rank before what all compare, and return the error of another one."""
    from moecache.integrations.transformers import _loading, _ranks

    _ranks.LOADING_SILENT_S = 2.0
    facts_of = _loading.facts_of

    def stop(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return facts_of(*given, **named)

    if rank == victim:
        _loading.facts_of = stop
    return said(lambda: load_in_slots(path, expert_parallel=True, rank_timeout_s=2))
