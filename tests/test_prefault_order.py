"""What comes first, and what is never touched where nothing is known."""

import mmap
from pathlib import Path

import pytest

from moecache import StoreError
from moecache._prefault import address_of
from moecache.prefault import Region, extents, merge, sweep, warm
from moecache.stores import SafetensorsStore
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.pages import PAGE, mapped, write_cold


def test_a_checkpoint_is_swept_from_its_first_layer_on(tmp_path: Path) -> None:
    """Wherever its shards are mapped: later ones usually at lower addresses."""
    model = write_checkpoint(tmp_path / "model", num_shards=4)
    with SafetensorsStore(model.path) as store:
        first = store.regions([0])[0]
        ranges, _ = merge(store.regions())
        addresses = [address for address, _ in ranges]

    assert ranges[0][0] <= first[0] < sum(ranges[0])
    assert addresses != sorted(addresses)


def test_without_a_list_of_mappings_a_cut_file_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No /proc and an old kernel: what is behind an address could be a file."""
    monkeypatch.setattr(extents, "read_mappings", lambda: None)
    monkeypatch.setattr(sweep, "can_populate", lambda: False)
    path = write_cold(tmp_path / "file", 8 * PAGE)
    with mapped(path) as mapping:
        path.write_bytes(b"")
        with pytest.raises(StoreError, match="cannot be opened to be read"):
            warm(mapping)


def test_memory_shared_without_a_name_can_be_swept_on_old_kernels() -> None:
    """It looks like a file of the kernel's own, but cannot be cut short."""
    with mmap.mmap(-1, 8 * PAGE) as memory:
        memory[5 * PAGE] = 7
        report = warm(memory, method="read")
        assert report.ran
        assert memory[5 * PAGE] == 7


def test_the_owner_of_a_region_cannot_be_closed_while_it_is_held() -> None:
    """A reference alone would not keep a mapping open."""
    memory = mmap.mmap(-1, PAGE)
    _, owners = merge([Region(*address_of(memory), memory)])
    with pytest.raises(BufferError):
        memory.close()
    del owners
    memory.close()
