"""A step decides on the device whether it runs, and tells the host what it found."""

import shutil

import numpy as np
import pytest

from tests.helpers.cuda_emulator import COMPILER, EmulatedKernels
from tests.helpers.cuda_layers import Layer

OPEN, STALLED, OUTSIDE = 0, 1, 2
UNTOUCHED = 0x5A
TOKEN, LAYER = 7, 3


class Gate:
    """A gate as the host makes one: the control block, the notice, a record."""

    def __init__(self, num_ids: int, *, closed: int = OPEN, first_layer: int = 0) -> None:
        self.control = np.array([closed, first_layer, TOKEN], np.int32)
        self.notice = np.zeros(3, np.int32)
        self.record = np.full(3 + num_ids, -9, np.int32)
        addresses = [one.ctypes.data for one in (self.control, self.notice, self.record)]
        self.gate = np.array([*addresses, LAYER | num_ids << 32], np.uint64)


@pytest.fixture(scope="module", name="kernels")
def _kernels() -> EmulatedKernels:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} compiles kernels for the CPU and is not here")
    return EmulatedKernels(sanitize=True)


def decode(layer: Layer, kernels: EmulatedKernels, gate: Gate, seed: int = 0) -> np.ndarray:
    """Return what a gated step leaves of a result that was there before."""
    out = np.full(layer.x.shape, 1, layer.x.dtype)
    out.view(np.uint8)[...] = UNTOUCHED
    return layer.decode(kernels, 3, seed, gate=gate.gate.ctypes.data, out=out)


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_an_open_gate_changes_no_bit_and_notes_the_ids(
    kernels: EmulatedKernels, ids_dtype: type[np.signedinteger], num_tokens: int
) -> None:
    """Whatever the order of blocks; the record says whose it is."""
    layer = Layer("f32", (num_tokens, 3, 7, 32, 24), ids_dtype=ids_dtype)
    wanted = layer.decode(kernels)
    for seed in range(3):
        gate = Gate(layer.ids.size)
        found = decode(layer, kernels, gate, seed)
        assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
        assert gate.record.tolist() == [TOKEN, num_tokens, 3, *layer.ids.ravel()]
        assert gate.notice.tolist() == [0, 0, 0]
        assert gate.control.tolist() == [OPEN, 0, TOKEN]


def test_a_missing_expert_closes_the_gate(kernels: EmulatedKernels) -> None:
    """In every order of blocks; the result is as it was, and the host knows what is missing."""
    layer = Layer("f32", (2, 3, 9, 32, 24))
    layer.slot_table[layer.ids[1, 2]] = -1
    for seed in range(8):
        gate = Gate(layer.ids.size)
        found = decode(layer, kernels, gate, seed)
        assert (found.view(np.uint8) == UNTOUCHED).all()
        assert gate.record.tolist() == [TOKEN, 2, 3, *layer.ids.ravel()]
        assert gate.notice.tolist() == [TOKEN, LAYER, 0]
        assert gate.control.tolist() == [STALLED, 0, TOKEN]


@pytest.mark.parametrize(
    ("closed", "first_layer", "outside"),
    [(STALLED, 0, 0), (OUTSIDE, 0, 1), (OPEN, LAYER + 1, 0)],
)
def test_a_closed_gate_is_passed_by_nobody(
    kernels: EmulatedKernels, closed: int, first_layer: int, outside: int
) -> None:
    """Behind a miss, outside of a token, and in layers whose results are there."""
    layer = Layer("f32", (1, 3, 9, 32, 24))
    gate = Gate(layer.ids.size, closed=closed, first_layer=first_layer)
    assert (decode(layer, kernels, gate).view(np.uint8) == UNTOUCHED).all()
    assert (gate.record == -9).all()
    assert gate.notice.tolist() == [0, 0, outside]
    assert gate.control[0] == closed


@pytest.mark.parametrize("wrong", [-1, 9, 2**33, -(2**33) + 1])
def test_a_wrong_id_is_no_miss(kernels: EmulatedKernels, wrong: int) -> None:
    """Its token's row is NaN, the others are as ever; the host is told of no expert."""
    layer = Layer("f32", (2, 3, 9, 32, 24), ids_dtype=np.int64)
    right = layer.decode(kernels)
    layer.ids[1, 0] = wrong
    gate = Gate(layer.ids.size)
    found = decode(layer, kernels, gate)
    assert np.isnan(found[1]).all()
    assert np.array_equal(found[0], right[0])
    assert gate.record[3 + 3] == -1
    assert gate.notice[0] == 0
