"""Decoders whose tokens the device takes by itself: see `CudaExperts.begin_token`.

They need no slot for every expert. A layer that misses one is computed again when it is there.
"""

import time
from contextlib import ExitStack

from bench.gpu_stack import Decoder, Inputs
from moecache import ExpertRuntime
from moecache.cuda import Device, Stream


class TokenDecoder(Decoder):
    """A decoder that issues a token's layers one by one, and waits at its end; see `Decoder`."""

    def __init__(
        self, name: str, device: Device, inputs: Inputs, stream: Stream, runtime: ExpertRuntime
    ) -> None:
        super().__init__(name, device, inputs, stream, runtime)
        self._num_stalls = 0
        with ExitStack() as undo:
            undo.callback(self._undo.close)
            self._experts = runtime.on_device(**inputs.size.gate)
            undo.pop_all()

    @property
    def num_stalls(self) -> int:
        """How often a token had to go on from a layer that missed an expert."""
        return self._num_stalls

    def compute(self) -> None:
        """Compute all layers of the token whose inputs are on the device, and wait for them."""
        first: int | None = self._experts.begin_token()
        while first is not None:
            self._issue(first)
            first = self._experts.end_token()
            self._num_stalls += first is not None

    def host_ns(self) -> int:
        """Compute as `compute` does; return what the host takes beside waiting for the device."""
        waited = 0
        start = time.perf_counter_ns()
        first: int | None = self._experts.begin_token()
        while first is not None:
            self._issue(first)
            before = time.perf_counter_ns()
            self.finish()
            waited += time.perf_counter_ns() - before
            first = self._experts.end_token()
            self._num_stalls += first is not None
        return time.perf_counter_ns() - start - waited

    def _issue(self, first: int) -> None:
        """Issue the layers from one on, until one is known to miss an expert."""
        experts, hidden = self._experts, self._hidden
        for layer in range(first, len(self._layers)):
            ids, weights, out = self._layers[layer]
            experts(layer, hidden, ids, weights, out=out)
            if experts.has_stalled:
                break


class TokenGraphDecoder(TokenDecoder):
    """A token decoder whose layers are one graph, issued again after a miss; see `TokenDecoder`.

    Raises
    ------
    CapacityError
        If there are fewer slots than experts of a layer's step.
    """

    def __init__(
        self, name: str, device: Device, inputs: Inputs, stream: Stream, runtime: ExpertRuntime
    ) -> None:
        super().__init__(name, device, inputs, stream, runtime)
        with ExitStack() as undo:
            undo.callback(self._undo.close)
            self._experts.begin_token()
            undo.callback(self._experts.end_token)
            device.begin_capture(stream)
            try:
                super()._issue(0)
            finally:
                self._graph = device.end_capture(stream)
            undo.pop_all()
        self._experts.end_token()

    def _issue(self, first: int) -> None:
        """Replay the graph; layers before the first one return at once."""
        del first
        self._device.replay(self._graph, self._stream)
