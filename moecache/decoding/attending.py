"""What layers do beside their experts: products, norms, and attention or what is in its place."""

from dataclasses import dataclass

import numpy as np

from moecache.kernels._matrix import Matrix


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
    bias : ndarray like weight, optional
        If given, the mean of x is subtracted first and this is added: Ba et al., LayerNorm, 2016.
    """

    weight: np.ndarray
    epsilon: float
    bias: np.ndarray | None = None


@dataclass(frozen=True)
class Temperature:
    """Queries of far positions are larger: Nakanishi, Scalable-Softmax, 2025.

    At position p they are multiplied by 1 + scale * log(1 + floor((p + 1) / floor)), or, if
    positions are a text's own, by 1 + scale * log(1 + floor(p / floor)).

    Parameters
    ----------
    floor, scale : float
    is_own : bool, default False
        Whether p counts from a text's first token, and not from padding before it.
    """

    floor: float
    scale: float
    is_own: bool = False


@dataclass(frozen=True)
class Rotation:
    """Rotary positions: Su et al., RoFormer, 2021.

    Parameters
    ----------
    width : int
        Numbers of a head that are turned by the position.
    pairs : {"halves", "neighbours", "neighbours to halves"}
        Which of them are turned together: those that are half of `width` apart, or neighbours,
        which are written back where they were, or as halves.
    first : int, default 0
        Which of a position's angles is the first pair's, where layers have other ones.
    """

    width: int
    pairs: str = "halves"
    first: int = 0


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention: Ainslie et al., 2023.

    Parameters
    ----------
    query, key, out : Linear
    value : Linear, optional
        Without it a value is the key's product, before its norm.
    num_heads, num_kv_heads : int
    width, value_width : int
        Numbers of a head's query or key, and of its value.
    scale : float
        Multiplies the products of queries and keys.
    rotation : Rotation
        Of the first numbers of queries and keys; of none if its width is 0.
    query_norm, key_norm : Norm, optional
        Of each head, or of all of them at once: as wide as its weight is.
    value_norm : Norm, optional
        Of each head.
    has_late_norms : bool, default False
        Whether norms of queries and keys come after the rotation.
    clip : float, optional
        Bound of the absolute values of queries, keys and values, before they are turned.
    sinks : ndarray of float32, shape [num_heads], optional
        A logit beside those of the positions, that has no value.
    window : int, optional
        Positions that a token sees, its own among them; all without it.
    is_chunked : bool, default False
        Whether it sees only positions of its own chunk of `window`.
    temperature : Temperature, optional
    is_gated : bool, default False
        Whether a head's query is followed by as many numbers whose sigmoid multiplies what the
        head gives: `query` is [2 * num_heads * width, inputs].
    gates : Linear [num_heads * width, inputs], optional
        The matrix of these numbers, where they do not follow queries.
    gate_function : {"sigmoid", "softplus"}
        What these numbers become. Of "softplus" there may be one for each head:
        [num_heads, inputs].
    value_scale : float, default 1
        Multiplies values.
    """

    query: Linear
    key: Linear
    value: Linear | None
    out: Linear
    num_heads: int
    num_kv_heads: int
    width: int
    value_width: int
    scale: float
    rotation: Rotation
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    has_late_norms: bool = False
    clip: float | None = None
    sinks: np.ndarray | None = None
    window: int | None = None
    is_chunked: bool = False
    temperature: Temperature | None = None
    is_gated: bool = False
    gates: Linear | None = None
    gate_function: str = "sigmoid"
    value_scale: float = 1.0

    @property
    def held(self) -> tuple[int, int, int]:
        """Heads, and numbers of a key and of a value, that a position leaves behind."""
        return self.num_kv_heads, self.width, self.value_width


