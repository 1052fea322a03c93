"""What a benchmark ran on: printed first."""

import os
import platform
from pathlib import Path

import numpy as np


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def describe_machine() -> str:
    """Return processor, cores, load, kernel and versions as one line."""
    usable = len(os.sched_getaffinity(0))
    return (
        f"{cpu_model()}, {usable} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Linux {platform.release()}, Python {platform.python_version()}, NumPy {np.__version__}"
    )
