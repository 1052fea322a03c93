"""The benchmark of the kernels, run once and small; at full size it is a script.

python -m bench.kernels --help
"""

import json
from pathlib import Path

import pytest


def test_kernels_and_torch_do_the_same_work(tmp_path: Path) -> None:
    """They agree, and the figures of every contestant are written."""
    pytest.importorskip("torch")
    from bench import kernels

    assert kernels.main(["--small", "--json", str(tmp_path / "figures.json")]) == 0
    found = json.loads((tmp_path / "figures.json").read_text())
    names = {figure["name"] for figure in found["figures"]}
    assert {"ours bf16", "ours q8_0", "ours q4_0", "torch bf16", "bandwidth bf16"} <= names
    assert {"ours mxfp4", "ours iq4_nl", "expand q8_0", "tile q4_0"} <= names
    assert all(figure["cpu_s"] > 0 for figure in found["figures"])
