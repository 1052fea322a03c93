"""Checkpoints packed so that every expert is one aligned read.

`pack` writes a checkpoint anew: `experts.safetensors` has the experts in the
order they run, each contiguous and each of its roles at a multiple of 4 KiB;
`trunk.safetensors` has the rest. Not a bit of any tensor changes, and the
result is a checkpoint like any other to all readers of safetensors. (Experts
that were stacked in one tensor become a tensor each.) With a format, the experts
are quantized, or what a publisher quantized is dequantized. A GGUF file becomes one in
two parts, of the trunk and of the experts.
"""

from moecache.packing._estimate import FormEstimate, estimate_form
from moecache.packing._manifest import Progress, verify
from moecache.packing._pack import pack, plan
from moecache.packing._plan import ALIGNMENT
from moecache.packing._report import Deviation, PackPlan, PackReport

__all__ = [
    "ALIGNMENT",
    "Deviation",
    "FormEstimate",
    "PackPlan",
    "PackReport",
    "Progress",
    "estimate_form",
    "pack",
    "plan",
    "verify",
]
