"""Traces for tests: random ones, and hypothesis strategies."""

import numpy as np
from hypothesis import strategies as st

from moecache.study import Trace


def random_trace(
    seed: int,
    *,
    num_tokens: int = 40,
    num_layers: int = 3,
    num_experts: int = 8,
    top_k: int = 2,
    padding: float = 0.0,
    num_sequences: int = 1,
) -> Trace:
    """Return a trace of a seed; some of its choices are padding."""
    rng = np.random.default_rng(seed)
    shape = (num_tokens, num_layers, num_experts)
    experts = rng.random(shape).argsort(axis=2)[:, :, :top_k]
    experts = np.where(rng.random(experts.shape) < padding, -1, experts)
    return Trace(
        experts,
        num_experts=num_experts,
        phase=rng.integers(0, 2, num_tokens),
        sequence=rng.integers(0, num_sequences, num_tokens),
        step=np.sort(rng.integers(0, max(1, num_tokens), num_tokens)),
        model="random",
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw small traces, with padding, sequences, one layer, no tokens."""
    num_experts = draw(st.integers(1, 9))
    return random_trace(
        draw(st.integers(0, 2**32 - 1)),
        num_tokens=draw(st.integers(0, 24)),
        num_layers=draw(st.integers(1, 4)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        padding=draw(st.sampled_from([0.0, 0.2, 1.0])),
        num_sequences=draw(st.integers(1, 3)),
    )
