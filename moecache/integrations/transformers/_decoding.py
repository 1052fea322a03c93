"""A token as one call: a model's forward computed by a program, where it has a recipe for it."""

import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules import module
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from moecache.decoding._held import KeyValues, States
from moecache.decoding._program import MAX_ROWS, Program
from moecache.decoding.look_ahead import observer
from moecache.errors import ConfigError
from moecache.integrations.transformers._cache_layers import growth
from moecache.integrations.transformers._fast import fast_rows
from moecache.integrations.transformers._lookahead import RouterLookAhead
from moecache.integrations.transformers._operators import is_transformed
from moecache.integrations.transformers._pages import Pages
from moecache.integrations.transformers._places import Rotary, begins_of, positions_of
from moecache.integrations.transformers._rows import are_rows_apart
from moecache.integrations.transformers._slots import SlotLayer
from moecache.integrations.transformers.prompts import (
    cuts,
    has_pages,
    is_paged,
    make_room,
    new_cache,
    read_prompt,
    span_pages,
)
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
# Names of sequences are below those of a batch's rows: see `runtime.batch`.
_NUM_NAMES = 1 << 30
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
        self._pages = Pages(MAX_ROWS)
        # Each sequence's name, as long as its cache lives; those of the call's rows.
        self._names: weakref.WeakKeyDictionary[Cache, int] = weakref.WeakKeyDictionary()
        self._new_names = itertools.cycle(range(_NUM_NAMES))
        self._sequences: np.ndarray | None = None
        self._reading: Reading | None = None
        self._program: Program | None = None
        self._rotary: Rotary | None = None
        # Calls until a model that has no recipe as it is now is asked again.
        self._calls_left, self._pause = 0, 1
        self._is_unknown = self._are_rows_apart = False
        self._counting = threading.Lock()
        self.reason = ""
        self.num_steps = 0

    def describe(self) -> str:
        """Return a line that says how tokens are computed."""
        if self.reason:
            return f"tokens go through the model's modules: {self.reason}"
        return f"tokens are one call each; {self.num_steps} were"

    def is_ready(self) -> bool:
        """Return whether the model has a recipe as it is now; `reason` says why not."""
        with self._lock:
            return self._is_ready()

    def are_rows_apart(self) -> bool:
        """Return whether a prompt's rows have the same bits wherever it is cut."""
        with self._lock:
            return self._is_ready() and self._are_rows_apart

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
        begins = begins_of(named.get("attention_mask"), batch, length, each)
        positions = positions_of(named.get("position_ids"), batch, length, each)
        wanted = named.get("logits_to_keep", 0)
        if begins is None or positions is None or not isinstance(wanted, int) or wanted < 0:
            return None
        with self._lock:
            if not self._is_ready():
                return None
            num_logits = min(wanted, each) or each
            tokens = ids.flatten().tolist()
            found = self._compute(tokens, [cache], [length], begins, positions, num_logits)
        if found is None:
            return None
        return MoeCausalLMOutputWithPast(logits=torch.from_numpy(found), past_key_values=cache)

    @torch.no_grad()
    def step_together(
        self,
        ids: Sequence[int],
        caches: Sequence[Cache],
        positions: Sequence[int] | None = None,
    ) -> np.ndarray | None:
        """Compute a new token of each of some sequences, which have caches of their own.

        A row's bits are those that it has alone. What hits or misses is counted once, for all of
        them; a policy is told which row is of which sequence.

        Parameters
        ----------
        ids : sequence of int
            The new token of each sequence, 1 to 16 of them.
        caches : sequence of DynamicCache
            What each sequence has read so far, a token or more. The new tokens are written there.
        positions : sequence of int, optional
            Of the new tokens; by default as many as a cache has tokens.

        Returns
        -------
        ndarray of float32, shape [num_sequences, vocabulary], or None
            The logits after each token; `None` if the model has no recipe, or a cache is of
            another kind, or in use for several sequences.

        Raises
        ------
        ConfigError
            If there are none or too many, or two have one cache.
        StoreError
            If an expert cannot be read. All caches are as they were.
        """
        num = len(ids)
        if not 1 <= num <= MAX_ROWS or len(caches) != num:
            raise ConfigError(f"{num} tokens and {len(caches)} caches; 1 to {MAX_ROWS} decode")
        if len({id(cache) for cache in caches}) != num:
            raise ConfigError("two sequences have one cache; each needs its own")
        lengths = [cache.get_seq_length() for cache in caches]
        if not all(isinstance(length, int) and length >= 1 for length in lengths):
            return None
        places = lengths if positions is None else list(positions)
        if len(places) != num or min(places) < 0:
            raise ConfigError(f"positions {places} are none of {num} tokens")
        if not self._is_plain({"position_ids": places}):
            return None
        make_room(self._model(), sum([growth(length, 1) for length in lengths]))
        with self._lock:
            if not self._is_ready():
                return None
            self._sequences = np.array([self._name(cache) for cache in caches], np.int32)
            try:
                found = self._compute(
                    list(ids), caches, lengths, None, np.array(places, np.int64), 1
                )
            finally:
                self._sequences = None
        return None if found is None else found[:, 0]

    def _name(self, cache: Cache) -> int:
        """Return the number of a sequence, which it keeps as long as its cache lives."""
        name = self._names.get(cache)
        if name is None:
            name = self._names[cache] = next(self._new_names)
        return name

    def read(
        self, forward: Callable[..., Any], named: dict[str, Any]
    ) -> MoeCausalLMOutputWithPast | None:
        """Return the result of a prompt that is cut into pages; `None` if it is no such prompt."""
        ids, cache = named.get("input_ids"), named.get("past_key_values")
        model: Any = self._model()
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != 1 or model is None:
            return None
        if cache is None and len(cuts(0, ids.shape[1])) < 2:
            return None
        if not self._is_plain(named) or not has_pages(model):
            return None
        cache = new_cache(model) if cache is None else cache
        if not is_paged(cache):
            return None
        length, each = cache.get_seq_length(), ids.shape[1]
        begins = begins_of(named.get("attention_mask"), 1, length, each)
        positions = positions_of(named.get("position_ids"), 1, length, each)
        wanted = named.get("logits_to_keep", 0)
        if (
            begins is None
            or begins.any()
            or positions is None
            or (positions != np.arange(length, length + each)).any()
            or not isinstance(wanted, int)
            or wanted < 0
            or len(cuts(length, length + each)) < 2
        ):
            return None
        logits = read_prompt(
            forward,
            ids,
            cache,
            num_logits=min(wanted, each),
            num_pages=functools.partial(span_pages, model),
        )
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
            # Of all modules: those that follow one are looked at with the weights.
            or module._has_any_global_hook()
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
            program = Program(reading.recipe, self._runtime.cache)
        except (NoRecipeError, ConfigError) as error:
            self._is_unknown = isinstance(error, UnknownFamilyError)
            # Reading takes as long as a token or two; hooks and adapters may stay or go.
            self._calls_left, self._pause = self._pause, min(2 * self._pause, _MOST_CALLS)
            if self.reason != str(error):
                self.reason = str(error)
                logger.info("transformers.no_recipe model=%s: %s", type(model).__name__, error)
            return False
        self.note_counts()
        self._program, self._reading, self.reason, self._pause = program, reading, "", 1
        experts = {model.get_submodule(path) for path in self._paths}
        self._are_rows_apart = are_rows_apart(model, reading.recipe, experts)
        self._rotary = Rotary(reading.rotary, reading.rotary_width)
        return True

    def _compute(
        self,
        ids: list[int],
        caches: Sequence[Cache],
        lengths: list[int],
        begins: np.ndarray | None,
        positions: np.ndarray,
        num_logits: int,
    ) -> np.ndarray | None:
        """Return logits; sequences of one cache begin at `begins`, or each has a cache."""
        program, reading, rotary = self._program, self._reading, self._rotary
        assert program is not None
        assert reading is not None
        assert rotary is not None
        self._runtime.steps.check_usable()
        num_rows = len(ids)
        each = 1 if begins is None else num_rows // len(begins)
        pages: list[list[KeyValues | States | None]] = []
        for cache, length in zip(caches, lengths, strict=True):
            found = self._pages.of(cache, length, each)
            if found is None or len(found) != len(reading.recipe.layers):
                return None
            pages.append(found)
        if begins is None and not self._pages.are_alike(caches):
            return None
        hidden = program.hidden[:num_rows]
        reading.embed(ids, hidden)
        cos, sin = rotary.angles(positions, apart=begins is None)
        observe = observer(self._runtime.steps, program, self._look_ahead())
        names = self._sequences
        if names is None:
            names = self._runtime.steps.names_of(num_rows)
        where: dict[str, Any] = {
            "observe": observe,
            "sequences": names,
            "is_spread": self._is_spread,
        }
        try:
            if begins is None:
                program.begin_together(pages, np.array(lengths), cos, sin, **where)
            else:
                program.begin(pages[0], lengths[0], each, begins, cos, sin, **where)
        except ConfigError:
            # A cache that was made with other windows, say.
            return None
        missed = program.run()
        while missed >= 0:
            self._wait_for(missed, program, num_rows)
            program.resume()
            missed = program.run()
        logits = program.logits_of(num_logits)
        # All layers or none: a cache whose layers differ in length is no cache.
        with uninterrupted():
            for cache in caches:
                self._pages.grow(cache, each)
        if program.num_resident:
            self._runtime.steps.count_leased(program.num_resident)
        self.num_steps += 1
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
        hidden = torch.from_numpy(program.given[:num_rows])
        ids = torch.from_numpy(program.ids[:num_rows])
        self._note(number, program)
        rows, num_experts = fast_rows(
            self._runtime, number, kernel, hidden, ids, layer.ranks, sequences=self._sequences
        )
        program.rows[: len(rows)] = rows.numpy()
        layer.num_products += num_experts

    def _compute_token(self, number: int, program: Program, kernel: SlotKernel) -> None:
        """Compute a token's experts, those that are resident first."""
        self._note(number, program)

        def compute(slots: np.ndarray, places: list[int]) -> None:
            kernel.count(len(places), program.compute(slots, places))

        self._runtime.steps.compute_token(number, program.ids[:1], compute, self._sequences)

    def _note(self, layer: int, program: Program) -> None:
        """Let the next layer's router foresee what it will choose."""
        look_ahead = self._look_ahead()
        if look_ahead is not None and self._runtime.steps.observer() is not None:
            look_ahead.follow(layer, program.foresee)

    def note_counts(self) -> None:
        """Have each layer's counters know what programs have computed."""
        with self._counting:
            if self._program is None:
                return
            for number, num_products, num_single, busy_ns in self._program.take_counts():
                layer = self._layers[number]
                layer.num_products += num_products
                assert isinstance(layer.kernel, SlotKernel)
                layer.kernel.count(num_single, busy_ns)
