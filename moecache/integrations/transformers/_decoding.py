"""A token as one call: a model's forward computed by a program, where it has a recipe for it."""

import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from moecache.decoding._program import MAX_ROWS, Program
from moecache.errors import ConfigError
from moecache.integrations.transformers._fast import fast_rows, is_transformed
from moecache.integrations.transformers._lookahead import RouterLookAhead
from moecache.integrations.transformers._pages import Pages
from moecache.integrations.transformers._slots import SlotLayer
from moecache.integrations.transformers.recipes import (
    NoRecipeError,
    Reading,
    UnknownFamilyError,
    read_recipe,
)
from moecache.interrupts import uninterrupted
from moecache.kernels import SlotKernel
from moecache.runtime.runtime import ExpertRuntime

if TYPE_CHECKING:
    import transformers

logger = logging.getLogger(__name__)

# Arguments of a forward that a step takes; another that is given has it computed by transformers.
_TAKEN = (
    *("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache"),
    "logits_to_keep",
)
_ANSWERS = ("output_attentions", "output_hidden_states", "output_router_logits")
# Positions whose angles are computed at once, where they depend on nothing else.
_POSITIONS = 1024
_STATIC = ("default", "linear", "llama3", "yarn")


# Calls after which a model that had no recipe for its hooks or adapters is asked again, at most.
_MOST_CALLS = 64


