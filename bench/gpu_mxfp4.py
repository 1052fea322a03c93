"""`bench.gpu_resident` with the shapes of gpt-oss-20b: experts in MXFP4, with biases.

24 layers of 32 experts, of which a token takes 4, hidden 2880, width 2880.

    python -m bench.gpu_mxfp4 [--runs 20] [--tokens 16] [--layers 24] [--json OUT]
"""

import sys

from bench.gpu_resident import main
from bench.gpu_stack import StackSize

GPT_OSS_20B = StackSize(
    num_layers=24, num_experts=32, top_k=4, hidden=2880, width=2880, format="mxfp4"
)

if __name__ == "__main__":
    sys.exit(main(size=GPT_OSS_20B))
