"""Decoder: a model's forward computed by a program, where it has a recipe for it."""

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
from moecache.integrations.transformers._asked import Asked, is_plain
from moecache.integrations.transformers._cache_layers import growth, is_dynamic
from moecache.integrations.transformers._current import Current, Found
from moecache.integrations.transformers._layer_experts import LayerExperts
from moecache.integrations.transformers._lookahead import RouterLookAhead
from moecache.integrations.transformers._padding import Ragged
from moecache.integrations.transformers._pages import Pages
from moecache.integrations.transformers._places import are_own
from moecache.integrations.transformers._prompting import in_parts, part_stops
from moecache.integrations.transformers._slots import SlotLayer
from moecache.integrations.transformers.prompts import (
    make_room,
)
from moecache.interrupts import uninterrupted
from moecache.runtime.runtime import ExpertRuntime

if TYPE_CHECKING:
    import transformers

logger = logging.getLogger(__name__)

# Names of sequences are below those of a batch's rows: see `runtime.batch`.
_NUM_NAMES = 1 << 30


class Decoder:
    """Computes new tokens by a program, in the place of a model's forward.

    A few behind a cache, and prompts. What it does not take is computed as before: caches of other
    kinds, gradients, hooks, arguments that it does not know.

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
    experts : LayerExperts
        Computes those that a program waits for.
    num_steps : int
        Calls for a few new tokens behind a cache that a program computed.
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
        self.experts = LayerExperts(runtime, layers)
        paths_of = dict(zip(paths, layers, strict=True))
        self._look_ahead = look_ahead
        # Whoever is told how far a prompt is may ask.
        self._lock = threading.RLock()
        self._pages = Pages(MAX_ROWS)
        # Each sequence's name, as long as its cache lives; those of the call's rows.
        self._names: weakref.WeakKeyDictionary[Cache, int] = weakref.WeakKeyDictionary()
        self._new_names = itertools.cycle(range(_NUM_NAMES))
        self._sequences: np.ndarray | None = None
        self._current = Current(model, runtime, paths_of, look_ahead, self.experts.count)
        self.num_steps = 0

    @property
    def reason(self) -> str:
        """Why the model has no recipe, or had none when it was asked last; empty if it has one."""
        return self._current.reason

    def describe(self) -> str:
        """Return a line that says how tokens and prompts are computed."""
        if self.reason:
            return f"tokens go through the model's modules: {self.reason}"
        last = self._current.last
        prompts = ", and prompts go by the program, too" if last and last.reads_prompts else ""
        return f"tokens are one call each; {self.num_steps} were{prompts}"

    def is_ready(self) -> bool:
        """Return whether the model has a recipe as it is now; `reason` says why not."""
        return self._found() is not None

    def reads_prompts(self) -> bool:
        """Return whether a program computes prompts, too, as the model is now."""
        found = self._found()
        return found is not None and found.reads_prompts

    def num_recipes(self) -> int:
        """Return how many recipes were read: one more once a weight has been replaced."""
        self._found()
        return self._current.num_found

    def are_rows_apart(self) -> bool:
        """Return whether rows of a prompt have the same bits in modules wherever it is cut."""
        found = self._found()
        return found is not None and found.are_rows_apart

    def _found(self) -> Found | None:
        self._check_process()
        with self._lock:
            return self._current.find()

    def _check_process(self) -> None:
        """Raise an error in a child, where a lock of the parent's may never be released."""
        if self._runtime.steps.is_forked:
            self._runtime.steps.check_usable()

    def step(self, asked: Asked) -> MoeCausalLMOutputWithPast | None:
        """Return a forward's result; `None` if it is not one that a program computes.

        Parameters
        ----------
        asked : Asked

        Raises
        ------
        StoreError
            If an expert cannot be read. The cache is as it was.
        """
        num_rows, cache = asked.ids.numel(), asked.cache
        is_step = asked.length > 0 and num_rows <= MAX_ROWS
        self._check_process()
        with self._lock:
            found = self._current.find()
            if found is None or not (is_step or found.reads_prompts):
                return None
            if is_step:
                logits = self._compute_asked(found, asked)
                self.num_steps += logits is not None
            else:
                logits = self._compute_prompt(found, asked)
        if logits is None:
            return None
        return MoeCausalLMOutputWithPast(logits=torch.from_numpy(logits), past_key_values=cache)

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
        self._check_process()
        with self._lock:
            current = self._current.find()
            if current is None:
                return None
            self._sequences = np.array([self._name(cache) for cache in caches], np.int32)
            try:
                found = self._compute(
                    current, list(ids), caches, lengths, None, np.array(places, np.int64), 1
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

    def _compute_prompt(self, how: Found, asked: Asked) -> np.ndarray | None:
        recipe, model = how.reading.recipe, self._model()
        if model is None or not is_dynamic(asked.cache):
            return None
        stops, most = part_stops(asked, PROMPT_TOKENS)
        program = how.program
        if most > MAX_ROWS:
            # A prompt's memory is its own, and goes with it.
            program = Program(recipe, self._runtime.cache, most)
        logits = None
        try:
            logits = in_parts(
                asked,
                stops,
                recipe.layers,
                model.dtype,
                lambda part: self._compute_asked(how, part, program),
            )
        finally:
            if logits is None:
                # Its layers are others, and what they had grown to is not kept.
                self._pages.forget(asked.cache)
        return logits

    def _compute_asked(
        self, how: Found, asked: Asked, program: Program | None = None
    ) -> np.ndarray | None:
        return self._compute(
            how,
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
        how: Found,
        ids: list[int],
        caches: Sequence[Cache],
        lengths: list[int],
        begins: np.ndarray | None,
        positions: np.ndarray,
        num_logits: int,
        program: Program | None = None,
    ) -> np.ndarray | None:
        """Return logits; sequences of one cache begin at `begins`, or each has a cache."""
        program, reading, rotary = program or how.program, how.reading, how.rotary
        self._runtime.steps.check_usable()
        each = 1 if begins is None else len(ids) // len(begins)
        ragged = Ragged.find(begins, lengths[0], each)
        pages: list[list[KeyValues | States | None]] = []
        for cache, length in zip(caches, lengths, strict=True):
            found = self._pages.of(cache, length, each)
            if found is None or len(found) != len(reading.recipe.layers):
                return None
            pages.append(found)
        if begins is None and not self._pages.are_alike(caches):
            return None
        if reading.recipe.counts_positions and not are_own(positions, lengths, begins):
            return None
        if ragged is not None:
            ragged.clear(caches[0].layers)
            ids, positions = [ids[row] for row in ragged.rows], positions[ragged.rows]
        num_rows = len(ids)
        reading.embed(ids, program.hidden[:num_rows])
        cos, sin = rotary.angles(positions, apart=begins is None)
        look_ahead = self._look_ahead() if num_rows <= MAX_ROWS else None
        observe = observer(self._runtime.steps, program, look_ahead)
        names = self._sequences
        if ragged is not None:
            names = ragged.names(self._runtime.steps.names_of(len(ragged.begins)))
        elif names is None:
            names = self._runtime.steps.names_of(num_rows)
        where: dict[str, Any] = {
            "observe": observe,
            "sequences": names,
            "is_spread": self.experts.are_spread,
        }
        try:
            if ragged is not None:
                where |= {"counts": ragged.counts, "begins": ragged.begins[ragged.texts]}
                program.begin_together(ragged.pages(pages[0]), ragged.lengths, cos, sin, **where)
            elif begins is None:
                program.begin_together(pages, np.array(lengths), cos, sin, **where)
            else:
                program.begin(pages[0], lengths[0], each, begins, cos, sin, **where)
        except ConfigError:
            # A cache that was made with other windows, say.
            return None
        self._run(program, num_rows, self._sequences if ragged is None else names)
        logits = program.logits_of(num_logits)
        # All layers or none: a cache whose layers differ in length is no cache.
        with uninterrupted():
            for cache in caches:
                self._pages.grow(cache, each)
        if program.num_resident:
            self._runtime.steps.count_leased(program.num_resident)
        self.counted(program, 0)
        return logits

    def _run(self, program: Program, num_rows: int, names: np.ndarray | None) -> None:
        """Compute a call that has begun; its rows' sequences are told if they are no batch's."""
        try:
            missed = program.run()
            while missed >= 0:
                if num_rows <= MAX_ROWS:
                    self._note(missed, program)
                self.experts.wait_for(missed, program, num_rows, names)
                program.resume()
                missed = program.run()
        except BaseException:
            # It would hold keys and values up to the next call.
            program.abandon()
            raise

    def counted(self, program: Program, num_steps: int) -> None:
        """Note what a call has computed.

        Parameters
        ----------
        program : Program
            Whose call it was.
        num_steps : int
            1 if it was for texts' next tokens, 0 if it was a prompt's.
        """
        self.num_steps += num_steps
        if len(program.hidden) > MAX_ROWS:
            self.experts.count(program)

    def _note(self, layer: int, program: Program) -> None:
        """Let the next layer's router foresee what it will choose."""
        look_ahead = self._look_ahead()
        if look_ahead is not None and self._runtime.steps.observer() is not None:
            look_ahead.follow(layer, program.foresee)

    def note_counts(self) -> None:
        """Have each layer's counters know what programs have computed."""
        last = self._current.last
        if last is not None:
            self.experts.count(last.program)

    @contextmanager
    def computing(self) -> Iterator[Computation]:
        """Give what computes texts, for one thread at a time.

        Yields
        ------
        Computation
            Of the model as it is now.

        Raises
        ------
        ConfigError
            If the model, as it is now, has no program that reads prompts.
        """
        self._check_process()
        with self._lock:
            found = self._current.find()
            if found is None or not found.reads_prompts:
                reason = self.reason or "their prompts go through the model's modules"
                raise ConfigError(f"texts of this model are not a program's: {reason}")
            yield Computation(
                found.reading.recipe,
                found.program,
                found.reading.embed,
                found.rotary.angles,
                self._look_ahead(),
            )
