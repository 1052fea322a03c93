"""The model of a command: opened once, and brought in while Python imports torch."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator

from moecache.commands import collector
from moecache.commands.ranks import num_ranks
from moecache.errors import MoeCacheError
from moecache.runtime import head_start
from moecache.runtime.options import Options
from moecache.runtime.plan import plan_store
from moecache.settings import Settings
from moecache.stores import CheckpointStore, open_store


@contextlib.contextmanager
def opened(
    arguments: argparse.Namespace,
    has_head_start: Callable[[CheckpointStore], bool] = lambda _: True,
) -> Iterator[str | CheckpointStore]:
    """Yield a model's checkpoint, open, for all that is made of it; else its name on the hub.

    To be entered before torch is imported: from here on its trunk is read and memory is made
    ready, see `HeadStart`, and nothing collects cycles until `collector.go_on`. Where
    `has_head_start` says that torch is not imported, none is begun.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(collector.waiting())
        if not os.path.exists(arguments.model):
            yield arguments.model
            return
        store = stack.enter_context(open_store(arguments.model))
        stack.callback(head_start.end, store)
        if num_ranks() == 1 and has_head_start(store):
            # `load` tells what cannot be read.
            settings = Settings.from_environ(is_told=False)
            prefault = settings.choose("prefault").value
            head_start.begin(store, prefault, _slots_bytes(arguments, store, settings))
        yield store


def trunk_read(store: str | CheckpointStore) -> Callable[[], tuple[int, int] | None]:
    """Return a function that says how many of the trunk's bytes are read, and how many there are.

    It returns `None` as long as nobody knows, and of a name on the hub.
    """
    return lambda: None if isinstance(store, str) else head_start.progress(store)


def _slots_bytes(arguments: argparse.Namespace, store: CheckpointStore, settings: Settings) -> int:
    """Return the memory that slots will take; 0 if the plan fails: `load` raises the error."""
    try:
        options = Options(
            arguments.memory,
            arguments.device,
            read=arguments.read,
            context_tokens=getattr(arguments, "context", None),
            host_bytes=store.trunk_bytes + head_start.OTHERS_BYTES,
        )
        return plan_store(store, options, settings).slots_bytes if options.device == "cpu" else 0
    except MoeCacheError:
        return 0
