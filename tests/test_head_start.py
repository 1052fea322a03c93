"""HeadStart: what is brought in before anybody asks for it, and given back."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moecache.errors import CapacityError
from moecache.prefault import warming
from moecache.runtime import head_start
from moecache.runtime.head_start import HeadStart
from moecache.runtime.options import Options
from moecache.stores import CheckpointStore, open_store
from tests.helpers.checkpoints import FAMILIES, write_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.leaks import nothing_left
from tests.helpers.pages import PAGE, evict, num_cached, wait_until

Open = Callable[[], CheckpointStore]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Check that no file and no thread is left."""
    with nothing_left():
        yield


@pytest.fixture(name="swept")
def _swept(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Return the regions of each sweep that begins; memory of slots counts, however little."""
    swept: list[list[tuple[int, int]]] = []

    def warm(regions: list[tuple[int, int]], **options: object) -> object:
        swept.append([tuple(region) for region in regions])  # type: ignore[misc]
        return warming.warm(regions, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(head_start, "warm", warm)
    monkeypatch.setattr(head_start, "_LEAST_BYTES", 1)
    return swept


@pytest.mark.parametrize("family", [*FAMILIES, "gguf"])
def test_a_trunk_is_all_that_is_no_experts(tmp_path: Path, family: str) -> None:
    """Each of its tensors once, at its bytes; none of an expert."""
    if family == "gguf":
        write_gguf(tmp_path / "model.gguf")
    else:
        write_checkpoint(tmp_path, family, num_shards=2)
    with open_store(tmp_path) as store:
        found = {ctypes.string_at(*region) for region in store.trunk_regions() if region[1]}
        trunk = [name for name in store.tensor_names if not store._is_expert(name)]
        assert found == {store._read_bytes(name).tobytes() for name in trunk} - {b""}
        assert trunk
        assert not {tuple(one) for one in store.regions()} & {*store.trunk_regions()}


def test_trunk_and_slots_are_brought_in_once(
    tmp_path: Path, swept: list[list[tuple[int, int]]]
) -> None:
    """Pages of the trunk stay cached; the memory is as much as the slots take, and goes."""
    checkpoint = write_checkpoint(tmp_path, num_experts=64)
    store = open_store(tmp_path)
    evict(tmp_path / "model.safetensors")
    options = Options(slots=64)
    head_start.begin(store, options)
    head_start.begin(store, options)
    trunk, memory = swept
    assert trunk == store.trunk_regions()
    slot_bytes = sum(part.nbytes for part in checkpoint.experts[0][0].values())
    assert 64 * slot_bytes // PAGE * PAGE <= memory[0][1] < 3 * 64 * slot_bytes
    begun = head_start._begun[store]
    wait_until(lambda: all(sweep.done for sweep in begun._sweeps))
    assert num_cached(tmp_path / "model.safetensors") > 0
    assert b"\0" * memory[0][1] == ctypes.string_at(*memory[0])
    head_start.end(store)
    head_start.end(store)
    assert begun._memory is None
    store.close()


@pytest.mark.parametrize(
    "options",
    [
        Options(prefault="off"),
        Options(memory="1 nonsense"),
        Options(memory="1"),
    ],
    ids=lambda options: f"{options.memory} {options.prefault}",
)
def test_what_cannot_be_used_is_left_to_the_plan(
    tmp_path: Path, swept: list[list[tuple[int, int]]], options: Options
) -> None:
    """Nothing is raised, and no memory taken."""
    write_checkpoint(tmp_path)
    with open_store(tmp_path) as store:
        begun = HeadStart(store, options)
        assert len(swept) == (options.prefault is None)
        assert begun._memory is None
        begun.end()


def test_of_little_memory_none_is_taken(
    tmp_path: Path, swept: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trunk is there twice for a while, and libraries take a part."""
    write_checkpoint(tmp_path)
    with open_store(tmp_path) as store:
        monkeypatch.setattr(head_start, "free_host_bytes", lambda: 2**30)
        HeadStart(store, Options(slots=8)).end()
        assert not swept


def test_files_that_are_cut_fail_where_they_are_read(tmp_path: Path) -> None:
    """The sweep's failure is logged; it kills nothing."""
    write_checkpoint(tmp_path)
    with open_store(tmp_path) as store:
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(4096)
        HeadStart(store, Options(slots=8)).end()


def test_it_ends_where_it_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that fails has begun to read the trunk."""
    write_checkpoint(tmp_path)

    def refuse(*_: object) -> object:
        raise CapacityError("too little")

    monkeypatch.setattr(head_start, "plan_store", refuse)
    with open_store(tmp_path) as store:
        begun = HeadStart(store, Options(slots=8))
        assert len(begun._sweeps) == 1
        begun.end()
        assert all(thread.name != "moecache-prefault" for thread in threading.enumerate())
