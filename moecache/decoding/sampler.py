"""Sampler: the next token, drawn from logits."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moecache.errors import ConfigError

# exp(-46) is 1e-20: tokens further below the largest logit add nothing to a sum in float64.
_FAR = 46.0


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The defaults draw from the model's own distribution.

    Parameters
    ----------
    temperature : float, default 1
        Divides logits; 0 takes the likeliest token.
    top_k : int, default 0
        Draw among this many of the likeliest; 0: among all.
    top_p : float, default 1
        Draw among the likeliest that together have this probability: Holtzman et al., The curious
        case of neural text degeneration, 2020.
    min_p : float, default 0
        Draw among those with at least this share of the likeliest one's probability: Nguyen et
        al., Min-p sampling, 2025.
    repetition_penalty : float, default 1
        Divides positive and multiplies negative logits of tokens that were there, in the prompt,
        too: Keskar et al., CTRL, 2019.
    presence_penalty, frequency_penalty : float, default 0
        Taken from the logits of tokens that were generated: once, and for each time, as OpenAI's
        protocol says.
    logit_bias : mapping of int to float
        Added to the logits of tokens.
    seed : int, default 0
        The draws of two samplers with the same seed are the same.

    Raises
    ------
    ConfigError
        If a number is out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        for name, least, most in (
            ("temperature", 0, math.inf),
            ("top_k", 0, math.inf),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("presence_penalty", -math.inf, math.inf),
            ("frequency_penalty", -math.inf, math.inf),
        ):
            value = getattr(self, name)
            if not least <= value <= most or (name != "top_k" and not math.isfinite(value)):
                raise ConfigError(f"{name} must be from {least} to {most}, got {value}")
        # Beyond these bounds float32 has infinities and zeros.
        if not 1e-6 <= self.repetition_penalty <= 1e6:
            raise ConfigError(
                f"repetition_penalty must be from 1e-6 to 1e6, got {self.repetition_penalty}"
            )

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


class Sampler:
    """Draws one token after the other. Not for two threads at once.

    Its generator is Philox: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011. The
    n-th draw of a seed is the same whatever else is drawn, so that a sequence has the tokens that
    it has alone, also in a batch.

    Parameters
    ----------
    sampling : Sampling
    prompt : iterable of int
        Tokens that were there before, for `repetition_penalty`.
    """

    def __init__(self, sampling: Sampling, prompt: Iterable[int] = ()) -> None:
        self.sampling = sampling
        self._random = np.random.Generator(np.random.Philox(key=sampling.seed % 2**64))
        self._counts: dict[int, int] = {}
        self._seen = set(prompt) if sampling.repetition_penalty != 1 else set()

    def draw(self, logits: np.ndarray, mask: np.ndarray | None = None) -> int:
        """Return the next token.

        Parameters
        ----------
        logits : ndarray of float32, shape [vocabulary]
            Not changed.
        mask : ndarray of bool, shape [vocabulary], optional
            Tokens that may be drawn.

        Raises
        ------
        ConfigError
            If no token may be drawn, or every logit is no number.
        """
        scores = self.adjusted(logits, mask)
        best = int(scores.argmax())
        if not scores[best] > -np.inf:
            raise ConfigError("no token can be drawn: none is allowed, or logits are no numbers")
        token = best if self.sampling.temperature == 0 else self._among(scores, scores[best])
        self.take(token)
        return token

    def take(self, token: int) -> None:
        """Count a token, as `draw` does with its own."""
        if self.sampling.looks_back:
            self._counts[token] = self._counts.get(token, 0) + 1
            self._seen.add(token)

    def adjusted(self, logits: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Return logits with penalties, biases and mask, before the temperature.

        Returns
        -------
        ndarray of float32, shape [vocabulary]
            Where nothing is to be changed, `logits` itself.
        """
        s = self.sampling
        if not s.looks_back and not s.logit_bias and mask is None and not np.isnan(logits.max()):
            return logits
        scores: np.ndarray = np.where(np.isnan(logits), -np.inf, logits).astype(np.float32)
        if self._seen and s.repetition_penalty != 1:
            seen = np.fromiter((t for t in self._seen if t < len(scores)), np.int64)
            had = scores[seen]
            factor = np.float32(s.repetition_penalty)
            scores[seen] = np.where(had > 0, had / factor, had * factor)
        if self._counts and (s.presence_penalty or s.frequency_penalty):
            tokens = np.fromiter(self._counts, np.int64)
            counts = np.fromiter(self._counts.values(), np.float32)
            scores[tokens] -= s.presence_penalty + s.frequency_penalty * counts
        for token, bias in s.logit_bias.items():
            if 0 <= token < len(scores):
                scores[token] += bias
        if mask is not None:
            scores[: len(mask)][~mask[: len(scores)]] = -np.inf
            scores[len(mask) :] = -np.inf
        return scores

    def _among(self, scores: np.ndarray, largest: np.float32) -> int:
        """Draw among the tokens that the limits leave."""
        s = self.sampling
        # One number for each token, whatever the limits are.
        point = self._random.random()
        if np.isinf(largest):
            # The limit: equal shares of those that are infinite.
            scores = np.where(scores == largest, np.float32(0), np.float32(-np.inf))
            largest = np.float32(0)
        if 0 < s.top_k < len(scores):
            tokens = _likeliest(scores, largest, s.top_k)
        else:
            tokens = np.flatnonzero(scores >= largest - _FAR * s.temperature)
        weights = np.exp((scores[tokens].astype(np.float64) - float(largest)) / s.temperature)
        if s.min_p > 0:
            kept = weights >= s.min_p * weights.max()
            tokens, weights = tokens[kept], weights[kept]
        total = weights.sum()
        if s.top_p < 1:
            tokens, sums = _ordered(tokens, weights, s.top_p * total)
            num = int(np.searchsorted(sums, s.top_p * total)) + 1
            tokens, sums = tokens[:num], sums[:num]
            point *= sums[-1]
        else:
            point *= total
            tokens, sums = _ordered(tokens, weights, point)
        place = int(np.searchsorted(sums, point, side="right"))
        return int(tokens[min(place, len(tokens) - 1)])


