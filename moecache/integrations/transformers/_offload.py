"""Offload: `model.moecache` of a model whose experts are in slots."""

import contextlib
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import transformers
from torch import nn

from moecache.errors import CapacityError, MoeCacheError
from moecache.integrations.transformers import _llama4, _longcat, _step3p7
from moecache.integrations.transformers._binding import bind_to, usual_compute
from moecache.integrations.transformers._decoding import Decoder
from moecache.integrations.transformers._detaching import read_experts
from moecache.integrations.transformers._device_tokens import DeviceTokens
from moecache.integrations.transformers._experts import (
    NotCopied,
    become_again,
    dispatch,
    is_llama4,
    is_transposed,
    num_bytes,
    restore,
    strip,
)
from moecache.integrations.transformers._fast import (
    check_compute,
    quicken,
    slow_down,
)
from moecache.integrations.transformers._figures import compute_stats
from moecache.integrations.transformers._guards import IMPLEMENTATION, guard, unguard
from moecache.integrations.transformers._installing import install, uninstall
from moecache.integrations.transformers._kernels import is_copied, make_kernels
from moecache.integrations.transformers._lookahead import (
    RouterLookAhead,
    find_routers,
    routers_by_layer,
)
from moecache.integrations.transformers._native import thaw
from moecache.integrations.transformers._on_device import join_torch
from moecache.integrations.transformers._parallel import agree_before
from moecache.integrations.transformers._ranks import Ranks
from moecache.integrations.transformers._sequences import SequenceHook
from moecache.integrations.transformers._slots import (
    LAYER,
    SlotLayer,
    SlotWeights,
)
from moecache.integrations.transformers.prompts import bytes_per_token
from moecache.interrupts import uninterrupted
from moecache.runtime.runtime import ExpertRuntime
from moecache.sizing.host_memory import free_host_bytes
from moecache.slots import CudaSlots
from moecache.telemetry import ComputeStats, RuntimeStats
from moecache.units import format_bytes

logger = logging.getLogger(__name__)

# Families whose experts have no interface.
_PATCHED = (
    (_llama4, is_llama4),
    (_longcat, _longcat.is_longcat),
    (_step3p7, _step3p7.is_step3p7),
)


