"""ProgramModel: texts that a program reads and goes on with, each from a cache of its own."""

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from moecache.decoding._program import MAX_ROWS, Program
from moecache.decoding.attending import Stateful
from moecache.decoding.embedding import Embed
from moecache.decoding.look_ahead import LookAhead, observer
from moecache.decoding.prefixes import Page, num_positions
from moecache.decoding.recipe import Recipe
from moecache.decoding.room import room_behind
from moecache.decoding.states_cache import empty_cache
from moecache.decoding.text_cache import TextCache
from moecache.errors import ConfigError
from moecache.runtime.runtime import ExpertRuntime

# Tokens of a prompt that go through a layer together: its experts are read once for all of them.
PROMPT_TOKENS = 512
_NONE: np.ndarray = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Computation:
    """What computes a model's texts, as the model is now.

    Parameters
    ----------
    recipe : Recipe
        Of the model's layers.
    step : Program
        The recipe's, of up to 16 tokens.
    embed : Embed
        Writes hidden states of tokens.
    angles : callable (positions)
        Returns cosines and sines, float32 [num_positions, width / 2] each.
    look_ahead : LookAhead or None
        Foresees experts of next layers; `None` where nothing is read ahead.
    """

    recipe: Recipe
    step: Program
    embed: Embed
    angles: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    look_ahead: LookAhead | None


