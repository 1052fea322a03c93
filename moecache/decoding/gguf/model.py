"""TextModel: a model of a GGUF file, computed by programs alone; neither torch nor transformers."""

import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from moecache.decoding._program import MAX_ROWS, Program
from moecache.decoding.gguf._keys_values import TextCache
from moecache.decoding.gguf._states import StatesCache
from moecache.decoding.gguf.recipes import FileModel
from moecache.decoding.gguf.trunk import Trunk
from moecache.decoding.look_ahead import LookAhead, observer
from moecache.decoding.prefixes import Page, num_positions
from moecache.errors import ConfigError
from moecache.kernels import SlotKernel
from moecache.runtime.runtime import ExpertRuntime
from moecache.units import format_bytes

# Tokens of a prompt that go through a layer together: its experts are read once for all of them.
PROMPT_TOKENS = 512


class TextModel:
    """A mixture-of-experts model of a GGUF file, with its experts in a bounded number of slots.

    Hidden states are float32 from the embedding to the logits, keys and values bfloat16. A token's
    bits depend neither on where a prompt is cut, nor on slots or threads. A context manager. For
    one thread at a time.

    Made by `opening.open_text_model`.

    Attributes
    ----------
    runtime : ExpertRuntime
        Closed with this.
    context : int
        Positions that a text may have.
    ends : frozenset of int
        Tokens with which the model ends its texts.
    """

    def __init__(
        self,
        said: FileModel,
        runtime: ExpertRuntime,
        trunk: Trunk,
        *,
        looks_ahead: bool = False,
    ) -> None:
        self.runtime = runtime
        self.context, self.ends = said.context, said.ends
        self._said, self._lock, self._num_steps = said, threading.Lock(), 0
        self._layers = {
            int(name.removeprefix("blk.")): number
            for number, name in enumerate(runtime.layout.layer_names)
        }
        self._kernels = {number: self._kernel(number) for number in self._layers.values()}
        self._recipe = said.recipe(
            trunk, lambda block: (self._layers[block], self._kernels[self._layers[block]])
        )
        self._embed = trunk.embed()
        self._step = Program(self._recipe, runtime.cache)
        self._look_ahead = self._start_look_ahead(is_forced=looks_ahead)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that have logits."""
        return int(self._recipe.head.matrix.rows)

    @property
    def num_layers(self) -> int:
        """Number of layers, those without experts among them."""
        return self._said.num_layers

    @property
    def has_states(self) -> bool:
        """Whether layers hold states, which belong to all tokens before them."""
        return self._said.facts.has_states

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values."""
        return self._said.bytes_per_token

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
        with self._lock:
            self._grow(cache, max(num_tokens, sum(map(num_positions, pages))))
            if pages:
                self.runtime.begin_sequence()
                cache.restore(pages)
        return cache

    def check_room(self, num_tokens: int) -> int:
        """Return how many tokens fit behind so many; a ConfigError if none does."""
        return self._said.check_room(num_tokens)

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
            Told how many of them are read, a layer's part of each being one of a prompt that is
            read from the disk. What it raises ends the call; what is read stays.

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
        if cache.length + num > self.context:
            raise ConfigError(
                f"{num} tokens after {cache.length} are more than the model's {self.context}"
            )
        self.runtime.steps.check_usable()
        with self._lock:
            if cache.length == 0:
                self.runtime.begin_sequence()
            self._grow(cache, num)
            program = self._program_of(min(num, PROMPT_TOKENS))
            for start in range(0, num, PROMPT_TOKENS):
                self._compute(program, tokens, start, cache, on_read)
            logits: np.ndarray = program.logits_of(1)[0, 0]
        return logits

    def read_together(
        self,
        parts: Sequence[Sequence[int]],
        caches: Sequence[TextCache],
        on_layer: Callable[[int], object] = lambda _: None,
    ) -> np.ndarray:
        """Put tokens behind those of each of some caches, and return the logits after each's last.

        A row's bits are those that it has alone. What hits or misses is counted once.

        Parameters
        ----------
        parts : sequence of sequence of int
            For each cache one at least; 512 in all at most.
        caches : sequence of TextCache
        on_layer : callable (layer), optional
            Told of each layer that had to wait for experts. What it raises ends the call.

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
        if counts.min() < 1 or (lengths + counts).max() > self.context:
            raise ConfigError(
                f"{counts.tolist()} tokens after {lengths.tolist()} are no texts of the model's "
                f"{self.context}"
            )
        names = [cache.name for cache in caches]
        is_step = num == len(counts) <= MAX_ROWS
        sequences = np.array(names, np.int32) if is_step and None not in names else None
        self.runtime.steps.check_usable()
        with self._lock:
            if not lengths.all():
                self.runtime.begin_sequence()
            for cache, count in zip(caches, counts.tolist(), strict=True):
                self._grow(cache, count)
            program = self._program_of(num)
            look_ahead = self._look_ahead if num <= MAX_ROWS else None
            self._embed(tokens, program.hidden[:num])
            program.begin_together(
                [cache.pages(count) for cache, count in zip(caches, counts.tolist(), strict=True)],
                lengths,
                *self._said.angles(np.concatenate(list(map(np.arange, lengths, lengths + counts)))),
                observe=observer(self.runtime.steps, program, look_ahead),
                counts=counts,
                sequences=sequences,
            )
            self._run(program, num, look_ahead, sequences, on_layer)
            logits: np.ndarray = program.logits_of(1)[:, 0]
            for cache, count in zip(caches, counts.tolist(), strict=True):
                cache.advance(count)
            self._num_steps += is_step
        return logits

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

    def _empty_cache(self, name: int | None) -> TextCache:
        facts = self._said.facts
        blocks = range(facts.num_layers)
        held = [facts.held(block) for block in blocks if facts.has_keys(block)]
        if facts.linear is None:
            return TextCache(held, name)
        kinds = [
            "keys" if facts.has_keys(block) else "states" if facts.is_linear(block) else ""
            for block in blocks
        ]
        return StatesCache(kinds, facts.linear, held, name)

    def _grow(self, cache: TextCache, num_new: int) -> None:
        growth = cache.growth_bytes(num_new)
        if growth:
            # Slots may have it so far.
            self.runtime.borrowed.make_room(growth)
            cache.pages(num_new)

    def _program_of(self, num_rows: int) -> Program:
        """Return a program for so many tokens; a prompt's memory is its own, and goes with it."""
        if num_rows <= MAX_ROWS:
            return self._step
        return Program(self._recipe, self.runtime.cache, num_rows)

    def _compute(
        self,
        program: Program,
        tokens: list[int],
        start: int,
        cache: TextCache,
        on_read: Callable[[int], object],
    ) -> None:
        """Compute a part of some tokens behind a cache, into it."""
        ids = tokens[start : start + PROMPT_TOKENS]
        num = len(ids)
        # Nothing is foreseen of a prompt.
        look_ahead = self._look_ahead if num <= MAX_ROWS else None
        names = None if num > 1 or cache.name is None else np.array([cache.name], np.int32)
        pages = cache.pages(num)
        self._embed(ids, program.hidden[:num])
        cos, sin = self._said.angles(np.arange(cache.length, cache.length + num))
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

        def on_layer(missed: int) -> None:
            if num > MAX_ROWS:
                on_read(start + num * missed // self._said.num_layers)

        self._run(program, num, look_ahead, names, on_layer)
        self._num_steps += num == 1
        cache.advance(num)
        on_read(start + num)

    def _run(
        self,
        program: Program,
        num: int,
        look_ahead: LookAhead | None,
        names: np.ndarray | None,
        on_layer: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Run a call that has begun, of so many rows, to its end."""
        try:
            missed = program.run()
            while missed >= 0:
                if look_ahead is not None:
                    look_ahead.follow(missed, program.foresee)
                self._wait_for(missed, program, num, names)
                on_layer(missed)
                program.resume()
                missed = program.run()
        except BaseException:
            # It would hold keys and values up to the next call.
            program.abandon()
            raise
        if program.num_resident:
            self.runtime.steps.count_leased(program.num_resident)

    def _wait_for(self, number: int, program: Program, num: int, names: np.ndarray | None) -> None:
        """Compute a layer's experts as they arrive."""
        kernel, steps = self._kernels[number], self.runtime.steps
        if num == 1:
            steps.compute_token(number, program.ids[:1], program.compute, names)
            return
        width = program.given.shape[1]
        given = kernel.inputs_at(program.given.ctypes.data, "f32", num, 4 * width)
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