class Offload(NotCopied):
    """The experts of a transformers model, in a bounded number of slots.

    Made by `load` and `attach`; the model has it as `model.moecache`. A context manager:
    leaving it closes it.

    Attributes
    ----------
    runtime : ExpertRuntime
        Closed with this if `load` opened it.
    ranks : Ranks or None
        The processes that the experts are spread over, with `load(expert_parallel=)`.
    decoder : Decoder or None
        What computes tokens in the place of the model's forward; none where torch computes.
    tokens : DeviceTokens or None
        What computes the tokens of `moecache generate`, `chat` and `serve` on a GPU.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        runtime: ExpertRuntime,
        *,
        look_ahead: bool | None,
        compute: str | None,
        owned: bool,
        ranks: Ranks | None = None,
    ) -> None:
        before = getattr(model, "moecache", None)
        if isinstance(before, Offload) and not before.closed:
            raise MoeCacheError("the model's experts are in a cache already; detach() it first")
        self.runtime = runtime
        self.ranks = ranks
        self._bindings = bind_to(model, runtime)
        self._compute = check_compute(compute or usual_compute(self._bindings, runtime.layout))
        self._kernels, self._left = make_kernels(self._bindings, runtime, self._compute)
        self._linears: list[nn.Module] = []
        self._owned = owned
        self._released: bool = False
        self._detached = False
        self._model = weakref.ref(model)
        prefetch = runtime.stats().prefetch
        # The runtime's predictor without this model, and its mode.
        self._before = runtime.predictor, None if prefetch is None else prefetch.mode
        self._look_ahead: RouterLookAhead | None = None
        # Calls that may fail come first, and interrupts wait: the model is changed as a whole.
        _, mode = self._before
        looks_ahead = mode == "auto" if look_ahead is None else mode is not None and look_ahead
        routers = routers_by_layer(model, self._bindings, runtime.layout) if looks_ahead else []
        with uninterrupted():
            # Llama 4's and LongCat's that were patched; raises before anything was changed.
            self._blocks = [
                family.patch(model, binding.path)
                for binding in self._bindings
                for family, is_family in _PATCHED
                if is_family(binding.module)
            ]
            self._layers = self._strip()
            if self._compute != "torch" and not isinstance(runtime.pool, CudaSlots):
                self._linears = quicken(model, find_routers(model, self.paths))
            join_torch(runtime)
            dispatch([binding.module for binding in self._bindings], IMPLEMENTATION)
            self._agreements = [] if ranks is None else list(agree_before(model, ranks))
            self.decoder: Decoder | None = self._start_decoder(model)
            hook = SequenceHook(runtime, bytes_per_token(model))
            self._hook = model.register_forward_pre_hook(hook, with_kwargs=True)
            on_gpu = isinstance(runtime.pool, CudaSlots)
            self.tokens: DeviceTokens | None = DeviceTokens(model) if on_gpu else None
            guard(model, getattr(runtime.store, "path", Path()))
            self._start_look_ahead(routers)
            model.__dict__["moecache"] = self

    @property
    def closed(self) -> bool:
        """Whether the model's experts cannot come from the slots any more."""
        return self._released

    @property
    def compute(self) -> str:
        """What multiplies: "torch" or "fast"."""
        return self._compute

    @property
    def model(self) -> transformers.PreTrainedModel:
        """The model."""
        model = self._model()
        if model is None:
            raise MoeCacheError("the model is gone")
        return model

    @property
    def paths(self) -> list[str]:
        """The experts modules, in the order of the model."""
        return [binding.path for binding in self._bindings]

    @property
    def num_products(self) -> int:
        """Expert feed-forwards computed: one for each distinct expert of a step.

        Kernels on a GPU count one for each token and each of its choices, which the host does not
        see.
        """
        self._note_counts()
        return sum(layer.num_products for layer in self._layers)

    def stats(self) -> RuntimeStats:
        """Return the runtime's counters as they are now."""
        return self.runtime.stats()

    def compute_stats(self) -> ComputeStats:
        """Return what multiplies, how much weight a token takes, and how fast it was read.

        With `compute="fast"`, and once tokens were decoded, the first call measures how fast this
        machine's memory is read, which takes a quarter of a second; a profile keeps it.
        """
        layers = [binding.layer for binding in self._bindings]
        self._note_counts()
        return compute_stats(
            self.model, self.runtime, layers, self._compute, self._kernels, self._left
        )

    def report(self) -> str:
        """Return the counters as text, with a line per layer; see also `compute_stats`."""
        experts = sum(num_bytes(binding.module) for binding in self._bindings)
        stats = self.stats()
        trunk = format_bytes(self.model.get_memory_footprint())
        return (
            f"trunk {trunk}, slots {format_bytes(stats.pool_bytes)} for experts of "
            f"{format_bytes(experts)} in {len(self._bindings)} layers\n"
            f"{self.compute_stats().describe()}\n{self._describe_decoding()}{self.runtime.report()}"
        )

    def _note_counts(self) -> None:
        decoder = self.decoder  # another thread may close it
        if decoder is not None:
            decoder.note_counts()

    def _describe_decoding(self) -> str:
        way = self.tokens or self.decoder
        return "" if way is None else f"{way.describe()}\n"

    def detach(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Give the model all its experts back, as if it had been loaded without a cache.

        Reads the whole checkpoint's experts. A second call does nothing. If this fails,
        the model goes on as before.

        Parameters
        ----------
        progress : callable (done_bytes, total_bytes), optional
            Called after each layer.

        Raises
        ------
        CapacityError
            If they do not fit into memory.
        StoreError
            If an expert cannot be read.
        MoeCacheError
            If this was closed before.
        """
        if self._detached:
            return
        if self._released:
            raise MoeCacheError("the model's cache is closed; load the model again")
        needed = sum(num_bytes(binding.module) for binding in self._bindings)
        free = free_host_bytes()
        if needed > free:
            raise CapacityError(
                f"all experts take {format_bytes(needed)}, but {format_bytes(free)} are free"
            )
        done, weights = 0, []
        for binding in self._bindings:
            weights.append(read_experts(self.runtime, binding))
            done += num_bytes(binding.module)
            if progress is not None:
                progress(done, needed)
        with uninterrupted():
            for binding, parameters in zip(self._bindings, weights, strict=True):
                restore(binding.module, parameters)
            for block in self._blocks:
                become_again(block)
            thaw(self.model)
            self._detached = True
            unguard(self.model)
            self.model.__dict__.pop("moecache", None)
            self._release()

    def close(self) -> None:
        """Give back slots, file and threads; the model cannot run its experts any more.

        A second call does nothing. A runtime that was given to `attach` stays open.
        """
        if not self._released:
            self._release()
        elif self._owned:
            # A call that was cut at its very end may have left it.
            self.runtime.close()

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it; other ranks are told of an error."""
        if error is not None and self.ranks is not None and not self._released:
            self.ranks.fail(error)
        self.close()

    def _release(self) -> None:
        with contextlib.ExitStack() as stack, uninterrupted():
            # An interrupt comes behind this, and leaves none of it out.
            self._released = True
            if self._owned:
                stack.callback(self.runtime.close)
            if self.ranks is not None:
                stack.callback(self.ranks.close)
            self._let_go()

    def _let_go(self) -> None:
        """Leave the model's modules, which have no experts then."""
        self._hook.remove()
        if self.tokens is not None:
            self.tokens.close()
        model, decoder, self.decoder = self._model(), self.decoder, None
        if model is not None and decoder is not None:
            uninstall(model)
        if decoder is not None:
            decoder.note_counts()
        for agreement in self._agreements:
            agreement.remove()
        slow_down(self._linears)
        if self._look_ahead is not None:
            self._look_ahead.close()
            # A runtime that goes on guesses as before; another model's guesses are let alone.
            predictor, mode = self._before
            ours = self.runtime.predictor is self._look_ahead
            is_over = self.runtime.closed or self.runtime.steps.is_forked
            if ours and predictor is not None and not is_over:
                self.runtime.use_predictor(predictor, mode)
        for binding in self._bindings:
            binding.module.__dict__.pop(LAYER, None)
        for layer in self._layers:
            layer.clear()

    def _start_decoder(self, model: transformers.PreTrainedModel) -> Decoder | None:
        """Have a token be one call where kernels compute in RAM."""
        if self._compute == "torch" or isinstance(self.runtime.pool, CudaSlots):
            return None
        if "forward" in model.__dict__:
            return None  # somebody follows it
        decoder = Decoder(model, self.runtime, self._layers, self.paths, lambda: self._look_ahead)
        install(model, decoder)
        return decoder

    def _strip(self) -> list[SlotLayer]:
        views: dict[Any, dict[int, SlotWeights]] = {}
        layers = []
        # A single rank has everything.
        spread = None if self.ranks is None or self.ranks.share is None else self.ranks
        for binding in self._bindings:
            strip(binding.module)
            layer = SlotLayer(
                self.runtime,
                binding.layer,
                views.setdefault(self.runtime.layout.layers[binding.layer], {}),
                is_transposed=is_transposed(binding.module),
                is_copied=is_copied(binding, self.runtime),
                regroup=binding.regroup,
                dtype=binding.dtype,
                kernel=self._kernels.get(binding.layer),
                ranks=spread,
            )
            binding.module.__dict__[LAYER] = layer
            layers.append(layer)
        return layers

    def _start_look_ahead(self, routers: list[nn.Module | None]) -> None:
        if routers:
            predictor, mode = self._before
            self._look_ahead = RouterLookAhead(routers, predictor)
            self.runtime.use_predictor(self._look_ahead, "auto" if mode == "auto" else "router")


def attach(
    model: transformers.PreTrainedModel,
    runtime: ExpertRuntime,
    *,
    look_ahead: bool | None = None,
    compute: str | None = None,
) -> Offload:
    """Have a model's experts come from a runtime; those that it has in memory are given up.

    For models that were loaded otherwise than by `load`: completely, or without experts by
    `from_pretrained(..., quantization_config=MoeCacheConfig())`.

    Parameters
    ----------
    model : PreTrainedModel
        On the device that has the slots.
    runtime : ExpertRuntime
        Opened on the very checkpoint that the model was loaded from, with slots in the model's
        dtype (`moecache.open(path, dtype=...)`). The caller closes it.
    look_ahead : bool, optional
        Have the next layer's router name the experts that are read ahead. By default if
        the runtime's prefetch is "auto".
    compute : {"torch", "fast"}, optional
        The multiplier; see `load`.

    Returns
    -------
    Offload
        Also `model.moecache`.

    Raises
    ------
    ConfigError
        If the family is not supported, or model and runtime do not fit; the model is as
        it was.
    MoeCacheError
        If the model has a cache already.
    """
    return Offload(model, runtime, look_ahead=look_ahead, compute=compute, owned=False)
