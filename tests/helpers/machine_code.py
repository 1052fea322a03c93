"""What compilers make of CUDA kernels: registers, spills, and the instructions of each."""

import functools
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from moecache.cuda._sources import OPTIONS, source_of
from tests.helpers.built import built


def _tool(name: str) -> str | None:
    """Return a program of the PATH, or of NVIDIA's wheels."""
    found = shutil.which(name)
    if found is None:
        for folder in map(Path, sys.path):
            found = next((str(one) for one in folder.glob(f"nvidia/cu*/bin/{name}")), found)
    return found


NVCC = _tool("nvcc")
# Behind the package's own: CuPy appends it to every compilation, and the last one holds.
_OF_CUPY = ("-ftz=true",)
_FOUND = re.compile(
    r"Compiling entry function '(\w+)' for.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)
_INSTRUCTION = re.compile(
    r"^\s*(?:/\*[0-9a-f]+\*/\s+)?(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)"
)


class MachineCode(NamedTuple):
    """A kernel for one kind of GPU.

    Parameters
    ----------
    registers : int
        Of a thread.
    spilled_bytes : int
        Of a thread, that found no register.
    """

    registers: int
    spilled_bytes: int


def disassembler() -> str | None:
    """Return NVIDIA's disassembler, if it is here."""
    return _tool("nvdisasm")


def compiled(kernel: str, arch: int) -> dict[str, MachineCode]:
    """Return what ptxas says of every kernel of a source, by name."""
    return _compiled(source_of(kernel).text, arch)[0]


@functools.cache
def _compiled(source: str, arch: int) -> tuple[dict[str, MachineCode], bytes]:
    """Return what ptxas says of every kernel of a source, by name, and the file that it makes."""
    assert NVCC is not None
    command = [NVCC, *OPTIONS, *_OF_CUPY, "-cubin", "-Xptxas", "-v", f"-arch=sm_{arch}"]
    version = subprocess.run([NVCC, "--version"], capture_output=True, text=True, check=True)

    def make(archive: Path) -> None:
        with tempfile.TemporaryDirectory() as name:
            file, out = Path(name) / "kernels.cu", Path(name) / "out"
            file.write_text(source)
            words = [*command, "-o", os.fspath(out), os.fspath(file)]
            run = subprocess.run(words, capture_output=True, text=True, check=False)
            assert run.returncode == 0, run.stderr
            archive.write_bytes(pickle.dumps((run.stderr, out.read_bytes())))

    archive = built(".pickle", [*command, version.stdout, source], make)
    said, code = pickle.loads(archive.read_bytes())
    found = {
        match[1]: MachineCode(int(match[4]), int(match[2]) + int(match[3]))
        for match in _FOUND.finditer(said)
    }
    return found, code


def instructions(kernel: str, arch: int) -> list[str]:
    """Return the instructions of a kernel in their order, such as "LDG.E.EF.128"; no operands."""
    entry, text = source_of(kernel)
    _, _, code = _disassembly(text, arch).partition(f".text.{entry}:")
    lines = code.split(".section", 1)[0].splitlines()
    return [match[1] for line in lines if (match := _INSTRUCTION.match(line))]


@functools.cache
def _disassembly(source: str, arch: int) -> str:
    """Return the instructions of all kernels of a source, as text."""
    tool = disassembler()
    assert tool is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(_compiled(source, arch)[1])
        file.flush()
        command = [tool, "-c", "-ndf", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
