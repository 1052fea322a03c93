"""The model of a command: opened once, and brought in while Python imports torch."""

import argparse
import contextlib
import os
from collections.abc import Iterator

from moecache.commands.ranks import num_ranks
from moecache.errors import ConfigError
from moecache.runtime import head_start
from moecache.runtime.options import Options
from moecache.stores import CheckpointStore, open_store


@contextlib.contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[str | CheckpointStore]:
    """Yield a model's checkpoint, open, for all that is made of it; else its name on the hub.

    To be entered before torch is imported: from here on its trunk is read and memory is made
    ready, see `HeadStart`.
    """
    if not os.path.exists(arguments.model):
        yield arguments.model
        return
    with open_store(arguments.model) as store:
        try:
            if num_ranks() == 1:
                # What cannot be used is refused by `load`.
                with contextlib.suppress(ConfigError):
                    options = Options(
                        arguments.memory,
                        arguments.device,
                        read=arguments.read,
                        context_tokens=getattr(arguments, "context", None),
                    )
                    head_start.begin(store, options, holds=True)
            yield store
        finally:
            head_start.end(store)