# Vocabularies are large, and few tokens matter: those near the likeliest one are looked at first.


def _likeliest(scores: np.ndarray, largest: np.float32, num: int) -> np.ndarray:
    """Return the tokens of the largest scores; of equal ones at the edge those of small ids."""
    for margin in (4, 16):
        near = np.flatnonzero(scores >= largest - np.float32(margin))
        if len(near) >= num:
            break
    else:
        near = np.arange(len(scores))
    some = scores[near]
    edge = np.partition(some, -num)[-num]
    return np.concatenate([near[some > edge], near[some == edge]])[:num]


def _ordered(
    tokens: np.ndarray, weights: np.ndarray, wanted: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and the sums of their weights, which reach beyond what is wanted if they can.

    The likeliest come first, of equal ones the smallest ids. The largest weight is 1.
    """
    for least in (2.0**-4, 2.0**-10, 0.0):
        some = np.flatnonzero(weights >= least)
        if least == 0 or weights[some].sum() > wanted * (1 + 1e-9):
            break
    order = some[np.lexsort((tokens[some], -weights[some]))]
    return tokens[order], np.cumsum(weights[order])


class Mask(Protocol):
    """Says which tokens may come next: a grammar."""

    def allowed(self) -> np.ndarray | None:
        """Return bool [vocabulary]; `None` if all tokens may come."""

    def take(self, token: int) -> None:
        """Take the token that came."""


def next_token(sampler: Sampler, logits: np.ndarray, mask: Mask | None = None) -> int:
    """Return what a sampler draws of logits, float32 [vocabulary], within a mask that takes it."""
    token = sampler.draw(logits, None if mask is None else mask.allowed())
    if mask is not None:
        mask.take(token)
    return token
