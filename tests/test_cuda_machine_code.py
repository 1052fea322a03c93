"""What NVIDIA's compilers make of the kernels, where they are installed; no GPU is needed."""

import pytest

from tests.helpers.machine_code import NVCC, compiled, disassembler, instructions
from tests.helpers.nightly import some

# Blocks of 256 threads share the 65,536 registers of a multiprocessor: three of plain numbers, two
# of quantised ones, whose rows' pointers may lie in memory: that was faster than fewer rows.
MOST_REGISTERS, MOST_QUANTIZED = 80, 128
MOST_SPILLED = 320
# Loads of weights that a lane has under way: of gate's and up's two rows, of down's three.
IN_FLIGHT, DOWN_IN_FLIGHT = 8, 6

pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not here; the extra cuda-test has it")
disassembled = pytest.mark.skipif(
    disassembler() is None, reason="nvdisasm is not here; the extra cuda-test has it"
)


@pytest.mark.parametrize(
    ("kernel", "arch"),
    some(
        [
            *(("decode_bf16", arch) for arch in (80, 90, 100)),
            *((f"decode_{hidden}", 90) for hidden in ("f32", "f16")),
            ("gather_bf16", 90),
            *(("decode_bf16|mxfp4|mxfp4|1", arch) for arch in (80, 90, 100)),
            ("decode_bf16|mxfp4|mxfp4|2", 90),
            ("decode_bf16|fp8[128x128,f32]|fp8[128x128,f32]|2", 100),
            ("decode_bf16|q8_0|q6_k|2", 80),
            ("decode_bf16|fp8[128x128,f32]|fp8[128x128,f32]|2", 90),
            ("decode_bf16|nvfp4|nvfp4|2", 90),
            ("decode_bf16|q4_k|q4_k|2", 90),
            *((f"decode_bf16|{one}|{one}|0", 90) for one in ("bf16", "nvfp4", "q8_0", "mxfp4")),
            ("decode_bf16|fp8[128x128,f32]|fp8[128x128,f32]|0", 90),
        ],
        lambda case: (
            case
            in {
                *(("decode_bf16", 90), ("decode_bf16|bf16|bf16|0", 90)),
                ("decode_bf16|nvfp4|nvfp4|2", 90),
            }
        ),
    ),
)
def test_registers_suffice(kernel: str, arch: int) -> None:
    """The blocks of a launch fit on a multiprocessor; kernels of plain numbers spill none."""
    found = compiled(kernel, arch)
    is_quantized = not {*kernel.split("|")[1:3]} <= {"bf16"}
    assert len(found) >= 3
    spilled = max(one.spilled_bytes for one in found.values())
    assert spilled <= (MOST_SPILLED if is_quantized else 0)
    registers = max(one.registers for one in found.values())
    assert registers <= (MOST_QUANTIZED if is_quantized else MOST_REGISTERS)


@pytest.mark.parametrize(
    ("kernel", "arch"),
    some(
        [
            *(("multiply_down_bf16", 90), ("multiply_down_bf16|bf16|bf16|0", 90)),
            ("multiply_down_f16|mxfp4|q4_k|1", 80),
        ],
        lambda case: case == ("multiply_down_bf16", 90),
    ),
)
def test_products_leave_room_for_two_blocks(kernel: str, arch: int) -> None:
    """Of 256 threads, without spills."""
    found = compiled(kernel, arch)
    assert found.keys() == {"multiply_gate_up", "multiply_down"}
    assert not any(one.spilled_bytes for one in found.values())
    assert max(one.registers for one in found.values()) <= 128


@disassembled
def test_products_are_those_of_tensor_cores() -> None:
    """A unit of 32 columns: two halves, times two sets, times two by two parts of a warp's rows."""
    code = instructions("multiply_down_bf16", 90)
    assert sum(name.startswith("HMMA.16816.F32.BF16") for name in code) >= 16
    assert any(name.startswith("LDG") and name.endswith("128") for name in code)
    assert any(name.startswith("STS.128") for name in code)


