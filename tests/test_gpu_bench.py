"""The benchmarks of a GPU run small on a device made for tests; no speed is claimed of that."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import gpu, gpu_contest, gpu_copies, gpu_decode, gpu_memory
from bench.checkpoint import SharedStore, StackSize, write_experts
from bench.gpu import bound, turns
from bench.gpu_copies import DeviceCopy, PinnedCopy, Shape, Timer
from bench.gpu_stack import (
    Decoder,
    GraphDecoder,
    TokenDecoder,
    TokenGraphDecoder,
    check_bits,
    digest,
    open_place,
    open_stack,
)
from bench.traces import routing_trace
from moecache.errors import CapacityError, MoeCacheError
from moecache.stores import ExpertStore, open_store
from moecache.study import Trace
from tests.helpers.fake_device import FakeDevice

ROOT = Path(__file__).parents[1]
SIZE = StackSize(num_layers=2, num_experts=8, top_k=2, hidden=32, width=16)
TOKEN_KINDS = [", tokens", ", token graph"]
RESIDENT_WAYS = [
    *("100%", "100%, graph", "100%, tokens", "100%, token graph"),
    *(f"{share}{kind}" for share in ("90%", "50%") for kind in ("", *TOKEN_KINDS)),
]
WAYS = [
    gpu_decode.RESIDENT,
    gpu_decode.GRAPH,
    *(way.name for ways in gpu_decode.GROUPS.values() for way in ways),
]


def make_trace(num_tokens: int = 6) -> np.ndarray:
    """Return routing for the stack of these tests."""
    return routing_trace(
        num_tokens, num_layers=SIZE.num_layers, num_experts=SIZE.num_experts, top_k=SIZE.top_k
    )


def numbers(figures: Any) -> Iterator[float]:
    """Yield every number of a JSON's contents."""
    if isinstance(figures, dict):
        for value in figures.values():
            yield from numbers(value)
    elif isinstance(figures, list):
        for value in figures:
            yield from numbers(value)
    elif isinstance(figures, (int, float)):
        yield figures


def check_figures(path: Path) -> dict[str, Any]:
    """Return a benchmark's JSON, whose numbers are finite and whose bounds are all there."""
    found: dict[str, Any] = json.loads(path.read_text())
    assert all(map(math.isfinite, numbers(found)))
    assert found["device"] == "cuda:0 (fake)"
    keys = {"name", "relation", "limit", "found", "holds", "note"}
    assert found["bounds"]
    assert all(one.keys() == keys and one["found"] is not None for one in found["bounds"])
    return found


def test_one_large_copy_inside_the_device_counts_both_ways() -> None:
    """What is read and what is written; the work takes its time in the stream that is given."""
    device = FakeDevice(eager=False)
    with DeviceCopy(device, device.current_stream(), 2**20) as copy:
        source, target = copy._arrays
        source[:] = 3
        assert copy.bytes_per_s() > 0
        assert (target == 3).all()

    def work() -> None:
        device.work(lambda: setattr(device, "clock_ns", device.clock_ns + 1000))

    with Timer(device) as timer:
        assert 1000 <= timer.time_ns(work, device.current_stream()) < 1010
    assert (device.used_bytes, device.num_events) == (0, 0)


def test_one_large_copy_has_the_rate_of_the_device() -> None:
    """A byte takes a nanosecond there; nothing is left behind."""
    device = FakeDevice()
    with PinnedCopy(device, 2**20) as link:
        assert link.bytes_per_s() == pytest.approx(1e9, rel=0.01)
    assert (device.used_bytes, device.pinned_bytes, device.num_streams) == (0, 0, 0)
    assert device.num_events == 0


