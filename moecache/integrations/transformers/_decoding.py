"""A token as one call: a model's forward computed by a program, where it has a recipe for it."""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from moecache.decoding._held import KeyValues, States
from moecache.decoding._program import MAX_ROWS, Program
from moecache.decoding.look_ahead import observer
from moecache.decoding.program_model import PROMPT_TOKENS, Computation
from moecache.errors import ConfigError
from moecache.integrations.transformers._asked import Asked, find, is_plain
from moecache.integrations.transformers._cache_layers import TYPES, growth
from moecache.integrations.transformers._fast import fast_rows
from moecache.integrations.transformers._lookahead import RouterLookAhead
from moecache.integrations.transformers._pages import Pages
from moecache.integrations.transformers._places import Rotary
from moecache.integrations.transformers._prompting import in_parts
from moecache.integrations.transformers._rows import are_rows_apart
from moecache.integrations.transformers._slots import SlotLayer
from moecache.integrations.transformers.prompts import (
    NOT_CAUSAL,
    make_room,
)
from moecache.integrations.transformers.recipes import (
    NoRecipeError,
    Reading,
    UnknownFamilyError,
    read_recipe,
)
from moecache.interrupts import uninterrupted
from moecache.kernels import SlotKernel
from moecache.kernels.forms import takes_integers
from moecache.runtime.runtime import ExpertRuntime

if TYPE_CHECKING:
    import transformers

