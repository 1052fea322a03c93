"""Plan: what `open` does, known before anything is allocated, each with its reason."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

import moecache
from moecache import CapacityError, ConfigError, Options
from tests.helpers.fake_device import FakeDevice
from tests.helpers.pages import num_descriptors
from tests.helpers.pairs import pairwise

OPTIONS: list[dict[str, Any]] = [
    *({"memory": memory} for memory in ("100KiB", "1MiB", "25%", "64MiB", None)),
    *({"slots": slots} for slots in (1, 7, 256, 999)),
    *({"memory": "25%", "read": read} for read in ("direct", "buffered", "mmap")),
    {"memory": "25%", "policy": "lru", "scope": "layer"},
    {"memory": "1MiB", "dtype": "float32"},
    {"reserve": "100MiB"},
]
ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {"MOECACHE_MEMORY": "2MiB", "MOECACHE_READ": "direct"},
    {"MOECACHE_RESERVE": "300MiB", "MOECACHE_POLICY": "lfru"},
]
# Each of the options with every environment and device; not all three with one another.
CASES = pairwise(ENVIRONMENTS, ("cpu", "cuda"), OPTIONS)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda found: "-".join(found) or "none")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_says_what_open_does(
    tiny_moe: Path,
    fake_cuda: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    environment: dict[str, str],
) -> None:
    """Over budgets, ways to read and the environment's settings, in RAM and on a GPU."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("moecache.runtime.opening.calibrate", lambda *_: None)
    for options in [case[2] for case in CASES if case[:2] == (environment, device)]:
        if device == "cuda" and "dtype" in options:
            continue
        planned = moecache.plan(tiny_moe, device=device, prefault="off", **options)
        with moecache.open(tiny_moe, device=device, prefault="off", **options) as runtime:
            stats = runtime.stats()
            found = (stats.capacity, stats.staging_slots, stats.policy, stats.scope)
            assert found == (
                *(planned.capacity, planned.staging_slots, planned.policy, planned.scope),
            )
            assert runtime.pool.nbytes >= planned.slots_bytes * 0.99
            way = "mmap" if stats.reading is None else stats.reading.way
            assert way == planned.read
        with planned.open() as runtime:
            assert runtime.cache.capacity == planned.capacity
        assert {"capacity", "reserve_bytes", "read", "policy"} <= planned.reasons.keys()


def test_a_plan_allocates_nothing_and_cannot_be_changed(
    tiny_moe: Path, fake_cuda: FakeDevice
) -> None:
    """No memory, no file stays open; and it says why."""
    before = num_descriptors()
    planned = moecache.plan(tiny_moe, "25%", "cuda")
    assert fake_cuda.used_bytes == fake_cuda.pinned_bytes == 0
    assert num_descriptors() == before
    with pytest.raises(FrozenInstanceError):
        planned.capacity = 3  # type: ignore[misc]
    assert "memory 25% (argument)" in planned.describe()


def test_options_are_an_object_too(tiny_moe: Path) -> None:
    """Beside the keywords, not with them; what cannot be used is refused when it is made."""
    options = Options(memory="25%", policy="lru")
    by_keywords = moecache.plan(tiny_moe, "25%", policy="lru")
    assert moecache.plan(tiny_moe, options=options) == by_keywords
    with pytest.raises(ConfigError, match="not both"):
        moecache.plan(tiny_moe, "25%", options=options)
    with pytest.raises(ConfigError, match="slots must be at least 1"):
        Options(slots=0)
    with pytest.raises(ConfigError, match="either memory or slots"):
        Options(slots=1, memory="1GiB")


def test_what_does_not_fit_is_refused_by_the_plan(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `open`, with the remedy."""
    with pytest.raises(CapacityError, match="raise memory to at least"):
        moecache.plan(tiny_moe, "10KiB")
    monkeypatch.setattr("moecache.sizing.headroom.free_host_bytes", lambda: 2**20)
    with pytest.raises(CapacityError, match="lower memory to at most"):
        moecache.plan(tiny_moe, "100%")