def test_uploads_and_look_ups_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every size and way, and the storm is one."""
    device = FakeDevice()
    options = ["--runs", "2", "--bytes", "100KB", "--copy-bytes", "64KiB", "--look-ups", "20"]
    options += ["--directory", str(tmp_path), "--json", str(tmp_path / "figures")]

    gpu.main(["upload", *options], device, size=(Shape("1.5 MB", 16, 8), Shape("13 MB", 32, 16)))

    found = check_figures(tmp_path / "figures")
    rows = {(row["size"], row["way"]): row for row in found["uploads"]}
    assert rows.keys() == {(size, way) for size in ("1.5 MB", "13 MB") for way in gpu_copies.WAYS}
    for row in rows.values():
        assert len(row["shares"]) == len(row["bytes_per_s"]) == 2
        assert row["share"] > 0
        assert row["refused"] is None
    assert found["look_ups"]["storm_bytes"] > 0
    assert len(found["look_ups"]["storm_p99_ns"]) == 2
    # Of 13 MB nothing is demanded.
    assert [one["limit"] for one in found["bounds"]] == [0.25, 0.09, 3.0]
    assert "look-up p99: quiet" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["figures"]
    assert (device.used_bytes, device.pinned_bytes) == (0, 0)


def test_a_way_that_the_system_refuses_is_a_bound_that_does_not_hold(tmp_path: Path) -> None:
    """With the reason; the others are measured."""
    rows = gpu_copies.uploads(
        FakeDevice(200_000),
        [Shape("tiny", 32, 16)],
        total_bytes=2**20,
        num_runs=1,
        directory=tmp_path,
        copy_bytes=4096,
    )
    by_way = {row["way"]: row for row in rows}
    assert "has no memory for" in by_way["memory"]["refused"]
    assert by_way["file"]["share"] > 0
    assert not bound("upload", ">=", 0.9, by_way["memory"].get("share"))["holds"]


def test_an_upload_that_finds_experts_there_is_refused() -> None:
    """It would be too fast."""
    device = FakeDevice()
    with open_stack(device, SIZE, 16) as runtime, pytest.raises(SystemExit, match="there already"):
        gpu_copies.upload_bytes_per_s(device, runtime)


def test_the_file_of_experts_is_a_checkpoint(tmp_path: Path) -> None:
    """With gate, up and down side by side: an expert is one read."""
    write_experts(tmp_path / "experts.safetensors", 4, 3, 16, 8)
    with open_store(tmp_path / "experts.safetensors", top_k=2) as store:
        assert (store.layout.num_layers, store.layout.num_experts) == (4, 3)
        assert store.layout.expert_bytes(0) == 6 * 16 * 8
        ((_, start, targets),) = store.runs(1, 2)
        assert start % 64 == 0
        assert targets == (("gate_up", 0, 512), ("down", 0, 256))
        one, other = (store.view(layer, 2)["down"] for layer in (0, 3))
        assert one.tobytes() == other.tobytes()


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the figures of a small stack that every way decoded."""
    directory = tmp_path_factory.mktemp("decode")
    trace = Trace(make_trace(), num_experts=SIZE.num_experts)
    trace.save(directory / "trace.npz")
    options = ["--runs", "2", "--tokens", "2", "--copy-bytes", "64KiB", "--threads", "1"]
    options += ["--trace", str(directory / "trace.npz"), "--json", str(directory / "figures")]
    device = FakeDevice()
    gpu.main(["decode", *options], device, size=SIZE)
    assert (device.used_bytes, device.pinned_bytes, device.num_streams) == (0, 0, 0)
    return check_figures(directory / "figures")


def test_every_way_decodes(decoded: dict[str, Any]) -> None:
    """And says how much it copied, waited, and reached of what is resident and of the link."""
    assert list(decoded["ways"]) == WAYS
    assert decoded["refused"] == {}
    for name, way in decoded["ways"].items():
        assert way["tokens_per_s"] > 0
        assert way["of_resident"] > 0
        assert len(way["runs"]) == 2
        assert (way["bytes_per_token"] == 0) == (way["of_link"] == 0)
        assert name.startswith("all resident") == (way["misses_per_token"] == 0)
    assert decoded["ways"][gpu_decode.RESIDENT]["of_resident"] == 1.0


