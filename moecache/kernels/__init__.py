"""Products over weights where they lie, on the CPU, near the speed of memory.

The order of every sum depends on the number of columns alone, so that a token's result has the same
bits alone and among others, with any number of threads, wherever the weights are. Products of
integers have the same bits on every level of instructions ("generic", "avx2", "avxvnni",
"avx512vnni", "avx512", "amx", "neon"); those of floats differ in their last bits.
"""

from moecache.kernels._experts import ACTIVATIONS, combine
from moecache.kernels._processor import (
    amx_is_refused,
    level,
    levels,
    num_threads,
    use_level,
    use_threads,
)
from moecache.kernels.experts import SlotKernel
from moecache.kernels.forms import (
    default_compute,
    expand,
    has_form,
    tile,
    tiler,
    values_in,
)
from moecache.kernels.matrices import matrix_of, products
from moecache.kernels.startup import usable_cores

__all__ = [
    "ACTIVATIONS",
    "SlotKernel",
    "amx_is_refused",
    "combine",
    "default_compute",
    "expand",
    "has_form",
    "level",
    "levels",
    "matrix_of",
    "num_threads",
    "products",
    "tile",
    "tiler",
    "usable_cores",
    "use_level",
    "use_threads",
    "values_in",
]
