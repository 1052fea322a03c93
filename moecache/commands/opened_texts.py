"""The model of a command that writes texts: with torch, or from a file alone."""

import argparse
import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console

from moecache.commands.opened import opened
from moecache.commands.start_line import StartLine
from moecache.commands.texts import OnTokenizer, Texts
from moecache.stores import CheckpointStore
from moecache.telemetry.loading import Loading

logger = logging.getLogger(__name__)


@contextmanager
def opened_way(
    arguments: argparse.Namespace, *, is_chat: bool
) -> Iterator[tuple[str | CheckpointStore, str]]:
    """Yield a command's checkpoint, which is being read, and why torch computes it; "" if not.

    Parameters
    ----------
    arguments : Namespace
        With `model`, and what `add_expert_options` adds.
    is_chat : bool
        Whether conversations are encoded.
    """
    # Not for --help to wait for.
    from moecache.commands import without_torch

    why_torch = functools.cache(
        functools.partial(without_torch.why_torch, arguments, is_chat=is_chat)
    )
    with opened(arguments, lambda store: why_torch(store) != "") as store:
        yield store, why_torch(store)


@contextmanager
def opened_texts(
    arguments: argparse.Namespace,
    console: Console,
    on_tokenizer: OnTokenizer,
    *,
    is_chat: bool,
) -> Iterator[Texts]:
    """Yield a command's model, and close it at the end.

    Parameters
    ----------
    arguments : Namespace
        With `model`, `verbose`, and what `add_expert_options` and `add_prefix_options` add.
    console : Console
        For a line that says how far the model has come.
    on_tokenizer : callable (Encoder)
        Called before the model is there: that takes long, and what it is asked may be wrong.
    is_chat : bool
        Whether conversations are encoded.
    """
    with (
        opened_way(arguments, is_chat=is_chat) as (store, why_torch),
        StartLine(console, Loading()) as line,
        texts_of(arguments, store, why_torch, line, on_tokenizer) as texts,
    ):
        yield texts


def texts_of(
    arguments: argparse.Namespace,
    store: str | CheckpointStore,
    why_torch: str,
    line: StartLine,
    on_tokenizer: OnTokenizer,
) -> AbstractContextManager[Texts]:
    """Return what gives the texts of a checkpoint that `opened_way` gave, and closes them."""
    from moecache.commands import with_torch, without_torch

    if not isinstance(store, str) and not why_torch:
        return without_torch.file_texts(arguments, store, line, on_tokenizer)
    logger.info("texts.torch %s", why_torch)
    return with_torch.loaded_texts(arguments, store, line, on_tokenizer)
