"""NotingSampler: draws tokens, and notes how likely they and others were."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moecache.decoding.sampler import Sampler, Sampling

# Said instead of the logarithm of 0, which JSON has no word for.
_LEAST = -9999.0


@dataclass(frozen=True)
class Noted:
    """A token that was drawn.

    Attributes
    ----------
    text : str
    logprob : float
        Natural logarithm of its probability by the model's own distribution, at temperature 1 and
        before penalties, biases and grammars.
    top : tuple of (str, float)
        The likeliest tokens at its place, and theirs.
    """

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


class NotingSampler(Sampler):
    """Draws what a `Sampler` draws.

    Parameters
    ----------
    sampling : Sampling
    prompt : iterable of int
    num_top : int
        Likeliest tokens that are noted at each place.
    tokenizer : FileTokenizer or PreTrainedTokenizerBase

    Attributes
    ----------
    noted : deque of Noted
    """

    def __init__(
        self, sampling: Sampling, prompt: Iterable[int], num_top: int, tokenizer: Any
    ) -> None:
        super().__init__(sampling, prompt)
        self.noted: deque[Noted] = deque()
        self._num_top = num_top
        self._tokenizer = tokenizer

    def draw(self, logits: np.ndarray, mask: np.ndarray | None = None) -> int:
        """Return the next token, as a `Sampler` does, and note it."""
        token = super().draw(logits, mask)
        scores = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
        scores -= scores.max()
        scores -= np.log(np.exp(scores).sum())
        num = min(self._num_top, len(scores))
        top = np.argpartition(scores, -num)[-num:] if num else np.empty(0, np.int64)
        # The likeliest first; of equal ones the smallest id.
        top = top[np.lexsort((top, -scores[top]))]
        self.noted.append(
            Noted(
                self._text(token),
                max(_LEAST, float(scores[token])),
                tuple((self._text(t), max(_LEAST, float(scores[t]))) for t in top.tolist()),
            )
        )
        return token

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))


def chat_logprobs(noted: Iterable[Noted]) -> dict[str, Any]:
    """Return tokens as a chat's choice has them."""
    return {
        "content": [
            {
                **_entry(each.text, each.logprob),
                "top_logprobs": [_entry(text, logprob) for text, logprob in each.top],
            }
            for each in noted
        ],
        "refusal": None,
    }


def completion_logprobs(noted: Iterable[Noted], offset: int) -> dict[str, Any]:
    """Return tokens as a completion's choice has them.

    Parameters
    ----------
    noted : iterable of Noted
    offset : int
        Characters of the tokens before.
    """
    found = list(noted)
    offsets = []
    for each in found:
        offsets.append(offset)
        offset += len(each.text)
    return {
        "tokens": [each.text for each in found],
        "token_logprobs": [each.logprob for each in found],
        "top_logprobs": [dict(each.top) for each in found],
        "text_offset": offsets,
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # A token may be a part of a character, whose bytes its text does not tell.
    known = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": [*text.encode()] if known else None}
