"""Replies by OpenAI's protocol: answers whole, and in parts."""

import dataclasses
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moecache.integrations.answer_parts import Piece
from moecache.serving.answer import Cost
from moecache.serving.errors import error_body
from moecache.serving.logprobs import Noted, chat_logprobs, completion_logprobs
from moecache.serving.requests import Asked

DONE = b"data: [DONE]\n\n"
# A comment, which clients skip: the connection is alive.
SIGN_OF_LIFE = b": the answer is on its way\n\n"


@dataclass(frozen=True)
class Choice:
    """One of the answers to a request, complete.

    Attributes
    ----------
    text : str
    noted : tuple of Noted
        Its tokens with their probabilities, if they were asked for.
    cost : Cost
    """

    text: str
    noted: tuple[Noted, ...]
    cost: Cost


class Reply:
    """The answers to a request in the shape of OpenAI's completions.

    Parts are written in order: `first`, `part`, `end` for each choice, then `last`.

    Parameters
    ----------
    asked : Asked
    model : str
        Name of the model.
    """

    def __init__(self, asked: Asked, model: str) -> None:
        self._asked = asked
        self._index = -1
        self._offset = 0
        self._parser = asked.new_parser()
        self._held: list[Noted] = []
        self._costs: list[Cost] = []
        self._head = {
            "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if asked.is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return all answers in one."""
        cost = combined([choice.cost for choice in choices])
        return {
            **self._head,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": _usage(cost),
            "moecache": _figures(cost),
            "timings": timings(cost),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        parser = self._asked.new_parser()
        pieces = [*parser.feed(choice.text), *parser.end()]
        finish = finish_of(choice.cost.finish, parser.num_calls)
        found = {"message": _message(pieces)} if self._asked.is_chat else {"text": choice.text}
        return {
            "index": index,
            "logprobs": self._logprobs(choice.noted),
            "finish_reason": finish,
            **found,
        }

    def first(self) -> bytes:
        """Return what comes before any text of a choice: nothing in a completion."""
        self._index += 1
        self._offset = 0
        self._parser = self._asked.new_parser()
        if not self._asked.is_chat:
            return b""
        return self._chunk({"role": "assistant", "content": ""})

    def part(self, text: str, noted: Sequence[Noted] = ()) -> bytes:
        """Return a part of a choice's text, and the tokens that were drawn meanwhile."""
        self._held += noted
        return self._chunks(self._parser.feed(text))

    def end(self, cost: Cost, noted: Sequence[Noted] = ()) -> bytes:
        """Return what comes after the text of a choice: how it ended, and what it took."""
        self._costs.append(cost)
        left = self._chunks(self._parser.end())
        noted, self._held = [*self._held, *noted], []
        finish = finish_of(cost.finish, self._parser.num_calls)
        return left + self._chunk({} if self._asked.is_chat else "", noted, cost, finish)

    def _chunks(self, pieces: Sequence[Piece]) -> bytes:
        """Return chunks of pieces; tokens that are in none yet wait for the next one."""
        chunks = []
        place = self._parser.num_calls - sum(piece.kind == "call" for piece in pieces)
        for piece in pieces:
            delta: Any = {"content": piece.text} if self._asked.is_chat else piece.text
            if piece.kind == "call":
                delta = {"tool_calls": [{"index": place, **call_of(piece)}]}
                place += 1
            elif piece.kind == "reasoning":
                delta = {"reasoning_content": piece.text}
            noted, self._held = self._held, []
            chunks.append(self._chunk(delta, noted))
        return b"".join(chunks)

    def last(self) -> bytes:
        """Return what comes after all choices."""
        if not self._asked.include_usage:
            return DONE
        return self._event({"choices": [], "usage": _usage(combined(self._costs))}) + DONE

    def failure(self, status: int, message: str) -> bytes:
        """Return what comes instead of the rest."""
        return event(error_body(status, message))

    def _logprobs(self, noted: Sequence[Noted]) -> dict[str, Any] | None:
        if self._asked.num_logprobs is None:
            return None
        if self._asked.is_chat:
            return chat_logprobs(noted)
        offset = self._offset
        self._offset += sum(len(each.text) for each in noted)
        return completion_logprobs(noted, offset)

    def _chunk(
        self,
        content: Any,
        noted: Sequence[Noted] = (),
        cost: Cost | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": self._index,
            "delta" if self._asked.is_chat else "text": content,
            "logprobs": self._logprobs(noted) if noted else None,
            "finish_reason": finish,
        }
        more: dict[str, Any] = {}
        if cost is not None:
            more = {"moecache": _figures(cost), "timings": timings(cost)}
        if self._asked.include_usage:
            more["usage"] = None
        return self._event({"choices": [choice], **more})

    def _event(self, fields: dict[str, Any]) -> bytes:
        head = dict(self._head)
        if self._asked.is_chat:
            head["object"] = "chat.completion.chunk"
        return event({**head, **fields})


def finish_of(finish: str, num_calls: int) -> str:
    """Return why an answer with some calls ended, as OpenAI says it."""
    return "tool_calls" if finish == "stop" and num_calls else finish


def call_of(piece: Piece) -> dict[str, Any]:
    """Return a call as OpenAI's protocol has it."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": piece.name, "arguments": piece.text},
    }


def _message(pieces: Sequence[Piece]) -> dict[str, Any]:
    content, reasoning = (
        "".join(piece.text for piece in pieces if piece.kind == kind)
        for kind in ("content", "reasoning")
    )
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [call_of(piece) for piece in pieces if piece.kind == "call"]
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def combined(costs: Sequence[Cost]) -> Cost:
    """Return what several answers to one prompt took together: the prompt counts once."""
    first = costs[0]
    if len(costs) == 1:
        return first
    summed = {
        name: sum(getattr(cost, name) for cost in costs)
        for name in (
            *("completion_tokens", "queued_s", "prefill_s", "decode_s", "waited_s"),
            *("bytes_read", "num_hits", "num_misses"),
        )
    }
    num_later = summed["completion_tokens"] - len(costs)
    rate = num_later / summed["decode_s"] if summed["decode_s"] > 0 else 0.0
    return dataclasses.replace(first, tokens_per_s=rate, **summed)


def event(fields: dict[str, Any]) -> bytes:
    """Return an object as one server-sent event."""
    return b"data: %s\n\n" % json.dumps(fields, ensure_ascii=False).encode()


def _usage(cost: Cost) -> dict[str, Any]:
    return {
        "prompt_tokens": cost.prompt_tokens,
        "completion_tokens": cost.completion_tokens,
        "total_tokens": cost.prompt_tokens + cost.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cost.cached_tokens},
    }


def timings(cost: Cost) -> dict[str, Any]:
    """Return times as llama-server tells them.

    Rates of tokens are of those after the first, whose time is the prompt's.
    """
    read = cost.prompt_tokens - cost.cached_tokens
    prompt_ms, predicted_ms = 1e3 * cost.prefill_s, 1e3 * cost.decode_s
    figures = {
        "cache_n": cost.cached_tokens,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / read if read else 0.0,
        "prompt_per_second": read / cost.prefill_s if cost.prefill_s > 0 else 0.0,
        "predicted_n": cost.completion_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": 1e3 / cost.tokens_per_s if cost.tokens_per_s > 0 else 0.0,
        "predicted_per_second": cost.tokens_per_s,
    }
    return {key: round(v, 3) if isinstance(v, float) else v for key, v in figures.items()}


def _figures(cost: Cost) -> dict[str, Any]:
    """Return what the protocol has no word for."""
    figures = dataclasses.asdict(cost)
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "finish", "stopped_by"):
        del figures[name]
    return {key: round(v, 6) if isinstance(v, float) else v for key, v in figures.items()}
