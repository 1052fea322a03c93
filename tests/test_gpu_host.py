"""The host's part of a token is measured without a GPU, and of hits alone."""

import json
from pathlib import Path

import pytest

from bench import gpu, gpu_host

pytest.importorskip("torch")


def test_host_time_is_measured_against_no_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every way and policy has a figure, and the bounds say what they compare."""
    out = tmp_path / "host.json"
    arguments = ["--layers", "3", "--experts", "16", "--runs", "5", "--json", str(out)]
    assert gpu.main(["host", *arguments]) == 0
    figures = json.loads(out.read_text())
    for policy in ("echo", "lru"):
        assert set(figures[policy]) == {
            "eager_us_per_layer",
            "graph_us_per_layer",
            "resident_us_per_layer",
        }
        assert min(figures[policy].values()) > 0
    assert len(figures["bounds"]) == 4
    assert "graph, us per layer, lru" in capsys.readouterr().out


def test_a_prepared_step_costs_less_than_a_new_one() -> None:
    """Arguments of a launch are made once for the same arrays."""
    loop = gpu_host.Loop(4, 16, "lru")
    with loop.runtime:
        found = gpu_host.measure(loop, 40)
    assert found["graph_us_per_layer"] < found["resident_us_per_layer"]