class Decoder:
    """Computes a few new tokens behind a cache by a program, in the place of a model's forward.

    What it does not take is computed as before: prompts, caches of other kinds, gradients, hooks,
    arguments that a step does not know.

    Parameters
    ----------
    model : PreTrainedModel
    runtime : ExpertRuntime
    layers : sequence of SlotLayer
        The model's experts, with their kernels.
    paths : sequence of str
        The experts modules, in the same order.
    look_ahead : callable
        Returns the predictor that follows the model's routers, or `None`.

    Attributes
    ----------
    reason : str
        Why the model has no recipe, or had none when it was asked last; empty if it has one.
    num_steps : int
        Calls that a program computed.
    """

    def __init__(
        self,
        model: "transformers.PreTrainedModel",
        runtime: ExpertRuntime,
        layers: Sequence[SlotLayer],
        paths: Sequence[str],
        look_ahead: Callable[[], RouterLookAhead | None],
    ) -> None:
        self._model = weakref.ref(model)
        self._runtime = runtime
        self._layers = {layer.layer: layer for layer in layers}
        self._paths = dict(zip(paths, layers, strict=True))
        self._look_ahead = look_ahead
        self._is_spread = any(layer.ranks is not None for layer in layers)
        self._lock = threading.Lock()
        self._pages = Pages()
        self._reading: Reading | None = None
        self._program: Program | None = None
        self._hidden = torch.empty(0)
        self._rotary: _Rotary | None = None
        # Calls until a model that has no recipe as it is now is asked again.
        self._calls_left, self._pause = 0, 1
        self._is_unknown = False
        self.reason = ""
        self.num_steps = 0

    def describe(self) -> str:
        """Return a line that says how tokens are computed."""
        if self.reason:
            return f"tokens go through the model's modules: {self.reason}"
        return f"tokens are one call each; {self.num_steps} were"

    def step(self, named: dict[str, Any]) -> MoeCausalLMOutputWithPast | None:
        """Return a forward's result; `None` if it is not one that a program computes."""
        ids, cache = named.get("input_ids"), named.get("past_key_values")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not isinstance(cache, Cache):
            return None
        batch, each = ids.shape
        if not 1 <= batch * each <= MAX_ROWS or ids.device.type != "cpu":
            return None
        length = cache.get_seq_length()
        if not isinstance(length, int) or length < 1 or not self._is_plain(named):
            return None
        begins = _begins(named.get("attention_mask"), batch, length, each)
        positions = _positions(named.get("position_ids"), batch, length, each)
        wanted = named.get("logits_to_keep", 0)
        if begins is None or positions is None or not isinstance(wanted, int) or wanted < 0:
            return None
        with self._lock:
            if not self._is_ready():
                return None
            logits = self._compute(ids, cache, length, begins, positions, min(wanted, each) or each)
        if logits is None:
            return None
        self.num_steps += 1
        return MoeCausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _is_plain(self, named: dict[str, Any]) -> bool:
        """Return whether a call asks for logits alone, and for no gradients."""
        model: Any = self._model()
        others = {k: v for k, v in named.items() if k not in (*_TAKEN, "return_dict")}
        return not (
            torch.is_grad_enabled()
            or model is None
            or model.training
            or (
                named.get("position_ids") is None
                and getattr(model.model, "rope_deltas", None) is not None
            )
            or named.get("use_cache") is False
            or not named.get("return_dict", True)
            or any(value is not None and value is not False for value in others.values())
            or any(getattr(model.config, name, False) for name in _ANSWERS)
            or torch.is_autocast_enabled("cpu")
            or is_transformed()
        )

    def _is_ready(self) -> bool:
        """Return whether there is a program of the model as it is now."""
        if self._reading is not None and self._reading.weights.are_current():
            self.reason = ""
            return True
        model: Any = self._model()
        self._calls_left -= 1
        if self._is_unknown or self._calls_left > 0 or model is None:
            return False
        hooked = self._look_ahead()
        hooks = {} if hooked is None else dict.fromkeys(self._paths, 1)
        kernels = {
            path: (layer.layer, layer.kernel)
            for path, layer in self._paths.items()
            if isinstance(layer.kernel, SlotKernel)
        }
        try:
            reading = read_recipe(model, kernels, hooks)
            self._program = Program(reading.recipe, self._runtime.cache)
        except (NoRecipeError, ConfigError) as error:
            self._is_unknown = isinstance(error, (UnknownFamilyError, ConfigError))
            # Reading takes as long as a token or two; hooks and adapters may stay or go.
            self._calls_left, self._pause = self._pause, min(2 * self._pause, _MOST_CALLS)
            if self.reason != str(error):
                self.reason = str(error)
                logger.info("transformers.no_recipe model=%s: %s", type(model).__name__, error)
            return False
        self._reading, self.reason, self._pause = reading, "", 1
        self._hidden = torch.from_numpy(self._program.hidden)
        self._rotary = _Rotary(reading.rotary, reading.rotary_width)
        return True

    def _compute(
        self,
        ids: torch.Tensor,
        cache: Any,
        length: int,
        begins: np.ndarray,
        positions: np.ndarray,
        num_logits: int,
    ) -> torch.Tensor | None:
        program, reading, rotary = self._program, self._reading, self._rotary
        assert program is not None
        assert reading is not None
        assert rotary is not None
        self._runtime.steps.check_usable()
        each = ids.shape[1]
        pages = self._pages.of(cache, length, each)
        if pages is None or len(pages) != len(reading.recipe.layers):
            return None
        hidden = self._hidden[: ids.numel()]
        hidden.copy_(reading.embedding(ids).view(ids.numel(), -1))
        if reading.recipe.embedding_scale != 1:
            hidden.mul_(reading.recipe.embedding_scale)
        cos, sin = rotary.angles(positions)
        observe = self._observer(program)
        program.begin(pages, length, each, begins, cos, sin, observe, is_spread=self._is_spread)
        missed = program.run()
        while missed >= 0:
            self._wait_for(missed, program, ids.numel())
            program.resume()
            missed = program.run()
        logits = torch.from_numpy(program.logits_of(num_logits))
        if reading.recipe.logits_scale != 1:
            logits.div_(reading.recipe.logits_scale)
        # All layers or none: a cache whose layers differ in length is no cache.
        with uninterrupted():
            self._pages.grow(each)
        self._count(program, reading)
        return logits

    def _wait_for(self, number: int, program: Program, num_rows: int) -> None:
        """Compute a layer's experts as they arrive, from the disk or from other ranks."""
        layer = self._layers[number]
        kernel = layer.kernel
        assert isinstance(kernel, SlotKernel)
        if num_rows == 1 and layer.ranks is None:
            self._compute_token(number, program, kernel)
            layer.num_products += program.ids.shape[1]
            return
        hidden = torch.from_numpy(program.normed[:num_rows])
        ids = torch.from_numpy(program.ids[:num_rows])
        self._note(number, program)
        rows, num_experts = fast_rows(self._runtime, number, kernel, hidden, ids, layer.ranks)
        program.rows[: len(rows)] = rows.numpy()
        layer.num_products += num_experts

    def _compute_token(self, number: int, program: Program, kernel: SlotKernel) -> None:
        """Compute a token's experts, those that are resident first."""
        self._note(number, program)

        def compute(slots: np.ndarray, places: list[int]) -> None:
            kernel.count(len(places), program.compute(slots, places))

        self._runtime.steps.compute_token(number, program.ids[:1], compute)

    def _observer(self, program: Program) -> Callable[[int, np.ndarray, None], object] | None:
        """Return what is told of resident steps; nothing is where nothing more can be read."""
        observe = self._runtime.steps.observer()
        if observe is None:
            return None

        def tell(layer: int, ids: np.ndarray, sequences: None) -> None:
            self._note(layer, program)
            observe(layer, ids, sequences)

        return tell

    def _note(self, layer: int, program: Program) -> None:
        """Let the next layer's router foresee what it will choose."""
        look_ahead = self._look_ahead()
        if look_ahead is not None and self._runtime.steps.observer() is not None:
            look_ahead.follow(layer, program.foresee)

    def _count(self, program: Program, reading: Reading) -> None:
        num_resident = 0
        for busy_ns, made in zip(program.busy_ns.tolist(), reading.recipe.layers, strict=True):
            if busy_ns and made.router is not None:
                layer = self._layers[made.number]
                layer.num_products += made.router.top_k
                assert isinstance(layer.kernel, SlotKernel)
                layer.kernel.count(made.router.top_k, busy_ns)
                num_resident += 1
        if num_resident:
            self._runtime.steps.count_leased(num_resident)