def test_without_a_cache_every_expert_is_copied_for_every_token(decoded: dict[str, Any]) -> None:
    """That is what "no cache" means."""
    wanted = SIZE.num_layers * SIZE.top_k * SIZE.expert_bytes
    assert decoded["ways"]["no cache"]["hit_rate"] == 0
    assert decoded["ways"]["no cache"]["bytes_per_token"] == wanted


def test_what_was_scaled_down_is_said(decoded: dict[str, Any]) -> None:
    """And where the routing is from."""
    assert "48 layers x 128 experts" in decoded["scaled"]
    assert decoded["routing"] == "trace.npz"
    assert decoded["stack"]["bytes"] == SIZE.total_bytes
    assert decoded["ways"]["25%, echo, prefetch auto"]["stalls_of_off"] > 0
    names = [one["name"] for one in decoded["bounds"]]
    assert names == ["stalls, 25%, echo, prefetch auto, of off's"]


def test_a_way_with_other_bits_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and the token are printed, and no speed."""
    original = SharedStore.view

    def view(store: SharedStore, layer: int, expert: int) -> dict[str, np.ndarray]:
        parts = dict(original(store, layer, expert))
        if expert == 3 and broken:
            parts["down"] = parts["down"].copy()
            parts["down"].view(np.uint16)[0, 0] ^= 0x8000
        return parts

    broken: list[str] = []

    def open_some(*arguments: Any, **options: Any) -> Any:
        if options.get("policy") == "lru":
            broken.append("lru")
        return open_stack(*arguments, **options)

    monkeypatch.setattr(SharedStore, "view", view)
    monkeypatch.setattr("bench.gpu_contest.open_stack", open_some)
    with pytest.raises(SystemExit, match=r"50%, lru, token \d+: other bits"):
        gpu_decode.decode_ways(
            FakeDevice(), SIZE, make_trace(), num_runs=1, num_tokens=1, copy_bytes=4096, progress={}
        )


@pytest.mark.parametrize("outputs", [np.zeros((2, 3), np.uint16), np.full(4, 0x7FC0, np.uint16)])
def test_outputs_that_say_nothing_are_refused(outputs: np.ndarray) -> None:
    """Zeros and NaNs are equal to each other, whatever computed them."""
    with pytest.raises(ValueError, match="zero or not finite"):
        digest(outputs)


@pytest.mark.parametrize("what", ["upload", "decode", "resident", "mxfp4"])
def test_an_interrupt_leaves_what_is_done(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ways, or the uploads, before it; "partial", and no bound."""
    path, calls = tmp_path / "partial.json", 0
    contest = gpu_contest.Contest._run

    def run(self: Any, always: Any, ways: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        contest(self, always, ways)

    def look_ups(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_contest.Contest, "_run", run)
    monkeypatch.setattr("bench.gpu_copies.look_ups", look_ups)
    options = ["--json", str(path), "--runs", "1", "--copy-bytes", "4KiB"]
    size: Any = (Shape("1.5 MB", 16, 8),)
    if what == "upload":
        options += ["--bytes", "4KiB", "--directory", str(tmp_path)]
    else:
        size = replace(SIZE, format="mxfp4", hidden=64, width=32) if what == "mxfp4" else SIZE
        Trace(make_trace(), num_experts=SIZE.num_experts).save(tmp_path / "trace.npz")
        options += ["--tokens", "1", "--trace", str(tmp_path / "trace.npz")]
    assert gpu.main([what, *options], FakeDevice(), size) == gpu.INTERRUPTED
    found = json.loads(path.read_text())
    assert (found["partial"], found["bounds"]) == (True, [])
    done = found["uploads" if what == "upload" else "ways"]
    assert done
    assert "25%, echo" not in done
    assert "50%, tokens" not in done


def test_the_host_is_no_part_of_a_graphs_time() -> None:
    """The device has work already when the clock starts; what is timed is issued behind it."""
    device = FakeDevice(eager=False)
    queued = []

    class Watching(Timer):
        def time_ns(self, work: Any, stream: Any) -> int:
            queued.append(device.num_queued)
            return super().time_ns(work, stream)

    with (
        gpu_decode.open_place(device, SIZE, make_trace()) as place,
        gpu_decode.open_stack(device, SIZE, 16) as runtime,
        Watching(device) as timer,
        gpu_decode.GraphDecoder("graph", place, runtime) as decoder,
    ):
        gpu_contest.LayerRow(decoder, place, timer).run([0, 1], 1.0)
    assert len(queued) == 2
    assert all(queued)


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the figures of a small stack with slots for all, nine in ten and half."""
    directory = tmp_path_factory.mktemp("resident")
    options = ["--runs", "2", "--tokens", "2", "--copy-bytes", "64KiB"]
    Trace(make_trace(12), num_experts=SIZE.num_experts).save(directory / "trace.npz")
    options += ["--trace", str(directory / "trace.npz"), "--json", str(directory / "figures")]
    device = FakeDevice()
    gpu.main(["resident", *options], device, size=SIZE)
    assert (device.used_bytes, device.pinned_bytes, device.num_streams) == (0, 0, 0)
    assert device.num_events == 0
    return check_figures(directory / "figures")


def test_shares_of_the_slots_are_compared_with_all(resident: dict[str, Any]) -> None:
    """By calls, by tokens, and by a graph of a whole token; each says how often it stalled."""
    ways = resident["ways"]
    assert resident["refused"] == {}
    assert list(ways) == RESIDENT_WAYS
    assert ways["100%"]["of_resident"] == 1.0
    for name, way in ways.items():
        assert way["of_resident"] > 0
        assert len(way["runs"]) == 2
        # By calls, what is read meanwhile makes no step wait.
        for run in way["runs"] if "token" in name else ():
            assert (run["hit_rate"] == 1) == (run["stalls_per_token"] == 0), name
        assert (way["hit_rate"] == 1) or not name.startswith("100%")
        assert (way["hit_rate"] < 1) or not name.startswith("50%")
    # One cache after another sees the same tokens.
    rates = [[run["hit_rate"] for run in ways[f"50%{kind}"]["runs"]] for kind in TOKEN_KINDS]
    assert rates[0] == rates[1]


def test_the_same_is_measured_of_mxfp4(tmp_path: Path) -> None:
    """With gpt-oss's biases and gate: slots and graphs leave the bits, fewer bytes are read."""
    size = replace(SIZE, hidden=64, width=32, format="mxfp4", is_gpt_oss=True)
    assert size.expert_bytes == (64 * 64 + 64 * 32) * 17 // 32 + 2 * (64 + 64)
    options = ["--runs", "2", "--tokens", "2", "--copy-bytes", "64KiB"]
    Trace(make_trace(), num_experts=SIZE.num_experts).save(tmp_path / "trace.npz")
    options += ["--trace", str(tmp_path / "trace.npz"), "--json", str(tmp_path / "figures")]
    device = FakeDevice()
    gpu.main(["mxfp4", *options], device, size=size)
    assert (device.used_bytes, device.pinned_bytes, device.num_events) == (0, 0, 0)
    found = check_figures(tmp_path / "figures")
    assert list(found["ways"]) == RESIDENT_WAYS
    assert found["stack"]["format"] == "mxfp4"
    assert {one["name"].partition(",")[0] for one in found["bounds"]} == {"host us per layer"}
    assert any("mxfp4" in kernel for kernel in device.num_launches)
    shapes = gpu_decode.GPT_OSS_20B
    assert shapes.expert_bytes == 3 * 2880 * 2880 * 17 // 32 + 2 * 3 * 2880


def test_every_format_is_measured_beside_a_copy(tmp_path: Path) -> None:
    """As graphs that leave the bits of calls; what has no kernel is refused, the others go on."""
    out = tmp_path / "figures"
    options = ["--runs", "2", "--tokens", "2", "--layers", "2", "--copy-bytes", "64KiB"]
    names = ["bf16", "q4_k", "int4[1x8,bf16]"]
    options += [word for name in names for word in ("--only", name)]
    device = FakeDevice()
    size = StackSize(num_layers=2, num_experts=16, top_k=2, hidden=256, width=256)
    assert gpu.main(["formats", *options, "--json", str(out)], device, size) == 1
    assert (device.used_bytes, device.pinned_bytes, device.num_events) == (0, 0, 0)
    found = json.loads(out.read_text())
    assert list(found["formats"]) == names
    read = {name: row.get("layer_bytes") for name, row in found["formats"].items()}
    assert read["bf16"] == 2 * 3 * 256 * 256 * 2
    assert read["q4_k"] == 2 * 3 * 256 * 144
    assert "no kernel" in found["formats"]["int4[1x8,bf16]"]["refused"]
    for name in names[:2]:
        row = found["formats"][name]
        assert len(row["runs"]) == 2
        rate = row["layer_bytes"] / (row["device_us_per_layer"] / 1e6)
        assert row["of_copy"] == pytest.approx(rate / found["copy_bytes_per_s"])
    assert [one["limit"] for one in found["bounds"]] == [0.55, 0.25, 0.25]


def test_what_the_kernel_reads_is_compared_with_a_copy(resident: dict[str, Any]) -> None:
    """By the device's time of a layer, whose weights are the experts of one token."""
    way = resident["ways"]["100%, graph"]
    read = SIZE.top_k * SIZE.expert_bytes / (way["device_us_per_layer"] / 1e6)
    assert way["weight_bytes_per_s"] == pytest.approx(read)
    assert way["of_copy"] == pytest.approx(read / resident["copy_bytes_per_s"])
    assert [one["found"] for one in resident["bounds"]] == [
        way["of_copy"],
        *(resident["ways"][name]["host_us_per_layer"] for name in RESIDENT_WAYS[:4]),
    ]


def test_a_graph_that_is_refused_gives_its_memory_back() -> None:
    """And the next step is computed."""
    device = FakeDevice()
    with (
        open_place(device, SIZE, make_trace()) as place,
        open_stack(device, SIZE, 8) as runtime,
        Decoder("calls", place, runtime) as decoder,
    ):
        decoder.step(0)
        before = device.used_bytes
        with pytest.raises(MoeCacheError, match="graph"):
            GraphDecoder("graph", place, runtime)
        assert device.used_bytes == before
        decoder.step(1)
        decoder.finish()
        digest(decoder.outputs())


def test_a_graph_leaves_the_bits_of_single_steps(gpu: Any) -> None:
    """In a place of its own, token by token; on a real device, if there is one."""
    expected: dict[int, str] = {}
    with (
        open_place(gpu, SIZE, make_trace()) as place,
        open_stack(gpu, SIZE, SIZE.num_layers * SIZE.num_experts) as runtime,
        Decoder("single", place, runtime) as single,
        GraphDecoder("graph", place, runtime) as graph,
    ):
        before = runtime.stats()
        for decoder in (single, graph):
            gpu_contest.verify(decoder, expected)
        made = runtime.stats() - before
        assert (
            made.num_steps == made.num_resident_steps == SIZE.num_layers * place.inputs.num_tokens
        )
        outputs = graph.outputs()
        outputs[0, 0] ^= 1
        assert digest(outputs) != expected[place.inputs.num_tokens - 1]
        graph.step(0)
        with pytest.raises(SystemExit, match="graph, token 1: other bits"):
            check_bits(graph, 1, expected)


@pytest.mark.parametrize("kind", [TokenDecoder, TokenGraphDecoder])
@pytest.mark.parametrize("eager", [True, False])
def test_tokens_with_few_slots_leave_the_bits_of_resident_ones(
    kind: type[TokenDecoder], eager: bool
) -> None:
    """A stall at a miss and none after it; also timed, whoever is ahead."""
    device = FakeDevice(eager=eager, seed=2)
    expected: dict[int, str] = {}
    with open_place(device, SIZE, make_trace(12)) as place:
        with (
            open_stack(device, SIZE, 16) as runtime,
            Decoder("resident", place, runtime) as resident,
            kind("all slots", place, runtime) as decoder,
        ):
            gpu_contest.verify(resident, expected)
            gpu_contest.verify(decoder, expected)
            assert decoder.num_stalls == 0
        with open_stack(device, SIZE, 4) as runtime, kind("few", place, runtime) as decoder:
            gpu_contest.verify(decoder, expected)
            before = decoder.num_stalls
            assert before > 0
            for token in range(place.inputs.num_tokens):
                decoder.bring_in(token)
                assert decoder.host_ns() > 0
                check_bits(decoder, token, expected)
            assert decoder.num_stalls > before
            before = decoder.num_stalls
            decoder.step(token)
            assert decoder.num_stalls == before
    assert (device.used_bytes, device.num_events) == (0, 0)


def test_a_token_graph_that_is_refused_ends_its_token() -> None:
    """Its memory is given back; a decoder without a graph goes on in waves."""
    device = FakeDevice()
    with (
        open_place(device, SIZE, make_trace()) as place,
        open_stack(device, SIZE, 1) as runtime,
        TokenDecoder("tokens", place, runtime) as decoder,
    ):
        decoder.step(0)
        before = device.used_bytes
        with pytest.raises(CapacityError, match="raise the memory"):
            TokenGraphDecoder("graph", place, runtime)
        assert (device.used_bytes, runtime.cache.evicts) == (before, True)
        decoder.step(1)
        digest(decoder.outputs())


def test_layers_have_other_experts_in_the_same_memory() -> None:
    """One layer's experts stand for all, in memory that no other layer uses."""
    with SharedStore(SIZE) as store:
        assert isinstance(store, ExpertStore)
        assert sum(num_bytes for _, num_bytes in store.regions()) == 8 * SIZE.expert_bytes
        parts = [store.view(layer, 0)["gate_up"].tobytes() for layer in (0, 1)]
        assert parts[0] != parts[1]
        buffers = {role.name: np.empty(role.shape, role.dtype) for role in store.layout.layers[0]}
        store.read_into(1, 5, buffers)
        assert all(buffers[name].tobytes() == a.tobytes() for name, a in store.view(1, 5).items())
    with pytest.raises(MoeCacheError, match="closed"):
        store.view(0, 0)


def test_layers_are_left_out_where_memory_ends() -> None:
    """As many as there is room for twice; less than one is an error with the remedy."""
    layer_bytes = SIZE.total_bytes // SIZE.num_layers
    room = FakeDevice(int(2.3 * layer_bytes))
    assert gpu_decode.fit(room, SIZE, 0).num_layers == 1
    assert gpu_decode.fit(FakeDevice(), SIZE, 0) == SIZE
    with pytest.raises(SystemExit, match="say --width"):
        gpu_decode.fit(FakeDevice(layer_bytes), SIZE, 0)


def test_memory_is_the_same_after_evictions_and_runtimes(tmp_path: Path) -> None:
    """Of the device not a byte is lost."""
    device = FakeDevice()
    options = ["--evictions", "300", "--rounds", "2", "--json", str(tmp_path / "figures")]

    gpu.main(["memory", *options], device, size=SIZE)

    found = check_figures(tmp_path / "figures")
    assert found["evictions"]["num_evictions"] >= 300
    assert found["rounds"]["num_rounds"] == 2
    lost = [one for one in found["bounds"] if one["name"].startswith("device")]
    assert [one["found"] for one in lost] == [0.0, 0.0]
    assert (device.used_bytes, device.num_streams, device.num_events) == (0, 0, 0)


def test_a_leak_of_the_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a round keeps is lost."""
    device = FakeDevice()

    def leak(*arguments: Any, **options: Any) -> Any:
        device.allocate(1)
        return open_stack(*arguments, **options)

    monkeypatch.setattr("bench.gpu_memory.open_stack", leak)
    found = gpu_memory.rounds(device, SIZE, 3)
    assert found["device_bytes_lost"] == 3 * device.allocation_bytes


def test_each_goes_first_in_turn() -> None:
    """No way always runs in the heat that the same other way left."""
    assert [turns("abc", run) for run in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_without_a_gpu_a_benchmark_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """And does not fail as if a bound were missed."""
    assert gpu.main(["memory", "--device", "cuda:99"]) == 2
    assert "skipped: " in capsys.readouterr().out


def test_help_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    """And each of them has a help of its own."""
    for argv in ([], *([name] for name in gpu.MEASUREMENTS)):
        with pytest.raises(SystemExit) as ended:
            gpu.main([*argv, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert all(name in text for name in (argv or gpu.MEASUREMENTS))


def write_stage(work: Path, name: str, code: int, **files: str) -> None:
    """Write what a stage left."""
    (work / f"{name}.status").write_text(f"{code} 1.5 60")
    for suffix, text in files.items():
        (work / f"{name}.{suffix}").write_text(text)


def test_stages_become_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage is well, missed a bound, failed, took too long, or was left out."""
    held, missed = bound("fast", ">=", 0.9, 0.95), bound("slow", "<=", 3.0, 4.0)
    xml = '<testsuites><testsuite tests="5" failures="0" errors="0" skipped="{}"/></testsuites>'
    write_stage(tmp_path, "build", 0, log="built")
    write_stage(tmp_path, "tests", 0, xml=xml.format(1))
    write_stage(tmp_path, "upload", 1, json=json.dumps({"bounds": [held, missed]}))
    write_stage(tmp_path, "decode", 1, log="x" * 5000 + "Traceback")
    write_stage(tmp_path, "memory", 124, log="slow")
    write_stage(tmp_path, "memcheck", 0, xml=xml.format(5), log="no test ran")
    (tmp_path / "racecheck.log").write_text("compute-sanitizer was not found\n")
    names = ["build", "tests", "upload", "decode", "memory", "memcheck", "racecheck"]
    options = [part for name in names for part in ("--stage", name)]
    out = tmp_path / "new" / "report.json"

    code = gpu.main(
        [
            "report",
            "--work",
            str(tmp_path),
            "--out",
            str(out),
            *options,
            "--fact",
            "gpu=made up = x",
        ]
    )

    report = json.loads(out.read_text())
    statuses = [report["stages"][name]["status"] for name in names]
    assert statuses == [
        "ok", "ok", "bounds missed", "failed", "timed out", "failed", "left out",
    ]  # fmt: skip
    assert report["gpu"] == "made up = x"
    assert (code, report["ok"]) == (1, False)
    assert (report["num_bounds"], report["num_bounds_held"]) == (2, 1)
    assert report["bounds"][1] == {"stage": "upload", **missed}
    assert report["stages"]["tests"]["tests"]["passed"] == 4
    assert report["stages"]["decode"]["log_tail"].endswith("Traceback")
    assert len(report["stages"]["decode"]["log_tail"]) == 2000
    assert report["stages"]["racecheck"]["note"] == "compute-sanitizer was not found"
    assert "bounds kept: 1 of 2" in capsys.readouterr().out


def test_a_report_without_faults_is_a_success(tmp_path: Path) -> None:
    """By Python alone: nothing of the package is imported, which may not even be built."""
    write_stage(tmp_path, "build", 0)
    command = [sys.executable, "-I", str(ROOT / "bench" / "gpu.py"), "report"]
    command += ["--work", str(tmp_path), "--out", str(tmp_path / "report.json"), "--stage", "build"]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads((tmp_path / "report.json").read_text())["ok"]
