"""Which kernel computes which layer, and what the slots have that the modules have otherwise."""

import logging
from collections.abc import Sequence

from moecache.cuda import check_experts
from moecache.errors import ConfigError
from moecache.integrations.transformers._binding import Binding
from moecache.integrations.transformers._experts import is_transposed
from moecache.integrations.transformers._fast import kernel_of, no_kernel
from moecache.integrations.transformers._on_device import DeviceKernel, device_kernel_of
from moecache.kernels import SlotKernel
from moecache.layout import ExpertLayout
from moecache.runtime.runtime import ExpertRuntime
from moecache.slots import CudaSlots

logger = logging.getLogger(__name__)


def make_kernels(
    bindings: Sequence[Binding], runtime: ExpertRuntime, compute: str
) -> tuple[dict[int, SlotKernel | DeviceKernel], dict[int, str]]:
    """Return what computes each layer, none for "torch", and why torch computes the others.

    On a GPU torch may be left with some layers, with a warning; in RAM with none.

    Raises
    ------
    ConfigError
        If there is no kernel for a layer in RAM, or on a GPU for any of them, or for one that is
        in a format.
    """
    made: dict[int, SlotKernel | DeviceKernel] = {}
    left: dict[int, str] = {}
    formats = _formats(runtime.layout)
    if compute == "torch":
        if isinstance(runtime.pool, CudaSlots):
            check_on_device(runtime.layout, compute)
        return made, left
    for binding in bindings:
        module, layer = binding.module, binding.layer
        if is_transposed(module) and not binding.has_output_rows:
            raise no_kernel(
                type(module).__name__,
                compute,
                "their weights are stored transposed, [in, out]",
                '"torch", or open the runtime with a store of moecache.open_store, after its '
                "transpose_roles(store.layout.find_transposed())",
            )
        alternate = _is_interleaved(binding)
        if not isinstance(runtime.pool, CudaSlots):
            made[layer] = kernel_of(module, runtime, layer, compute, is_interleaved=alternate)
            continue
        try:
            made[layer] = device_kernel_of(
                module, runtime, layer, binding.dtype, is_interleaved=alternate
            )
        except ConfigError as error:
            left[layer] = str(error)
    if left:
        reason = next(iter(left.values()))
        if formats or not made:
            family, remedy = (
                type(bindings[0].module).__name__,
                'device="cpu"' if formats else '"torch"',
            )
            raise no_kernel(family, compute, reason, remedy)
        logger.warning(
            "transformers.left_to_torch layers=%d of=%d: %s", len(left), len(bindings), reason
        )
    return made, left


def check_on_device(layout: ExpertLayout, compute: str | None) -> None:
    """Raise ConfigError if a GPU cannot compute experts in a format as it is asked to."""
    formats = _formats(layout)
    if formats and compute == "torch":
        raise ConfigError(
            f"experts in {', '.join(formats)} are computed on a GPU by kernels alone; use "
            'compute="fast", or device="cpu"'
        )
    if formats:
        check_experts(layout)


def _formats(layout: ExpertLayout) -> list[str]:
    return sorted({role.format for roles in layout.layers for role in roles} - {""})


def is_copied(binding: Binding, runtime: ExpertRuntime) -> bool:
    """Return whether slots have no weights as a module has them: in a format, or in its order."""
    is_turned = binding.has_output_rows and is_transposed(binding.module)
    is_coded = any(role.format for role in runtime.layout.layers[binding.layer])
    return is_coded or is_turned or binding.regroup is not None


def _is_interleaved(binding: Binding) -> bool:
    """Return whether rows of gate and up alternate in the slots."""
    is_interleaved = not getattr(binding.module, "is_concatenated", True)
    return is_interleaved != (binding.regroup is not None)
