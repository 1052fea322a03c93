"""The model of a command that writes texts: with torch, or from a file alone."""

import argparse
import functools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console

from moecache.commands.opened import opened
from moecache.commands.start_line import StartLine
from moecache.commands.texts import OnTokenizer, Texts
from moecache.stores import GgufStore
from moecache.telemetry.loading import Loading

logger = logging.getLogger(__name__)


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
    # Not for --help to wait for.
    from moecache.commands import with_torch, without_torch

    why_torch = functools.cache(
        functools.partial(without_torch.why_torch, arguments, is_chat=is_chat)
    )
    with ExitStack() as stack:
        store = stack.enter_context(opened(arguments, lambda store: why_torch(store) != ""))
        line = stack.enter_context(StartLine(console, Loading()))
        if isinstance(store, GgufStore):
            if not why_torch(store):
                texts = without_torch.file_texts(arguments, store, line, on_tokenizer)
                yield stack.enter_context(texts)
                return
            logger.info("texts.torch %s", why_torch(store))
        yield stack.enter_context(with_torch.loaded_texts(arguments, store, line, on_tokenizer))
