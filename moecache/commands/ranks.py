"""Commands under torchrun: rank 0 talks, the others follow."""

import argparse
import contextlib
import logging
import signal
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from moecache.commands.metrics import served
from moecache.errors import ConfigError
from moecache.settings import launched_ranks
from moecache.units import format_bytes

logger = logging.getLogger(__name__)


def num_ranks() -> int:
    """Return how many processes were started, 1 if nobody said."""
    found = launched_ranks()
    return 1 if found.rank is None or found.num_ranks is None else found.num_ranks


def rank() -> int:
    """Return which of them this is."""
    return 0 if num_ranks() == 1 else launched_ranks().rank or 0


def add_rank_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that concern several processes."""
    parser.add_argument(
        "--placement",
        metavar="FILE",
        help="which rank has which experts, as moecache plan-ranks wrote it; under torchrun, where "
        "the experts are spread over all processes (default: all have as many)",
    )
    parser.add_argument(
        "--rank-timeout",
        type=float,
        metavar="SECONDS",
        help="after so long without an answer a process counts as gone (default: 60)",
    )


def rank_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what `load` is told of several processes."""
    given = {
        "placement": getattr(arguments, "placement", None),
        "rank_timeout_s": getattr(arguments, "rank_timeout", None),
    }
    if num_ranks() > 1:
        if given["rank_timeout_s"] is not None:
            from moecache.integrations.transformers._joining import check_timeout

            check_timeout("--rank-timeout", given["rank_timeout_s"])
        return {"expert_parallel": True, **given}
    for name, value in given.items():
        if value is not None:
            option = {"placement": "--placement", "rank_timeout_s": "--rank-timeout"}[name]
            raise ConfigError(f"{option} is for several processes; start the command by torchrun")
    return {}


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Tell the other ranks of an error that comes before this one has joined them."""
    try:
        yield
    except Exception as error:
        if num_ranks() > 1:
            from moecache.integrations.transformers._joining import tell

            logger.info("ranks.telling %s: %s", type(error).__name__, error)
            tell(error)
        raise


def follow(arguments: argparse.Namespace, loaded: Any, metrics_port: int = 0) -> int:
    """Do what rank 0 does, and say nothing; return the exit code.

    Signals are rank 0's: its end ends this one. Metrics are served meanwhile on the port that
    comes as many after `metrics_port` as the rank says, unless that is 0.
    """
    from moecache.integrations.transformers import _following, generation

    with (
        generation.quiet(verbose=arguments.verbose),
        loaded(arguments) as model,
        _deaf(),
        _metrics(model, metrics_port),
    ):
        _following.follow(model)
    return 0


def _metrics(model: Any, port: int) -> contextlib.AbstractContextManager[object]:
    if not port:
        return contextlib.nullcontext()
    return served(model.moecache.runtime, port + rank(), {"rank": str(rank())})


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Let signals that end a command pass."""
    before = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def rank_table(figures: list[dict[str, Any]]) -> Table:
    """Return what each rank counted, and the sum."""
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "experts", "slots", "memory", "hit rate", "read", "waited", "sent"):
        table.add_column(name, justify="right")
    total = {name: sum(one[name] for one in figures) for name in figures[0]}
    for name, one in [*((str(n), one) for n, one in enumerate(figures)), ("all", total)]:
        asked = one["num_hits"] + one["num_misses"]
        table.add_row(
            name,
            str(one["experts"]),
            str(one["capacity"]),
            format_bytes(one["pool_bytes"]),
            f"{one['num_hits'] / asked:.1%}" if asked else "-",
            format_bytes(one["bytes_read"]),
            # Ranks wait beside each other: a sum of seconds would be nobody's.
            f"{one['stall_ns'] / 1e9:.2f} s" if name != "all" else "",
            format_bytes(one["sent_bytes"]),
        )
    return table
