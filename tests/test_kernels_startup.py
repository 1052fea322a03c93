"""Which level computes, with how many threads: what the environment, the machine, a call say."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moecache
from moecache import kernels
from moecache.errors import ConfigError
from moecache.prefault.sweep import check_threads
from moecache.stores import open_store
from tests.helpers.kernels import computing

# A child imports the build that is tested here.
PACKAGE = Path(moecache.__file__).parents[1]
TELL = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
from moecache import kernels
print(kernels.level(), kernels.num_threads(), *kernels.levels())
"""


def tell(**environment: str) -> tuple[list[str], str]:
    """Return what a new process says about its kernels, and what it logs."""
    done = subprocess.run(
        [sys.executable, "-c", TELL],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=PACKAGE,
        env={**os.environ, **environment},  # noqa: TID251 - a child's
    )
    return done.stdout.split(), done.stderr


def test_the_best_level_and_all_usable_cores_are_the_default() -> None:
    """Without a word about it."""
    found, logged = tell()
    assert found[0] == found[-1]
    assert int(found[1]) == kernels.usable_cores()
    assert logged == ""


def test_level_and_threads_are_settings() -> None:
    """Every machine has the generic level."""
    found, logged = tell(MOECACHE_KERNELS="generic", MOECACHE_THREADS="1")
    assert found[:2] == ["generic", "1"]
    assert logged == ""


def test_a_level_that_is_none_is_a_warning_at_the_start() -> None:
    """Which lists those there are; the best one computes."""
    found, logged = tell(MOECACHE_KERNELS="nonsense", MOECACHE_THREADS="3")
    assert found[:2] == [kernels.levels()[-1], "3"]
    assert "WARNING settings.malformed MOECACHE_KERNELS='nonsense' is not one of" in logged
    assert "generic, neon, avx2, avxvnni, avx512vnni, avx512, amx; using the default" in logged


@pytest.mark.skipif("avx512" in kernels.levels(), reason="the processor lacks no level")
def test_a_level_that_the_processor_lacks_is_a_warning_at_the_start() -> None:
    """Which lists those that it has; the best one computes."""
    found, logged = tell(MOECACHE_KERNELS="avx512")
    assert found[0] == kernels.levels()[-1]
    assert "WARNING settings.unsupported MOECACHE_KERNELS='avx512'" in logged
    assert f"this processor has {', '.join(kernels.levels())}; using {found[0]}" in logged


@pytest.mark.parametrize("number", [0, -1, 257, 2**70, 1.5, 2.0, True, np.True_, "2", None])
def test_a_number_of_threads_that_cannot_be_is_refused(number: Any) -> None:
    """The number before stays; an integer of NumPy is one."""
    before = kernels.num_threads()
    with pytest.raises(ConfigError, match=f"from 1 to 256, got {re.escape(repr(number))}"):
        kernels.use_threads(number)
    assert kernels.num_threads() == before
    kernels.use_threads(np.int64(before))


@pytest.mark.parametrize("number", [2**70, 1.5, True, "2"])
def test_other_numbers_that_are_no_integers_are_refused(number: Any, tiny_moe: Path) -> None:
    """Of slots, of threads that pre-fault, of experts for each token."""
    for use, name in (
        (lambda: kernels.SlotKernel(lambda _: {}, number), "num_slots"),
        (lambda: check_threads(number), "threads"),
        (lambda: open_store(tiny_moe, top_k=number), "top_k"),
    ):
        with pytest.raises(ConfigError, match=rf"{name} must be .*, got {number!r}"):
            use()


def test_a_level_that_is_none_is_refused() -> None:
    """The level before stays; the message lists those there are."""
    before = kernels.level()
    with pytest.raises(ConfigError, match="level 'x' is not one of generic"):
        kernels.use_level("x")
    assert kernels.level() == before


def test_levels_and_threads_are_those_that_were_asked_for() -> None:
    """One after the other."""
    for level in kernels.levels():
        with computing(level, 7):
            assert (kernels.level(), kernels.num_threads()) == (level, 7)


@pytest.mark.parametrize(
    ("quotas", "cores"),
    [
        ({}, 8),
        ({"a/b": "max 100000"}, 8),
        ({"a/b": "50000 100000"}, 1),
        ({"a/b": "100000 100000"}, 1),
        ({"a/b": "250000 100000"}, 3),
        ({"a/b": "900000 100000"}, 8),
        ({"a/b": "400000 100000", "a": "200000 100000"}, 2),
        ({"a/b": "max 100000", "a": "300000 100000"}, 3),
        ({"a": "200000 100000"}, 2),
        ({"a/b/c": "100000 100000"}, 8),
        ({"a/b": "nonsense"}, 8),
        ({"a/b": "nonsense", "a": "200000 100000"}, 2),
    ],
    ids=str,
)
def test_usable_cores_are_those_that_affinity_and_cgroups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quotas: dict[str, str], cores: int
) -> None:
    """The least quota from the process's own group up; a part of a core counts as one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/x\n0::/a/b\n")
    for group, quota in quotas.items():
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(f"{quota}\n")

    assert kernels.usable_cores(tmp_path) == cores


def test_affinity_counts_where_there_are_no_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of version 2, that is."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 7}, raising=False)
    assert kernels.usable_cores(tmp_path) == 3
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu:/a\n")
    assert kernels.usable_cores(tmp_path) == 3
