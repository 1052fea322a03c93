"""The GPU: its interface, CuPy's implementation of that, and the kernels."""

from moecache.cuda._kinds import check_experts
from moecache.cuda._launches import ACTIVATIONS
from moecache.cuda.device import (
    Device,
    DeviceArray,
    Graph,
    Memory,
    Product,
    Stream,
    parse_device,
)
from moecache.errors import ConfigError

__all__ = [
    "ACTIVATIONS",
    "Device",
    "DeviceArray",
    "Graph",
    "Memory",
    "Product",
    "Stream",
    "check_experts",
    "open_device",
    "parse_device",
]


def open_device(name: str) -> Device:
    """Return a CUDA device, such as "cuda:0".

    Raises
    ------
    ConfigError
        If no GPU here has that name.
    MissingDependencyError
        If CuPy is not installed, or finds parts of CUDA missing.
    MoeCacheError
        If there is no driver, or it is too old.
    """
    number = parse_device(name)
    if number is None:
        raise ConfigError(f"{name!r} is no GPU")
    # CuPy is imported where a GPU is asked for, and nowhere else.
    from moecache.cuda._cupy import CupyDevice

    return CupyDevice(number)
