"""Continuing a text: the loop of a token after the other, and how each is drawn."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache
from transformers.generation.logits_process import LogitsProcessor

from moecache.decoding import text
from moecache.decoding.prefixes import PrefixCache
from moecache.decoding.safetensors.generation import SAMPLED
from moecache.decoding.sampler import Mask, Sampler, Sampling, next_token
from moecache.decoding.streams import TokenTimes
from moecache.integrations.transformers._decoded import decoded_model
from moecache.integrations.transformers._device_tokens import DeviceTokens
from moecache.integrations.transformers._loops import ends_of, has_loop, is_plain
from moecache.integrations.transformers.prompts import SPAN_PAGES, Span
from moecache.integrations.transformers.reading import PromptReader


def sampling_of(model: Any, seed: int = 0, **given: Any) -> Sampling:
    """Return how a model's tokens are drawn: what is given, else what the model's files say.

    Parameters
    ----------
    model : PreTrainedModel
    seed : int, default 0
    **given
        Fields of `Sampling`; `None` is what generation_config.json says. A temperature of 0 takes
        the likeliest token, whatever else is said.

    Raises
    ------
    ConfigError
        If a number is out of its range.
    """
    config = model.generation_config
    defaults = GenerationConfig._get_default_generation_params()
    said = {name: getattr(config, name, None) for name in SAMPLED}
    found = {name: defaults.get(name) if had is None else had for name, had in said.items()}
    does_sample = bool(found.pop("do_sample"))
    if not does_sample:
        # Files may name a temperature that is not used.
        found["temperature"] = 0.0
    found |= {name: value for name, value in given.items() if value is not None}
    return Sampling(seed=seed, **{k: v for k, v in found.items() if v is not None})


@torch.no_grad()
def continue_text(
    model: Any,
    prompt: Sequence[int],
    sampler: Sampler,
    streamer: TokenTimes,
    *,
    max_new_tokens: int,
    mask: Mask | None = None,
    prefixes: PrefixCache | None = None,
) -> None:
    """Generate tokens until the model ends its text, `max_new_tokens` are there, or `Stopped`.

    Parameters
    ----------
    model : PreTrainedModel
    prompt : sequence of int
    sampler : Sampler
    streamer : TokenTimes
        Gets the prompt, each token, and the end.
    max_new_tokens : int
    mask : Mask, optional
        Which tokens may come.
    prefixes : PrefixCache, optional
        Pages of earlier prompts.
    """
    tokens = _device_tokens(model)
    if tokens is not None:

        def take(logits: np.ndarray) -> int | None:
            token = next_token(sampler, logits, mask)
            taken.append(token)
            streamer.put(torch.tensor([[token]]))
            is_over = token in ends or len(taken) >= max_new_tokens
            return None if is_over else token

        ends, taken = ends_of(model), list[int]()
        streamer.put(torch.tensor([list(prompt)]))
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        tokens.write(prompt, take, max_new_tokens, context)
        streamer.end()
        return
    decoded = decoded_model(model)
    if decoded is not None:
        text.continue_text(
            decoded,
            prompt,
            sampler,
            streamer,
            max_new_tokens=max_new_tokens,
            mask=mask,
            prefixes=decoded.own(prefixes),
        )
        return
    if not has_loop(model):
        ids = torch.tensor([list(prompt)], dtype=torch.int64)
        if model.device.type != "meta":
            ids = ids.to(model.device)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            do_sample=False,
            logits_processor=[_Drawn(sampler, mask)],
            **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty")),
        )
        return
    own_text = Text(
        model,
        prompt,
        sampler,
        streamer,
        max_new_tokens=max_new_tokens,
        mask=mask,
        prefixes=prefixes,
    )
    while not own_text.is_over:
        if own_text.is_reading:
            own_text.read(SPAN_PAGES)
        else:
            own_text.step()
    streamer.end()


def _device_tokens(model: Any) -> DeviceTokens | None:
    """Return what computes a model's texts on a GPU; `None` if `generate` does."""
    offload = getattr(model, "moecache", None)
    tokens: DeviceTokens | None = None if offload is None else offload.tokens
    is_fit = tokens is not None and is_plain(model) and not tokens.why_not_static()
    return tokens if is_fit else None


