"""What slots as wide as their layers would be worth, as a replay says it."""

from pathlib import Path

import numpy as np
import pytest

from bench import slot_widths
from moecache.traces.trace import Trace


def test_half_of_the_layers_are_wide() -> None:
    """As llama.cpp has it in Q4_K_M of 48 layers: the first and last eighth, then each third."""
    wide = [layer for layer in range(48) if slot_widths.is_wide(layer, 48)]
    assert len(wide) == 24
    assert wide[:8] == [0, 1, 2, 3, 4, 5, 8, 11]
    assert wide[-6:] == [42, 43, 44, 45, 46, 47]


def test_hit_rates_are_those_of_the_pools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where pools have room for all of their layers there are first misses alone."""
    ids = np.random.default_rng(0).random((200, 8, 4)).argsort(-1)[..., :2].astype(np.int16)
    trace = Trace(ids, num_experts=4)
    one, two, more = slot_widths.hit_rates(trace, 0.5, 0.06)
    assert 0 < two <= more < 1
    assert 0 < one < 1
    everything = slot_widths.hit_rates(trace, 1.0, 0.5)
    assert everything[0] == everything[1] == everything[2] > one

    trace.save(tmp_path / "random.npz")
    assert slot_widths.main([str(tmp_path / "random.npz"), "--shares", "50%", "--gain", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert f"{one:.4f}" in shown
    assert "50%" in shown
