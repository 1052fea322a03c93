"""Texts: what a command asks of a model that writes some, be it with torch or without."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moecache.runtime.runtime import ExpertRuntime

if TYPE_CHECKING:
    from moecache.decoding.prefixes import PrefixCache
    from moecache.decoding.sampler import Mask
    from moecache.decoding.streams import TokenTimes
    from moecache.serving.model import ServedModel


class Encoder(Protocol):
    """Texts as tokens."""

    tokenizer: Any

    def encode(self, prompt: str) -> Any:
        """Return a prompt's tokens, int64 [1, tokens], an array or a tensor."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        """Return a conversation's tokens with the beginning of an answer, as `encode` does."""

    def check_chat(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise a ConfigError if there is no chat template, or it fails with such messages."""


OnTokenizer = Callable[[Encoder], object]


class Texts(Protocol):
    """A model that goes on with texts."""

    @property
    def model(self) -> Any:
        """The `TextModel`, or transformers' model, that computes them."""

    @property
    def encoder(self) -> Encoder:
        """Makes its tokens of text."""

    @property
    def runtime(self) -> ExpertRuntime:
        """The runtime of its experts."""

    def report(self) -> str:
        """Return the counters, layer by layer."""

    def served(self) -> "ServedModel":
        """Return the model as a server asks it."""

    def watch(self) -> Callable[[], object] | None:
        """Return what raises once a rank is gone; `None` if there is one."""

    def rank_figures(self) -> list[dict[str, Any]]:
        """Return each rank's figures, for `rank_table`."""

    def new_mask(self, grammar: Any) -> "Mask":
        """Return what keeps a text within a `Grammar`."""

    def open_prefixes(
        self, max_bytes: int, *, directory: Path | None = None, max_disk_bytes: int = 0
    ) -> "PrefixCache | None":
        """Return a cache of texts' pages; `None` if the model's are not read in pages."""

    def continue_tokens(
        self,
        ids: Any,
        stream: "TokenTimes",
        *,
        max_new_tokens: int,
        temperature: float | None,
        seed: int,
        mask: "Mask | None" = None,
        prefixes: "PrefixCache | None" = None,
    ) -> None:
        """Generate tokens behind those of an `Encoder`.

        They go to the stream, until the model ends the text, so many are there, no room is left,
        or the stream is stopped, which is no error.
        """