class ProgramModel(ABC):
    """A model whose texts a program computes, prompts and tokens.

    A token's bits depend neither on where a prompt is cut, nor on slots, threads or other texts.

    Parameters
    ----------
    runtime : ExpertRuntime
    context : int or None
        Positions that a text may have; `None` if there is no end.
    recipe : Recipe
        Of the model as it is now.
    kinds : (str, str)
        Of keys and values, and of rows that convolutions see: "bf16" or "f32".

    Attributes
    ----------
    runtime, context
        What was given.
    """

    # Says whether pages are of the model's own making; see `PrefixCache`.
    way = "program"

    def __init__(
        self,
        runtime: ExpertRuntime,
        context: int | None,
        recipe: Recipe,
        kinds: tuple[str, str],
    ) -> None:
        self.runtime, self.context = runtime, context
        self._recipe, self._kinds = recipe, kinds

    @property
    @abstractmethod
    def ends(self) -> Collection[int]:
        """Tokens with which the model ends its texts."""

    @property
    def num_layers(self) -> int:
        """Number of layers, those without experts among them."""
        return len(self._recipe.layers)

    @property
    def has_states(self) -> bool:
        """Whether layers hold states, which belong to all tokens before them."""
        return any(isinstance(layer.attention, Stateful) for layer in self._recipe.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values."""
        return self._empty_cache(None).bytes_per_token

    def check_room(self, num_tokens: int) -> int | None:
        """Return how many tokens fit behind so many, `None` if there is no end.

        Raises
        ------
        ConfigError
            If none does.
        """
        return room_behind(num_tokens, self.context)

    def new_cache(
        self, known: Sequence[Page] = (), num_tokens: int = 0, name: int | None = None
    ) -> TextCache:
        """Return a cache, for a text.

        Parameters
        ----------
        known : sequence of Page, optional
            Keys and values of the text's first tokens, which begins by this call then. Pages that
            are none of this model's, and those behind them, are left out.
        num_tokens : int, default 0
            Of the whole text, as far as it is known: memory grows once.
        name : int, optional
            Of the text among others that go on beside it, for a policy to tell them apart.
        """
        cache = self._empty_cache(name)
        pages = list(itertools.takewhile(cache.fits, known))
        if not pages and not num_tokens:
            return cache
        self.runtime.steps.check_usable()
        with self._computing():
            self._grow(cache, max(num_tokens, sum(map(num_positions, pages))))
            if pages:
                self.runtime.begin_sequence()
                cache.restore(pages)
        return cache

    def read(
        self,
        ids: Sequence[int] | np.ndarray,
        cache: TextCache,
        on_read: Callable[[int], object] = lambda _: None,
    ) -> np.ndarray:
        """Put tokens behind those of a cache, and return the logits after the last one.

        Parameters
        ----------
        ids : sequence or ndarray of int
            One at least.
        cache : TextCache
        on_read : callable (num_tokens), optional
            Told how many are read when a part of 512 is, and of more than 16 before each layer, in
            parts of a layer each. What it raises ends the call; what is read stays.

        Returns
        -------
        ndarray of float32, shape [vocabulary]

        Raises
        ------
        ConfigError
            If there is no token, or no room for them in the context.
        IndexError
            If one is none of the vocabulary.
        TypeError
            If one is no whole number.
        StoreError
            If an expert cannot be read; tokens before it may be in the cache.
        """
        tokens = [operator.index(token) for token in ids]
        num = len(tokens)
        if not num:
            raise ConfigError("a text goes on by a token at least")
        if self.context is not None and cache.length + num > self.context:
            raise ConfigError(
                f"{num} tokens after {cache.length} are more than the model's {self.context}"
            )
        self.runtime.steps.check_usable()
        with self._computing() as how:
            if cache.length == 0:
                self.runtime.begin_sequence()
            self._grow(cache, num)
            program = self._program_of(how, min(num, PROMPT_TOKENS))
            for start in range(0, num, PROMPT_TOKENS):
                logits = self._compute(how, program, tokens, start, cache, on_read)
        return logits

    def read_together(
        self,
        parts: Sequence[Sequence[int]],
        caches: Sequence[TextCache],
        on_layer: Callable[[int], object] | None = None,
    ) -> np.ndarray:
        """Put tokens behind those of each of some caches, and return the logits after each's last.

        A row's bits are those that it has alone. What hits or misses is counted once.

        Parameters
        ----------
        parts : sequence of sequence of int
            For each cache one at least; 512 in all at most.
        caches : sequence of TextCache
        on_layer : callable (layer), optional
            Told of each layer, before its experts are computed. What it raises ends the call.

        Returns
        -------
        ndarray of float32, shape [num_texts, vocabulary]

        Raises
        ------
        ConfigError
            If there are none or too many, two have one cache, or there is no room in a context.
        IndexError, TypeError
            As `read`.
        StoreError
            If an expert cannot be read. All caches are as they were.
        """
        tokens = [operator.index(token) for part in parts for token in part]
        counts, num = np.array([len(part) for part in parts], np.int64), len(tokens)
        num_own = len({id(cache) for cache in caches})
        if not 1 <= num <= PROMPT_TOKENS or not num_own == len(caches) == len(counts):
            raise ConfigError(
                f"{num} tokens of {len(counts)} texts and {len(caches)} caches; up to "
                f"{PROMPT_TOKENS} are read together, each text's with a cache of its own"
            )
        lengths = np.array([cache.length for cache in caches])
        most = PROMPT_TOKENS + lengths.max() if self.context is None else self.context
        if counts.min() < 1 or (lengths + counts).max() > most:
            raise ConfigError(
                f"{counts.tolist()} tokens after {lengths.tolist()} are no texts of the model's "
                f"{most}"
            )
        names = [cache.name for cache in caches]
        is_step = num == len(counts) <= MAX_ROWS
        sequences = np.array(names, np.int32) if is_step and None not in names else None
        self.runtime.steps.check_usable()
        with self._computing() as how:
            if not lengths.all():
                self.runtime.begin_sequence()
            for cache, count in zip(caches, counts.tolist(), strict=True):
                self._grow(cache, count)
            program = self._program_of(how, num)
            look_ahead = how.look_ahead if num <= MAX_ROWS else None
            how.embed(tokens, program.hidden[:num])
            program.begin_together(
                [cache.pages(count) for cache, count in zip(caches, counts.tolist(), strict=True)],
                lengths,
                *how.angles(np.concatenate(list(map(np.arange, lengths, lengths + counts)))),
                observe=observer(self.runtime.steps, program, look_ahead),
                counts=counts,
                sequences=sequences,
            )
            self._run(program, num, look_ahead, sequences, on_layer)
            logits: np.ndarray = program.logits_of(1)[:, 0]
            for cache, count in zip(caches, counts.tolist(), strict=True):
                cache.advance(count)
            self._counted(program, int(is_step))
        return logits

    @abstractmethod
    def _computing(self) -> AbstractContextManager[Computation]:
        """Return what computes, for one caller at a time."""

    @abstractmethod
    def _wait_for(self, number: int, program: Program, num: int, names: np.ndarray | None) -> None:
        """Compute a layer's experts as they arrive, for so many rows."""

    @abstractmethod
    def _counted(self, program: Program, num_steps: int) -> None:
        """Note what a call has computed, and how many of its rows were a text's next token."""

    def _empty_cache(self, name: int | None) -> TextCache:
        return empty_cache(self._recipe, *self._kinds, name)

    def _grow(self, cache: TextCache, num_new: int) -> None:
        growth = cache.growth_bytes(num_new)
        if growth:
            # Slots may have it so far.
            self.runtime.borrowed.make_room(growth)
            cache.pages(num_new)

    def _program_of(self, how: Computation, num_rows: int) -> Program:
        """Return a program for so many tokens; a prompt's memory is its own, and goes with it."""
        if num_rows <= MAX_ROWS:
            return how.step
        return Program(how.recipe, self.runtime.cache, num_rows)

    def _compute(
        self,
        how: Computation,
        program: Program,
        tokens: list[int],
        start: int,
        cache: TextCache,
        on_read: Callable[[int], object],
    ) -> np.ndarray:
        """Put a part of some tokens into a cache; return the logits after the last one's."""
        ids = tokens[start : start + PROMPT_TOKENS]
        num = len(ids)
        # Nothing is foreseen of a prompt.
        look_ahead = how.look_ahead if num <= MAX_ROWS else None
        names = None if num > 1 or cache.name is None else np.array([cache.name], np.int32)
        pages = cache.pages(num)
        how.embed(ids, program.hidden[:num])
        cos, sin = how.angles(np.arange(cache.length, cache.length + num))
        program.begin(
            pages,
            cache.length,
            num,
            np.zeros(1, np.int64),
            cos,
            sin,
            observe=observer(self.runtime.steps, program, look_ahead),
            sequences=names,
        )

        def on_layer(layer: int) -> None:
            on_read(start + num * layer // self.num_layers)

        # Whoever is told may compute something, by the program of a few tokens.
        told = on_layer if program is not how.step else None
        self._run(program, num, look_ahead, names, told)
        logits = _NONE
        if start + num == len(tokens):
            # Before anybody else is told, who may have the program compute something.
            logits = program.logits_of(1)[0, 0]
        self._counted(program, int(num == 1))
        cache.advance(num)
        on_read(start + num)
        return logits

    def _run(
        self,
        program: Program,
        num: int,
        look_ahead: LookAhead | None,
        names: np.ndarray | None,
        on_layer: Callable[[int], object] | None = None,
    ) -> None:
        """Run a call that has begun, of so many rows, to its end."""
        try:
            missed = program.run(on_layer)
            while missed >= 0:
                if look_ahead is not None:
                    look_ahead.follow(missed, program.foresee)
                self._wait_for(missed, program, num, names)
                program.resume()
                missed = program.run(on_layer)
        except BaseException:
            # It would hold keys and values up to the next call.
            program.abandon()
            raise
        if program.num_resident:
            self.runtime.steps.count_leased(program.num_resident)
