"""`moecache.open` with slots on a GPU: as many as fit, and a clear word where it fails."""

import functools
import itertools
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import moecache
from moecache import cli
from moecache.cuda import open_device, parse_device
from moecache.errors import CapacityError, ConfigError, MissingDependencyError, MoeCacheError
from moecache.loading._reader_engine import ReaderEngine
from moecache.slots import CudaSlots
from moecache.telemetry import UploadStats
from tests.helpers import quantized
from tests.helpers.fake_device import FakeDevice
from tests.test_exactness import assert_same, generate


@pytest.mark.parametrize(("name", "number"), [("cpu", None), ("cuda", 0), ("cuda:3", 3)])
def test_devices_have_names(name: str, number: int | None) -> None:
    """As torch writes them."""
    assert parse_device(name) == number


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "", None, 0])
def test_other_names_are_refused(tiny_moe: Path, name: object) -> None:
    """With those that there are."""
    with pytest.raises(ConfigError, match='neither "cpu" nor "cuda"'):
        moecache.open(tiny_moe, "25%", name)  # type: ignore[arg-type]


def test_without_cupy_the_error_names_the_extra(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is imported without it; only slots on a GPU need it."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "moecache.cuda._cupy", raising=False)
    with pytest.raises(MissingDependencyError, match=r"pip install 'moecache\[cuda13\]'"):
        moecache.open(tiny_moe, "25%", "cuda")
    with pytest.raises(ConfigError, match="is no GPU"):
        open_device("cpu")


def test_importing_the_package_does_not_import_cupy() -> None:
    """Nor does a runtime in RAM."""
    code = "import moecache, moecache.slots, sys; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("memory", ["3%", "25%", "100%"])
@pytest.mark.parametrize("policy", ["echo", "lru"])
@pytest.mark.parametrize("length", [1, 64])
def test_what_is_generated_is_what_it_is_in_ram(
    fake_cuda: FakeDevice,
    tiny_moe: Path,
    numpy_loop: ModuleType,
    resident_logits: dict[int, list[np.ndarray]],
    prompt: bytes,
    memory: str,
    policy: str,
    length: int,
) -> None:
    """Every logit, to the bit, through buffers, copies and events."""
    with moecache.open(tiny_moe, memory, "cuda", policy=policy, prefetch="echo") as runtime:
        assert isinstance(runtime.pool, CudaSlots)
        logits = generate(numpy_loop, tiny_moe, runtime, prompt[:length])
        stats = runtime.stats()
        runtime.cache.check()
    assert_same(logits, resident_logits[length])
    assert stats.uploads is not None
    assert stats.uploads.num_uploads + stats.uploads.in_flight_bytes > 0
    assert fake_cuda.used_bytes == fake_cuda.pinned_bytes == 0
    assert fake_cuda.num_events == fake_cuda.num_streams == 0


@pytest.mark.parametrize("read", ["direct", "buffered", "mmap"])
def test_every_way_of_reading_fills_slots(fake_cuda: FakeDevice, tiny_moe: Path, read: str) -> None:
    """Straight into the buffers, or copied there."""
    with moecache.open(tiny_moe, "25%", "cuda", read=read) as runtime:
        for layer, expert in itertools.product(range(runtime.layout.num_layers), range(6)):
            wanted = {
                role.name: np.empty(role.shape, role.dtype) for role in runtime.layout.layers[layer]
            }
            runtime.store.read_into(layer, expert, wanted)
            with runtime.lease(layer, np.array([expert])) as lease:
                found = runtime.expert(int(lease.slots[0]), layer)
                for name, array in wanted.items():
                    assert np.array_equal(fake_cuda.to_host(found[name]), array)
    assert fake_cuda.pinned_bytes == 0


def test_threads_share_what_is_copied_from_the_page_cache(
    fake_cuda: FakeDevice, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 12, as there are cores, each a part of an expert; fewer where somebody says so."""
    made: list[tuple[str, int, int]] = []
    make = ReaderEngine

    def note(reader: Any, store: Any, num_threads: int, **options: Any) -> Any:
        made.append((reader.engine, reader.piece_bytes, num_threads))
        return make(reader, store, num_threads, **options)

    monkeypatch.setattr("moecache.runtime._parts.ReaderEngine", note)
    for cores in (3, 64):
        monkeypatch.setattr("moecache.runtime.opening.usable_cores", lambda cores=cores: cores)
        moecache.open(tiny_moe, "25%", "cuda", read="buffered").close()
    moecache.open(tiny_moe, "25%", "cuda", read="buffered", loader_threads=1).close()
    pieces = 256 * 2**10
    assert made == [("threads", pieces, 3), ("threads", pieces, 12), ("threads", pieces, 1)]
    moecache.open(tiny_moe, "25%", read="buffered").close()
    assert made[-1] == (made[-1][0], 2**20, 2)


@pytest.mark.parametrize(
    ("option", "problem"), [({"dtype": "float32"}, "dtype"), ({"lock": True}, "lock")]
)
def test_options_of_ram_are_refused(
    tiny_moe: Path, fake_cuda: FakeDevice, option: dict[str, object], problem: str
) -> None:
    """They would do nothing."""
    with pytest.raises(ConfigError, match=f"leave {problem} out"):
        moecache.open(tiny_moe, "25%", "cuda", **option)  # type: ignore[arg-type]


@pytest.mark.parametrize("total_mib", [700, 520, 600])
def test_the_plan_is_what_is_allocated(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, total_mib: int
) -> None:
    """All that is free less the reserve, in whole allocations: not a byte more is used."""
    device = FakeDevice(total_bytes=total_mib * 2**20)
    monkeypatch.setattr("moecache.runtime.plan.open_device", lambda name: device)
    reserve = 512 * 2**20
    with moecache.open(tiny_moe, device="cuda", reserve=reserve) as runtime:
        slot_bytes = CudaSlots.bytes_per_slot(runtime.layout)
        room = device.total_bytes - reserve
        staging = runtime.stats().staging_slots
        planned = (runtime.cache.capacity + staging) * slot_bytes
        grown = -(-planned // device.allocation_bytes) * device.allocation_bytes
        assert device.used_bytes == grown <= room
        if runtime.cache.capacity < runtime.layout.total_experts:
            assert room - grown < slot_bytes + device.allocation_bytes
        assert runtime.stats().pool_bytes == planned


def test_memory_that_others_took_means_fewer_slots(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model must not fail to load because of its cache; a warning says so."""
    device = FakeDevice(total_bytes=600 * 2**20)
    monkeypatch.setattr("moecache.runtime.plan.open_device", lambda name: device)
    device.allocate(599 * 2**20)
    asked = device.free_bytes
    answers = iter([10 * 2**30] * 2)
    monkeypatch.setattr(device, "free_bytes", lambda: next(answers, None) or asked())
    with moecache.open(tiny_moe, device="cuda", reserve=0) as runtime:
        assert runtime.cache.capacity < runtime.layout.total_experts
        assert runtime.pool.num_slots > runtime.cache.capacity  # now there is need for staging
        with runtime.lease(0, np.arange(2)):
            pass
    assert "cuda.shrunk" in caplog.text


def test_a_gpu_without_room_for_one_expert_is_an_error(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is free and what to do."""
    device = FakeDevice(total_bytes=2**20)
    monkeypatch.setattr("moecache.runtime.plan.open_device", lambda name: device)
    device.allocate(2**20 - 4096)
    with pytest.raises(CapacityError, match=r"cuda:0 \(fake\) has 4\.00 KiB free"):
        moecache.open(tiny_moe, "1MiB", "cuda")
    with pytest.raises(CapacityError, match="too little for one expert"):
        moecache.open(tiny_moe, device="cuda")
    assert device.used_bytes == 2**20 - 4096


def test_every_call_that_fails_while_opening_leaves_nothing(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or it opens all the same."""
    caplog.set_level(logging.CRITICAL)
    probe = FakeDevice()
    monkeypatch.setattr("moecache.runtime.plan.open_device", lambda name: probe)
    with (
        moecache.open(tiny_moe, "10%", "cuda", prefault="off") as runtime,
        runtime.lease(0, np.arange(3)),
    ):
        pass
    assert probe.num_calls > 10
    for number in range(min(probe.num_calls, 60)):
        device = FakeDevice()
        device.fail_at = number
        monkeypatch.setattr(
            "moecache.runtime.plan.open_device",
            lambda name, device=device: device,  # type: ignore[misc]
        )
        try:
            with moecache.open(tiny_moe, "10%", "cuda", prefault="off") as runtime:
                for _ in range(2):
                    try:
                        with runtime.lease(0, np.arange(3)) as lease:
                            assert (lease.slots >= 0).all()
                    except MemoryError:
                        pass
                runtime.cache.check()
        except (MemoryError, CapacityError):
            pass
        assert device.used_bytes == device.pinned_bytes == 0, number
        assert device.num_events == device.num_streams == 0, number


def test_a_device_that_is_lost_is_an_error_of_the_step(
    fake_cuda: FakeDevice, tiny_moe: Path
) -> None:
    """Close returns, with the same error, once."""
    runtime = moecache.open(tiny_moe, "10%", "cuda", prefault="off")
    with runtime.lease(0, np.arange(3)):
        pass
    fake_cuda.lost = True
    with pytest.raises(MoeCacheError, match="lost"), runtime.lease(1, np.arange(3)):
        pass
    with pytest.raises(MoeCacheError, match="lost"):
        runtime.close()
    runtime.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_staged_expert_is_not_overwritten_before_it_was_used(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Also when a step is given up in the middle of a wave, its products still to come."""
    device = FakeDevice(eager=False, seed=seed)
    monkeypatch.setattr("moecache.runtime.plan.open_device", lambda name: device)
    wrong: list[np.ndarray] = []

    def look(array: np.ndarray, wanted: np.ndarray) -> None:
        if not np.array_equal(array, wanted):
            wrong.append(array)

    with moecache.open(tiny_moe, slots=1, device="cuda", prefault="off", prefetch="off") as runtime:
        for turn in range(6):
            waves = runtime.waves(0, np.arange(8).reshape(2, 4))
            for number, wave in enumerate(waves):
                for slot, pairs in wave:
                    wanted = {
                        role.name: np.empty(role.shape, role.dtype)
                        for role in runtime.layout.layers[0]
                    }
                    runtime.store.read_into(0, int(pairs[0]), wanted)
                    found = runtime.expert(slot, 0)["down"]
                    device.work(functools.partial(look, found, wanted["down"]))
                if turn % 2 and number == 2:
                    waves.close()
                    break
        device.run()
    assert not wrong


def test_inspect_plans_for_a_gpu(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what is free there, and an error where that is too little."""
    device = FakeDevice(total_bytes=800 * 2**20)
    monkeypatch.setattr("moecache.runtime.plan.open_device", lambda name: device)
    monkeypatch.setenv("COLUMNS", "200")
    command = ["inspect", str(tiny_moe), "--device", "cuda"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "cuda:0 (fake)" in shown
    assert "800.0 MiB" in shown
    assert "staging buffers" not in shown
    assert "256 of 256 experts, 12.0 MiB" in shown
    assert 'with compute="fast": computed by kernels: cuda; bfloat16; ' in shown
    assert "this machine reads" not in shown
    assert 'tokens of olmoe: CUDA graphs with compute="fast"' in shown
    device.allocate(795 * 2**20)
    assert cli.main([*command, "--memory", "10MiB"]) == 0
    assert "for want of memory on cuda:0" in capsys.readouterr().out
    assert cli.main([*command[:-1], "gpu"]) != 0
    assert 'neither "cpu" nor "cuda"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "memory", "reason"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "25%", "linear_attention"),
        ({"text_config": {"attention_chunk_size": 64}}, "25%", "attention by chunks"),
        ({"mamba_d_state": 16, "layer_types": 3}, "25%", "states"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "25%", ""),
        ({}, "160KiB", "a token asks for 4 experts of a layer, and there are 2 slots"),
    ],
)
def test_inspect_says_why_tokens_are_no_graphs(
    said: dict[str, Any],
    memory: str,
    reason: str,
    tiny_moe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By what config.json names; the report of a model that is loaded looks at the model."""
    for file in tiny_moe.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tiny_moe / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    monkeypatch.setattr("moecache.runtime.plan.open_device", lambda name: FakeDevice())
    assert cli.main(["inspect", str(tmp_path), "--device", "cuda", "--memory", memory]) == 0
    shown = capsys.readouterr().out
    if reason:
        assert "tokens of olmoe: the model's modules: " in shown
        assert reason in shown
    else:
        assert 'tokens of olmoe: CUDA graphs with compute="fast"' in shown


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (np.float32, 'with compute="fast": '),
        (np.float64, "no kernels on a GPU, so that torch multiplies: experts of float64"),
    ],
)
def test_inspect_says_whether_a_gpu_has_kernels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dtype: type[np.floating],
    said: str,
) -> None:
    """Of experts without a gate, which it has; of another type there are none, and why."""
    shapes = {"up": (8, 4), "down": (4, 8)}
    tensors = {
        f"backbone.layers.0.mixer.experts.{expert}.{name}_proj.weight": np.zeros(shape, dtype)
        for expert in range(4)
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr("moecache.runtime.plan.open_device", lambda name: FakeDevice())
    assert cli.main(["inspect", str(tmp_path), "--device", "cuda"]) == 0
    assert said in capsys.readouterr().out


def test_inspect_says_which_format_a_gpu_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what to do; nothing else would multiply it there."""
    pytest.importorskip("transformers")
    scheme = quantized.grouped("gptq", is_ordered=True)
    path, _ = quantized.write_quantized(quantized.QWEN2_MOE, scheme, tmp_path)
    monkeypatch.setattr("moecache.runtime.plan.open_device", lambda name: FakeDevice())
    assert cli.main(["inspect", str(path), "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    assert "no kernels on a GPU: experts in " in shown
    assert 'device="cpu"' in shown


def test_uploads_are_told(fake_cuda: FakeDevice, tiny_moe: Path) -> None:
    """In the snapshot, its difference, the text and the notebook's table."""
    with moecache.open(tiny_moe, "25%", "cuda", prefault="off", prefetch="off") as runtime:
        with runtime.lease(0, np.arange(4)):
            pass
        earlier = runtime.stats()
        with runtime.lease(1, np.arange(6)):
            pass
        later = runtime.stats()
        between = (later - earlier).uploads
        assert isinstance(between, UploadStats)
        assert between.num_uploads == 6
        assert between.bytes_uploaded == 6 * runtime.layout.expert_bytes(1)
        assert between.bytes_per_s > 0
        assert "uploads to cuda:0 (fake) 10, " in runtime.report()
        assert "cuda:0 (fake)" in runtime._repr_html_()
        assert later.to_dict()["uploads"]["num_uploads"] == 10
    with moecache.open(tiny_moe, "25%") as runtime:
        assert runtime.stats().uploads is None