@dataclass(frozen=True)
class LinearAttention:
    """The gated delta rule behind a convolution: Yang et al., Gated Delta Networks, 2024.

    A head has a state [width, value_width] instead of keys and values. A token's state decays by
    exp(rate * softplus(decay + step)); what it has for the token's key goes the part
    sigmoid(share) of the way to the token's value; the token's query reads it.

    Parameters
    ----------
    mixed : Linear [2 * num_keys * width + num_heads * value_width, hidden_size]
        Queries, keys and values before the convolution. Without `gates` it has these, too: for each
        key its query, itself, its heads' values and their gates.
    gates : Linear [num_heads * value_width, hidden_size], optional
        Their silu multiplies the norm of what heads give.
    decays : Linear [num_heads, hidden_size], optional
        Without it `shares` has them, too: for each key its heads' shares, then their decays.
    shares : Linear [num_heads, hidden_size]
    conv : ndarray of float32, shape [kernel, channels]
        Weights of the last tokens' rows, the oldest first; its silu goes on.
    rates, steps : ndarray of float32, shape [num_heads]
    norm : Norm
        Of what a head gives.
    out : Linear [hidden_size, num_heads * value_width]
    num_keys, num_heads : int
        Heads of queries and keys, and of values.
    width, value_width : int
        At most 256.
    is_tiled : bool, default False
        Whether heads of values that share a key are `num_keys` apart, and not neighbours.
    """

    mixed: Linear
    gates: Linear | None
    decays: Linear | None
    shares: Linear
    conv: np.ndarray
    rates: np.ndarray
    steps: np.ndarray
    norm: Norm
    out: Linear
    num_keys: int
    num_heads: int
    width: int
    value_width: int
    is_tiled: bool = False

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of what is held of a text beside the rows that the convolution sees."""
        return self.num_heads, self.width, self.value_width


@dataclass(frozen=True)
class DeltaAttention:
    """The delta rule with a decay for each number of a key: Kimi Team, Kimi Linear, 2025.

    A head has a state [width, value_width], as `LinearAttention` has it, whose rows decay by
    exp(rate * softplus(decay + step)) or, if there is a bound, by
    exp(bound * sigmoid(-rate * (decay + step))).

    Parameters
    ----------
    query, key : Linear [num_heads * width, hidden_size]
    value : Linear [num_heads * value_width, hidden_size]
        Their results go through the convolution, one behind the other.
    decays : tuple of Linear, to [num_heads * width]
        One product, or two, the second of what the first makes.
    shares : Linear [num_heads, hidden_size]
    gates : tuple of Linear, to [num_heads * value_width]
        Likewise; their sigmoid multiplies the norm of what heads give.
    conv : ndarray of float32, shape [kernel, 2 * num_heads * width + num_heads * value_width]
        Weights of the last tokens' rows, the oldest first; its silu goes on.
    rates : ndarray of float32, shape [num_heads]
    steps : ndarray of float32, shape [num_heads * width]
    norm : Norm
        Of what a head gives.
    out : Linear [hidden_size, num_heads * value_width]
    num_heads : int
    width, value_width : int
        At most 256.
    bound : float, optional
        Least logarithm of a decay.
    """

    query: Linear
    key: Linear
    value: Linear
    decays: tuple[Linear, ...]
    shares: Linear
    gates: tuple[Linear, ...]
    conv: np.ndarray
    rates: np.ndarray
    steps: np.ndarray
    norm: Norm
    out: Linear
    num_heads: int
    width: int
    value_width: int
    bound: float | None = None

    @property
    def num_keys(self) -> int:
        """Heads of queries and keys: one for each of values."""
        return self.num_heads

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of what is held of a text beside the rows that the convolution sees."""
        return self.num_heads, self.width, self.value_width


