"""TextModel: a model of a GGUF file, computed by programs alone; neither torch nor transformers."""

import itertools
import operator
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from moecache.decoding._program import MAX_ROWS, Program
from moecache.decoding.gguf._keys_values import TextCache
from moecache.decoding.gguf.recipes import FileModel
from moecache.decoding.gguf.trunk import Trunk
from moecache.decoding.look_ahead import LookAhead, observer
from moecache.decoding.prefixes import Page, num_positions
from moecache.errors import ConfigError
from moecache.kernels import SlotKernel
from moecache.runtime.open import open as open_runtime
from moecache.runtime.runtime import ExpertRuntime
from moecache.stores import GgufStore, open_store
from moecache.units import format_bytes, parse_bytes

# Tokens of a prompt that go through a layer together: its experts are read once for all of them.
PROMPT_TOKENS = 512
# Options of `moecache.Options` that are this module's own to give.
_OWN = {"device", "dtype", "layers", "makes_room", "share", "top_k"}


class TextModel:
    """A mixture-of-experts model of a GGUF file, with its experts in a bounded number of slots.

    Hidden states are float32 from the embedding to the logits, keys and values bfloat16. A token's
    bits depend neither on where a prompt is cut, nor on slots or threads. A context manager. For
    one thread at a time.

    Made by `open_text_model`.

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

    def new_cache(self, known: Sequence[Page] = (), num_tokens: int = 0) -> TextCache:
        """Return a cache, for a text.

        Parameters
        ----------
        known : sequence of Page, optional
            Keys and values of the text's first tokens, which begins by this call then. Pages that
            are none of this model's, and those behind them, are left out.
        num_tokens : int, default 0
            Of the whole text, as far as it is known: memory grows once.
        """
        said = self._said
        cache = TextCache(said.num_layers, said.num_kv_heads, said.width)
        pages = list(itertools.takewhile(cache.fits, known))
        if pages:
            self.runtime.steps.check_usable()
            with self._lock:
                self.runtime.begin_sequence()
                self._grow(cache, max(num_tokens, sum(map(num_positions, pages))))
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
        )

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
        steps = self.runtime.steps
        ids = tokens[start : start + PROMPT_TOKENS]
        num = len(ids)
        # Nothing is foreseen of a prompt.
        look_ahead = self._look_ahead if num <= MAX_ROWS else None
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
            observe=observer(steps, program, look_ahead),
        )
        missed = program.run()
        while missed >= 0:
            if look_ahead is not None:
                look_ahead.follow(missed, program.foresee)
            self._wait_for(missed, program, num)
            if num > MAX_ROWS:
                on_read(start + num * missed // self._said.num_layers)
            program.resume()
            missed = program.run()
        if program.num_resident:
            steps.count_leased(program.num_resident)
        self._num_steps += num == 1
        cache.length += num
        on_read(start + num)

    def _wait_for(self, number: int, program: Program, num: int) -> None:
        """Compute a layer's experts as they arrive."""
        kernel, steps = self._kernels[number], self.runtime.steps
        if num == 1:
            steps.compute_token(number, program.ids[:1], program.compute, None)
            return
        width = program.hidden.shape[1]
        given = kernel.inputs_at(program.normed.ctypes.data, "f32", num, 4 * width)
        into = program.rows.ctypes.data, "f32", 4 * width
        ids = program.ids[:num]
        waves = steps.waves(number, ids)
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


def open_text_model(
    path: str | os.PathLike[str] | GgufStore,
    memory: int | str | None = None,
    *,
    prefix_memory: int | str = 0,
    on_trunk: Callable[[FileModel, Trunk], object] = lambda *_: None,
    **options: Any,
) -> TextModel:
    """Open a GGUF file's model to compute text with it, without torch.

    Parameters
    ----------
    path : str, Path or GgufStore
        One that is open is closed with the model, and also on an error.
    memory : int or str, optional
        For the experts' slots, as `moecache.open` takes it; the trunk comes on top.
    prefix_memory : int or str, default 0
        That a cache of texts' pages will take, as `continuing.open_prefixes` makes one.
    on_trunk : callable (FileModel, Trunk), optional
        Given, as the trunk's reads begin, what the file says, and the trunk, whose `progress` says
        how far it is.
    **options
        Those of `moecache.Options` that say how experts are kept and read: not `device`, `dtype`,
        `layers`, `makes_room`, `share` or `top_k`. `prefetch` may also be "router": the next
        layer's router, given this layer's input.

    Returns
    -------
    TextModel
        A context manager; `close` it.

    Raises
    ------
    NoTextModelError
        If the file's model runs with torch alone.
    ConfigError
        If an option cannot be used.
    StoreError
        If the file cannot be read, or is another one at the end.
    """
    given = sorted(_OWN & options.keys())
    if given:
        raise ConfigError(f"{', '.join(given)} cannot be given for a model without torch")
    store = path if isinstance(path, GgufStore) else open_store(path)
    runtime = trunk = None
    try:
        if not isinstance(store, GgufStore):
            raise ConfigError(f"{path}: is no GGUF file")
        said = FileModel(store)
        is_forced = options.get("prefetch") == "router"
        if is_forced:
            # It still guesses for the first layer.
            options["prefetch"] = "echo"
        host_bytes = said.trunk_bytes + said.prompt_bytes(PROMPT_TOKENS)
        options["host_bytes"] = options.get("host_bytes", host_bytes) + parse_bytes(prefix_memory)
        # First: its calibration wants the disk for itself, and the plan leaves room for the trunk.
        runtime = open_runtime(store, memory, makes_room=True, **options)
        trunk = Trunk(store, said.names())
        on_trunk(said, trunk)
        model = TextModel(said, runtime, trunk, looks_ahead=is_forced)
        trunk.close()
        # A trunk and experts of two versions would be no model.
        store.check_current()
    except BaseException:
        # Its threads read from the store.
        if trunk is not None:
            trunk.close()
        if runtime is not None:
            runtime.close()
        store.close()
        raise
    return model
