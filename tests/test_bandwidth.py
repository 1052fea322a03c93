"""The memory's bandwidth: measured once, kept in a profile, another machine's is not used."""

import logging
from pathlib import Path

import pytest

from moecache import cli, kernels
from moecache.profiles import bandwidth as module
from moecache.profiles.bandwidth import bandwidth, measure_bandwidth
from moecache.profiles.file import read_profile, update_profile
from moecache.telemetry import ComputeStats


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each measurement give the next rate of a list; what this process knows is forgotten."""
    monkeypatch.setattr(module, "_measured", {})
    monkeypatch.setattr(module, "_repeated", set())
    monkeypatch.setattr(module, "measure_bandwidth", [3e9, 2e9, 1e9].pop)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be another process."""
    monkeypatch.setattr(module, "_measured", {})


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a process, and once with a profile; what else the profile has stays."""
    path = tmp_path / "kept"
    update_profile(path, disks={"sda": {"depth": 1}})
    assert bandwidth(measures=False) is None
    assert [bandwidth(path), bandwidth(path), bandwidth()] == [1e9, 1e9, 1e9]
    forget(monkeypatch)
    assert bandwidth(path, measures=False) == 1e9
    forget(monkeypatch)
    assert bandwidth() == 2e9

    update_profile(path, disks={"sdb": {"depth": 2}})
    profile = read_profile(path)
    assert profile is not None
    assert profile.disks.keys() == {"sda", "sdb"}
    assert profile.machines == {module.machine(): {"bytes_per_s": 1e9}}


def test_what_was_disturbed_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding that was faster shows it; the better of two counts, and is kept."""
    path = tmp_path / "kept"
    assert bandwidth(path) == 1e9
    assert bandwidth(path, at_least=0.9e9) == 1e9
    assert bandwidth(path, measures=False, at_least=1.5e9) == 1e9
    assert bandwidth(path, at_least=1.5e9) == 2e9
    monkeypatch.setattr(module, "measure_bandwidth", lambda: 0.5e9)
    assert bandwidth(path, at_least=2.5e9) == 2e9
    forget(monkeypatch)
    assert bandwidth(path) == 2e9


def test_another_machine_measures_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stay in the profile."""
    path = tmp_path / "kept"
    assert bandwidth(path) == 1e9
    here = module.machine()
    forget(monkeypatch)
    monkeypatch.setattr(module, "machine", lambda: "another")
    assert bandwidth(path) == 2e9

    profile = read_profile(path)
    assert profile is not None
    assert profile.machines.keys() == {here, "another"}


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), "fast", None, True, 10])
def test_what_is_no_rate_is_a_warning(
    tmp_path: Path, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    """It is measured anew, and put in its place."""
    update_profile(tmp_path / "kept", machines={module.machine(): {"bytes_per_s": value}})
    assert bandwidth(tmp_path / "kept") == 1e9
    assert "bandwidth.ignored" in caplog.text
    assert read_profile(tmp_path / "kept").machines[module.machine()] == {"bytes_per_s": 1e9}  # type: ignore[union-attr]


def test_a_damaged_profile_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A flipped bit is a warning; a file that is no profile stays as it is."""
    path = tmp_path / "kept"
    assert bandwidth(path) == 1e9
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    forget(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert bandwidth(path) == 2e9
    assert "its checksum is not that of its contents" in caplog.text
    assert read_profile(path).machines[module.machine()] == {"bytes_per_s": 2e9}  # type: ignore[union-attr]

    (tmp_path / "letter").write_text("Dear reader")
    forget(monkeypatch)
    assert bandwidth(tmp_path / "letter") == 3e9
    assert (tmp_path / "letter").read_text() == "Dear reader"


def test_memory_is_read_where_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small host is not filled to find out."""
    monkeypatch.setattr(module, "_MAX_S", 0)
    assert measure_bandwidth() > 1e8  # type: ignore[operator]
    monkeypatch.setattr(module, "free_host_bytes", lambda: 200 * 2**20)
    assert measure_bandwidth() is None


def test_a_line_says_what_is_known() -> None:
    """No share without a bandwidth, and none with torch."""
    known = {"compute": "fast", "level": "avx2", "num_threads": 2, "formats": ("bfloat16",)}
    used = {"expert_bytes": 2**20, "bytes_computed": 3 * 2**30, "busy_ns": 10**9}
    fast = ComputeStats(**known, **used, bytes_per_s=4.0 * 2**30)  # type: ignore[arg-type]
    assert fast.bandwidth_share == 0.75
    assert fast.describe() == (
        "computed by kernels: avx2, 2 threads; bfloat16; 1.00 MiB of weights per token; experts of "
        "single tokens at 3.00 GiB/s, 75% of the 4.00 GiB/s that this machine reads"
    )
    unused = ComputeStats(**known, expert_bytes=2**20, trunk_bytes=2**20, bytes_per_s=2.0**30)  # type: ignore[arg-type]
    assert unused.bandwidth_share is None
    assert unused.describe() == (
        "computed by kernels: avx2, 2 threads; bfloat16; 2.00 MiB of weights per token (experts "
        "1.00 MiB, trunk 1.00 MiB); the 1.00 GiB/s that this machine reads allow 512.0 tokens/s"
    )
    torch = ComputeStats("torch", "", 1, ("float32",), 2**20)
    assert torch.describe() == "computed by torch, 1 thread; float32; 1.00 MiB of weights per token"


def test_inspect_says_what_the_kernels_would_do(
    tiny_moe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bandwidth when asked for; the tiny model multiplies 8 x 4 experts of 48 KiB."""
    assert cli.main(["inspect", str(tiny_moe)]) == 0
    plain = capsys.readouterr().out
    assert 'with compute="fast": computed by kernels: ' in plain
    assert "bfloat16; " in plain
    assert "of weights per token" in plain
    assert "this machine reads" not in plain
    assert cli.main(["inspect", str(tiny_moe), "--bandwidth"]) == 0
    assert "the 953.7 MiB/s that this machine reads allow" in capsys.readouterr().out


def test_inspect_says_if_the_system_refuses_amx(
    tiny_moe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the processor has it; nothing is said otherwise."""
    for is_refused in (False, True):
        monkeypatch.setattr(kernels, "amx_is_refused", lambda is_refused=is_refused: is_refused)
        assert cli.main(["inspect", str(tiny_moe)]) == 0
        assert ("refuses AMX to this process" in capsys.readouterr().out) == is_refused


def test_what_was_faster_than_memory_is_measured_once_more_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts that fit into a processor's cache are; each report would take a tenth of a second."""
    from moecache.profiles import bandwidth as module

    calls: list[float] = []
    monkeypatch.setattr(module, "_measured", {})
    monkeypatch.setattr(module, "_repeated", set())
    monkeypatch.setattr(module, "measure_bandwidth", lambda: calls.append(1e9) or 1e9)

    for _ in range(3):
        assert module.bandwidth(at_least=5e9) == 1e9
    assert len(calls) == 2