logger = logging.getLogger(__name__)

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
        self._is_unknown = self._are_rows_apart = self._reads_prompts = False
        self._counting = threading.Lock()
        self.reason = ""
        self.num_steps = 0

    def describe(self) -> str:
        """Return a line that says how tokens are computed."""
        if self.reason:
            return f"tokens go through the model's modules: {self.reason}"
        prompts = ", and prompts go by the program, too" if self._reads_prompts else ""
        return f"tokens are one call each; {self.num_steps} were{prompts}"

    def is_ready(self) -> bool:
        """Return whether the model has a recipe as it is now; `reason` says why not."""
        with self._lock:
            return self._is_ready()

    def reads_prompts(self) -> bool:
        """Return whether a program computes prompts, too, as the model is now."""
        with self._lock:
            return self._is_ready() and self._reads_prompts

    def are_rows_apart(self) -> bool:
        """Return whether a prompt's rows have the same bits wherever it is cut."""
        with self._lock:
            return self._is_ready() and self._are_rows_apart

    def step(self, named: dict[str, Any]) -> MoeCausalLMOutputWithPast | None:
        """Return a forward's result; `None` if it is not one that a program computes."""
        asked = find(self._model(), named)
        if asked is None:
            return None
        num_rows, cache = asked.ids.numel(), asked.cache
        is_step = asked.length > 0 and num_rows <= MAX_ROWS
        with self._lock:
            if not self._is_ready() or not (is_step or self._reads_prompts):
                return None
            found = self._compute_step(asked) if is_step else self._compute_prompt(asked)
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
        model = self._model()
        if model is None or not is_plain(model, {"position_ids": places}):
            return None
        make_room(model, sum([growth(length, 1) for length in lengths]))
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
            self.num_steps += found is not None
        return None if found is None else found[:, 0]

    def _name(self, cache: Cache) -> int:
        """Return the number of a sequence, which it keeps as long as its cache lives."""
        name = self._names.get(cache)
        if name is None:
            name = self._names[cache] = next(self._new_names)
        return name

    def _is_ready(self) -> bool:
        """Return whether there is a program of the model as it is now."""
        if self._reading is not None and self._reading.weights.are_current():
            self.reason, self._calls_left, self._pause = "", 0, 1
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
        self._reads_prompts = (
            model.dtype in TYPES
            and self._rotary.is_static
            and model.config.model_type not in NOT_CAUSAL
            and takes_integers(self._runtime.layout)
        )
        return True

    def _compute_step(self, asked: Asked) -> np.ndarray | None:
        found = self._compute_asked(asked)
        self.num_steps += found is not None
        return found

    def _compute_prompt(self, asked: Asked) -> np.ndarray | None:
        assert self._reading is not None
        recipe, model = self._reading.recipe, self._model()
        batch, each = asked.ids.shape
        size = min(each, max(1, PROMPT_TOKENS // batch))
        if model is None:
            return None
        program = None
        if batch * size > MAX_ROWS:
            # A prompt's memory is its own, and goes with it.
            program = Program(recipe, self._runtime.cache, batch * size)
        return in_parts(
            asked,
            size,
            recipe.layers,
            model.dtype,
            lambda part: self._compute_asked(part, program),
        )

    def _compute_asked(self, asked: Asked, program: Program | None = None) -> np.ndarray | None:
        return self._compute(
            asked.ids.flatten().tolist(),
            [asked.cache],
            [asked.length],
            asked.begins,
            asked.positions,
            asked.num_logits,
            program,
        )

    def _compute(
        self,
        ids: list[int],
        caches: Sequence[Cache],
        lengths: list[int],
        begins: np.ndarray | None,
        positions: np.ndarray,
        num_logits: int,
        program: Program | None = None,
    ) -> np.ndarray | None:
        """Return logits; sequences of one cache begin at `begins`, or each has a cache."""
        program, reading, rotary = program or self._program, self._reading, self._rotary
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
        look_ahead = self._look_ahead() if num_rows <= MAX_ROWS else None
        observe = observer(self._runtime.steps, program, look_ahead)
        names = self._sequences
        if names is None and num_rows <= MAX_ROWS:
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
        try:
            missed = program.run()
            while missed >= 0:
                if num_rows <= MAX_ROWS:
                    self._note(missed, program)
                self.wait_for(missed, program, num_rows, self._sequences)
                program.resume()
                missed = program.run()
        except BaseException:
            # It would hold keys and values up to the next call.
            program.abandon()
            raise
        logits = program.logits_of(num_logits)
        # All layers or none: a cache whose layers differ in length is no cache.
        with uninterrupted():
            for cache in caches:
                self._pages.grow(cache, each)
        if program.num_resident:
            self._runtime.steps.count_leased(program.num_resident)
        self.counted(program, 0)
        return logits

    def counted(self, program: Program, num_steps: int) -> None:
        """Note what a call has computed."""
        self.num_steps += num_steps
        if program is not self._program:
            self._note_counts(program)

    def wait_for(
        self, number: int, program: Program, num_rows: int, names: np.ndarray | None
    ) -> None:
        """Compute a layer's experts as they arrive, from the disk or from other ranks."""
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
        )
        if rows is not into:
            into.copy_(rows)
        layer.num_products += num_experts

    def _compute_token(
        self, number: int, program: Program, kernel: SlotKernel, names: np.ndarray | None
    ) -> None:
        """Compute a token's experts, those that are resident first."""

        def compute(slots: np.ndarray, places: list[int]) -> None:
            kernel.count(len(places), program.compute(slots, places))

        self._runtime.steps.compute_token(number, program.ids[:1], compute, names)

    def _note(self, layer: int, program: Program) -> None:
        """Let the next layer's router foresee what it will choose."""
        look_ahead = self._look_ahead()
        if look_ahead is not None and self._runtime.steps.observer() is not None:
            look_ahead.follow(layer, program.foresee)

    def note_counts(self) -> None:
        """Have each layer's counters know what programs have computed."""
        if self._program is not None:
            self._note_counts(self._program)

    def _note_counts(self, program: Program) -> None:
        with self._counting:
            for number, num_products, num_single, busy_ns in program.take_counts():
                layer = self._layers[number]
                layer.num_products += num_products
                assert isinstance(layer.kernel, SlotKernel)
                layer.kernel.count(num_single, busy_ns)

    @contextmanager
    def computing(self) -> Iterator[Computation]:
        """Return what computes texts, for one caller at a time.

        Raises
        ------
        ConfigError
            If the model, as it is now, has no program that reads prompts.
        """
        with self._lock:
            if not self._is_ready() or not self._reads_prompts:
                reason = self.reason or "their prompts go through the model's modules"
                raise ConfigError(f"texts of this model are not a program's: {reason}")
            assert self._reading is not None
            assert self._program is not None
            assert self._rotary is not None
            yield Computation(
                self._reading.recipe,
                self._program,
                self._reading.embed,
                self._rotary.angles,
                self._look_ahead(),
            )
