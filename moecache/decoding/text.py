"""Text: a prompt that a program's model reads in parts, then a token after another."""

import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from moecache.decoding.prefixes import PAGE_TOKENS, PART_TOKENS, PrefixCache
from moecache.decoding.program_model import ProgramModel
from moecache.decoding.sampler import Mask, Sampler, next_token
from moecache.decoding.states_cache import STATE_TOKENS
from moecache.decoding.streams import TokenTimes
from moecache.decoding.text_cache import TextCache

# Names of texts are numbers of 32 bits, each as good as new when it comes again.
NUM_NAMES = 1 << 30


class Text:
    """A text of a model that a program computes.

    Its pages are kept however it ends, by `forget`, those of its answer, too: a token's keys and
    values are the same, however it was read. A call that fails leaves the text where it was; it may
    not be possible to go on.

    Parameters
    ----------
    model : ProgramModel
    prompt : sequence of int
    sampler : Sampler
    streamer : TokenTimes
        Gets the prompt and each token.
    max_new_tokens : int
    mask : Mask, optional
        Which tokens may come.
    prefixes : PrefixCache, optional
        Pages of earlier texts, as `keep_pages` gives it.
    name : int, optional
        Of the text, if others go on beside it.

    Attributes
    ----------
    streamer : TokenTimes
    token : int or None
        The last one that was drawn; `None` while the prompt is read.
    cache : TextCache or None
        Keys and values of all tokens but the last one that was drawn, once it has begun.
    is_over : bool
        Whether the model has ended it, or all tokens are there.
    error : Exception or None
        What ended it otherwise; noted by whoever goes on with it.

    Raises
    ------
    ConfigError
        If the prompt leaves no room for a token.
    Stopped
        If the streamer wants no more.
    """

    def __init__(
        self,
        model: ProgramModel,
        prompt: Sequence[int],
        sampler: Sampler,
        streamer: TokenTimes,
        *,
        max_new_tokens: int,
        mask: Mask | None = None,
        prefixes: PrefixCache | None = None,
        name: int | None = None,
    ) -> None:
        self.streamer = streamer
        self.token: int | None = None
        self.cache: TextCache | None = None
        self.is_over = False
        self.error: Exception | None = None
        self._model, self._prefixes, self._name = model, prefixes, name
        self._tokens = list(prompt)
        self._num_prompt, self._num_kept = len(self._tokens), 0
        self._sampler, self._mask = sampler, mask
        # Tokens that another text, which reads them, will have kept.
        self._shared: weakref.WeakKeyDictionary[Text, int] = weakref.WeakKeyDictionary()
        room = model.check_room(self._num_prompt)
        self._num_left = max_new_tokens if room is None else min(max_new_tokens, room)
        streamer.put(np.array([self._tokens]))

    @property
    def is_reading(self) -> bool:
        """Whether some of the prompt is still to be read."""
        return self.token is None

    def will_find(self, other: "Text") -> bool:
        """Return whether pages that another's prompt still reads need not be read for this one."""
        if self.cache is not None or other.cache is None or self._prefixes is None:
            return False
        shared = self._shared.get(other)
        if shared is None:
            shared = self._shared[other] = other.num_kept_of(self._tokens)
        return other.cache.length < shared

    def num_kept_of(self, prompt: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens are in whole pages that this text keeps."""
        if self._prefixes is None or self._model.has_states:
            return 0  # where they have states is where that prompt happens to be cut
        pairs = enumerate(zip(prompt, self._tokens, strict=False))
        # A prompt's last token is read anew: its logits are wanted.
        shared = next((num for num, (one, other) in pairs if one != other), len(prompt) - 1)
        most = self._prefixes.max_bytes // self._model.bytes_per_token
        size = self._prefixes.page_tokens
        return min(shared, most, len(prompt) - 1, self._num_prompt) // size * size

    def unread(self, num_tokens: int | None = None) -> list[int]:
        """Return the prompt's next tokens, at most so many; it begins by this."""
        begin = self._begun().length
        end = self._num_prompt if num_tokens is None else begin + num_tokens
        return self._tokens[begin : min(end, self._num_prompt)]

    def read(self, num_tokens: int) -> None:
        """Read at most so many tokens of the prompt; draw one after the last.

        Raises
        ------
        Stopped
            If the streamer wants no more.
        """
        some, cache = self.unread(num_tokens), self._begun()
        begin = cache.length
        self.take_read(self._model.read(some, cache, lambda num: self.streamer.read(begin + num)))

    def take_read(self, logits: np.ndarray) -> None:
        """Take the logits after tokens of the prompt that are read; draw one after the last.

        Raises
        ------
        Stopped
            If the streamer wants no more.
        """
        num = self._begun().length
        self.streamer.read(num)
        if num == self._num_prompt:
            self.is_over = self._num_left < 1
            if not self.is_over:
                self.take(logits)
        elif self._prefixes is not None:
            # Whole pages: who begins alike waits for them.
            size = self._prefixes.page_tokens
            self._keep(num // size * size)

    def step(self) -> None:
        """Compute the logits after the last token, alone, and draw the next one.

        Raises
        ------
        Stopped
            If the streamer wants no more.
        """
        assert self.token is not None
        self.take(self._model.read([self.token], self._begun()))

    def take(self, logits: np.ndarray) -> None:
        """Draw a token of the logits after the last one.

        Parameters
        ----------
        logits : ndarray of float32, shape [vocabulary]

        Raises
        ------
        Stopped
            If the streamer wants no more.
        """
        self.token = next_token(self._sampler, logits, self._mask)
        self._tokens.append(self.token)
        self._num_left -= 1
        self.is_over = self.token in self._model.ends or self._num_left < 1
        self.streamer.put(np.array([[self.token]]))
        if len(self._tokens) == self._num_prompt + 1:
            # By itself: a file is found by the tokens that it ends with.
            self._keep(self._num_prompt)

    def forget(self) -> None:
        """Keep the pages that others may find, and give keys and values back."""
        if self.cache is not None:
            self._keep(self.cache.length)
            self.cache = None

    def _begun(self) -> TextCache:
        """Return keys and values; at the first call those of pages that are known."""
        if self.cache is None:
            tokens, prefixes = self._tokens, self._prefixes
            known = [] if prefixes is None else prefixes.find(tokens, in_parts=True)
            self.cache = self._model.new_cache(known, len(tokens), self._name)
            self._num_kept = self.streamer.cached_tokens = self.cache.length
        return self.cache

    def _keep(self, num: int) -> None:
        """Keep the pages of the first tokens that were not kept as a whole, one after the other."""
        prefixes, cache, before = self._prefixes, self.cache, self._num_kept
        if prefixes is None or cache is None or num <= before:
            return
        size, part = prefixes.page_tokens, prefixes.part_tokens
        if num // part > before // part:
            with suppress(MemoryError):  # a text is none the worse without
                for begin in range(before // size * size, num, size):
                    end = min(begin + size, num)
                    # A copy at a time: all of a long text would take as much again.
                    prefixes.keep(self._tokens[:end], [cache.page(begin, end)], in_parts=True)
        # Behind it: what an interrupt cut is kept when the text is over.
        self._num_kept = num


def keep_pages(
    model: ProgramModel,
    identity: bytes,
    max_bytes: int,
    *,
    directory: Path | None = None,
    max_disk_bytes: int = 0,
) -> PrefixCache:
    """Return a cache of texts' pages for a model.

    Parameters
    ----------
    model : ProgramModel
    identity : bytes
        All that a page's bits depend on beside its tokens.
    max_bytes, directory, max_disk_bytes
        As `PrefixCache` takes them.

    Raises
    ------
    StoreError
        If the directory cannot be used.
    """
    has_states = model.has_states
    return PrefixCache(
        identity,
        STATE_TOKENS if has_states else PAGE_TOKENS,
        max_bytes,
        part_tokens=None if has_states else PART_TOKENS,
        way=model.way,
        num_plain=len(model.new_cache().sizes) if has_states else None,
        directory=directory,
        max_disk_bytes=max_disk_bytes,
    )


def continue_text(
    model: ProgramModel,
    prompt: Sequence[int],
    sampler: Sampler,
    stream: TokenTimes,
    *,
    max_new_tokens: int,
    mask: Mask | None = None,
    prefixes: PrefixCache | None = None,
) -> None:
    """Generate tokens until the model ends its text, `max_new_tokens` are there, or no room is.

    Parameters
    ----------
    model : ProgramModel
    prompt : sequence of int
    sampler : Sampler
    stream : TokenTimes
        Gets the prompt, each token, and the end.
    max_new_tokens : int
    mask : Mask, optional
        Which tokens may come.
    prefixes : PrefixCache, optional
        Pages of earlier texts, as `keep_pages` gives it. This one's are kept however it ends,
        those of its answer, too: a token's keys and values are the same, however it was read.

    Raises
    ------
    ConfigError
        If the prompt leaves no room for a token.
    Stopped
        If the stream wants no more.
    """
    text = Text(
        model,
        prompt,
        sampler,
        stream,
        max_new_tokens=max_new_tokens,
        mask=mask,
        prefixes=prefixes,
    )
    try:
        text.read(len(prompt))
        while not text.is_over:
            text.step()
    finally:
        text.forget()
    stream.end()
