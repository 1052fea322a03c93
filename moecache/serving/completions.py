"""Completions: requests that are answered with text, whole or in parts."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from moecache.errors import MoeCacheError
from moecache.serving.answer import Answer, Cost
from moecache.serving.bodies import Bodies, disconnected
from moecache.serving.engine import Engine, Reader
from moecache.serving.errors import RequestError
from moecache.serving.grammars import GrammarError
from moecache.serving.logprobs import Noted
from moecache.serving.replies import SIGN_OF_LIFE, Choice
from moecache.serving.requests import Asked

# Errors that a model may raise; any other is a mistake of this server, logged with its trace.
FAILURES = (MoeCacheError, OSError, MemoryError, RuntimeError, ValueError)
_CUT_OFF = "the server ended before the answer did; ask again"
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # nginx would hold parts back.
    (b"x-accel-buffering", b"no"),
]


class Writer(Protocol):
    """Writes the answers to a request down, as a protocol has them; see `Reply`."""

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return all answers in one."""

    def first(self) -> bytes:
        """Return what comes before any text of a choice."""

    def part(self, text: str, noted: Sequence[Noted] = ()) -> bytes:
        """Return a part of a choice's text."""

    def end(self, cost: Cost, noted: Sequence[Noted] = ()) -> bytes:
        """Return what comes after the text of a choice."""

    def last(self) -> bytes:
        """Return what comes after all choices."""

    def failure(self, status: int, message: str) -> bytes:
        """Return what comes instead of the rest."""


class Completions:
    """Answers completions, whole or in parts; an ASGI application.

    Parameters
    ----------
    engine : Engine
    bodies : Bodies
    reader : Reader
        Reads requests.
    writer : callable (Asked, str)
        Returns the Writer of the answers to a request, by the model of this name.
    """

    def __init__(
        self,
        engine: Engine,
        bodies: Bodies,
        reader: Reader,
        writer: Callable[[Asked, str], Writer],
    ) -> None:
        self._engine = engine
        self._bodies = bodies
        self._reader = reader
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; one whose client leaves is not answered, and not generated on."""
        engine = self._engine
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with self._bodies.held(scope, receive) as body:
                    gone = asyncio.ensure_future(disconnected(receive))
                    stack.callback(gone.cancel)
                    read = await engine.read(body, self._reader, gone=gone)
            except ClientDisconnect:
                return
            # Nothing is awaited in between, so the place in the queue is kept.
            if read is None or (first := await engine.begin(*read, gone)) is None:
                return
            answers = self._answers(first, *read, gone)
            await stack.enter_async_context(contextlib.aclosing(answers))
            writer = self._writer(read[0], engine.names[0])
            if read[0].stream:
                await _send_parts(answers, writer, send)
            elif choices := await _choices(answers):
                await JSONResponse(writer.whole(choices))(scope, receive, send)

    async def _answers(
        self, answer: Answer | None, asked: Asked, prompt: Any, gone: "asyncio.Future[Any]"
    ) -> AsyncGenerator[Answer]:
        """Yield the answers of a request, one after another, until its client has left."""
        for number in range(1, asked.num_choices + 1):
            if answer is None:
                return
            try:
                yield answer
            finally:
                answer.stop()
            if number < asked.num_choices:
                # Seeds are of 64 bits, and go round.
                seed = (asked.seed + number + 2**63) % 2**64 - 2**63
                one = dataclasses.replace(asked, seed=seed)
                answer = await self._engine.begin(one, prompt, gone)


async def _choices(answers: AsyncIterator[Answer]) -> list[Choice]:
    """Return what all answers say; nothing if the client has left before the first."""
    found = []
    async for answer in answers:
        try:
            text = "".join([part async for part in answer.parts()])
        except FAILURES as error:
            raise _failure(error) from error
        if answer.cost is None:
            # Nobody reads this if it is the client that has left.
            raise RequestError(503, _CUT_OFF)
        found.append(Choice(text, tuple(answer.noted), answer.cost))
    return found


async def _send_parts(answers: AsyncIterator[Answer], writer: Writer, send: Send) -> None:
    async def write(body: bytes, *, more: bool = True) -> None:
        if body or not more:
            await send({"type": "http.response.body", "body": body, "more_body": more})

    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
    try:
        async for answer in answers:
            await write(writer.first())
            async for part in answer.parts():
                await write(writer.part(part, _taken(answer)) if part else SIGN_OF_LIFE)
            if answer.cost is None:
                await write(writer.failure(503, _CUT_OFF), more=False)
                return
            await write(writer.end(answer.cost, _taken(answer)))
    except RequestError as error:
        # The status was sent: the error is an event, and nothing says that the answer is complete.
        await write(writer.failure(error.status, str(error)), more=False)
    except FAILURES as error:
        failure = _failure(error)
        await write(writer.failure(failure.status, str(failure)), more=False)
    else:
        await write(writer.last(), more=False)


def _failure(error: BaseException) -> RequestError:
    """Return what a client is told of an answer that failed."""
    if isinstance(error, GrammarError):
        return RequestError(400, str(error))
    return RequestError(500, f"the model failed: {error}")


def _taken(answer: Answer) -> list[Noted]:
    """Return the tokens that were noted since the last time."""
    return [answer.noted.popleft() for _ in range(len(answer.noted))]
