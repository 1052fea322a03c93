"""The routed feed-forward over a runtime's slots, on the host and on a GPU."""

from moecache.compute.cuda_experts import CudaExperts, on_device

__all__ = ["CudaExperts", "on_device"]
