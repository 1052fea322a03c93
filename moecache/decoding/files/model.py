"""TextModel: a model of files, computed by programs alone; neither torch nor transformers."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np

from moecache.decoding._program import Program
from moecache.decoding.files.recipes import FileModel
from moecache.decoding.files.trunk import Trunk
from moecache.decoding.look_ahead import LookAhead
from moecache.decoding.program_model import Computation, ProgramModel
from moecache.kernels import SlotKernel
from moecache.runtime.runtime import ExpertRuntime
from moecache.units import format_bytes


class TextModel(ProgramModel):
    """A mixture-of-experts model of files, with its experts in a bounded number of slots.

    Hidden states are float32 from the embedding to the logits, keys and values bfloat16; states are
    float32, and bfloat16 of a checkpoint in that type, as transformers has them. A token's bits
    depend neither on where a prompt is cut, nor on slots or threads. A context manager. For one
    thread at a time. Its runtime is closed with it.

    Made by `opening.open_text_model`.
    """

    context: int

    def __init__(
        self,
        said: FileModel,
        runtime: ExpertRuntime,
        trunk: Trunk,
        *,
        looks_ahead: bool = False,
    ) -> None:
        self._said, self._lock, self._num_steps = said, threading.RLock(), 0
        self._layers = {
            int(name.removeprefix("blk.")): number
            for number, name in enumerate(said.tensors.layout.layer_names)
        }
        self.runtime = runtime  # of the kernels
        self._kernels = {number: self._kernel(number) for number in self._layers.values()}
        recipe = said.recipe(
            trunk, lambda block: (self._layers[block], self._kernels[self._layers[block]])
        )
        super().__init__(runtime, said.context, recipe, ("bf16", said.state_type))
        self._how = Computation(
            recipe,
            Program(recipe, runtime.cache),
            trunk.embed(),
            said.angles,
            self._start_look_ahead(is_forced=looks_ahead),
        )

    @property
    def vocabulary(self) -> int:
        """Number of tokens that have logits."""
        return int(self._recipe.head.matrix.rows)

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the files say of the model, as transformers' configuration has it."""
        return self._said.settings

    @property
    def tensor_types(self) -> frozenset[str]:
        """Types and formats of the trunk, such as "BF16" and "fp8[128x128,f32]"."""
        return frozenset(self._said.tensors.tensor_types.values())

    @property
    def drawn(self) -> Mapping[str, Any]:
        """Fields of `Sampling`: how the files say that tokens are drawn."""
        return self._said.drawn

    @property
    def ends(self) -> frozenset[int]:
        """Tokens with which the model ends its texts."""
        return self._said.ends

    def check_room(self, num_tokens: int) -> int:
        """Return how many tokens fit behind so many; a ConfigError if none does."""
        return self._said.check_room(num_tokens)

    def report(self) -> str:
        """Return the runtime's counters as text, and how tokens are computed."""
        trunk = format_bytes(self._said.trunk_bytes)
        way = f"tokens are one call each, without torch; {self._num_steps} were"
        return f"trunk {trunk}\n{self.runtime.report()}\n{way}"

    def close(self) -> None:
        """Close the runtime, once no text is read any more; a second call does nothing."""
        if self.runtime.steps.is_forked:  # whoever held the lock is the parent's
            self.runtime.close()
            return
        with self._lock:
            self.runtime.close()

    def __enter__(self) -> Self:
        """Return the model."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the model."""
        self.close()

    def _kernel(self, number: int) -> SlotKernel:
        runtime = self.runtime
        return SlotKernel(
            lambda slot: runtime.expert(slot, number),
            runtime.pool.num_slots,
            roles=runtime.layout.layers[number],
            **self._said.gate,
        )

    @contextmanager
    def _computing(self) -> Iterator[Computation]:
        with self._lock:
            yield self._how

    def _counted(self, _: Program, num_steps: int) -> None:
        self._num_steps += num_steps

    def _wait_for(self, number: int, program: Program, num: int, names: np.ndarray | None) -> None:
        """Compute a layer's experts as they arrive."""
        kernel, steps = self._kernels[number], self.runtime.steps
        if num == 1:
            steps.compute_token(number, program.ids[:1], program.compute, names)
            return
        width = program.given.shape[1]
        given = kernel.inputs_at(
            program.given.ctypes.data, "f32", num, 4 * width, program.product_type
        )
        into = program.rows.ctypes.data, "f32", 4 * width
        ids = program.ids[:num]
        waves = steps.waves(number, ids, sequences=names)
        try:
            for wave in waves:
                kernel.compute_at(wave.slots, wave.offsets, wave.pairs, ids.shape[1], given, *into)
        finally:
            # A traceback that the caller keeps would keep the leases as well.
            waves.close()

    def _start_look_ahead(self, *, is_forced: bool) -> LookAhead | None:
        prefetch = self.runtime.stats().prefetch
        if prefetch is None or not (is_forced or prefetch.mode == "auto"):
            return None
        found = LookAhead(self.runtime.predictor)
        self.runtime.use_predictor(found, "router" if is_forced else "auto")
        return found