class _Rotary:
    """Angles of positions, from a model's own module; kept where they depend on nothing else."""

    def __init__(self, module: Any, width: int) -> None:
        self._module, self._width = module, width
        self._is_static = getattr(module, "rope_type", None) in _STATIC
        self._cos = self._sin = np.empty((0, 0), np.float32)

    def angles(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines, float32 [num_positions, width / 2] each."""
        if not self._is_static:
            return self._compute(positions)
        most = int(positions.max())
        if most >= len(self._cos):
            num = (most // _POSITIONS + 1) * _POSITIONS
            self._cos, self._sin = self._compute(np.arange(num))
        return self._cos[positions], self._sin[positions]

    def _compute(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        like = torch.empty((1, 1, 1), dtype=torch.float32)
        found = self._module(like, torch.from_numpy(positions)[None])
        # A pair has one angle: twice if the module says it for each number, once as a complex one.
        pair = (found.real, found.imag) if isinstance(found, torch.Tensor) else found
        cos, sin = (part.reshape(len(positions), -1)[:, : self._width // 2] for part in pair)
        return cos.float().contiguous().numpy(), sin.float().contiguous().numpy()


def _begins(mask: Any, batch: int, length: int, each: int) -> np.ndarray | None:
    """Return the first position that each sequence sees; `None` if a mask hides others, too."""
    if mask is None:
        return np.zeros(batch, np.int64)
    if not isinstance(mask, torch.Tensor) or mask.shape != (batch, length + each):
        return None
    seen = mask.numpy() != 0
    num_hidden = (length + each) - seen.sum(1)
    # Padding on the left, and nothing else.
    if num_hidden.max() > length or any(
        seen[row, :num].any() for row, num in enumerate(num_hidden.tolist())
    ):
        return None
    return num_hidden.astype(np.int64)


def _positions(given: Any, batch: int, length: int, each: int) -> np.ndarray | None:
    """Return each row's position; `None` if they are of another form."""
    if given is None:
        return np.tile(np.arange(length, length + each), batch)
    if not isinstance(given, torch.Tensor) or given.dtype != torch.int64:
        return None
    if given.dim() == 3 and given.shape[0] in (1, 3, 4):
        # Time, height and width of a picture, after the place in the text; text has one for all.
        planes = given[-3:].numpy()
        if (planes != planes[:1]).any():
            return None
        given = given[-1]
    if given.dim() != 2 or given.shape[1] != each or given.shape[0] not in (1, batch):
        return None
    positions: np.ndarray = given.expand(batch, each).reshape(-1).numpy()
    return positions if positions.min() >= 0 else None


def install(model: Any, decoder: Decoder) -> None:
    """Have a decoder compute what it can of a model's forward."""
    own = type(model).forward
    signature = inspect.signature(own)
    names = list(signature.parameters)[1:]
    reference = weakref.ref(model)

    @functools.wraps(own)
    def forward(*given: Any, **named: Any) -> Any:
        model = reference()
        if torch.compiler.is_compiling():
            return own(model, *given, **named)
        found = decoder.step({**dict(zip(names, given, strict=False)), **named})
        return own(model, *given, **named) if found is None else found

    shown: Any = forward
    shown.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    model.__dict__["forward"] = forward


def uninstall(model: Any) -> None:
    """Give a model its own forward back."""
    model.__dict__.pop("forward", None)
