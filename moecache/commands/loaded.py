"""A model of transformers, loaded as a command's options say."""

import argparse
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from moecache.commands import collector
from moecache.commands.ranks import rank_options
from moecache.commands.start_line import StartLine


@contextlib.contextmanager
def loaded(
    arguments: argparse.Namespace,
    store: Any = None,
    line: StartLine | None = None,
) -> Iterator[Any]:
    """Load the model as the options say, and close it at the end.

    `store` is what `opened` gave, if it was asked. `line` is told of what is read ahead, and ends
    once the model is there.
    """
    from moecache.integrations.transformers import load

    collector.go_on()
    options = {} if arguments.dtype is None else {"dtype": arguments.dtype}
    if getattr(arguments, "context", None) is not None:
        options["context_tokens"] = arguments.context
    if getattr(arguments, "prefix_memory", None) is not None:
        options["prefix_memory"] = arguments.prefix_memory
    if line is not None:
        options["progress"] = functools.partial(line.loading.note, "reading experts ahead")
    model = load(
        store or arguments.model,
        arguments.memory,
        arguments.device,
        policy=arguments.policy,
        scope=arguments.scope,
        prefetch=arguments.prefetch,
        read=arguments.read,
        compute=arguments.compute,
        profile=arguments.profile,
        **options | rank_options(arguments),
    )
    with model.moecache:
        if line is not None:
            line.stop()
        yield model