@dataclass(frozen=True)
class StateSpace:
    """Mamba 2: Dao and Gu, Transformers are SSMs, 2024.

    A head has a state [value_width, width] instead of keys and values. A token's step is
    softplus(share + step). What is held decays by exp(rate * step); step times the token's value
    is added to it for the token's key; the token's query reads it, and skip times the value is
    added to the result.

    Parameters
    ----------
    mixed : Linear [2 * values + 2 * num_keys * width + num_heads, hidden_size]
        With values = num_heads * value_width: gates, then values, keys and queries before the
        convolution, then shares. Silu of the gates multiplies what heads give.
    conv : ndarray of float32, shape [kernel, values + 2 * num_keys * width]
        Weights of the last tokens' rows, the oldest first; the sum's silu goes on.
    conv_bias : ndarray of float32, shape [values + 2 * num_keys * width], optional
    rates, steps, skips : ndarray of float32, shape [num_heads]
    norm : Norm
        Of all that heads give behind the gates, in `num_norms` parts of one weight.
    out : Linear [hidden_size, values]
    num_keys, num_heads : int
        Keys and queries, which neighbouring heads share, and heads.
    width, value_width : int
        At most 256.
    num_norms : int, default 1
    """

    mixed: Linear
    conv: np.ndarray
    conv_bias: np.ndarray | None
    rates: np.ndarray
    steps: np.ndarray
    skips: np.ndarray
    norm: Norm
    out: Linear
    num_keys: int
    num_heads: int
    width: int
    value_width: int
    num_norms: int = 1

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of what is held of a text beside the rows that the convolution sees."""
        return self.num_heads, self.value_width, self.width


@dataclass(frozen=True)
class ShortConvolution:
    """A convolution over the last tokens between two gates: Liquid AI, LFM2 Technical Report, 2025.

    Parameters
    ----------
    mixed : Linear [3 * hidden_size, hidden_size]
        What multiplies the convolution's input, its result, and its input.
    conv : ndarray of float32, shape [kernel, hidden_size]
        Weights of the last tokens' rows, the oldest first.
    conv_bias : ndarray of float32, shape [hidden_size], optional
    out : Linear [hidden_size, hidden_size]
    """

    mixed: Linear
    conv: np.ndarray
    conv_bias: np.ndarray | None
    out: Linear

    @property
    def state(self) -> tuple[int, int, int]:
        """As one head without a state."""
        return 1, 0, self.conv.shape[1]


@dataclass(frozen=True)
class LatentAttention:
    """Attention to latents that keys and values are expanded from: DeepSeek-AI, DeepSeek-V2, 2024.

    A head's query has two parts: the content, and what is turned by the position.

    Parameters
    ----------
    query : Linear [num_heads * (width + shared_width), inputs]
        Of hidden states, or of what `low` makes of them.
    compressed : Linear [rank + shared_width, hidden_size]
        A position's latent, and the part of its key that is turned, which all heads share.
    norm : Norm
        Of the latent.
    expand : ndarray of float32 or bfloat16, shape [num_heads, width + value_width, rank]
        Makes a head's key and value of a latent.
    out : Linear
    num_heads : int
    width, value_width : int
        Numbers of the content of a head's query, and of its value.
    scale : float
    rotation : Rotation
    low : Linear, optional
    low_norm : Norm, optional
    temperature : Temperature, optional
        Of queries, their turned part too.
    still_width : int, default 0
        Numbers of the second part if it is not turned: `rotation.width` is 0 then.
    gates : Linear [num_heads, hidden_size], optional
        Their sigmoid multiplies what each head gives.
    """

    query: Linear
    compressed: Linear
    norm: Norm
    expand: np.ndarray
    out: Linear
    num_heads: int
    width: int
    value_width: int
    scale: float
    rotation: Rotation
    low: Linear | None = None
    low_norm: Norm | None = None
    temperature: Temperature | None = None
    still_width: int = 0
    gates: Linear | None = None

    @property
    def shared_width(self) -> int:
        """Numbers of a query's second part, whose keys all heads share."""
        return self.still_width or self.rotation.width

    @property
    def held(self) -> tuple[int, int, int]:
        """Heads, and numbers of a key and of a value, that a position leaves behind."""
        return 1, self.norm.weight.size, self.shared_width


Stateful = LinearAttention | DeltaAttention | StateSpace | ShortConvolution
Attending = Attention | LatentAttention | Stateful
