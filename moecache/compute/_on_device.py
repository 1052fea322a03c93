"""The experts of a runtime on its GPU, made once for all who ask."""

from typing import Any
from weakref import WeakKeyDictionary

from moecache.compute.cuda_experts import CudaExperts
from moecache.errors import ConfigError
from moecache.runtime.runtime import ExpertRuntime

# Experts of each runtime, by activation and other options; they go with the runtime.
_made: WeakKeyDictionary[ExpertRuntime, dict[tuple[Any, ...], CudaExperts]] = WeakKeyDictionary()


def on_device(runtime: ExpertRuntime, activation: str = "silu", **options: Any) -> CudaExperts:
    """Return what computes a runtime's experts on the GPU that has the slots.

    The same for the same options, as each has memory of its own.

    Parameters
    ----------
    runtime : ExpertRuntime
    activation : str, default "silu"
    **options
        Others of `CudaExperts`: is_interleaved, alpha, limit, dtype.

    Raises
    ------
    ConfigError
        If the slots are in RAM, or there are no kernels for these experts.
    MoeCacheError
        If the runtime is closed.
    """
    runtime.steps.check_usable()
    if not isinstance(activation, str):
        raise ConfigError(f"activation must be a name, got {activation!r}")
    made = _made.setdefault(runtime, {})
    known = (activation, *sorted(options.items()))
    if known not in made:
        made[known] = CudaExperts(runtime, activation, **options)
    return made[known]
