"""Recipes: what the layers of a decoder compute, as plain data over weights in memory."""

from dataclasses import dataclass

import numpy as np

from moecache.kernels._kernels import Experts, Matrix


@dataclass(frozen=True)
class Linear:
    """A product with a weight matrix, and a bias.

    Parameters
    ----------
    matrix : Matrix [outputs, inputs]
    bias : ndarray of float32 or bfloat16, shape [outputs], optional
    """

    matrix: Matrix
    bias: np.ndarray | None = None


@dataclass(frozen=True)
class Norm:
    """x / sqrt(mean(x^2) + epsilon) * weight: Zhang and Sennrich, RMSNorm, 2019.

    Parameters
    ----------
    weight : ndarray of float32 or bfloat16
    epsilon : float
    """

    weight: np.ndarray
    epsilon: float


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with rotary positions.

    Parameters
    ----------
    query, key, value, out : Linear
    num_heads, num_kv_heads : int
    width, value_width : int
        Numbers of a head's query or key, and of its value.
    scale : float
        Multiplies the products of queries and keys.
    query_norm, key_norm : Norm, optional
        Of each head, or of all of them at once: as wide as its weight is.
    rotary_width : int
        Numbers of a head that are turned by the position, from the first one on.
    is_interleaved : bool, default False
        Whether pairs are neighbours; else they are half of `rotary_width` apart.
    clip : float, optional
        Bound of the absolute values of queries, keys and values, before they are turned.
    sinks : ndarray of float32, shape [num_heads], optional
        A logit beside those of the positions, that has no value.
    """

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    num_heads: int
    num_kv_heads: int
    width: int
    value_width: int
    scale: float
    rotary_width: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    is_interleaved: bool = False
    clip: float | None = None
    sinks: np.ndarray | None = None


@dataclass(frozen=True)
class Router:
    """The choice of a token's experts.

    Parameters
    ----------
    linear : Linear [num_experts, hidden_size]
    top_k : int
    scores : {"softmax", "sigmoid", "softmax of the chosen"}
        What is made of the logits; the largest are chosen, and are the experts' weights.
    correction : ndarray of float32, shape [num_experts], optional
        Added to the scores for the choice alone.
    num_groups, num_kept_groups : int, default 1
        Only experts of the best groups are chosen; a group's score is the sum of its two best.
    is_normalized : bool, default False
        Whether weights are divided by their sum.
    least : float, default 0
        Added to that sum.
    scale : float, default 1
        Multiplies the weights.
    """

    linear: Linear
    top_k: int
    scores: str
    correction: np.ndarray | None = None
    num_groups: int = 1
    num_kept_groups: int = 1
    is_normalized: bool = False
    least: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward of all tokens: down(act(gate(x)) * up(x)).

    Parameters
    ----------
    gate, up, down : Linear
    activation : str
        One of the kernels'.
    weight : Linear [1, hidden_size], optional
        Its sigmoid multiplies the result.
    """

    gate: Linear
    up: Linear
    down: Linear
    activation: str
    weight: Linear | None = None


@dataclass(frozen=True)
class Layer:
    """A decoder layer: x + attention(norm(x)), then x + experts(norm(x)).

    Parameters
    ----------
    attention_norm : Norm
    attention : Attention
    forward_norm : Norm
    forward : FeedForward, optional
        Of every token: instead of experts, or the shared ones beside them.
    router : Router, optional
    experts : Experts, optional
        Kernel of the layer's slots.
    number : int, default -1
        The layer's number in the runtime; -1 if it has no experts.
    """

    attention_norm: Norm
    attention: Attention
    forward_norm: Norm
    forward: FeedForward | None = None
    router: Router | None = None
    experts: Experts | None = None
    number: int = -1


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
    """

    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
