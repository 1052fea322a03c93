"""CupyDevice over a CUDA runtime that does nothing: what it asks for, and what it leaves behind."""

import contextlib
import ctypes
import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moecache.compute import on_device
from moecache.cuda import Stream
from moecache.cuda._structs import STRUCTS
from moecache.cuda.device import dtype_of, is_in_host_memory
from moecache.errors import MoeCacheError
from tests.helpers.fake_device import FakeArray, FakeDevice
from tests.test_cuda_experts import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    TOP_K,
    TYPES,
    WIDTH,
    make_runtime,
    make_step,
    on,
)

NOT_READY, CAPTURED, ILLEGAL_ADDRESS = 600, 900, 700


class CudaRuntimeError(RuntimeError):
    """What CuPy raises for a status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class NoOpRuntime(types.ModuleType):
    """The part of cupy.cuda.runtime that is used here, with CUDA's last error."""

    CUDARuntimeError = CudaRuntimeError

    def __init__(self) -> None:
        super().__init__("cupy.cuda.runtime")
        self.status = self.last_error = 0

    def getDeviceCount(self) -> int:  # noqa: N802 - CuPy's name
        """Return one."""
        return 1

    def getDeviceProperties(self, number: int) -> dict[str, Any]:  # noqa: N802 - CuPy's name
        """Return what is asked for."""
        return {"name": b"nothing", "multiProcessorCount": 1}

    def eventQuery(self, event: int) -> int:  # noqa: N802 - CuPy's name
        """Return the status, which becomes the last error."""
        self.last_error = self.status or self.last_error
        return self.status

    def memsetAsync(self, *_: int) -> None:  # noqa: N802 - CuPy's name
        """Do nothing."""

    def check_status(self, status: int) -> None:
        """Raise, and clear the last error."""
        if status:
            self.last_error = 0
            raise CudaRuntimeError(status)


class Address:
    """What CuPy takes for where an argument is, and not for the argument."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.fixture(name="runtime")
def _runtime(monkeypatch: pytest.MonkeyPatch) -> NoOpRuntime:
    runtime = NoOpRuntime()
    cuda: Any = types.ModuleType("cupy.cuda")
    cuda.runtime = runtime
    cuda.compiler = types.SimpleNamespace(
        CompileException=type("CompileException", (Exception,), {})
    )
    cuda.function = types.SimpleNamespace(CPointer=Address)
    cuda.driver = types.SimpleNamespace(CUDADriverError=type("CUDADriverError", (Exception,), {}))
    cuda.get_current_stream = lambda *_: types.SimpleNamespace(ptr=1, synchronize=lambda: None)
    cupy: Any = types.ModuleType("cupy")
    cupy.cuda = cuda
    cupy.ndarray = lambda shape, dtype, pointer, strides: (shape, dtype, pointer)
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.runtime", runtime)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "moecache.cuda._cupy", raising=False)
    return runtime


class Pointer(int):
    """An address as CuPy has it."""

    @property
    def ptr(self) -> int:
        """The address."""
        return int(self)


def allocate(device: Any) -> Any:
    """Return the address of new memory."""
    return device.allocate(64).address


def make_array(device: Any) -> Any:
    """Return the address of a new array."""
    return device.empty((4, 4), np.dtype(np.float32), Stream(1))[2]


def make_device() -> Any:
    """Return a device over the runtime that does nothing."""
    try:
        return importlib.import_module("moecache.cuda._cupy").CupyDevice(0)
    finally:
        sys.modules.pop("moecache.cuda._cupy", None)


@pytest.mark.parametrize("status", [NOT_READY, CAPTURED])
def test_an_event_that_is_not_done_leaves_no_error_behind(
    runtime: NoOpRuntime, status: int
) -> None:
    """Who asks for the last error next, as torch does after a launch, finds none."""
    device = make_device()
    runtime.status = status
    assert not device.is_done(1)
    assert runtime.last_error == 0
    runtime.status = 0
    assert device.is_done(1)


def test_other_states_of_an_event_are_errors(runtime: NoOpRuntime) -> None:
    """With the remedy."""
    device = make_device()
    runtime.status = ILLEGAL_ADDRESS
    with pytest.raises(MoeCacheError, match="start it again"):
        device.is_done(1)


@pytest.mark.parametrize(("capacity", "entry"), [(LAYERS * EXPERTS, "decode"), (3, "gate_up")])
def test_a_kernel_gets_one_struct(
    runtime: NoOpRuntime, monkeypatch: pytest.MonkeyPatch, capacity: int, entry: str
) -> None:
    """By its address, from which CUDA copies it: NumPy would take a microsecond to tell it."""
    launched: list[tuple[Any, ...]] = []

    def call(name: str, grid: tuple[int], block: tuple[int], given: tuple[Address]) -> None:
        (argument,) = given
        fields = STRUCTS[name].dtype
        raw = ctypes.string_at(argument.value, fields.itemsize)
        launched.append((name, grid, block, np.frombuffer(raw, fields)[0]))

    cupy: Any = sys.modules["cupy"]
    module = types.SimpleNamespace(get_function=lambda name: functools.partial(call, name))
    cupy.RawModule = lambda **_: module
    device = make_device()
    monkeypatch.setattr(device, "_in", lambda _: contextlib.nullcontext())
    fake = FakeDevice()
    launch = fake.launch

    def launch_both(*given: Any, **how: Any) -> None:
        device.launch(*given, **how)
        launch(*given, **how)

    dtype = np.dtype(np.float32)
    with make_runtime(fake, dtype, capacity) as opened:
        opened.usage.fill().wait()
        arrays = on(fake, *make_step(dtype, 2))
        monkeypatch.setattr(fake, "launch", launch_both)
        on_device(opened)(1, *arrays)
        num_slots, stride = opened.pool.num_slots, opened.pool.slot_stride
    name, (num_blocks,), block, fields = launched[0]
    assert (name, block) == (entry, (256,))
    assert num_blocks >= 1
    assert (fields["top_k"], fields["gate.slot_stride"]) == (TOP_K, stride)
    assert (fields["gate.hidden"], fields["gate.width"]) == (HIDDEN, WIDTH)
    if entry == "decode":
        assert (fields["num_tokens"], fields["num_experts"]) == (2, EXPERTS)
        assert fields["num_slots"] == num_slots


def test_an_error_of_a_launch_is_this_librarys(
    runtime: NoOpRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's with its remedy, and what CuPy or a compiler says."""
    device = make_device()
    monkeypatch.setattr(device, "_in", lambda _: contextlib.nullcontext())
    cupy: Any = sys.modules["cupy"]
    errors = [CudaRuntimeError(ILLEGAL_ADDRESS), RuntimeError("what it is"), MemoryError("none")]

    def fail(*_: Any) -> None:
        raise errors.pop(0)

    cupy.RawModule = lambda **_: types.SimpleNamespace(get_function=lambda _: fail)
    argument = (ctypes.c_char * 8)()
    for kind, problem in ((MoeCacheError, "again"), (MoeCacheError, "what"), (MemoryError, "none")):
        with pytest.raises(kind, match=problem):
            device.launch("gather_f32", 1, argument, Stream(1))


