"""Experts whose matrices are codes and scales: as good as floats, in whatever waves they come."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache import kernels
from moecache.errors import ConfigError
from moecache.layout import Role
from tests.helpers.kernels import (
    BLOCKED,
    DTYPES,
    F32,
    LEVELS,
    SCALED,
    Experts,
    compute_pairs,
    computing,
    draw_inputs,
    fitting,
)

# Of each level; both roles have formats of their own.
few = settings(max_examples=max(1, settings().max_examples // 2))
formats = st.sampled_from((*BLOCKED, *SCALED))


@pytest.fixture(name="level", params=LEVELS, autouse=True, scope="module")
def _level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with each level that this processor has."""
    with computing(request.param):
        yield request.param


def rows_of(
    experts: Experts, inputs: np.ndarray, slots: np.ndarray, pairs: np.ndarray
) -> np.ndarray:
    """Return the rows of some (token, choice) pairs, by `slots` [num_tokens, top_k]."""
    rows = np.full((slots.size, inputs.shape[1]), np.nan, np.float32)
    compute_pairs(
        experts.kernel,
        inputs,
        rows,
        slots=slots.reshape(-1)[pairs],
        pairs=pairs,
        top_k=slots.shape[1],
    )
    return rows[pairs]


def size_in(name: str, size: int) -> int:
    """Return a number of columns that a format has, near to `size` but positive."""
    return fitting(name, size) or fitting(name, 32)


@given(
    names=st.tuples(formats, formats),
    other=st.sampled_from((*BLOCKED, "f32", "f16", "bf16")),
    input_dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    activation=st.sampled_from(["silu", "swiglu", "relu", "clamped_silu"]),
    kind=st.sampled_from(["two matrices", "two types", "one matrix", "interleaved", "no gate"]),
    bias_dtype=st.sampled_from([None, *DTYPES]),
    num_tokens=st.integers(1, 9),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@few
def test_experts_of_codes_are_as_good_as_sums_in_float32(
    names: tuple[str, str],
    other: str,
    input_dtype: np.dtype,
    sizes: tuple[int, int],
    activation: str,
    kind: str,
    bias_dtype: np.dtype | None,
    num_tokens: int,
    threads: int,
    seed: int,
) -> None:
    """Gate and up of every kind, with biases and without; sizes as ragged as formats allow."""
    kind = (
        "two matrices" if activation in ("swiglu", "clamped_silu") and kind == "no gate" else kind
    )
    if kind == "two types":
        both = [names[0] if names[0] in BLOCKED else "q4_0", other]
        names = "+".join(both[:: 1 if seed % 2 else -1]), names[1]
    hidden_size, width = size_in(names[0], sizes[0]), size_in(names[1], sizes[1])
    if kind == "one matrix":
        width = -(-width // 32) * 32
    experts = Experts(
        F32,
        hidden_size,
        width,
        3,
        activation=activation,
        is_gated=kind != "no gate",
        is_interleaved=kind == "interleaved",
        bias_dtype=bias_dtype,
        limit=0.5,
        names=names,
        matrices=2 if kind == "two matrices" else 1,
        seed=seed,
    )
    inputs = draw_inputs(num_tokens, hidden_size, input_dtype, seed)
    slots = np.random.default_rng(seed).integers(0, 3, (num_tokens, 2))
    with computing(threads=threads):
        rows = rows_of(experts, inputs, slots, np.arange(slots.size))

    for pair, slot in enumerate(slots.reshape(-1)):
        expected, bound = experts.expected(slot, inputs[pair // 2][None])
        assert (np.abs(rows[pair] - expected[0]) <= bound[0]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("mxfp4", "mxfp4"), "interleaved"),
        (("fp8[128x128,f32]", "int4[1x16,f32]"), "two matrices"),
        (("int8[*x*,f32]", "fp8[1x*,bf16]"), "two matrices"),
        (("q4_0+q8_0", "int8[*x*,f32]"), "two types"),
        (("bf16+q4_0", "fp8[1x*,bf16]"), "two types"),
    ],
)
def test_a_pair_has_the_same_bits_in_any_wave(
    names: tuple[str, str], kind: str, dtype: np.dtype
) -> None:
    """With any number of threads, alone and among others."""
    hidden_size = size_in(names[0], 136)
    experts = Experts(
        F32,
        hidden_size,
        200,
        5,
        activation="swiglu",
        is_interleaved=kind == "interleaved",
        bias_dtype=F32,
        names=names,
        matrices=2 if kind == "two matrices" else 1,
    )
    inputs = draw_inputs(40, hidden_size, dtype, 1)
    slots = np.random.default_rng(2).integers(0, 5, (40, 2))
    with computing(threads=1):
        alone = np.concatenate(
            [rows_of(experts, inputs, slots, np.array([pair])) for pair in range(80)]
        )
    for threads in (1, 3):
        with computing(threads=threads):
            for pairs in (np.arange(80), np.arange(3, 80), np.arange(0, 80, 7)):
                assert rows_of(experts, inputs, slots, pairs).tobytes() == alone[pairs].tobytes()


def test_a_format_without_a_compute_form_is_refused() -> None:
    """Blocks of 8 columns have none; the role and the format are named."""
    role = Role("gate_up", (32, 32), format="fp8[1x8,f32]")
    arrays = {"gate_up": np.zeros(role.nbytes, np.uint8)}
    arrays["down"] = np.zeros((32, 16), np.float32)
    with pytest.raises(ConfigError, match=r"gate_up is fp8\[1x8,f32\], which has no compute form"):
        kernels.SlotKernel(lambda _: arrays, 1, roles=[role])


@pytest.mark.parametrize(
    ("matrices", "is_interleaved", "message"),
    [
        (1, False, "up begins at row 24 of gate_up; in a compute form that is a multiple of 16"),
        (2, True, "rows of gate_up alternate in one matrix, not in two"),
    ],
)
def test_gate_and_up_that_no_kernel_finds_are_refused(
    matrices: int, is_interleaved: bool, message: str
) -> None:
    """Up within a tile of gate's, and rows that alternate between matrices."""
    with pytest.raises(ConfigError, match=message):
        Experts(
            F32,
            32,
            24,
            1,
            is_interleaved=is_interleaved,
            names=("mxfp4", "mxfp4"),
            matrices=matrices,
        )
