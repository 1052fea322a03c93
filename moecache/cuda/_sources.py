"""Kernel sources: which files, and which types, a kernel's name stands for."""

import functools
from importlib import resources
from typing import NamedTuple

from moecache.cuda._formats import cuda_type

_FORMATS = ("plain.cuh", "formats.cuh", "ggml.cuh")
# The file that defines each kernel, and the headers before its source.
_FILES = {
    **dict.fromkeys(
        ("decode", "gate_up", "down"),
        (*_FORMATS, "experts.cuh", "steps.cuh", "decode.cu"),
    ),
    **dict.fromkeys(
        ("multiply_gate_up", "multiply_down"), (*_FORMATS, "experts.cuh", "products.cu")
    ),
    **dict.fromkeys(("gather", "activate", "combine", "combine_rows"), ("rows.cu",)),
}
# -fmad=false: two kernels that give the same bits must not be contracted differently.
OPTIONS = ("-std=c++17", "-fmad=false")
_HIDDEN = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


class Source(NamedTuple):
    """The kernel to compile.

    Parameters
    ----------
    entry : str
        The kernel's name in it.
    text : str
        CUDA C, which includes nothing.
    """

    entry: str
    text: str


def kernel_name(entry: str, hidden: str, gate_up: str = "", down: str = "", halves: int = 1) -> str:
    """Return the name under which a device launches a kernel.

    Parameters
    ----------
    entry : str
        Such as "decode".
    hidden : {"f32", "f16", "bf16"}
        Type of inputs and results.
    gate_up, down : str, optional
        Formats of the matrices; plain experts are in the type of `hidden`.
    halves : int, default 1
        2 where gate and up are a matrix each, 0 where there is no gate and `gate_up` is up's.
    """
    plain = gate_up in ("", hidden) and down in ("", hidden) and halves == 1
    if plain or "plain.cuh" not in _FILES[entry]:
        return f"{entry}_{hidden}"
    return "|".join((f"{entry}_{hidden}", gate_up or hidden, down or hidden, str(halves)))


@functools.cache
def source_of(kernel: str) -> Source:
    """Return the source of a kernel by its name; kernels of a source have the same text.

    Raises
    ------
    LookupError
        If there is no such kernel.
    """
    name, *formats = kernel.split("|")
    entry, _, hidden = name.rpartition("_")
    if entry not in _FILES or hidden not in _HIDDEN:
        raise LookupError(f"there is no kernel {kernel!r}")
    gate_up, down, halves = formats or (hidden, hidden, "1")
    files = _FILES[entry]
    before = ["common.cuh", *(name for name in files if name in _FORMATS)]
    behind = [name for name in files if name not in before]
    chosen = [f"using Hidden = {_HIDDEN[hidden]};"]
    if before[1:]:
        chosen += [f"using GateUp = {cuda_type(gate_up)};", f"using Down = {cuda_type(down)};"]
        chosen.append(f"constexpr int NUM_GATE_UPS = {halves};")
    return Source(entry, "\n".join([*map(_read, before), *chosen, *map(_read, behind)]))


def _read(name: str) -> str:
    text = resources.files("moecache.cuda").joinpath(name).read_text()
    return f'#line 1 "{name}"\n{text}'
