"""The CPU that stands in for a GPU stops what a GPU would not survive."""

import shutil

import numpy as np
import pytest

from tests.helpers.cuda_emulator import COMPILER, EmulatedModule, address_of
from tests.helpers.cuda_layers import ends_at_guard

SOURCE = """
extern "C" __global__ void sum_lanes(int* out)
{
    int sum = threadIdx.x;
    for (int distance = 16; distance > 0; distance /= 2)
        sum += __shfl_down_sync(0xffffffffu, sum, distance);
    __syncwarp();
    if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = sum;
}
extern "C" __global__ void count(unsigned long long* counter)
{
    atomicAdd(counter, (unsigned long long)blockIdx.x);
}
extern "C" __global__ void wait_for_blocks(unsigned long long* counter)
{
    if (threadIdx.x == 0) {
        atomicAdd(counter, 1ull);
        while (*(volatile unsigned long long*)counter < gridDim.x) __nanosleep(1);
    }
    __syncthreads();
}
extern "C" __global__ void half_a_block(int* out)
{
    if (threadIdx.x < 32) __syncthreads();
}
extern "C" __global__ void touch(int* out, long long at)
{
    out[at] = 1;
}
extern "C" __global__ void add(int* out, int first, int second)
{
    *out = first + second;
}
extern "C" __global__ void load_chunk(const uint4* from, unsigned* to)
{
    *to = from->x;
}
"""


@pytest.fixture(scope="module")
def module() -> EmulatedModule:
    """Return small kernels, checked for what C++ leaves undefined."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} compiles kernels for the CPU and is not here")
    return EmulatedModule(SOURCE, sanitize=True)


def test_lanes_exchange_in_lock_step(module: EmulatedModule) -> None:
    """A warp's first lane has the sum of its lanes, in every order."""
    for seed in range(5):
        out = np.zeros(2, np.int32)
        module.launch("sum_lanes", 1, 64, [address_of(out)], seed=seed)
        assert out.tolist() == [sum(range(32)), sum(range(32, 64))]


def test_every_thread_runs_once(module: EmulatedModule) -> None:
    """As many as blocks times threads."""
    counter = np.zeros(1, np.uint64)
    module.launch("count", 5, 96, [address_of(counter)])
    assert counter[0] == 96 * sum(range(5))


def test_blocks_that_wait_for_each_other_are_launched_together(module: EmulatedModule) -> None:
    """Launched one after the other they would wait for ever: that is an error."""
    counter = np.zeros(1, np.uint64)
    module.launch("wait_for_blocks", 4, 64, [address_of(counter)], cooperative=True)
    counter[0] = 0
    with pytest.raises(RuntimeError, match="never arrive"):
        module.launch("wait_for_blocks", 4, 64, [address_of(counter)])


def test_a_barrier_that_some_threads_miss_is_an_error(module: EmulatedModule) -> None:
    """No thread waits for ever, and the next launch works."""
    out = np.zeros(1, np.int32)
    with pytest.raises(RuntimeError, match="never arrive"):
        module.launch("half_a_block", 1, 64, [address_of(out)])
    module.launch("half_a_block", 1, 32, [address_of(out)])


def test_touching_a_guard_page_is_an_error(module: EmulatedModule) -> None:
    """With the address, and the process lives on."""
    out = ends_at_guard(np.zeros(4, np.int32))
    with pytest.raises(RuntimeError, match=f"{out.ctypes.data + 16:#x}"):
        module.launch("touch", 1, 32, [address_of(out), np.int64(4)])
    module.launch("touch", 1, 32, [address_of(out), np.int64(3)])
    assert out.tolist() == [0, 0, 0, 1]


def test_an_integer_that_overflows_is_an_error(module: EmulatedModule) -> None:
    """An index computed in 32 bits is found without 2 GiB of memory."""
    out = np.zeros(1, np.int32)
    args: list[np.generic] = [address_of(out), np.int32(2**31 - 1)]
    module.launch("add", 1, 32, [*args, np.int32(0)])
    with pytest.raises(RuntimeError, match="add: "):
        module.launch("add", 1, 32, [*args, np.int32(1)])


def test_a_load_that_is_not_aligned_is_an_error(module: EmulatedModule) -> None:
    """As it is on a GPU."""
    array = np.zeros(12, np.uint32)
    first = -(array.ctypes.data // 4) % 4
    out = np.zeros(1, np.uint32)
    module.launch("load_chunk", 1, 32, [address_of(array[first:]), address_of(out)])
    with pytest.raises(RuntimeError, match="load_chunk: "):
        module.launch("load_chunk", 1, 32, [address_of(array[first + 1 :]), address_of(out)])


def test_calls_that_do_not_fit_are_refused(module: EmulatedModule) -> None:
    """Unknown names, another number of arguments, another size, half a warp."""
    out = np.zeros(1, np.int32)
    with pytest.raises(LookupError, match="'absent'"):
        module.launch("absent", 1, 32, [])
    with pytest.raises(TypeError, match="takes 2 arguments"):
        module.launch("touch", 1, 32, [address_of(out)])
    with pytest.raises(TypeError, match="takes 2 arguments"):
        module.launch("touch", 1, 32, [address_of(out), np.int32(0)])
    with pytest.raises(ValueError, match="whole warps"):
        module.launch("touch", 1, 16, [address_of(out), np.int64(0)])


def test_a_source_that_does_not_compile_says_why() -> None:
    """With the compiler's words."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} compiles kernels for the CPU and is not here")
    with pytest.raises(RuntimeError, match="no_such_function"):
        EmulatedModule('extern "C" __global__ void wrong() { no_such_function(); }')
