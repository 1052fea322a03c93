"""Quantized experts whose bytes do not come: none are seen, and the next call has them."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import moecache
from moecache import packing
from moecache.errors import StoreError
from moecache.reader._reader import HAS_FAULTS, inject_fault
from moecache.slots import HostSlots
from moecache.stores import CheckpointStore, open_store
from tests.helpers.gguf_files import write_gguf
from tests.helpers.quantized import SCHEMES, write_experts

NAMES = ("fp8", "int3", "mxfp4", "nvfp4", "awq", "gptq_ordered", "gguf", "packed gguf")


@pytest.fixture(name="model", scope="module", params=NAMES)
def _model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    if request.param in SCHEMES:
        write_experts(SCHEMES[request.param], directory, num_layers=1, num_experts=2)
        return directory
    pytest.importorskip("gguf")
    path = write_gguf(directory / "m.gguf").path
    if request.param == "gguf":
        return path
    return packing.pack(path, directory / "out", compute_form=True).path


def fill(store: CheckpointStore, pool: HostSlots, expert: int) -> dict[str, bytes]:
    """Bring an expert into the only slot, and return what lies there."""
    parts = pool.buffers(0, 0)
    store.read_into(0, expert, parts)
    pool.upload(0, 0, parts)
    return {name: array.tobytes() for name, array in pool.expert(0, 0).items()}


@pytest.mark.parametrize("times", [1, 2])
def test_a_read_that_fails_at_any_part_is_an_error_and_the_next_one_is_right(
    model: Path, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of codes, scales, zero points: the error names file, expert and place."""
    preadv = os.preadv
    with open_store(model) as store, HostSlots(store.layout, 1) as pool:
        expected = [fill(store, pool, expert) for expert in range(2)]
        assert expected[0] != expected[1]
        for position in range(len(store.runs(0, 1))):
            reads = iter(range(position))
            left = [times]

            def failing(
                descriptor: int,
                buffers: list[memoryview],
                offset: int,
                reads: Iterator[int] = reads,
                left: list[int] = left,
            ) -> int:
                if next(reads, None) is None and left[0]:
                    left[0] -= 1
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return preadv(descriptor, buffers, offset)

            with monkeypatch.context() as patched:
                patched.setattr(os, "preadv", failing)
                for _ in range(times):
                    with pytest.raises(StoreError, match="reading expert 1 of layer 0 at byte"):
                        fill(store, pool, 1)
                assert fill(store, pool, 1) == expected[1]
        assert fill(store, pool, 0) == expected[0]


@pytest.mark.parametrize("most", [7, 501])
def test_short_reads_of_any_part_are_gone_on_with(
    model: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a scale, too."""
    preadv = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:most]], offset)

    with open_store(model) as store, HostSlots(store.layout, 1) as pool:
        expected = fill(store, pool, 1)
        fill(store, pool, 0)
        monkeypatch.setattr(os, "preadv", short)
        assert fill(store, pool, 1) == expected


@pytest.mark.skipif(not HAS_FAULTS, reason="this build has no faults: make debug, make sanitize")
@pytest.mark.parametrize("refuse", [0, errno.EPERM])
@pytest.mark.parametrize("read", ["direct", "buffered"])
@pytest.mark.parametrize(("kind", "times"), [("error", 1), ("error", 2), ("zero", 1), ("short", 5)])
def test_a_runtime_abandons_a_slot_whose_parts_did_not_all_come(
    model: Path, read: str, kind: str, times: int, refuse: int
) -> None:
    """Whichever of its reads failed; the next step has the bits of one that nothing disturbed."""

    def lease(runtime: moecache.ExpertRuntime, expert: int) -> dict[str, bytes]:
        with runtime.lease(0, np.array([expert])) as held:
            parts = runtime.expert(int(held.slots[0]), 0)
            return {name: np.asarray(array).tobytes() for name, array in parts.items()}

    inject_fault("none", refuse_ring=refuse)
    try:
        with moecache.open(model, slots=1, read=read, prefault="off") as runtime:
            expected = [lease(runtime, expert) for expert in range(2)]
            for skip in range(8):
                assert lease(runtime, 0) == expected[0]
                inject_fault(kind, error=errno.EIO, skip=skip, times=times)
                for _ in range(times + 1):
                    try:
                        found = lease(runtime, 1)
                    except StoreError as error:
                        assert "expert 1 of layer 0" in str(error)  # noqa: PT017 - or none
                        runtime.cache.check()
                        continue
                    assert found == expected[1]
                inject_fault("none")
                assert lease(runtime, 1) == expected[1]
    finally:
        inject_fault("none")