@disassembled
@pytest.mark.parametrize("arch", some([80, 90, 100], lambda arch: arch == 90))
@pytest.mark.parametrize("kernel", ["decode_bf16", "decode_bf16|bf16|bf16|0"])
def test_loads_are_of_128_bits_and_many_are_under_way(kernel: str, arch: int) -> None:
    """In both halves of the launch; x and h come in words of 128 bits, too."""
    code = instructions(kernel, arch)
    weights = [at for at, name in enumerate(code) if name.endswith("EF.128")]
    assert len(weights) == IN_FLIGHT + DOWN_IN_FLIGHT
    for half in (weights[:IN_FLIGHT], weights[IN_FLIGHT:]):
        assert not any(name.startswith("FFMA") for name in code[half[0] : half[-1]])
    # x: a load for each chunk of weights of a row, two rows at once. h is twice as wide.
    others = [name for name in code if name.startswith("LDG") and name.endswith("128")]
    assert len(others) - len(weights) == IN_FLIGHT // 2 + 2 * DOWN_IN_FLIGHT // 3
    assert not any(name.startswith(("LDL", "STL")) for name in code)


@disassembled
@pytest.mark.parametrize(
    "kernel",
    [
        *("gate_up_bf16", "down_bf16", "multiply_gate_up_bf16", "multiply_down_bf16"),
        *("gather_bf16", "activate_bf16", "combine_bf16", "combine_rows_bf16"),
        "gate_up_bf16|bf16|bf16|0",
    ],
)
def test_an_argument_is_read_where_it_is(kernel: str) -> None:
    """No lane has a copy of the struct in its memory."""
    assert not any(name.startswith(("LDL", "STL")) for name in instructions(kernel, 90))


@disassembled
def test_several_rows_are_on_their_way_to_a_sum() -> None:
    """A loop for each kind of weights, and more than one row's load at a time."""
    code = instructions("combine_rows_bf16", 90)
    assert sum(name.startswith("LDG") for name in code) >= 32


@disassembled
def test_fp8_becomes_halves_by_the_hardware() -> None:
    """Two codes by an instruction, where there is one; the others are put together from bits."""
    kernel = "gate_up_bf16|fp8[128x128,f32]|fp8[128x128,f32]|2"
    code = instructions(kernel, 90)
    made = [one for one in code if one.startswith("F2FP") and "E4M3" in one]
    widened = [one for one in code if one.startswith("HADD2.F32")]
    assert len(made) >= 32
    assert len(widened) >= 2 * len(made)
    assert not any("E4M3" in one for one in instructions(kernel, 80))


@disassembled
def test_fp4_takes_a_permutation_for_two_codes() -> None:
    """Bytes are put into the upper halves of both halves of a word, which are widened there."""
    code = instructions("gate_up_bf16|mxfp4|mxfp4|1", 90)
    widened = sum(one.startswith("HADD2.F32") for one in code)
    assert widened >= 64
    assert sum(one.startswith("PRMT") for one in code) <= widened


@disassembled
def test_all_rows_of_a_warp_are_fetched_before_one_is_computed() -> None:
    """Gate's and up's of three elements: their bytes are under way together."""
    code = instructions("gate_up_bf16|mxfp4|mxfp4|1", 90)
    first = next(at for at, one in enumerate(code) if one.startswith("FFMA"))
    assert sum(one.endswith("EF.128") for one in code[:first]) == 6


@disassembled
def test_a_gate_is_loaded_through_the_caches() -> None:
    """By all warps of a launch; past them go the barrier's loads and what the host is told."""
    code = instructions("decode_bf16", 90)
    strong = [one for one in code if one.startswith("LD") and "STRONG" in one]
    assert {one.split(".STRONG")[0] for one in strong} == {"LDG.E.64"}
    assert any(one.startswith("ST") and "STRONG.SYS" in one for one in code)


@disassembled
def test_no_product_and_no_sum_loses_small_numbers() -> None:
    """CuPy compiles with -ftz=true: only expf, erff and tanhf of an activation may heed it.

    `down` has none of these, and `gate_up` has the same ones whatever the format is.
    """
    for kernel in ("bf16", "bf16|mxfp4|mxfp4|1"):
        assert not _flushing(f"down_{kernel}")
        assert len(_flushing(f"gate_up_{kernel}")) == len(_flushing("gate_up_bf16")) < 64
    assert not _flushing("combine_rows_bf16")


def _flushing(kernel: str) -> list[str]:
    """Return the sums and products that take numbers below 2^-126 for zero."""
    names = ("FFMA", "FMUL", "FADD")
    return [one for one in instructions(kernel, 90) if one.startswith(names) and ".FTZ" in one]
