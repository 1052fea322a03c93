"""Streamers: when each token came, and its text."""

import time
from collections.abc import Callable, Collection
from typing import Any

# A prompt's last tokens: the text before a token decides how the token is written.
_CONTEXT_TOKENS = 5
_REPLACEMENT = "\ufffd"


class Stopped(Exception):  # noqa: N818 - no error: somebody asked for it
    """Ends a generation that nobody wants to go on; raised and caught here."""


class TokenTimes:
    """Notes when each token came; has what transformers' `generate` asks of a streamer.

    Parameters
    ----------
    on_first : callable (), optional
        Called once the first token is there: the prompt has been read by then.

    Attributes
    ----------
    stamps_s : list of float
        By `time.perf_counter`, one per token.
    tokens : list of int
    stopped : bool
        Set it, in any thread, and no further token comes.
    is_spread : bool
        The model's experts are spread over ranks: all of them stop before the same forward.
    cached_tokens : int
        Tokens of the prompt that were known from an earlier one.
    read_tokens : int
        Tokens of the prompt that are read so far, the known ones among them.
    """

    def __init__(self, on_first: Callable[[], object] | None = None) -> None:
        self.stamps_s: list[float] = []
        self.tokens: list[int] = []
        self.stopped = False
        self.is_spread = False
        self.cached_tokens = self.read_tokens = 0
        self._prompt_tokens = 0
        self._on_first = on_first
        self._begun_s: float | None = None
        self._started_s = time.perf_counter()

    @property
    def prefill_s(self) -> float:
        """Seconds from the prompt to the first token; 0.0 before it."""
        if not self.stamps_s:
            return 0.0
        return self.stamps_s[0] - (self._started_s if self._begun_s is None else self._begun_s)

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.stamps_s[-1] - self.stamps_s[0] if self.stamps_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first, whose time the prompt took."""
        return (len(self.stamps_s) - 1) / self.decode_s if self.decode_s > 0 else 0.0

    def put(self, value: Any) -> None:
        """Take the prompt, at the first call, and then each token: a tensor or an array of ids."""
        now = time.perf_counter()
        tokens: list[int] = value.reshape(-1).tolist()
        if self._begun_s is None:
            self._begun_s = now
            self._prompt_tokens = len(tokens)
        else:
            self.stamps_s.append(now)
            if len(self.stamps_s) == 1 and self._on_first is not None:
                self._on_first()
            self.tokens += tokens
            self.take(tokens)
        self.check()

    def take(self, tokens: list[int]) -> None:
        """Do nothing with new tokens."""

    def progress(self) -> tuple[int, int, int]:
        """Return how many tokens of the prompt were known, are read, and are there in all."""
        return self.cached_tokens, self.read_tokens, self._prompt_tokens

    def read(self, num_tokens: int) -> None:
        """Note how many tokens of the prompt are read by now."""
        self.read_tokens = num_tokens
        self.check()

    def check(self) -> None:
        """Raise `Stopped` if no further token is wanted."""
        if self.stopped and not self.is_spread:
            raise Stopped

    def end(self) -> None:
        """Do nothing."""


class TextStream(TokenTimes):
    """Hands out text as soon as it is certain, token by token.

    Together it is what the tokenizer makes of all tokens at once: a character of several
    tokens waits for the last of them, and spaces between words stay.

    Parameters
    ----------
    tokenizer : FileTokenizer or PreTrainedTokenizerBase
    prompt : Tensor or ndarray, int64 [1, tokens]
    write : callable (str)
    on_first : callable (), optional
        As that of `TokenTimes`.
    hidden : collection of int, optional
        Tokens that are no text; by default the tokenizer's special ones.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Any,
        write: Callable[[str], None],
        on_first: Callable[[], object] | None = None,
        *,
        hidden: Collection[int] | None = None,
    ) -> None:
        super().__init__(on_first)
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._write = write
        self._ids = prompt[0, -_CONTEXT_TOKENS:].tolist()
        # Tokens before `_shown` are written; those from `_start` on are decoded with later ones.
        self._start, self._shown = 0, len(self._ids)

    def take(self, tokens: list[int]) -> None:
        """Write what new tokens make certain."""
        self._ids += tokens
        self._advance(last=False)

    def end(self) -> None:
        """Write what is left: for a broken character, its replacement."""
        self._advance(last=True)

    def _advance(self, *, last: bool) -> None:
        before = self._decode(self._ids[self._start : self._shown])
        text = self._decode(self._ids[self._start :])
        if len(text) > len(before) and (last or not text.endswith(_REPLACEMENT)):
            self._start, self._shown = self._shown, len(self._ids)
            self._write(text[len(before) :])

    def _decode(self, ids: list[int]) -> str:
        if self._hidden is not None:
            ids = [token for token in ids if token not in self._hidden]
        return str(
            self._tokenizer.decode(
                ids,
                skip_special_tokens=self._hidden is None,
                clean_up_tokenization_spaces=False,
            )
        )
