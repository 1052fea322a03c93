"""Files that break, disks that are full, processes that end: clear errors, and nothing is lost."""

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moecache.errors import MoeCacheError, StoreError
from moecache.stores import SafetensorsStore
from tests.helpers.families import FAMILIES
from tests.helpers.leaks import nothing_left
from tests.helpers.offloading import generated, load_in_slots, prompt

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

FAMILY = FAMILIES["qwen3_moe"]
FILE = "model.safetensors"


@pytest.fixture(name="copied")
def _copied(qwen3_moe: Path, tmp_path: Path) -> Path:
    """Return a checkpoint to be damaged."""
    return shutil.copytree(qwen3_moe, tmp_path / "copied")


@pytest.fixture(name="sharded", scope="module")
def _sharded(whole_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    whole_model.save_pretrained(directory, max_shard_size="300KB")
    return directory


@pytest.mark.parametrize(
    "damage",
    [
        lambda shard: shard.unlink(),
        lambda shard: (shard.unlink(), shard.mkdir()),
        lambda shard: os.truncate(shard, shard.stat().st_size // 2),
        lambda shard: os.truncate(shard, 0),
        lambda shard: shard.write_bytes(b"\xff" * 100),
    ],
    ids=["missing", "directory", "truncated", "empty", "garbage"],
)
def test_a_shard_that_cannot_be_read_is_named_when_the_model_is_loaded(
    sharded: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """And nothing of the attempt stays open."""
    directory = shutil.copytree(sharded, tmp_path / "sharded")
    shard = sorted(directory.glob("*.safetensors"))[1]
    damage(shard)

    with nothing_left(), pytest.raises(StoreError, match=shard.name):
        load_in_slots(directory)


@pytest.mark.parametrize("prefetch", ["off", "auto"])
@pytest.mark.parametrize("read", ["buffered", "direct", "auto"])
def test_a_file_that_gets_shorter_is_an_error_that_names_it(
    copied: Path, whole_model: Any, read: str, prefetch: str
) -> None:
    """No hang, no crash; what is resident still runs, and all does when the bytes are back."""
    model = load_in_slots(copied, read=read, prefetch=prefetch)
    contents = (copied / FILE).read_bytes()
    with model.moecache as offload, torch.no_grad():
        first = model(torch.tensor([[9]])).logits
        os.truncate(copied / FILE, 4096)
        with pytest.raises(StoreError, match=rf"{FILE}: expert .* the file has only 4096 now"):
            generated(model)
        offload.runtime.cache.check()
        _write_in_place(copied / FILE, contents)

        assert torch.equal(model(torch.tensor([[9]])).logits, first)
        assert torch.equal(generated(model), generated(whole_model))


def test_experts_in_slots_need_no_file_any_more(copied: Path, whole_model: Any) -> None:
    """All resident, it is not read again, whatever it has become."""
    model = load_in_slots(copied, "100%")
    with model.moecache, torch.no_grad():
        expected = [model(torch.arange(start, start + 64)[None]).logits for start in (0, 64)]
        assert model.moecache.stats().num_resident == 2 * FAMILY.num_experts
        os.truncate(copied / FILE, 4096)

        for start, logits in zip((0, 64), expected, strict=True):
            assert torch.equal(model(torch.arange(start, start + 64)[None]).logits, logits)
        assert torch.equal(generated(model), generated(whole_model))


def test_a_file_that_is_replaced_stays_the_one_it_was(copied: Path, whole_model: Any) -> None:
    """As a new download replaces a checkpoint: the old file is still open."""
    model = load_in_slots(copied)
    with model.moecache:
        (copied / "new").write_bytes(b"short")
        os.replace(copied / "new", copied / FILE)

        assert torch.equal(generated(model), generated(whole_model))


@pytest.mark.parametrize("times", [1, 3])
def test_a_read_that_fails_is_an_error_and_the_next_call_goes_well(
    qwen3_moe: Path, whole_model: Any, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Nothing stays claimed or leased, in whatever layer it failed."""
    failing = _Failing(monkeypatch, times)
    model = load_in_slots(qwen3_moe, read="mmap", prefetch="off", loader_threads=0)
    with model.moecache as offload:
        failing.armed = True
        for _ in range(times):
            with pytest.raises(StoreError, match="disk is broken"):
                generated(model)

        assert torch.equal(generated(model), generated(whole_model))
        assert offload.stats().num_failed_reads == times
        offload.runtime.cache.check()


def test_a_read_that_fails_in_backward_is_an_error_and_the_next_goes_well(
    qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are read again for gradients."""
    failing = _Failing(monkeypatch, 1)
    model = load_in_slots(qwen3_moe, None, slots=1, read="mmap", prefetch="off", loader_threads=0)
    with model.moecache:
        loss = model(prompt(), labels=prompt()).loss
        failing.armed = True
        with pytest.raises(StoreError, match="disk is broken"):
            loss.backward()
        model.zero_grad()

        model(prompt(), labels=prompt()).loss.backward()
        assert bool(torch.isfinite(model.lm_head.weight.grad).all())


def test_an_error_that_somebody_keeps_does_not_keep_the_slots(
    qwen3_moe: Path, whole_model: Any
) -> None:
    """A notebook holds the last traceback, and in it the step that failed."""
    model = load_in_slots(qwen3_moe, None, slots=1)
    experts = model.model.layers[1].mlp.experts

    def fail(tensor: object) -> None:
        raise RuntimeError("no product")

    with model.moecache as offload, torch.no_grad():
        activation, experts.act_fn = experts._modules["act_fn"], torch.nn.Identity()
        experts.act_fn.register_forward_pre_hook(lambda module, inputs: fail(inputs))
        with pytest.raises(RuntimeError, match="no product") as kept:
            model(prompt())
        experts.act_fn = activation

        assert torch.equal(model(prompt()).logits, whole_model(prompt()).logits)
        offload.runtime.cache.check()
    assert kept.traceback


def test_a_trace_that_cannot_be_written_is_a_warning(
    qwen3_moe: Path, whole_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is found out at the end, and costs neither text nor model."""
    model = load_in_slots(qwen3_moe, record_trace="/dev/full")
    with model.moecache:
        text = generated(model)

    assert torch.equal(text, generated(whole_model))
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "/dev/full" in record.message
    assert "No space left on device" in record.message


def test_a_trace_is_refused_at_once_where_nothing_can_be_written(
    qwen3_moe: Path, tmp_path: Path
) -> None:
    """Not after hours; and what was opened for it is closed again."""
    with nothing_left(), pytest.raises(MoeCacheError, match="there is no directory"):
        load_in_slots(qwen3_moe, record_trace=tmp_path / "none" / "trace.npz")


def test_slots_that_no_memory_is_left_for_are_an_error_that_leaves_nothing_open(
    qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trunk was loaded already; it is given back too."""

    def refuse(*arguments: object, **named: object) -> None:
        raise MemoryError("cannot allocate")

    with nothing_left(), monkeypatch.context() as patched:
        patched.setattr("moecache.slots._memory.mmap.mmap", refuse)
        with pytest.raises((MemoryError, MoeCacheError)):
            load_in_slots(qwen3_moe)

    with load_in_slots(qwen3_moe).moecache:
        pass


def test_two_processes_use_one_checkpoint_and_one_is_killed(
    qwen3_moe: Path, whole_model: Any
) -> None:
    """In the middle of a generation; the files are as they were, for the other and for the next."""
    before = {file.name: file.read_bytes() for file in qwen3_moe.iterdir()}
    expected = generated(whole_model).tolist()
    reading, writing = os.pipe()
    # Not a new interpreter, which would import torch again: the child loads its own model.
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            model = load_in_slots(qwen3_moe)
            while True:
                os.write(writing, f"{generated(model).tolist()}\n".encode())
        os._exit(1)
    os.close(writing)
    try:
        model = load_in_slots(qwen3_moe)
        with model.moecache, os.fdopen(reading) as lines:
            # It is in its second generation then.
            assert json.loads(lines.readline()) == expected
            assert generated(model).tolist() == expected
            os.kill(child, signal.SIGKILL)
            assert generated(model).tolist() == expected
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert status == -signal.SIGKILL
    assert {file.name: file.read_bytes() for file in qwen3_moe.iterdir()} == before
    model = load_in_slots(qwen3_moe)
    with model.moecache:
        assert generated(model).tolist() == expected


def test_a_forked_child_is_told_to_load_its_own(qwen3_moe: Path, whole_model: Any) -> None:
    """Threads do not survive a fork; closed there, the parent's model is not disturbed."""
    model = load_in_slots(qwen3_moe, prefetch="router")
    with model.moecache:
        generated(model)
        child = os.fork()
        if child == 0:
            try:
                generated(model)
                os._exit(1)
            except MoeCacheError as error:
                if "fork" not in str(error):
                    os._exit(2)
            except BaseException:  # noqa: BLE001
                os._exit(3)
            try:
                model.moecache.close()
                os._exit(0)
            except BaseException:  # noqa: BLE001
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(generated(model), generated(whole_model))


class _Failing:
    """Has a number of expert reads fail, once it is armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.armed = False
        self._left = times
        self._skip = 5
        read_into = SafetensorsStore.read_into

        def read(store: SafetensorsStore, layer: int, expert: int, parts: Any) -> None:
            if self.armed and self._left:
                self._skip -= 1
                if self._skip < 0:
                    self._left -= 1
                    raise StoreError("the disk is broken") from OSError(errno.EIO, "disk")
            read_into(store, layer, expert, parts)

        monkeypatch.setattr(SafetensorsStore, "read_into", read)


def _write_in_place(file: Path, contents: bytes) -> None:
    with file.open("r+b") as opened:
        opened.write(contents)
