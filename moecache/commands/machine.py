"""The machine of a measurement."""

import os
import platform
from importlib import metadata
from typing import Any

import numpy as np

from moecache import __version__
from moecache.profiles.bandwidth import cpu_model
from moecache.sizing.host_memory import total_host_bytes
from moecache.units import format_bytes


def machine_facts(*packages: str) -> dict[str, Any]:
    """Return processor, memory and versions, those of some packages too."""
    return {
        "cpu": cpu_model(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "memory_bytes": total_host_bytes(),
        "linux": platform.release(),
        "python": platform.python_version(),
        "versions": {
            "moecache": __version__,
            "numpy": np.__version__,
            **{name: _version(name) for name in packages},
        },
    }


def describe_facts(facts: dict[str, Any]) -> str:
    """Return it as one line."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"{facts['cpu']}, {facts['usable_cores']} of {facts['cores']} cores, load "
        f"{facts['load']:.1f}, {format_bytes(facts['memory_bytes'])} of memory, "
        f"Linux {facts['linux']}, Python {facts['python']}, {versions}"
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
