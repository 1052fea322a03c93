"""Tokens of texts and texts of tokens, as llama-server answers `/tokenize` and `/detokenize`."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from moecache.errors import ConfigError
from moecache.serving.bodies import Bodies, disconnected
from moecache.serving.engine import Engine
from moecache.serving.errors import RequestError
from moecache.serving.fields import Fields, refuse, text_of
from moecache.serving.grammars import Grammars
from moecache.serving.messages import read_message
from moecache.serving.requests import read_object


class Tokens:
    """Answers what a tokenizer alone knows, in a thread that reads; an ASGI application.

    A request takes a place in the queue while it is read, as a completion does.

    Parameters
    ----------
    engine : Engine
    bodies : Bodies
    work : callable (tokenizer, bytearray)
        Returns the answer to a request: `tokenize` or `count_tokens`, each with its first argument,
        or `detokenize`.
    """

    def __init__(
        self,
        engine: Engine,
        bodies: Bodies,
        work: Callable[[Any, bytearray], dict[str, Any]],
    ) -> None:
        self._engine = engine
        self._bodies = bodies
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                body = await stack.enter_async_context(self._bodies.held(scope, receive))
            except ClientDisconnect:
                return
            gone = asyncio.ensure_future(disconnected(receive))
            stack.callback(gone.cancel)
            found = await self._engine.compute(
                body, lambda tokenizer: self._work(tokenizer, body), gone=gone
            )
            if found is not None:
                await JSONResponse(found)(scope, receive, send)


def tokenize(grammars: Grammars, tokenizer: Any, body: bytes | bytearray) -> dict[str, Any]:
    """Return the tokens of `content`; with `with_pieces`, also what each of them stands for.

    `add_special` puts those in front that the tokenizer adds to a prompt.
    """
    given = read_object(body)
    fields = Fields(given)
    if given.get("parse_special", True) is not True:
        raise RequestError(
            400,
            "parse_special: false is not supported; leave it out",
            param="parse_special",
            code="unsupported",
        )
    content = text_of("content", given.get("content"))
    adds = fields.flag("add_special")
    ids = tokenizer(content, add_special_tokens=adds)["input_ids"]
    # As in a prompt, which goes on: tokenizers of encoders close a text.
    if adds and ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    if not fields.flag("with_pieces"):
        return {"tokens": ids}
    pieces = {token: grammars.piece(token, tokenizer) for token in set(ids)}
    return {"tokens": [{"id": token, "piece": _written(pieces[token])} for token in ids]}


def detokenize(tokenizer: Any, body: bytes | bytearray) -> dict[str, Any]:
    """Return the text of `tokens`, special ones included, as `content`."""
    tokens = read_object(body).get("tokens")
    if not isinstance(tokens, list):
        refuse("tokens", tokens, "a list of numbers of tokens")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            refuse("tokens", token, "a list of whole numbers")
        if not 0 <= token < len(tokenizer):
            raise RequestError(
                400,
                f"tokens has {str(token)[:40]}, but the tokenizer knows {len(tokenizer)} tokens",
                param="tokens",
            )
    return {"content": tokenizer.decode(tokens, clean_up_tokenization_spaces=False)}


def count_tokens(engine: Engine, tokenizer: Any, body: bytes | bytearray) -> dict[str, Any]:
    """Return how many tokens the prompt of a message has, by Anthropic's protocol."""
    asked = engine.checks.with_tools(
        read_message(body, models=engine.names, counts=True), tokenizer
    )
    assert asked.messages is not None
    try:
        prompt = engine.model.encode_chat(tokenizer, asked.messages, asked.template)
    except ConfigError as error:
        raise RequestError(400, str(error), param="messages") from error
    return {"input_tokens": prompt.shape[1]}


def _written(piece: bytes) -> str | list[int]:
    """Return a piece as JSON has it: its bytes if it is a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