class Text:
    """A text whose prompt goes through a model's modules in parts; then a token after the other.

    A call that fails leaves the text where it was; it may not be possible to go on.

    Parameters
    ----------
    model, prompt, sampler, streamer, max_new_tokens, mask, prefixes
        As those of `continue_text`, of a model that `has_loop`.

    Attributes
    ----------
    streamer : TokenTimes
    token : int or None
        The last one that was drawn; `None` while the prompt is read.
    is_over : bool
        Whether the model has ended it, or all tokens are there.
    error : Exception or None
        What ended it otherwise; noted by whoever goes on with it.
    """

    def __init__(
        self,
        model: Any,
        prompt: Sequence[int],
        sampler: Sampler,
        streamer: TokenTimes,
        *,
        max_new_tokens: int,
        mask: Mask | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.streamer = streamer
        self.token: int | None = None
        self.is_over = False
        self.error: Exception | None = None
        self._model = model
        self._ends = ends_of(model)
        self._sampler, self._mask = sampler, mask
        self._num_left = max_new_tokens
        streamer.put(torch.tensor([list(prompt)]))
        self._reader = PromptReader(model, prompt, prefixes)

    @property
    def cache(self) -> DynamicCache:
        """The keys and values of all tokens but the last one that was drawn."""
        return self._reader.cache

    @property
    def is_reading(self) -> bool:
        """Whether some of the prompt is still to be read."""
        return self._reader.num_left > 0

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of the prompt was read but what was known."""
        return self._reader.is_fresh

    @property
    def num_unread(self) -> int:
        """Tokens of the prompt that are still to be read."""
        return self._reader.num_left

    def read(self, num_pages: int) -> None:
        """Read at most so many pages of the prompt; draw a token after the last one.

        Raises
        ------
        Stopped
            If the streamer wants no more.
        """
        self.begin()
        self._take_logits(self._reader.advance(num_pages, self.streamer.read))

    def will_find(self, other: "Text") -> bool:
        """Return whether pages that another's prompt still reads need not be read for this one."""
        return self._reader.will_find(other._reader)

    def next_span(self, num_pages: int) -> Span | None:
        """Return the prompt's next pages, at most so many; `None` if they go alone."""
        self.begin()
        span = self._reader.next_span(num_pages)
        return None if span is None or span.is_decoded else span

    def progress_of(self, span: Span) -> Callable[[], int]:
        """Return what says, called once a layer, how many tokens are read, in layers."""
        return self._reader.progress_of(span)

    def take_span(self, span: Span) -> None:
        """Take pages that were read; draw a token after the last one.

        Raises
        ------
        Stopped
            If the streamer wants no more.
        """
        logits = self._reader.take(span)
        self.streamer.read(span.end)
        self._take_logits(logits)

    def forget(self) -> None:
        """Give keys and values back; the prompt would have to be read anew."""
        self._reader.forget()

    def begin(self) -> None:
        """Find the prompt's pages that are known by now, unless this was done before."""
        self._reader.begin()
        self.streamer.cached_tokens = self._reader.num_cached

    def _take_logits(self, logits: torch.Tensor | None) -> None:
        """Draw the first token, once the prompt is read."""
        if logits is not None:
            self.is_over = self._num_left < 1
            if not self.is_over:
                self.take(logits.float().numpy())

    def step(self) -> None:
        """Compute the logits after the last token, alone, and draw the next one.

        Raises
        ------
        Stopped
            If the streamer wants no more.
        """
        ids = torch.tensor([[self.token]])
        if self._model.device.type != "meta":
            ids = ids.to(self._model.device)
        logits = self._model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits
        self.take(logits[0, -1].float().numpy())

    def take(self, logits: np.ndarray) -> None:
        """Draw a token of the logits after the last one.

        Parameters
        ----------
        logits : ndarray of float32, shape [vocabulary]

        Raises
        ------
        Stopped
            If the streamer wants no more.
        """
        self.token = next_token(self._sampler, logits, self._mask)
        self._num_left -= 1
        self.is_over = self.token in self._ends or self._num_left < 1
        self.streamer.put(torch.tensor([[self.token]]))


class _Drawn(LogitsProcessor):
    """Leaves the one token that a sampler draws."""

    def __init__(self, sampler: Sampler, mask: Mask | None) -> None:
        self._sampler, self._mask = sampler, mask

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores of which one is finite."""
        token = next_token(self._sampler, scores[0].float().cpu().numpy(), self._mask)
        left = torch.full_like(scores, -torch.inf)
        left[0, token] = 0
        return left
