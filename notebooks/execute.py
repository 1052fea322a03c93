"""Execute notebooks: ``python -m notebooks.execute`` (all of them, in place)."""

import json
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

import moecache

NOTEBOOKS = Path(__file__).parent
# What a notebook says of its kernel: any Python 3, wherever it was run.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


def read(path: Path) -> NotebookNode:
    """Return a notebook as it is in the file."""
    return nbformat.read(path, as_version=4)


def execute(path: Path, *, directory: Path = NOTEBOOKS, timeout: float = 120) -> NotebookNode:
    """Run a notebook from top to bottom and return it with new outputs.

    The kernel is this interpreter and finds the same moecache. Nothing of the user's IPython
    and Jupyter configuration counts, and nothing of the machine is in the result.

    Parameters
    ----------
    path : Path
        Left as it is.
    directory : Path
        Where the kernel runs.
    timeout : float
        Seconds that a cell may take.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell raises.
    nbclient.exceptions.CellTimeoutError
        If a cell takes too long.
    """
    notebook = read(path)
    with tempfile.TemporaryDirectory() as scratch:
        # A client that makes its kernel ends it too, and closes what it opened.
        kernel = {
            "connection_file": f"{scratch}/connection.json",
            # Sockets in that directory: no ports to run out of, and nobody else can listen.
            "transport": "ipc",
            "ip": f"{scratch}/kernel",
        }
        specs = {"kernel_dirs": [_write_spec(Path(scratch))], "ensure_native_kernel": False}
        NotebookClient(
            notebook,
            config=Config({"KernelManager": kernel, "KernelSpecManager": specs}),
            kernel_name="python3",
            timeout=timeout,
            record_timing=False,
            # How a cell's output is cut into messages is chance.
            coalesce_streams=True,
            resources={"metadata": {"path": str(directory)}},
        ).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def _write_spec(scratch: Path) -> str:
    """Write a specification of the kernel and return the directory to find it in."""
    spec = {
        **METADATA["kernelspec"],
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "env": {
            "PYTHONPATH": str(Path(moecache.__file__).parents[1]),
            "IPYTHONDIR": str(scratch / "ipython"),
            # Else the debugger, which nobody attaches, warns of frozen modules.
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        },
    }
    place = scratch / "kernels" / "python3"
    place.mkdir(parents=True)
    (place / "kernel.json").write_text(json.dumps(spec))
    return str(place.parent)


def main() -> None:
    """Execute every notebook in place."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
