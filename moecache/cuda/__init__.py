"""The GPU: what is asked of it, and the kernels."""
