"""Traces of one model as one trace: one after the other, or side by side."""

from collections.abc import Iterable, Sequence

import numpy as np

from moecache.errors import ConfigError
from moecache.traces.trace import Trace


def concatenate(traces: Iterable[Trace]) -> Trace:
    """Return traces of one model one after the other.

    Sequences stay apart, steps go on counting. Rows that are narrower than others
    are padded. Metadata is what all have in common.

    Raises
    ------
    ConfigError
        If there is no trace, or their shapes differ.
    """
    traces = list(traces)
    return _join(traces, [np.full(len(trace), number) for number, trace in enumerate(traces)])


def interleave(traces: Iterable[Trace]) -> Trace:
    """Return traces of one model as a batch: a row of each in turn, as one step.

    A trace that ends earlier leaves the batch. For measuring what batching does to a
    cache: the steps are new, and `bulk` where they have several rows.

    Raises
    ------
    ConfigError
        If there is no trace, or their shapes differ.
    """
    traces = list(traces)
    return _join(traces, [np.arange(len(trace)) for trace in traces], together=True)


def _join(traces: Sequence[Trace], rounds: list[np.ndarray], *, together: bool = False) -> Trace:
    if not traces:
        raise ConfigError("there is no trace to join")
    first = traces[0]
    for trace in traces[1:]:
        if trace.num_experts != first.num_experts or not np.array_equal(trace.layers, first.layers):
            raise ConfigError(f"{trace!r} and {first!r} are not of one model")
    top_k = max(trace.top_k for trace in traces)
    order = np.argsort(np.concatenate(rounds), kind="stable")
    experts, sequences, steps = [], [], []
    num_sequences = num_steps = 0
    for trace in traces:
        padding = ((0, 0), (0, 0), (0, top_k - trace.top_k))
        experts.append(np.pad(trace.experts, padding, constant_values=-1))
        numbers = np.unique(trace.sequence, return_inverse=True)[1].astype(np.int32)
        sequences.append(numbers + num_sequences)
        num_sequences += int(numbers.max(initial=-1)) + 1
        passes = np.cumsum(np.diff(trace.step, prepend=trace.step[:1]) != 0).astype(np.int32)
        steps.append(passes + num_steps)
        num_steps += trace.num_steps
    common = {
        name: value
        for name, value in first.metadata.items()
        if all(trace.metadata.get(name) == value for trace in traces)
    }
    return Trace(
        np.concatenate(experts)[order],
        num_experts=first.num_experts,
        phase=np.concatenate([trace.phase for trace in traces])[order],
        sequence=np.concatenate(sequences)[order],
        step=np.concatenate(rounds if together else steps)[order],
        bulk=None if together else np.concatenate([trace.bulk for trace in traces])[order],
        layers=first.layers,
        **common,
    )
