"""ServedModel: what a server asks of a model, be it with torch or without."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from moecache.decoding.prefixes import PrefixCache
from moecache.decoding.sampler import Mask, Sampler, Sampling
from moecache.decoding.streams import TokenTimes
from moecache.runtime.runtime import ExpertRuntime
from moecache.telemetry import RuntimeStats


class ServedText(Protocol):
    """A text that comes about beside others.

    Attributes
    ----------
    error : Exception or None
        What ended it, if it was that.
    """

    error: Exception | None

    def forget(self) -> None:
        """Give keys and values back."""


class ServedTogether(Protocol):
    """Goes on with texts of a model side by side."""

    def add(self, text: Any) -> None:
        """Take a text in, whose prompt is still to be read."""

    def advance(self) -> list[Any]:
        """Go on with all texts by a part of a prompt, or a token; return those that are over."""


class ServedModel(Protocol):
    """A model whose answers are served, and how its tokens are made of texts.

    A prompt is an array or a tensor, int64 [1, tokens], for the model that made it alone.
    """

    @property
    def runtime(self) -> ExpertRuntime:
        """The runtime of its experts."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the model knows."""

    @property
    def ends(self) -> Collection[int]:
        """Tokens with which it ends its texts."""

    @property
    def own_context(self) -> int | None:
        """Tokens of a text, prompt and answer; `None` if there is no end."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values."""

    @property
    def is_spread(self) -> bool:
        """Whether its experts are spread over processes."""

    @property
    def is_alone(self) -> bool:
        """Whether a text is generated as a whole, with nothing else meanwhile."""

    @property
    def why_alone(self) -> str:
        """Why its answers do not decode together; empty if they do."""

    def stats(self) -> RuntimeStats:
        """Return the runtime's counters."""

    def splits_plainly(self, tokenizer: Any) -> bool:
        """Return whether nothing but a tokenizer's backend splits texts."""

    def encode(self, tokenizer: Any, text: str) -> Any:
        """Return a text's tokens; a ConfigError if there are none."""

    def encode_chat(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> Any:
        """Return a conversation's tokens with the beginning of an answer.

        `variables` are what the template may look at beside. A ConfigError if it refuses these.
        """

    def render_chat(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Return the text of which `encode_chat` makes tokens."""

    def sampling_of(self, seed: int, **given: Any) -> Sampling:
        """Return how tokens are drawn: what is given, else what the model's files say."""

    def check_text(
        self, prompt: Any, max_new_tokens: int, seed: int, **sampling: Any
    ) -> tuple[int, Sampling]:
        """Return how many tokens fit behind a prompt, up to a number, and how they are drawn."""

    def new_text(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        stream: TokenTimes,
        *,
        max_new_tokens: int,
        mask: Mask | None,
        prefixes: PrefixCache | None,
    ) -> ServedText:
        """Return a text whose prompt is still to be read."""

    def together(self) -> ServedTogether:
        """Return what goes on with its texts."""


class ServedAlone(ServedModel, Protocol):
    """A model that `is_alone`, or may be."""

    def check_between_layers(self, stream: TokenTimes) -> ExitStack:
        """Have a text that goes alone end between layers, until the stack is closed."""

    def continue_tokens(self, prompt: Any, stream: TokenTimes, **given: Any) -> int:
        """Generate a text that goes alone; return how many tokens it may have."""
