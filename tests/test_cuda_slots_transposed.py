"""CudaSlots of what a file has transposed: rows, turned on their way."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moecache import ExpertLayout
from moecache.layout import Role
from moecache.slots import CudaSlots
from tests.test_cuda_slots import bits

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32), np.dtype(np.float64)], ids=str)
def test_what_is_stored_transposed_is_not_in_slots(gpu: Any, dtype: np.dtype) -> None:
    """By buffers and by arrays of one's own; what has no order stays; no buffer is lost."""
    roles = [Role("gate_up", (40, 34), dtype), Role("gate_up_bias", (34,), dtype)]
    layout = ExpertLayout(4, 2, [roles]).with_transposed(["gate_up"])
    numbers = np.arange(40 * 34).reshape(40, 34).astype(dtype)
    with CudaSlots(layout, 3, 1, gpu) as pool:
        for again in range(8):
            for slot in range(4):
                given = {"gate_up": numbers + slot + again, "gate_up_bias": numbers[0] + slot}
                parts = pool.buffers(slot, 0)
                if slot % 2:
                    for name, array in given.items():
                        parts[name][...] = array
                pool.upload(slot, 0, parts if slot % 2 else given)
            for slot in range(4):
                pool.before_compute(np.array([slot], np.int32))
                found = {n: pool.device.to_host(a) for n, a in pool.expert(slot, 0).items()}
                wanted = (numbers + slot + again).T
                assert found["gate_up"].shape == pool.slab("gate_up").shape[1:] == wanted.shape
                assert np.array_equal(bits(found["gate_up"]), bits(wanted))
                assert np.array_equal(bits(found["gate_up_bias"]), bits(numbers[0] + slot))
                assert pool.raw_expert(slot, 0)["gate_up"].shape == (34, 40 * dtype.itemsize)
