"""The benchmarks of several machines: their arithmetic, with small traces and made-up figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import ranks_model, scale
from moecache.study import Network, simulate_ranks
from moecache.study.ranks import AGREE_BYTES
from tests.helpers.routing import random_trace


def test_curves_are_drawn_of_warm_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each network, number of machines, placement and batch; shares of the time are all of it."""
    pytest.importorskip("matplotlib")
    for name in scale.MODELS:
        random_trace(shape=(24, 2, 3)).save(tmp_path / f"{name}.npz")
    out, picture = tmp_path / "scale.json", tmp_path / "scale.png"
    options = ["--ranks", "1", "2", "--batch", "1", "3", "--json", str(out)]
    assert scale.main(["--traces", str(tmp_path), *options, "--plot", str(picture)]) == 0
    found = json.loads(out.read_text())
    for name in scale.MODELS:
        assert set(found["scale"][name]) == set(scale.NETWORKS)
        for cells in found["scale"][name].values():
            assert cells["1"]["network"] == cells["1"]["sent_per_token"] == 0
            assert cells["2"]["network"] > 0
            for cell in cells.values():
                parts = ("computing", "reads", "slower ranks", "network")
                assert sum(cell[part] for part in parts) == pytest.approx(1)
                assert min(cell[part] for part in parts) >= 0
        assert len(found["placements"][name]) == 2
    assert set(found["batches"]) == {"one machine", *scale.NETWORKS}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "machines" in capsys.readouterr().out


def test_without_the_traces_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And succeeds: they are not the project's to ship."""
    assert scale.main(["--traces", str(tmp_path)]) == 0
    assert "skipped: the traces are not in" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.15, 0), (1.3, 1), (0.7, 1)])
def test_what_is_apart_by_a_fifth_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, code: int
) -> None:
    """What the processes measured becomes the machine that is simulated, and nothing else."""
    trace = random_trace(shape=(20, 3, 4), n=16)
    nbytes, few_s, rate = 10**6, 0.002, 4e9
    machine: dict[str, Any] = {"bandwidth": rate, "latency_ns": 50_000, "compute_ns": 400_000}
    expected = simulate_ranks(
        trace,
        2,
        network=Network("measured", 1e9, 2_000_000, 0),
        row_bytes=256,
        capacity=12,
        expert_bytes=nbytes,
        expert_share=0.25,
        **machine,
    )
    measured = {
        "alone": {
            "token_s": 3 * 400e-6,
            "expert_share": 0.25,
            "one_s": 50e-6 + nbytes / rate,
            "many_s": 50e-6 + ranks_model.MANY * nbytes / rate,
            "expert_bytes": nbytes,
        },
        "ranks": {
            "few_s": few_s,
            "exchanged_s": few_s + 1e-3,
            "exchanged_bytes": 10**6,
            "row_bytes": 256,
            "total_s": expected.total_ns / 1e9 * factor,
            "num_misses": 5,
            "sent_bytes": (expected.network_bytes - 20 * 2 * AGREE_BYTES) // 2,
        },
    }

    # Begun, ready and done: from when the later rank is ready; one exchange was disturbed.
    took_s = few_s + measured["ranks"]["sent_bytes"] / 20 / 3 / 1e9
    ready = ((1.5, 0.0), (2.5, 0.1), (3.5, 0.0))
    exchanges = [
        [(1e-4, at - 0.5, at) for at, _ in ready],
        [(2e-4, at, at + took_s - 2e-4 + late) for at, late in ready],
    ]

    def run(role: str, num_ranks: int, **given: Any) -> list[dict[str, Any]]:
        if role == "alone":
            trace.save(given["trace"])
        return [{**measured[role], "exchanges": exchanges[rank]} for rank in range(num_ranks)]

    monkeypatch.setattr(ranks_model, "_run", run)
    monkeypatch.setattr(ranks_model, "_write", lambda directory, _: str(directory))
    out = tmp_path / "found.json"
    sizes = ["--layers", "3", "--experts", "16", "--share", "0.25", "--tokens", "20"]
    assert ranks_model.main(["--ranks", "2", *sizes, "--json", str(out)]) == code
    (row,) = json.loads(out.read_text())["rows"]
    assert row["apart"] == pytest.approx(factor - 1, abs=2e-3)
    assert row["simulated_misses"] == sum(one.num_misses for one in expected.ranks)
    assert row["measured_sent_bytes"] == row["simulated_sent_bytes"]
