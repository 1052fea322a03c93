"""What formats cost in quality: the example model's loss on text it was not trained on.

    python -m bench.loss --json FILE

The trained model of examples/tiny_moe is packed in each format that `moecache pack` offers, and
computed by the kernels. Shown are the bytes of its experts, and nats per byte of the held-out files
of examples/tiny_moe/train.py (other files than those of its training run where the standard
library is of another version: compare within a run).
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.runs import begin, write_figures
from moecache import packing
from moecache.formats import find_format
from moecache.stores import open_store
from moecache.units import format_bytes

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tiny_moe"
# Experts of 128 x 64: blocks of FP8 cannot be larger.
FORMATS = ("q8_0", "fp8[64x64,f32]", "int8[1x32,bf16]", "int4[1x32,bf16]", "q4_0", "mxfp4", "nvfp4")
NUM_WINDOWS, LENGTH = 48, 512


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    arguments = begin(parser, argv, rounds=1)
    import torch

    # Others look at what is in the example's directory: nothing is left there.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(EXAMPLE))
    import train  # examples/tiny_moe/train.py

    sys.path.remove(str(EXAMPLE))
    sys.dont_write_bytecode = before
    from moecache.integrations.transformers import load

    _, held_out, _ = train.read_corpus()
    rng = np.random.default_rng(1)
    windows = train.sample_windows(held_out, arguments.windows, LENGTH, rng)
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("bf16", *arguments.formats):
            path = EXAMPLE
            if name != "bf16":
                path = Path(folder) / str(len(figures))
                packing.pack(EXAMPLE, path, format=name)
            with open_store(path) as store:
                nbytes = store.layout.total_bytes
            model = load(path, "100%", compute="fast", dtype=torch.bfloat16)
            with model.moecache:
                loss = train.held_out_loss(model, windows)
            bits = find_format(name).bits_per_weight
            figures.append({"format": name, "bits": bits, "expert_bytes": nbytes, "loss": loss})
            more = loss - figures[0]["loss"]
            print(
                f"{name:16} {bits:6.3f} bits a weight, experts {format_bytes(nbytes):>8}: "
                f"{loss:.4f} nats per byte, {more:+.4f}",
                flush=True,
            )
    write_figures(arguments, figures=figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