@pytest.mark.parametrize("take", [allocate, make_array])
def test_memory_is_asked_for_once_more_when_another_library_has_given_back(
    runtime: NoOpRuntime, monkeypatch: pytest.MonkeyPatch, take: Callable[[Any], Any]
) -> None:
    """Without one that could, and where it has nothing either, it is the error that it was."""
    device = make_device()
    cuda: Any = sys.modules["cupy.cuda"]
    free = asked = num_tries = 0

    def alloc(num_bytes: int) -> Any:
        nonlocal num_tries
        num_tries += 1
        if num_bytes > free:
            raise MemoryError(f"{free} bytes are free")
        return Pointer(7)

    def give_back(num_bytes: int) -> None:
        nonlocal free, asked
        free, asked = num_bytes, asked + 1

    monkeypatch.setattr(cuda, "alloc", alloc, raising=False)
    with pytest.raises(MemoryError, match="0 bytes are free"):
        take(device)
    assert num_tries == 1
    device.on_out_of_memory = lambda: give_back(0)
    with pytest.raises(MemoryError, match="0 bytes are free"):
        take(device)
    device.on_out_of_memory = lambda: give_back(64)
    assert take(device) == 7
    assert take(device) == 7
    assert asked == 2


def test_host_memory_is_numpys_and_torchs(runtime: NoOpRuntime) -> None:
    """Not only ndarrays: a router on the CPU gives tensors."""
    torch = pytest.importorskip("torch")
    device = make_device()
    assert device.is_on_host(np.zeros(3))
    assert device.is_on_host(torch.zeros(3))
    assert not device.is_on_host(torch.zeros(3, device="meta"))


@pytest.mark.parametrize("capacity", [5, LAYERS * EXPERTS])
def test_ids_may_be_a_tensor_in_host_memory(capacity: int) -> None:
    """Whatever is resident, and a wrong id is an error."""
    torch = pytest.importorskip("torch")

    class Device(FakeDevice):
        def is_on_host(self, array: Any) -> bool:
            return is_in_host_memory(array) and not isinstance(array, FakeArray)

    device = Device()
    hidden, ids, weights = make_step(TYPES["float32"], 1)
    with make_runtime(device, TYPES["float32"], capacity) as runtime:
        runtime.usage.fill().wait()
        x, w = on(device, hidden, weights)
        compute = on_device(runtime)
        wanted = compute(0, x, ids, w)
        for kind in (torch.int32, torch.int64):
            assert np.array_equal(compute(0, x, torch.tensor(ids, dtype=kind), w), wanted)
        with pytest.raises(ValueError, match=f"expert {EXPERTS} is not in"):
            compute(0, x, torch.full((1, TOP_K), EXPERTS), w)


def test_host_memory_of_other_libraries_is_found_by_dlpack() -> None:
    """By where they say that they are."""

    class Array:
        def __init__(self, kind: int) -> None:
            self._kind = kind

        def __dlpack_device__(self) -> tuple[int, int]:
            return self._kind, 0

    assert is_in_host_memory(Array(1))
    assert not is_in_host_memory(Array(2))
    assert not is_in_host_memory(object())


def test_dtypes_are_found_by_themselves() -> None:
    """The same object at every call: no text is made of it."""
    torch = pytest.importorskip("torch")
    assert dtype_of(torch.zeros(1, dtype=torch.bfloat16)) == np.dtype(ml_dtypes.bfloat16)
    one = torch.zeros(1)
    assert dtype_of(one) is dtype_of(one)
    array = np.zeros(1, np.float16)
    assert dtype_of(array) is array.dtype
