"""DecodedModel: a model of transformers whose texts a program computes, prompts and tokens."""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from moecache.decoding._program import Program
from moecache.decoding.prefixes import PrefixCache
from moecache.decoding.program_model import Computation, ProgramModel
from moecache.integrations.transformers._cache_layers import TYPES
from moecache.integrations.transformers._loops import ends_of, has_loop


class DecodedModel(ProgramModel):
    """A model of transformers, whose weights, hooks and adapters may change between two calls.

    Keys and values have the model's dtype, and so have rows that convolutions see: a text has the
    bits that it has in a cache of transformers'. Experts of other processes are not asked for.

    Parameters
    ----------
    model : PreTrainedModel
        As `load` returns it, whose decoder `reads_prompts`.

    Raises
    ------
    ConfigError
        If a program does not compute its texts; so do the methods, of a model that has changed.
    """

    def __init__(self, model: Any) -> None:
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._decoder = model.moecache.decoder
        with self._computing() as how:
            recipe = how.recipe
        self._model, kind = model, TYPES[model.dtype]
        super().__init__(model.moecache.runtime, context, recipe, (kind, kind))

    @property
    def ends(self) -> set[int]:
        """Tokens with which the model ends its texts, as its configuration says now."""
        return ends_of(self._model)

    @property
    def way(self) -> str:  # type: ignore[override]
        """Which weights pages are of: another once a tensor has been replaced."""
        return f"program {self._decoder.num_recipes()}"

    def own(self, prefixes: PrefixCache | None) -> PrefixCache | None:
        """Return pages if they are of the model as it is now."""
        return prefixes if prefixes is not None and prefixes.way == self.way else None

    def _computing(self) -> AbstractContextManager[Computation]:
        found: AbstractContextManager[Computation] = self._decoder.computing()
        return found

    def _wait_for(self, number: int, program: Program, num: int, names: np.ndarray | None) -> None:
        self._decoder.experts.wait_for(number, program, num, names)

    def _counted(self, program: Program, num_steps: int) -> None:
        self._decoder.counted(program, num_steps)


def decoded_model(model: Any) -> DecodedModel | None:
    """Return what computes a model's texts from their first token on, if it is a program."""
    offload = getattr(model, "moecache", None)
    decoder = getattr(offload, "decoder", None)
    if offload is None or decoder is None or offload.ranks is not None or not has_loop(model):
        return None
    return DecodedModel(model) if decoder.reads_prompts() else None
