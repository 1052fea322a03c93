"""LayerExperts: what programs leave of a layer's experts, and the counts of what they compute."""

import threading
from collections.abc import Sequence

import numpy as np
import torch

from moecache.decoding._program import Program
from moecache.integrations.transformers._fast import fast_rows
from moecache.integrations.transformers._slots import SlotLayer
from moecache.kernels import SlotKernel
from moecache.runtime.runtime import ExpertRuntime


class LayerExperts:
    """Computes experts that a program waits for, and counts those that it has computed.

    Parameters
    ----------
    runtime : ExpertRuntime
    layers : sequence of SlotLayer
        The model's experts, with their kernels.

    Attributes
    ----------
    are_spread : bool
        Whether some are other processes'.
    """

    def __init__(self, runtime: ExpertRuntime, layers: Sequence[SlotLayer]) -> None:
        self._runtime = runtime
        self._layers = {layer.layer: layer for layer in layers}
        self._counting = threading.Lock()
        self.are_spread = any(layer.ranks is not None for layer in layers)

    def wait_for(
        self, number: int, program: Program, num_rows: int, names: np.ndarray | None
    ) -> None:
        """Compute a layer's experts as they arrive, from the disk or from other processes.

        Parameters
        ----------
        number : int
            The runtime's number of the layer, as `Program.run` returned it.
        program : Program
            Has ids and inputs, and gets rows.
        num_rows : int
            Tokens of the call.
        names : ndarray of int32, shape [num_rows], or None
            Which sequence each row is of.

        Raises
        ------
        StoreError
            If an expert cannot be read.
        """
        layer = self._layers[number]
        kernel = layer.kernel
        assert isinstance(kernel, SlotKernel)
        if num_rows == 1 and layer.ranks is None:
            self._compute_token(number, program, kernel, names)
            layer.num_products += program.ids.shape[1]
            return
        hidden = torch.from_numpy(program.given[:num_rows])
        ids = torch.from_numpy(program.ids[:num_rows])
        into = torch.from_numpy(program.rows[: ids.numel()])
        rows, num_experts = fast_rows(
            self._runtime,
            number,
            kernel,
            hidden,
            ids,
            layer.ranks,
            sequences=names,
            rows=into,
            product_type=program.product_type,
        )
        if rows is not into:
            into.copy_(rows)
        layer.num_products += num_experts

    def count(self, program: Program) -> None:
        """Have the layers' counters know what a program has computed of resident experts."""
        with self._counting:
            for number, num_products, num_single, busy_ns in program.take_counts():
                layer = self._layers[number]
                layer.num_products += num_products
                assert isinstance(layer.kernel, SlotKernel)
                layer.kernel.count(num_single, busy_ns)

    def _compute_token(
        self, number: int, program: Program, kernel: SlotKernel, names: np.ndarray | None
    ) -> None:
        """Compute a token's experts, those that are resident first."""

        def compute(slots: np.ndarray, places: list[int]) -> None:
            kernel.count(len(places), program.compute(slots, places))

        self._runtime.steps.compute_token(number, program.ids[:1], compute, names)
