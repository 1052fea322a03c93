"""The benchmarks of quantized checkpoints, run once and small; at full size they are scripts.

python -m bench.quantized --help; python -m bench.formats --help; python -m bench.loss --help
"""

import json
from pathlib import Path

import pytest


def test_quantized_checkpoints_are_decoded(tmp_path: Path) -> None:
    """Each with all slots, a quarter, and bfloat16's bytes; fewer bytes are read for a miss."""
    pytest.importorskip("transformers")
    from bench import formats, quantized, qwen3_moe

    plain = tmp_path / "bf16"
    sizes = ["--layers", "2", "--experts", "16", "--hidden", "128", "--width", "128"]
    assert qwen3_moe.main([str(plain), *sizes, "--top-k", "4", "--tokens", "0"]) == 0
    for form in ("fp8", "int4"):
        assert quantized.main([form, str(tmp_path / form), "--of", str(plain)]) == 0
    paths = [str(tmp_path / name) for name in ("bf16", "fp8", "int4")]
    figures = tmp_path / "figures.json"
    assert formats.main([*paths, "--rounds", "1", "--json", str(figures)]) == 0
    found = {(f["name"], f["memory"]): f for f in json.loads(figures.read_text())["figures"]}
    assert len(found) == 8
    assert all(figure["tokens_per_s"] > 0 for figure in found.values())
    read = [found[name, "25%"]["read_bytes_per_token"] for name in ("bf16", "fp8", "int4")]
    # By how much depends on what is prefetched in time.
    assert read[0] > read[1] > read[2]


def test_the_loss_of_formats_is_near_to_that_of_bfloat16(tmp_path: Path) -> None:
    """Eight bits cost next to nothing."""
    pytest.importorskip("transformers")
    from bench import loss

    figures = tmp_path / "figures.json"
    arguments = ["--windows", "4", "--formats", "q8_0", "mxfp4", "--json", str(figures)]
    assert loss.main(arguments) == 0
    plain, eight, four = json.loads(figures.read_text())["figures"]
    assert abs(eight["loss"] - plain["loss"]) < 0.02
    assert plain["expert_bytes"] > eight["expert_bytes"] > four["expert_bytes"]
    assert four["loss"] < plain["loss"] + 0.5
