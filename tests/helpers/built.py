"""What compilers make, kept for later runs: a file's name is a hash of all that it is made of."""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def built(suffix: str, parts: list[str], make: Callable[[Path], None]) -> Path:
    """Return the file that `make` writes from `parts`, unless an earlier run has."""
    folder = Path(tempfile.gettempdir()) / f"moecache-built-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user; remove it")
    file = folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}{suffix}"
    if not file.exists():
        # Processes that test side by side need the same one at about the same time.
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                descriptor, made = tempfile.mkstemp(dir=folder, suffix=suffix)
                os.close(descriptor)
                make(Path(made))
                os.replace(made, file)
    return file
