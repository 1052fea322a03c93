"""What a benchmark ran on: printed first."""

import os
import platform

import numpy as np

from moecache.commands.machine import cpu_model


def describe_machine() -> str:
    """Return processor, cores, load, kernel and versions as one line."""
    usable = len(os.sched_getaffinity(0))
    return (
        f"{cpu_model()}, {usable} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Linux {platform.release()}, Python {platform.python_version()}, NumPy {np.__version__}"
    )
