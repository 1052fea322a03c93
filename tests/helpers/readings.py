"""Runtimes over readers: experts out of their slots, engines and settings that a test chooses."""

import functools

import numpy as np
import pytest

import moecache
from moecache.reader import disk as reading
from moecache.reader._reader import Reader
from moecache.runtime import opening
from tests.helpers.checkpoints import Parts


def force_engine(monkeypatch: pytest.MonkeyPatch, engine: str) -> str:
    """Let runtimes read by one engine; skip where there is none of it."""
    try:
        Reader([], engine=engine).close()
    except OSError:
        pytest.skip("this kernel refuses io_uring")
    open_reader = functools.partial(reading.open_reader, engine=engine)
    monkeypatch.setattr(opening, "open_reader", open_reader)
    return engine


def leased(runtime: moecache.ExpertRuntime, layer: int, expert: int) -> Parts:
    """Return a copy of one expert as it is in its slot."""
    with runtime.lease(layer, np.array([expert])) as lease:
        parts = runtime.expert(int(lease.slots[0]), layer)
        return {role: part.copy() for role, part in parts.items()}


def all_experts(runtime: moecache.ExpertRuntime) -> list[list[Parts]]:
    """Return a copy of every expert, each layer's in one bulk step."""
    found: list[list[Parts]] = []
    for layer in range(runtime.layout.num_layers):
        ids = np.arange(runtime.layout.num_experts)[:, None]
        experts: list[Parts] = [{} for _ in range(len(ids))]
        for wave in runtime.waves(layer, ids):
            for slot, pairs in wave:
                parts = runtime.expert(slot, layer)
                experts[int(pairs[0])] = {role: part.copy() for role, part in parts.items()}
        found.append(experts)
    return found


def same_converted(found: Parts, stored: Parts) -> bool:
    """Return whether an expert in its slot is the file's, converted to what slots hold."""
    with np.errstate(invalid="ignore"):  # any bits, NaNs too
        return set(found) == set(stored) and all(
            part.tobytes() == stored[role].astype(part.dtype).tobytes()
            for role, part in found.items()
        )
