"""CUDA kernels on the CPU: the source that a GPU runs, compiled by g++ over a header."""

import ctypes
import os
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moecache.cuda._sources import source_of
from tests.helpers.built import built

HEADER = Path(__file__).with_suffix(".h")
COMPILER = "g++"
FLAGS = [
    # Kernels of tests are launched once or a few times: -O2 compiles longer than it saves.
    *("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
    *("-fPIC", "-shared", "-DMOECACHE_EMULATED", "-Wno-unknown-pragmas"),
    # Else all libraries of a process have the shared memory of the first, of whatever size.
    "-fno-gnu-unique",
]
# An instruction that stops the kernel: no run-time library to be loaded before Python.
SANITIZE = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
MARK = "moecache_kernel"
# The one right before a kernel, if there is one.
NAMESPACE = r"(?:namespace\s+(\w+)\s*\{\s*(?:using[^;]*;\s*)?)?"


class EmulatedModule:
    """The kernels of a CUDA source, run by fibers of this thread.

    Parameters
    ----------
    source : str
        CUDA C; its kernels are `extern "C" __global__`.
    sanitize : bool, default False
        Stop at what C++ leaves undefined: an address that is not aligned, an
        integer that overflows.

    Raises
    ------
    RuntimeError
        If the source does not compile; with what the compiler says.
    """

    def __init__(self, source: str, *, sanitize: bool = False) -> None:
        flags = [*FLAGS, *(SANITIZE if sanitize else [])]
        self._library = ctypes.CDLL(os.fspath(_built(source, flags)))
        self._library.parameter_bytes.restype = ctypes.c_size_t
        # Its fibers are one process's: one launch at a time.
        self._lock = threading.Lock()

    def launch(
        self,
        name: str,
        grid: int,
        block: int,
        args: Sequence[np.generic | np.ndarray],
        *,
        cooperative: bool = False,
        seed: int = 0,
    ) -> None:
        """Run a kernel to its end.

        Parameters
        ----------
        name : str
        grid, block : int
            Blocks, and threads of each: a multiple of 32.
        args : sequence of NumPy scalars
            Pointers as uint64, of host memory. A struct is an array of one element.
        cooperative : bool, default False
            Have all blocks alive at once; otherwise one runs after the other.
        seed : int, default 0
            Of the order in which warps and their lanes go on.

        Raises
        ------
        LookupError
            If there is no such kernel.
        TypeError
            If arguments differ from the kernel's parameters in number or size.
        RuntimeError
            If threads wait for others that never arrive, or the kernel does
            what the processor or the sanitizer refuses.
        """
        encoded = name.encode()
        count = self._library.num_parameters(encoded)
        if count < 0:
            raise LookupError(f"the source has no kernel {name!r}")
        sizes = [self._library.parameter_bytes(encoded, i) for i in range(count)]
        if [arg.itemsize for arg in args] != sizes:
            raise TypeError(
                f"{name} takes {count} arguments of {sizes} bytes, "
                f"not {len(args)} of {[arg.itemsize for arg in args]}"
            )
        if grid < 1 or block < 32 or block % 32:
            raise ValueError(f"{name}: {grid} blocks of {block} threads; give whole warps of 32")
        held = [np.array(arg) for arg in args]
        pointers = (ctypes.c_void_p * count)(*(one.ctypes.data for one in held))
        address = ctypes.c_size_t()
        with self._lock:
            result = self._library.launch_kernel(
                encoded,
                grid,
                block,
                pointers,
                int(cooperative),
                ctypes.c_uint64(seed),
                ctypes.byref(address),
            )
        if result < 0:
            raise RuntimeError(f"{name}: threads wait for others that never arrive")
        if result > 0:
            raise RuntimeError(f"{name}: {signal.strsignal(result)} at {address.value:#x}")


class EmulatedKernels:
    """The package's kernels by their names, each source compiled when it is first needed.

    Parameters
    ----------
    sanitize : bool, default False
        See `EmulatedModule`.
    """

    def __init__(self, *, sanitize: bool = False) -> None:
        self._sanitize = sanitize
        self._modules: dict[str, EmulatedModule] = {}
        self._lock = threading.Lock()

    def launch(
        self,
        name: str,
        grid: int,
        block: int,
        args: Sequence[np.generic | np.ndarray],
        *,
        cooperative: bool = False,
        seed: int = 0,
    ) -> None:
        """Run a kernel to its end; see `EmulatedModule.launch`."""
        entry, text = source_of(name)
        with self._lock:
            module = self._modules.get(text)
            if module is None:
                module = EmulatedModule(text, sanitize=self._sanitize)
                self._modules[text] = module
        module.launch(entry, grid, block, args, cooperative=cooperative, seed=seed)


def address_of(array: np.ndarray) -> np.uint64:
    """Return where an array's first element lies, as a kernel takes it."""
    return np.uint64(array.ctypes.data)


def _built(source: str, flags: list[str]) -> Path:
    """Return the library of a source, compiled unless some run before this has."""

    def make(library: Path) -> None:
        included = f'#include "{HEADER}"\n{source}\n'
        expanded = _compiler_output([*flags, f"-D__global__={MARK}", "-E", "-P"], included)
        found = re.findall(rf'{NAMESPACE}extern "C" {MARK}\s+void\s+(\w+)\s*\(', expanded)
        entries = [f'emulator::Wrapped<&{at}::{name}>::named("{name}")' for at, name in found]
        kernels = ",\n".join([*entries, "{}"])
        defined = f"const emulator::Kernel emulator::kernels[] = {{\n{kernels}}};\n"
        _compiler_output([*flags, "-o", str(library)], f"{included}{defined}")

    return built(".so", [source, HEADER.read_text(), *flags], make)


def _compiler_output(flags: list[str], text: str) -> str:
    """Return what the compiler writes for a source that it gets on its standard input."""
    command = [COMPILER, *flags, "-x", "c++", "-"]
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{run.stderr}")
    return run.stdout
