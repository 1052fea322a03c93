"""Text with torch: the model of a command, as `load` brings it into transformers."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moecache.commands.loaded import loaded
from moecache.commands.opened import trunk_read
from moecache.commands.start_line import StartLine
from moecache.commands.texts import OnTokenizer
from moecache.decoding.prefixes import PrefixCache
from moecache.decoding.sampler import Mask
from moecache.decoding.streams import TokenTimes
from moecache.runtime.runtime import ExpertRuntime
from moecache.stores import CheckpointStore

if TYPE_CHECKING:
    from moecache.integrations.transformers.served import Served


class LoadedTexts:
    """The texts of a model of transformers; a `Texts`.

    Parameters
    ----------
    model : PreTrainedModel
        As `load` returns it.
    encoder : LoadedEncoder
    """

    def __init__(self, model: Any, encoder: "LoadedEncoder") -> None:
        self.model, self.encoder = model, encoder
        self.runtime: ExpertRuntime = model.moecache.runtime

    def report(self) -> str:
        """Return the counters, layer by layer."""
        return str(self.model.moecache.report())

    def served(self) -> "Served":
        """Return the model as a server asks it."""
        from moecache.integrations.transformers.served import Served

        return Served(self.model)

    def watch(self) -> Callable[[], object] | None:
        """Return what raises once a rank is gone; `None` if there is one."""
        from moecache.integrations.transformers import _following

        return _following.watch(self.model)

    def rank_figures(self) -> list[dict[str, Any]]:
        """Return each rank's figures, for `rank_table`."""
        from moecache.integrations.transformers import _following

        return _following.gathered_figures(self.model)

    def new_mask(self, grammar: Any) -> Mask:
        """Return what keeps a text within a grammar."""
        from moecache.integrations.transformers._loops import ends_of
        from moecache.serving.grammars import Grammars

        width = self.model.config.get_text_config().vocab_size
        grammars = Grammars(width, ends_of(self.model))
        mask: Mask = grammars.compile(grammar, self.encoder.tokenizer).new_mask()
        return mask

    def open_prefixes(
        self, max_bytes: int, *, directory: Path | None = None, max_disk_bytes: int = 0
    ) -> PrefixCache | None:
        """Return a cache of prompts' pages; `None` if they are not read in pages."""
        from moecache.integrations.transformers.reading import open_prefixes

        return open_prefixes(
            self.model, max_bytes, directory=directory, max_disk_bytes=max_disk_bytes
        )

    def continue_tokens(
        self,
        ids: Any,
        stream: TokenTimes,
        *,
        max_new_tokens: int,
        temperature: float | None,
        seed: int,
        mask: Mask | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """Generate, with all ranks that there are."""
        from moecache.integrations.transformers import generation

        generation.continue_tokens(
            self.model,
            ids,
            stream,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            mask=mask,
            prefixes=prefixes,
        )


class LoadedEncoder:
    """A tokenizer of transformers; an `Encoder`.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, prompt: str) -> Any:
        """Return a prompt's tokens, int64 [1, tokens]."""
        from moecache.integrations.transformers import generation

        return generation.encode(self.tokenizer, prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        """Return a conversation's tokens with the beginning of an answer, int64 [1, tokens]."""
        from moecache.integrations.transformers import generation

        return generation.encode_chat(self.tokenizer, messages)

    def check_chat(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise a ConfigError if there is no chat template, or it fails with such messages."""
        from moecache.integrations.transformers import generation

        generation.check_chat(self.tokenizer, messages)


@contextmanager
def loaded_texts(
    arguments: argparse.Namespace,
    store: str | CheckpointStore,
    line: StartLine,
    on_tokenizer: OnTokenizer,
) -> Iterator[LoadedTexts]:
    """Yield the texts of a model of transformers, and close it at the end.

    `on_tokenizer` is called before the model is loaded.
    """
    loading, trunk = line.loading, trunk_read(store)
    loading.enter("importing torch", trunk)
    from moecache.integrations.transformers import _following, generation

    with generation.quiet(verbose=arguments.verbose):
        loading.enter("reading the tokenizer", trunk)
        encoder = LoadedEncoder(generation.load_tokenizer(store))
        on_tokenizer(encoder)
        loading.enter("building the model", trunk)
        with loaded(arguments, store, line) as model, _following.leading(model):
            yield LoadedTexts(model, encoder)
