"""Recipes: what the layers of a decoder compute, as plain data over weights in memory."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moecache.decoding.attending import (
    Attending,
    Attention,
    DeltaAttention,
    LatentAttention,
    Linear,
    LinearAttention,
    Norm,
    Rotation,
    ShortConvolution,
    StateSpace,
    Temperature,
)
from moecache.kernels._experts import Experts

__all__ = [
    "Attending",
    "Attention",
    "Beside",
    "DeltaAttention",
    "FeedForward",
    "LatentAttention",
    "Layer",
    "Linear",
    "LinearAttention",
    "Norm",
    "Recipe",
    "Rotation",
    "Router",
    "ShortConvolution",
    "StateSpace",
    "Temperature",
]


@dataclass(frozen=True)
class Router:
    """The choice of a token's experts.

    Parameters
    ----------
    linear : Linear [num_experts, hidden_size]
    top_k : int
    scores : str
        What is made of the logits; the largest are chosen, and are the experts' weights: "softmax",
        "sigmoid", "softmax of the chosen", "sigmoid of the chosen" (the largest logits are chosen,
        and weights made of theirs), or "sparsemixer", Liu et al., GRIN, 2024, of two experts.
    correction : ndarray of float32, shape [num_experts], optional
        Added to the scores for the choice alone.
    num_groups, num_kept_groups : int, default 1
        Only experts of the best groups are chosen.
    num_best : int, default 2
        A group's score is the sum of so many of its best.
    is_normalized : bool, default False
        Whether weights are divided by their sum.
    least : float, default 0
        Added to that sum.
    floor : float, default 0
        Least of that sum.
    scale : float, default 1
        Multiplies the weights.
    expert_scales : ndarray of float32, shape [num_experts], optional
        Multiply the weights, too, each of its expert's.
    jitter : float, default 0
        Of "sparsemixer".
    scales_input : bool, default False
        Whether the weight of a token's only expert multiplies its input, and not its result.
    cap : float, default 0
        If it is above 0, logits are cap * tanh(logits / cap).
    """

    linear: Linear
    top_k: int
    scores: str
    correction: np.ndarray | None = None
    num_groups: int = 1
    num_kept_groups: int = 1
    num_best: int = 2
    is_normalized: bool = False
    least: float = 0.0
    floor: float = 0.0
    scale: float = 1.0
    expert_scales: np.ndarray | None = None
    jitter: float = 0.0
    scales_input: bool = False
    cap: float = 0.0


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward of all tokens: down(act(gate(x)) * up(x)), or down(act(up(x))).

    Parameters
    ----------
    gate : Linear, optional
    up, down : Linear
    activation : str
        One of the kernels'.
    weight : Linear [1, hidden_size], optional
        Its sigmoid multiplies the result.
    """

    gate: Linear | None
    up: Linear
    down: Linear
    activation: str
    weight: Linear | None = None


@dataclass(frozen=True)
class Beside:
    """Norms of a feed-forward beside experts that have their own: Google DeepMind, Gemma 4, 2026.

    Parameters
    ----------
    router, experts : Norm, optional
        Of hidden states, for the router and for the experts, which are given these without it.
    forward_out, experts_out : Norm, optional
        Of the feed-forward's result, and of the experts' sum.
    """

    router: Norm | None
    experts: Norm | None
    forward_out: Norm | None = None
    experts_out: Norm | None = None


@dataclass(frozen=True)
class Layer:
    """A decoder layer: x + scale * attention(norm(x)), then x + scale * experts(norm(x)).

    Parameters
    ----------
    attention_norm : Norm, optional
        Without it attention is given x.
    attention : Attending, optional
        Without it a layer is a feed-forward alone; its page is `None`.
    forward_norm : Norm, optional
        Without it the feed-forward and the experts are given x.
    forward : FeedForward, optional
        Of every token: instead of experts, or the shared ones beside them.
    router : Router, optional
        Without it and `forward` a layer is attention alone.
    experts : Experts, optional
        Kernel of the layer's slots.
    number : int, default -1
        The layer's number in the runtime; -1 if it has no experts.
    latents : (Linear, Linear), optional
        The first makes the experts' input from the feed-forward's, the second brings the experts'
        sum back to the hidden size: NVIDIA, Nemotron 3, 2025. All layers with experts have such
        products, of one width, or none has.
    scale : float, default 1
    attention_out, forward_out : Norm, optional
        Of what is added to x.
    beside : Beside, optional
        If the feed-forward beside the experts has norms of its own.
    factor : float, default 1
        Multiplies x behind the layer.
    """

    attention_norm: Norm | None
    attention: Attending | None
    forward_norm: Norm | None
    forward: FeedForward | None = None
    router: Router | None = None
    experts: Experts | None = None
    number: int = -1
    latents: tuple[Linear, Linear] | None = None
    scale: float = 1.0
    attention_out: Norm | None = None
    forward_out: Norm | None = None
    beside: Beside | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """What a decoder computes between a token's embedding and the logits of the next.

    Parameters
    ----------
    hidden_size : int
    layers : tuple of Layer
    norm : Norm
        Before the head.
    head : Linear [vocabulary, hidden_size]
    embedding_scale : float, default 1
        Multiplies embeddings.
    logits_scale : float, default 1
        Divides logits.
    cap : float, optional
        Logits are cap * tanh(logits / cap).
    product_type : {"f32", "bf16"}, default "f32"
        Type of the inputs of weights that are no integers, where the processor has such products:
        "bf16" rounds inputs. All else is float32.
    """

    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    cap: float | None = None
    product_type: str = "f32"

    @cached_property
    def counts_positions(self) -> bool:
        """Whether what is computed depends on a text's positions beyond their angles."""
        parts = (layer.attention for layer in self.layers)
        return any(
            isinstance(part, Attention | LatentAttention)
            and part.temperature is not None
            and part.temperature.is_own
            for part in parts
        )
