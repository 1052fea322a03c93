"""Buffers between file and slot: they lie as the file does, so that direct reads copy nothing."""

from pathlib import Path

import numpy as np
import pytest

import moecache
from moecache.slots import HostSlots
from moecache.stores import open_store
from tests.helpers.gguf_files import write_gguf

NUM_EXPERTS = 4


@pytest.mark.parametrize("shift", [0, 32, 160, 3000])
def test_a_direct_read_goes_to_a_buffer_that_lies_as_the_file_does(
    tmp_path: Path, shift: int
) -> None:
    """Wherever the metadata of a GGUF file ends: but for the blocks at an expert's ends."""
    path = tmp_path / "model.gguf"
    write_gguf(
        path,
        (("Q8_0", "Q8_0", "Q8_0"), ("Q4_0", "Q4_0", "Q6_K")),
        num_experts=NUM_EXPERTS,
        hidden=256,
        width=512,
        metadata={"general.description": "x" * shift},
    )
    found = {}
    for read in ("direct", "buffered"):
        with moecache.open(path, slots=3, read=read, prefault="off", policy="lru") as runtime:
            reader = runtime._loader.engine._reader  # type: ignore[attr-defined]
            if read == "direct" and not reader.direct:
                pytest.skip("this file system has no direct reads")
            before = reader.bytes_copied, reader.bytes_wanted
            experts = []
            for layer in range(2):
                for expert in range(NUM_EXPERTS):
                    with runtime.lease(layer, np.array([expert])) as lease:
                        slot = int(lease.slots[0])
                        held = runtime.expert(slot, layer)
                        experts.append({name: array.copy() for name, array in held.items()})
            copied, wanted = reader.bytes_copied - before[0], reader.bytes_wanted - before[1]
            found[read] = experts
            if reader.direct:
                # Two ends of three matrices; of one that is too short all of it.
                assert copied <= 2 * NUM_EXPERTS * 3 * 2 * reader.alignment < wanted / 4
    for one, other in zip(found["direct"], found["buffered"], strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one | other)


def test_buffers_in_use_stay_where_they_are(tmp_path: Path) -> None:
    """And a unit that no disk has, or a place that no array may begin at, changes nothing."""
    path = tmp_path / "model.gguf"
    write_gguf(path, num_experts=NUM_EXPERTS)
    with open_store(path) as store:
        layout = store.layout
    pool = HostSlots(layout, 3)

    def remainder(slot: int) -> int:
        address: int = pool.buffers(slot, 0)["down"].ctypes.data
        pool.reclaim(slot)
        return address % 512

    pool.align_to_file([{"down": 512 * 7 + 48}] * layout.num_layers, 512)
    assert remainder(0) == 48
    pool.align_to_file([{"down": 8192 + 80}] * layout.num_layers, 8192)
    assert remainder(1) == 48
    pool.buffers(2, 0)
    pool.align_to_file([{"down": 64}] * layout.num_layers, 512)
    pool.reclaim(2)
    assert remainder(2) == 48
    pool.align_to_file([{"down": 65}] * layout.num_layers, 512)
    assert remainder(2) % 64 == 0
