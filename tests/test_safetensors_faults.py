"""A store whose files change, whose disk fails, and whose threads collide."""

import copy
import errno
import gc
import itertools
import mmap
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.errors import FormatError, StoreError
from moecache.stores import SafetensorsStore
from tests.helpers.checkpoints import (
    NUM_EXPERTS,
    Checkpoint,
    empty_parts,
    read_expert,
    same_parts,
    write_checkpoint,
)

FILE = "model.safetensors"


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "small", num_layers=2)


@pytest.fixture(name="fast_switches")
def _fast_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def _offsets(checkpoint: Checkpoint) -> dict[tuple[int, int], int]:
    """Return where each expert begins in the file, as its bytes occur there once."""
    content = (checkpoint.path / FILE).read_bytes()
    return {
        (layer, expert): content.index(parts["down"].tobytes())
        for layer, experts in enumerate(checkpoint.experts)
        for expert, parts in enumerate(experts)
    }


def test_a_file_cut_after_opening_is_a_store_error_with_offset_and_size(
    small: Checkpoint,
) -> None:
    """No crash and no garbage; experts before the cut stay readable."""
    offsets = _offsets(small)
    cut = sorted(offsets.values())[NUM_EXPERTS] + 100
    with SafetensorsStore(small.path) as store:
        os.truncate(small.path / FILE, cut)
        for (layer, expert), offset in offsets.items():
            nbytes = store.layout.expert_bytes(layer)
            if offset + nbytes <= cut:
                parts = small.experts[layer][expert]
                assert same_parts(read_expert(store, layer, expert), parts)
                continue
            with pytest.raises(StoreError, match=f"expert {expert} of layer {layer}") as caught:
                read_expert(store, layer, expert)
            message = str(caught.value)
            assert FILE in message
            assert f"the file has only {cut}" in message
            assert f"at byte {max(offset, min(cut, offset + nbytes))}" in message


def test_a_trunk_tensor_of_a_cut_file_is_a_store_error(small: Checkpoint) -> None:
    """With its name in the message."""
    with SafetensorsStore(small.path) as store:
        os.truncate(small.path / FILE, 8)
        with pytest.raises(StoreError, match=r"tensor 'model\.embed_tokens\.weight' needs 256"):
            store.read_tensor("model.embed_tokens.weight")


@pytest.mark.parametrize("size", [0, 8, 4000])
def test_a_file_cut_before_it_was_mapped_is_a_store_error(small: Checkpoint, size: int) -> None:
    """Views and regions never reach beyond the mapping."""
    last = max(_offsets(small), key=_offsets(small).__getitem__)
    with SafetensorsStore(small.path) as store:
        os.truncate(small.path / FILE, size)
        with pytest.raises(StoreError, match=FILE):
            store.view(*last)
        with pytest.raises(StoreError, match=FILE):
            store.regions()


def test_a_shard_that_vanished_is_still_read(small: Checkpoint) -> None:
    """An open file needs no name."""
    with SafetensorsStore(small.path) as store:
        (small.path / FILE).unlink()
        assert same_parts(read_expert(store, 1, 3), small.experts[1][3])


