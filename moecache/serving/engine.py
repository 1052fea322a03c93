"""Engine: one model that answers some requests at a time, in a thread of its own."""

import asyncio
import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from moecache.decoding.prefixes import PrefixCache
from moecache.decoding.room import context_of, room_behind
from moecache.decoding.token_bound import TokenBound
from moecache.errors import ConfigError
from moecache.serving.answer import Answer
from moecache.serving.checks import Checks
from moecache.serving.errors import RequestError, ending
from moecache.serving.generating import Generating
from moecache.serving.model import ServedModel
from moecache.serving.requests import Asked
from moecache.serving.turns import COUNTED_TOKENS, Turns

Result = TypeVar("Result")
# The largest Retry-After, however long the queue is.
_MOST_RETRY_S = 120
# Tokenised within some 20 ms; 2 MiB take 2.6 s.
_SMALL_BYTES = 64 * 1024


class Reader(Protocol):
    """Reads requests of a protocol."""

    def __call__(self, body: bytes | bytearray, *, models: tuple[str, ...]) -> Asked:
        """Return what a request asks for; a RequestError if it is none."""


@dataclass
class Totals:
    """The counters of an engine since it was made.

    Attributes
    ----------
    answered, refused, left, failed : int
        Requests that were answered, that were refused for want of room or as the server ends, whose
        client left, that failed or were cut off.
    prompt_tokens, completion_tokens : int
    """

    answered: int = 0
    refused: int = 0
    left: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Engine:
    """Answers requests with one model, some at a time; others wait in a queue with an end.

    All methods are called in the event loop. The model computes in a thread of its own, and two
    others read requests: one the small, one the big, so that nobody waits for another's long text.

    Parameters
    ----------
    model : ServedModel
        The caller closes it, after `close`.
    tokenizer : FileTokenizer or PreTrainedTokenizerBase
    names : tuple of str
        Names by which clients may call the model; the first is its own.
    most_waiting : int, default 16
        Requests that may wait; more are refused.
    parallel : int, default 1
        Answers that are generated at a time: as many as decode together where a model can.
    most_tokens : int, default 4096
        Tokens of an answer whose request says no number.
    context_tokens : int, optional
        Tokens of a prompt and its answer, if that is fewer than the model takes.
    prefixes : PrefixCache, optional
        Pages of earlier prompts; the caller closes it.

    Attributes
    ----------
    totals : Totals
    checks : Checks
    context_tokens : int or None
        Tokens of a prompt and its answer; `None` if there is no bound.
    """

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Any,
        names: tuple[str, ...],
        *,
        most_waiting: int = 16,
        parallel: int = 1,
        most_tokens: int = 4096,
        context_tokens: int | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.model = model
        self.names = names
        self.most_waiting = most_waiting
        self.parallel = parallel
        self.most_tokens = most_tokens
        self.context_tokens = context_of(model.own_context, context_tokens)
        self.prefixes = prefixes
        self.totals = Totals()
        self._tokenizer = tokenizer
        self._bound = TokenBound(tokenizer, is_plain=model.splits_plainly(tokenizer))
        self.checks = Checks(model)
        # transformers' work for one thread at a time: prompts are read while another one decodes.
        self._small, self._big = (
            (ThreadPoolExecutor(1, f"moecache-read-{size}"), copy.deepcopy(tokenizer))
            for size in ("small", "big")
        )
        self._generating = Generating(model)
        # Requests that are read; they have a place in the queue, as those that wait have.
        self._reading: set[asyncio.Future[Any]] = set()
        self._turns = Turns(model, parallel, prefixes)
        self._last_s = 1.0
        self.draining = False

    @property
    def runtime(self) -> Any:
        """The model's runtime."""
        return self.model.runtime

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, to be looked at."""
        return self._tokenizer

    @property
    def path(self) -> str:
        """Where the model is, as it was named."""
        return self.names[-1]

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, also those whose prompt is still read."""
        return len(self._reading) + self._turns.num_waiting

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The answers that are being generated, the oldest first."""
        return self._turns.answers

    @property
    def answer(self) -> Answer | None:
        """The oldest of them."""
        return next(iter(self.answers), None)

    async def read(
        self, body: bytes | bytearray, reader: Reader, *, gone: "asyncio.Future[Any]"
    ) -> tuple[Asked, Any] | None:
        """Return what a request asks for and its tokens; `None` if the client left before.

        The request takes its place in the queue first: if there is none, nothing is read.

        Parameters
        ----------
        body : bytes or bytearray
            JSON.
        reader : callable (body, models=names)
            Returns what a request of its protocol asks for.
        gone : Future
            Done once the client has left.

        Returns
        -------
        tuple of Asked and Tensor or ndarray
            The tokens are int64 [1, tokens]. `begin` takes both, before anything is awaited.

        Raises
        ------
        RequestError
            If too many wait, or the server is about to end, or the model takes no such request.
        """
        return await self.compute(
            body, lambda tokenizer: self._read(tokenizer, body, reader), gone=gone
        )

    async def compute(
        self,
        body: bytes | bytearray,
        work: Callable[[Any], Result],
        *,
        gone: "asyncio.Future[Any]",
    ) -> Result | None:
        """Return what is done with a body in a thread that reads; `None` if the client left before.

        Parameters
        ----------
        body : bytes or bytearray
            By whose length the thread is chosen.
        work : callable (tokenizer)
            Called in that thread, whose tokenizer it is.
        gone : Future
            Done once the client has left.

        Raises
        ------
        RequestError
            As `read`, or what `work` raises.
        """
        self._check_room()
        executor, tokenizer = self._big if len(body) > _SMALL_BYTES else self._small
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(executor, work, tokenizer)
        self._reading.add(job)
        try:
            await asyncio.wait((job, gone), return_when=asyncio.FIRST_COMPLETED)
            has_left = not job.done()
        finally:
            self._reading.discard(job)
            job.cancel()
        if has_left:
            self.totals.left += 1
            return None
        if job.cancelled():
            raise ending()
        return job.result()

    def _read(self, tokenizer: Any, body: bytes | bytearray, reader: Reader) -> tuple[Asked, Any]:
        asked = self.checks.with_tools(reader(body, models=self.names), tokenizer)
        try:
            if len(body) > _SMALL_BYTES:
                self._check_length(tokenizer, asked)
            if asked.messages is not None:
                prompt = self.model.encode_chat(tokenizer, asked.messages, asked.template)
            else:
                prompt = self.model.encode(tokenizer, asked.prompt or "")
            self._find_room(prompt.shape[1])
        except ConfigError as error:
            field_ = "messages" if asked.is_chat else "prompt"
            if "for a chat template to look at" in str(error):
                field_ = "chat_template_kwargs"
            code = "context_length_exceeded" if "no room" in str(error) else None
            raise RequestError(400, str(error), param=field_, code=code) from error
        asked = self.checks.with_parser(asked, tokenizer, prompt[0].tolist())
        return self.checks.checked(asked, tokenizer), prompt

    def _check_length(self, tokenizer: Any, asked: Asked) -> None:
        """Raise a ConfigError if the prompt is too long for any way to make tokens of it."""
        if self._bound.most_letters is None:
            return
        if asked.messages is not None:
            # Parts of the messages that a template leaves out take no tokens.
            text = self.model.render_chat(tokenizer, asked.messages, asked.template)
        else:
            text = asked.prompt or ""
        self._find_room(self._bound.least(text), at_least=True)

    def _find_room(self, prompt_tokens: int, *, at_least: bool = False) -> int | None:
        return room_behind(
            prompt_tokens, self.model.own_context, self.context_tokens, at_least=at_least
        )

    async def begin(self, asked: Asked, prompt: Any, gone: "asyncio.Future[Any]") -> Answer | None:
        """Wait for the turn of a request that was read, and begin to generate.

        Returns `None` if the client left before.

        Parameters
        ----------
        asked : Asked
        prompt : Tensor or ndarray, int64 [1, tokens]
        gone : Future
            Done once the client has left, which also ends the generation.

        Raises
        ------
        RequestError
            If the server is about to end.
        """
        begun_s = time.perf_counter()
        if self.draining:
            self.totals.refused += 1
            raise ending()
        room = self._find_room(prompt.shape[1])
        counted = min(asked.max_tokens or self.most_tokens, COUNTED_TOKENS)
        turn = await self._turns.take(prompt.shape[1] + counted, gone)
        if turn is None:
            self.totals.left += 1
            return None
        try:
            turn.answer = answer = Answer(
                self.model,
                self._tokenizer,
                asked,
                prompt,
                most_tokens=self.most_tokens,
                room=room,
                place=min(set(range(self.parallel)) - {each.place for each in self.answers}),
                queued_s=time.perf_counter() - begun_s,
                prefixes=self.prefixes,
            )
            answer.start(self._generating, self._finish)
        except BaseException:
            self._turns.give_up(turn)
            raise
        gone.add_done_callback(lambda _: answer.stop())
        return answer

    def _check_room(self) -> None:
        if self.draining:
            self.totals.refused += 1
            raise ending()
        # One that is read while it could be answered waits for nobody.
        if self.num_waiting >= self.most_waiting + self._turns.num_free:
            self.totals.refused += 1
            wait_s = self._last_s * (1 + self.num_waiting) / self.parallel
            retry_s = min(_MOST_RETRY_S, max(1, round(wait_s)))
            raise RequestError(
                503,
                f"{self._waiting()}; ask again in {retry_s} s",
                code="queue_full",
                headers={"Retry-After": str(retry_s)},
            )

    def _waiting(self) -> str:
        """Return why there is no room, in words."""
        if not self.num_waiting:
            return "others are being answered, and none may wait"
        return f"{self.num_waiting} requests wait already"

    def _finish(self, answer: Answer) -> None:
        """Note an answer that has ended; the next one begins."""
        self._last_s = time.perf_counter() - answer.started_s
        totals = self.totals
        totals.prompt_tokens += answer.prompt_tokens
        totals.completion_tokens += len(answer.stream.tokens)
        if answer.left:
            totals.left += 1
        elif answer.cost is None:
            totals.failed += 1
        else:
            totals.answered += 1
        self._turns.end(answer)

    def drain(self) -> None:
        """Refuse what waits and what comes; the answers that are being generated go on."""
        self.draining = True
        # Jobs that were read meanwhile refuse themselves.
        unread = [job for job in self._reading if not job.done()]
        self.totals.refused += self._turns.refuse(ending()) + len(unread)
        for job in unread:
            job.cancel()

    async def stop(self) -> None:
        """End the answers that are being generated."""
        for answer in self.answers:
            answer.stop(cut=True)
        await asyncio.gather(*(answer.ended() for answer in self.answers))

    def close(self) -> None:
        """End the threads; waits for them."""
        self._generating.close()
        for executor, _ in (self._small, self._big):
            executor.shutdown(cancel_futures=True)
