"""Current: the recipe of a model as it is now, and the program that computes it."""

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moecache.decoding._program import Program
from moecache.errors import ConfigError
from moecache.integrations.transformers._cache_layers import TYPES
from moecache.integrations.transformers._lookahead import RouterLookAhead
from moecache.integrations.transformers._places import Rotary
from moecache.integrations.transformers._rows import are_rows_apart
from moecache.integrations.transformers._slots import SlotLayer
from moecache.integrations.transformers.prompts import NOT_CAUSAL
from moecache.integrations.transformers.recipes import (
    NoRecipeError,
    Reading,
    UnknownFamilyError,
    read_recipe,
)
from moecache.kernels import SlotKernel
from moecache.runtime.runtime import ExpertRuntime

if TYPE_CHECKING:
    import transformers

logger = logging.getLogger(__name__)

# Calls after which a model that had no recipe for its hooks or adapters is asked again, at most.
_MOST_CALLS = 64


@dataclass(frozen=True)
class Found:
    """A recipe that was read from a model, and what computes it.

    Parameters
    ----------
    reading : Reading
    program : Program
        Of up to 16 rows.
    rotary : Rotary
    reads_prompts : bool
        Whether prompts go by programs as well.
    are_rows_apart : bool
        Whether a prompt's rows have the same bits in the model's modules wherever it is cut.
    """

    reading: Reading
    program: Program
    rotary: Rotary
    reads_prompts: bool
    are_rows_apart: bool


class Current:
    """Finds the recipe of a model, whose weights, hooks and adapters may change between two calls.

    Parameters
    ----------
    model : PreTrainedModel
        Held weakly.
    runtime : ExpertRuntime
    paths : mapping of str to SlotLayer
        By path of the experts module.
    look_ahead : callable ()
        Returns the predictor that follows the model's routers, or `None`.
    forget : callable (Program)
        Called with a program that another takes the place of.

    Attributes
    ----------
    last : Found or None
        What was found last.
    num_found : int
        Recipes that were read so far: another weight is another recipe.
    reason : str
        Why there was none when the model was asked last; empty if there was one.
    """

    def __init__(
        self,
        model: "transformers.PreTrainedModel",
        runtime: ExpertRuntime,
        paths: Mapping[str, SlotLayer],
        look_ahead: Callable[[], RouterLookAhead | None],
        forget: Callable[[Program], object],
    ) -> None:
        self._model = weakref.ref(model)
        self._runtime, self._paths, self._look_ahead = runtime, paths, look_ahead
        self._forget = forget
        # Calls until a model that has no recipe as it is now is asked again.
        self._calls_left, self._pause = 0, 1
        self._is_unknown = False
        self.last: Found | None = None
        self.num_found = 0
        self.reason = ""

    def find(self) -> Found | None:
        """Return the recipe of the model as it is now; `reason` says why there is none."""
        if self.last is not None and self.last.reading.weights.are_current():
            self.reason, self._calls_left, self._pause = "", 0, 1
            return self.last
        model: Any = self._model()
        self._calls_left -= 1
        if self._is_unknown or self._calls_left > 0 or model is None:
            return None
        hooked = self._look_ahead()
        hooks = {} if hooked is None else dict.fromkeys(self._paths, 1)
        kernels = {
            path: (layer.layer, layer.kernel)
            for path, layer in self._paths.items()
            if isinstance(layer.kernel, SlotKernel)
        }
        try:
            reading = read_recipe(model, kernels, hooks)
            program = Program(reading.recipe, self._runtime.cache)
        except (NoRecipeError, ConfigError) as error:
            self._is_unknown = isinstance(error, UnknownFamilyError)
            # Reading takes as long as a token or two; hooks and adapters may stay or go.
            self._calls_left, self._pause = self._pause, min(2 * self._pause, _MOST_CALLS)
            if self.reason != str(error):
                self.reason = str(error)
                logger.info("transformers.no_recipe model=%s: %s", type(model).__name__, error)
            return None
        if self.last is not None:
            self._forget(self.last.program)
        rotary = Rotary(reading.rotary, reading.rotary_width)
        experts = {model.get_submodule(path) for path in self._paths}
        self.reason, self._pause = "", 1
        self.num_found += 1
        self.last = Found(
            reading,
            program,
            rotary,
            _reads_prompts(model, rotary),
            are_rows_apart(model, reading.recipe, experts),
        )
        return self.last


def _reads_prompts(model: Any, rotary: Rotary) -> bool:
    """Return whether programs compute a model's prompts, too."""
    is_causal = model.config.model_type not in NOT_CAUSAL
    return model.dtype in TYPES and rotary.is_static and is_causal