def test_a_failing_disk_is_a_store_error_and_the_next_call_works(
    small: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has file, expert and offset, the cause is the OSError."""
    preadv, failures = os.preadv, [OSError(errno.EIO, "Input/output error")]

    def flaky(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if failures:
            raise failures.pop()
        return preadv(descriptor, buffers, offset)

    offset = _offsets(small)[1, 7]
    with SafetensorsStore(small.path) as store:
        monkeypatch.setattr(os, "preadv", flaky)
        words = f"{FILE}: reading expert 7 of layer 1 at byte {offset} failed: Input/output error"
        with pytest.raises(StoreError, match=re.escape(words)) as caught:
            read_expert(store, 1, 7)
        assert isinstance(caught.value.__cause__, OSError)
        assert same_parts(read_expert(store, 1, 7), small.experts[1][7])


@pytest.mark.parametrize("most", [1, 7, 64, 100])
def test_short_reads_are_continued(
    small: Checkpoint, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The kernel may return fewer bytes than asked for, in the middle of a role too."""

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        content = os.pread(descriptor, min(most, sum(map(len, buffers))), offset)
        position = 0
        for buffer in buffers:
            piece = content[position : position + len(buffer)]
            buffer[: len(piece)] = piece
            position += len(piece)
        return len(content)

    monkeypatch.setattr(os, "preadv", short)
    with SafetensorsStore(small.path) as store:
        for expert in range(NUM_EXPERTS):
            assert same_parts(read_expert(store, 1, expert), small.experts[1][expert])


@pytest.mark.usefixtures("fast_switches")
@pytest.mark.parametrize("method", ["read_into", "view"])
def test_a_store_closed_under_its_readers_never_gives_wrong_data(
    small: Checkpoint, tmp_path: Path, method: str
) -> None:
    """Readers get the expert or a StoreError, also when descriptors are used again."""
    decoy = tmp_path / "decoy"
    decoy.write_bytes(b"\xaa" * (small.path / FILE).stat().st_size)
    wrong: list[object] = []
    experts = list(itertools.product(range(2), range(NUM_EXPERTS)))

    def use(store: SafetensorsStore, started: threading.Barrier) -> None:
        outs = [empty_parts(store, layer) for layer in range(2)]
        started.wait()
        try:
            for layer, expert in itertools.cycle(experts):
                if method == "view":
                    outs[layer] = store.view(layer, expert)
                else:
                    store.read_into(layer, expert, outs[layer])
                if not same_parts(outs[layer], small.experts[layer][expert]):
                    wrong.append((layer, expert))
        except StoreError:
            return
        except BaseException as error:  # noqa: BLE001 - the main thread reports it
            wrong.append(error)

    for round_ in range(30):
        store, started = SafetensorsStore(small.path), threading.Barrier(3)
        threads = [threading.Thread(target=use, args=(store, started)) for _ in range(2)]
        for thread in threads:
            thread.start()
        started.wait()
        threading.Event().wait(round_ * 2e-4)
        store.close()
        decoys = [os.open(decoy, os.O_RDONLY) for _ in range(4)]
        for thread in threads:
            thread.join()
        for descriptor in decoys:
            os.close(descriptor)

    assert wrong == []


def test_threads_read_different_experts_at_once(small: Checkpoint) -> None:
    """Every thread gets its own experts."""
    wrong: list[tuple[int, int]] = []
    with SafetensorsStore(small.path) as store:

        def use(first: int) -> None:
            for expert in np.random.default_rng(first).integers(0, NUM_EXPERTS, 300):
                parts = read_expert(store, first % 2, int(expert))
                if not same_parts(parts, small.experts[first % 2][expert]):
                    wrong.append((first, int(expert)))

        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert wrong == []


def test_opening_and_closing_leaks_no_descriptors(tmp_path: Path) -> None:
    """Neither after reads nor after views nor after a failed opening."""
    write_checkpoint(tmp_path / "good", num_layers=1, num_shards=3)
    write_checkpoint(tmp_path / "bad", num_layers=1, config={"num_experts_per_tok": 99})
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(50):
        with SafetensorsStore(tmp_path / "good") as store:
            read_expert(store, 0, 0)
            store.view(0, 0)
            store.regions()
        with pytest.raises(FormatError):
            SafetensorsStore(tmp_path / "bad")

    assert len(os.listdir("/proc/self/fd")) == before


def _use_while_mapping(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Let something happen while a file is being mapped, where Python switches threads."""
    real = mmap.mmap

    def slow(descriptor: int, *args: Any, **options: Any) -> mmap.mmap:
        meanwhile()
        return real(descriptor, *args, **options)

    monkeypatch.setattr(mmap, "mmap", slow)


def test_a_store_closed_while_mapping_never_maps_another_file(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed descriptor may by then be another file's."""
    other = tmp_path / "other"
    other.write_bytes(b"\xaa" * (small.path / FILE).stat().st_size)
    store, opened = SafetensorsStore(small.path), []
    closer = threading.Thread(target=store.close)

    def replace() -> None:
        closer.start()
        # A store that makes `close` wait for the mapping is right too.
        closer.join(0.3)
        opened.append(os.open(other, os.O_RDONLY))

    _use_while_mapping(monkeypatch, replace)
    try:
        views = store.view(0, 0)
    except StoreError:
        return
    finally:
        closer.join()
        os.close(opened.pop())

    assert same_parts(views, small.experts[0][0])


def test_addresses_stay_valid_when_two_threads_map_at_once(
    small: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both see one mapping: the addresses handed out first are those of the second call."""
    entered, done = threading.Semaphore(0), threading.Event()
    with SafetensorsStore(small.path) as store:

        def first_waits_for_second() -> None:
            entered.release()
            if threading.current_thread() is threading.main_thread():
                second.start()
                entered.acquire()
                entered.acquire(timeout=0.3)
            else:
                done.wait(0.6)

        second = threading.Thread(target=store.regions)
        _use_while_mapping(monkeypatch, first_waits_for_second)
        regions = store.regions()
        done.set()
        second.join()

        assert store.regions() == regions


def test_a_store_cannot_be_copied(small: Checkpoint) -> None:
    """Two owners would close one descriptor twice, and so perhaps a file of other code."""
    with SafetensorsStore(small.path) as store:
        for twice in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                twice(store.files)
            with pytest.raises(TypeError):
                twice(store)
        gc.collect()
        assert same_parts(read_expert(store, 0, 0), small.experts[0][0])
