"""Answer: a text as a thread generates it, and its figures."""

import asyncio
import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from moecache.decoding import streams
from moecache.decoding.prefixes import PrefixCache
from moecache.decoding.sampler import Mask, Sampler, Sampling
from moecache.serving.generating import Generating
from moecache.serving.logprobs import Noted, NotingSampler
from moecache.serving.model import ServedAlone, ServedModel, ServedText
from moecache.serving.requests import Asked
from moecache.serving.stops import StopText
from moecache.telemetry import RuntimeStats

logger = logging.getLogger(__name__)

# Parts come at least so often, empty ones if need be: who waits for a prompt sees that it goes on.
_SIGN_OF_LIFE_S = 10.0


@dataclass(frozen=True)
class Cost:
    """The figures of an answer.

    Attributes
    ----------
    prompt_tokens, completion_tokens : int
    cached_tokens : int
        Tokens of the prompt that were known from an earlier one.
    finish : {"stop", "length"}
        Whether the text came to its end, or as many tokens as were asked for.
    seed : int
    queued_s, prefill_s, decode_s : float
        For other requests, for the prompt and the first token, and for the others.
    tokens_per_s : float
        Rate of the tokens after the first.
    waited_s : float
        The part of prefill and decode spent waiting for experts. The rest was computation.
    bytes_read : int
        Into slots.
    stopped_by : str or None
        The client's string that ended the text.
    num_hits, num_misses : int
        Distinct experts per step that were in memory, or were not. These and the two before them
        are those of all answers that were generated meanwhile, as steps are taken together.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish: str
    seed: int
    queued_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    waited_s: float
    bytes_read: int
    num_hits: int
    num_misses: int
    stopped_by: str | None = None


class Answer:
    """An answer as it is generated.

    Parameters
    ----------
    model : ServedModel
    tokenizer : FileTokenizer or PreTrainedTokenizerBase
        Used by the thread that generates.
    asked : Asked
    prompt : Tensor or ndarray, int64 [1, tokens]
    most_tokens : int
        Tokens to generate if the request says no number.
    room : int, optional
        Tokens that fit behind the prompt, however many are asked for.
    place : int, default 0
        The lowest number that no other answer under way had.
    queued_s : float
        How long the request has waited.
    prefixes : PrefixCache, optional
        Pages of earlier prompts.

    Attributes
    ----------
    asked : Asked
    place : int
    cost : Cost or None
        Once it has ended well.
    left : bool
        Whether it was stopped, as nobody wants it any more.
    stream : TextStream
    noted : deque of Noted
        Tokens with their probabilities, if they are asked for; whoever sends them takes them out.
    """

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Any,
        asked: Asked,
        prompt: Any,
        *,
        most_tokens: int,
        room: int | None = None,
        place: int = 0,
        queued_s: float = 0.0,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.asked = asked
        self.place = place
        self.prompt_tokens: int = prompt.shape[1]
        self.cost: Cost | None = None
        self.left = self._cut = False
        self.started_s = time.perf_counter()
        self.stream = streams.TextStream(
            tokenizer,
            prompt,
            self._write,
            self._end_prefill,
            hidden=model.ends if asked.shows_special else None,
        )
        self.noted: deque[Noted] = deque()
        self._model = model
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._most_tokens = asked.max_tokens or most_tokens
        if room is not None:
            self._most_tokens = min(self._most_tokens, room)
        self._queued_s = queued_s
        self._prefixes = prefixes
        self._parts: asyncio.Queue[str | None] = asyncio.Queue()
        self._text = StopText(asked.stop, self._hand_over)
        self._before: RuntimeStats | None = None
        self._checks = contextlib.ExitStack()

    @property
    def most_tokens(self) -> int:
        """Tokens that it may have."""
        return self._most_tokens

    def start(self, generating: Generating, on_end: Callable[["Answer"], object]) -> None:
        """Begin to generate in a thread; `on_end` is called in the event loop afterwards."""
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._job = asyncio.wrap_future(generating.submit(self))
        self._job.add_done_callback(self._end)

    def stop(self, *, cut: bool = False) -> None:
        """Have the generation end: nobody wants the rest, or the server ends before (`cut`)."""
        if not self._job.done() and not self._cut:
            self._cut, self.left, self.stream.stopped = cut, not cut, True

    async def ended(self) -> None:
        """Return once nothing is generated any more, however it ended."""
        await asyncio.wait((self._job,))

    async def parts(self) -> AsyncIterator[str]:
        """Yield the text as it comes, and now and then an empty string.

        Raises
        ------
        Exception
            Any error of the model.
        """
        while True:
            try:
                part = await asyncio.wait_for(self._parts.get(), _SIGN_OF_LIFE_S)
            except TimeoutError:
                yield ""
                continue
            if part is None:
                break
            yield part
        await self._job

    # In the event loop.
    def _end(self, job: "asyncio.Future[None]") -> None:
        self._parts.put_nowait(None)
        error = None if job.cancelled() else job.exception()
        if error is not None:
            logger.warning("answer.failed %s: %s", type(error).__name__, error)
        self._on_end(self)

    # In the thread that generates, from here on.
    def begin(self) -> ServedText:
        """Return the text, whose prompt is still to be read."""
        self._before = self._model.stats()
        self._most_tokens, drawn = self._model.check_text(
            self._prompt, self._most_tokens, **self._sampling()
        )
        tokens = self._prompt[0].tolist()
        return self._model.new_text(
            tokens,
            self._sampler(drawn, tokens),
            self.stream,
            max_new_tokens=self._most_tokens,
            mask=self._new_mask(),
            prefixes=self._prefixes,
        )

    def run(self) -> None:
        """Generate the text where it goes alone."""
        model = cast("ServedAlone", self._model)
        self._before = model.stats()
        # Prompts of a model larger than memory take long.
        with model.check_between_layers(self.stream) as self._checks:
            self._most_tokens = model.continue_tokens(
                self._prompt,
                self.stream,
                max_new_tokens=self._most_tokens,
                mask=self._new_mask(),
                prefixes=self._prefixes,
                make_sampler=self._sampler,
                **self._sampling(),
            )
        self.end()

    def _new_mask(self) -> Mask | None:
        return None if self.asked.new_mask is None else self.asked.new_mask()

    def _sampling(self) -> dict[str, Any]:
        """Return how tokens are drawn, as `check_text` takes it."""
        asked = self.asked
        return {
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "min_p": asked.min_p,
            "repetition_penalty": asked.repetition_penalty,
            "presence_penalty": asked.presence_penalty,
            "frequency_penalty": asked.frequency_penalty,
            "logit_bias": asked.logit_bias,
            "seed": asked.seed,
        }

    def _sampler(self, drawn: Sampling, tokens: Sequence[int]) -> Sampler:
        """Return what draws tokens, and notes their probabilities if they are asked for."""
        if self.asked.num_logprobs is None:
            return Sampler(drawn, tokens)
        sampler = NotingSampler(drawn, tokens, self.asked.num_logprobs, self._tokenizer)
        self.noted = sampler.noted
        return sampler

    def end(self) -> None:
        """Note what a text that is over has cost."""
        asked, model = self.asked, self._model
        assert self._before is not None
        self._text.end()
        if self.left or self._cut:
            return
        stats = model.stats() - self._before
        tokens = self.stream.tokens
        ended = self._text.found or (bool(tokens) and tokens[-1] in model.ends)
        self.cost = Cost(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(tokens),
            cached_tokens=self.stream.cached_tokens,
            finish="stop" if ended or len(tokens) < self._most_tokens else "length",
            seed=asked.seed,
            queued_s=self._queued_s,
            prefill_s=self.stream.prefill_s,
            decode_s=self.stream.decode_s,
            tokens_per_s=self.stream.tokens_per_s,
            waited_s=stats.stall_ns / 1e9,
            bytes_read=stats.bytes_read,
            num_hits=stats.num_hits,
            num_misses=stats.num_misses,
            stopped_by=self._text.stop,
        )

    def _end_prefill(self) -> None:
        self._checks.close()

    def _write(self, text: str) -> None:
        self._text.feed(text)
        if self._text.found:
            self.stream.stopped = True

    def _hand_over(self, text: str) -> None:
        self._loop.call_soon_threadsafe(functools.partial(self._parts.put_nowait, text))
