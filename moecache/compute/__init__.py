"""The routed feed-forward over a runtime's slots, on the host and on a GPU."""

from moecache.compute._on_device import on_device
from moecache.compute.cuda_experts import CudaExperts

__all__ = ["CudaExperts", "on_device"]
