"""Rank 0 talks, the others follow: the parts of a command of several processes."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from moecache.decoding.sampler import Sampler, Sampling
from moecache.decoding.streams import Stopped, TokenTimes
from moecache.errors import ConfigError, MoeCacheError
from moecache.integrations.transformers._ranks import Ranks
from moecache.integrations.transformers.continuing import continue_text

logger = logging.getLogger(__name__)


class _Leader:
    """Counts the orders of rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._number = 0

    def give(self, **order: Any) -> None:
        self._ranks.post(self._number, json.dumps(order))
        self._number += 1


def watch(model: Any) -> Callable[[], object] | None:
    """Return what raises once a rank is gone, to be called every few seconds; None: one rank."""
    ranks = ranks_of(model)
    return None if ranks is None else ranks.look


def ranks_of(model: Any) -> Ranks | None:
    """Return the ranks that a model's experts are spread over; `None` if there is one."""
    ranks: Ranks | None = getattr(getattr(model, "moecache", None), "ranks", None)
    return ranks if ranks is not None and ranks.num_ranks > 1 else None


@contextlib.contextmanager
def leading(model: Any) -> Iterator[None]:
    """Have the ranks that `follow` generate what this one does, and end when it is done.

    After an error they end with one, too.
    """
    ranks = ranks_of(model)
    if ranks is None:
        yield
        return
    leader = model.__dict__["_moecache_leader"] = _Leader(ranks)
    try:
        yield
        leader.give(do="end")
    except BaseException as error:
        ranks.fail(error)
        raise
    finally:
        del model.__dict__["_moecache_leader"]


def follow(model: Any) -> None:
    """Generate what rank 0 generates, until it says that it is done.

    Raises
    ------
    MoeCacheError
        If rank 0, or another one, is gone.
    """
    ranks = ranks_of(model)
    assert ranks is not None
    number = 0
    while True:
        order = json.loads(ranks.order(number))
        number += 1
        if order["do"] == "end":
            return
        if order["do"] == "figures":
            ranks.gather(figures_of(model))
            continue
        sampling = order["sampling"]
        # JSON has no numbers for keys.
        biases = {int(token): bias for token, bias in sampling.pop("logit_bias").items()}
        drawn = Sampling(**sampling, logit_bias=biases)
        torch.manual_seed(drawn.seed)
        try:
            with _together(ranks):
                continue_text(
                    model,
                    order["prompt"],
                    Sampler(drawn, order["prompt"]),
                    TokenTimes(),
                    max_new_tokens=order["max_new_tokens"],
                )
        except Stopped:
            pass
        except Exception as error:
            # Rank 0 has an error, too, and may go on after it.
            if ranks.are_gone:
                raise
            logger.warning("generation.failed %s: %s", type(error).__name__, error)


@contextlib.contextmanager
def _together(ranks: Ranks) -> Iterator[None]:
    """End a generation on all ranks where it ends on one, whether it is done or has failed."""
    ranks.stage = "between"
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        # The first error is the one that counts.
        with contextlib.suppress(MoeCacheError):
            ranks.leave(error)
        raise
    ranks.leave()


@contextlib.contextmanager
def announced(
    model: Any,
    streamer: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    is_masked: bool = False,
) -> Iterator[None]:
    """Tell the ranks that follow, if there are any, what this one generates meanwhile.

    Raises
    ------
    ConfigError
        If tokens are masked, which the other ranks know nothing of.
    """
    ranks = ranks_of(model)
    if ranks is None:
        yield
        return
    if is_masked:
        raise ConfigError(
            "a grammar is for one process; leave it out, or serve the model without torchrun"
        )
    # One rank that stops by itself would leave the others waiting for it.
    streamer.is_spread = True
    ranks.stop_wanted = lambda: streamer.stopped
    leader = model.__dict__.get("_moecache_leader")
    if leader is None:
        yield
        return
    leader.give(
        do="generate",
        prompt=list(prompt),
        max_new_tokens=max_new_tokens,
        sampling=dataclasses.asdict(sampling),
    )
    with _together(ranks):
        yield


def gathered_figures(model: Any) -> list[dict[str, Any]]:
    """Return the figures of all ranks, by rank; a process without others has its own alone.

    On rank 0 of a command; the others `follow`.
    """
    ranks = ranks_of(model)
    if ranks is None:
        return [figures_of(model)]
    leader = model.__dict__.get("_moecache_leader")
    if leader is not None:
        leader.give(do="figures")
    return ranks.gather(figures_of(model))


def figures_of(model: Any) -> dict[str, Any]:
    """Return what this rank's runtime and its exchanges counted."""
    stats, ranks = model.moecache.stats(), model.moecache.ranks
    share = model.moecache.runtime.share
    return {
        "experts": stats.total_experts if share is None else share.num_experts,
        "capacity": stats.capacity,
        "pool_bytes": stats.pool_bytes,
        "num_hits": stats.num_hits,
        "num_misses": stats.num_misses,
        "bytes_read": stats.bytes_read,
        "stall_ns": stats.stall_ns,
        "exchanges": 0 if ranks is None else ranks.num_exchanges,
        "sent_bytes": 0 if ranks is None else ranks.sent_bytes,
        "waited_ns": 0 if ranks is None else ranks.waited_ns,
    }
