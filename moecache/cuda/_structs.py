"""KernelStruct: what a kernel is given, all of it as one argument."""

import ctypes
import struct

import numpy as np

# Codes of `struct` and NumPy (Q: an address, q: long long, i: int, f: float), and names in CUDA C.
Fields = tuple[tuple[str, str], ...]


class KernelStruct:
    """A struct that is passed by value: numbers cost the host time one by one.

    What a launch has of its own comes first. Behind it comes what all launches over a layer's
    experts have alike, which is packed once.

    Parameters
    ----------
    own, shared : tuple of (str, str)
        Codes and names of the fields, in the order of the kernel's source.

    Attributes
    ----------
    dtype : numpy.dtype
        All fields, each where C has it.
    """

    def __init__(self, own: Fields, shared: Fields = ()) -> None:
        self.dtype = np.dtype([(name, code) for code, name in own + shared], align=True)
        places = [self.dtype.fields[name][1] for _, name in own + shared]  # type: ignore[index]
        places.append(self.dtype.itemsize)
        self._own = _packer(own, places[: len(own) + 1])
        self._shared = _packer(shared, places[len(own) :])
        # Of ctypes: NumPy takes a microsecond to say where an array is.
        self._memory = ctypes.c_char * self.dtype.itemsize

    def share(self, *values: float) -> bytes:
        """Return the shared fields, as `pack` takes them."""
        return bytes(self._own.size) + self._shared.pack(*values)

    def pack(self, shared: bytes, *values: float) -> "ctypes.Array[ctypes.c_char]":
        """Return the struct's bytes."""
        made = self._memory.from_buffer_copy(shared)
        self._own.pack_into(made, 0, *values)
        return made


def _packer(fields: Fields, places: list[int]) -> struct.Struct:
    """Return what packs fields at their places, from the first one's to where others begin."""
    text, at = "=", places[0]
    for (code, _), place in zip(fields, places, strict=False):
        text += "x" * (place - at) + code
        at = place + struct.calcsize(f"={code}")
    return struct.Struct(text + "x" * (places[-1] - at))


def _fields(*groups: str) -> Fields:
    """Return the fields of groups, each a code and the names that have it."""
    split = [group.split() for group in groups]
    return tuple((code, name) for code, *names in split for name in names)


def _within(member: str, fields: Fields) -> Fields:
    return tuple((code, f"{member}.{name}") for code, name in fields)


_OF_SLOTS = _fields("q slot_stride offset bias_offset", "i bias_kind")
_GATE = _within(
    "gate", _OF_SLOTS + _fields("i is_interleaved hidden width activation", "f alpha limit")
)
_DOWN = _within("down", _OF_SLOTS + _fields("i hidden width"))
_COMBINED = KernelStruct(
    _fields("Q rows place weights out", "i weights_kind num_tokens top_k hidden")
)

# By the kernels' entries; the structs are in the files that define these.
STRUCTS = {
    "decode": KernelStruct(
        _fields(
            "Q x ids slot_table weights first_slot h out barrier step_gate",
            "i ids_kind weights_kind num_tokens top_k num_experts num_slots",
        ),
        _GATE + _DOWN,
    ),
    "gate_up": KernelStruct(
        _fields("Q x pair_slots pairs first_slot h", "i num_pairs top_k"), _GATE
    ),
    "down": KernelStruct(_fields("Q pair_slots pairs first_slot h rows", "i num_pairs"), _DOWN),
    "multiply_gate_up": KernelStruct(
        _fields("Q x tiles pairs first_slot h", "i num_tiles top_k"), _GATE
    ),
    "multiply_down": KernelStruct(_fields("Q h tiles pairs first_slot rows", "i num_tiles"), _DOWN),
    "gather": KernelStruct(_fields("Q x pairs out", "i num_pairs top_k hidden")),
    "activate": KernelStruct(_fields("Q both out", "q num_rows", "i width is_gated activation")),
    "combine": _COMBINED,
    "combine_rows": _COMBINED,
}
