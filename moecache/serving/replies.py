"""Replies by OpenAI's protocol: answers whole, and in parts."""

import dataclasses
import json
import time
import uuid
from typing import Any

from moecache.serving.answer import Cost
from moecache.serving.requests import Asked

DONE = b"data: [DONE]\n\n"
# A comment, which clients skip: the connection is alive.
SIGN_OF_LIFE = b": the answer is on its way\n\n"


class Reply:
    """One answer in the shape of the protocol: everything but the text is fixed.

    Parameters
    ----------
    asked : Asked
    model : str
        Name of the model.
    """

    def __init__(self, asked: Asked, model: str) -> None:
        self._asked = asked
        self._head = {
            "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if asked.is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, cost: Cost) -> dict[str, Any]:
        """Return the answer in one."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": cost.finish}
        choice |= {"message": message} if self._asked.is_chat else {"text": text}
        return {
            **self._head,
            "choices": [choice],
            "usage": _usage(cost),
            "moecache": _figures(cost),
        }

    def first(self) -> bytes:
        """Return what comes before any text: nothing in a completion."""
        if not self._asked.is_chat:
            return b""
        return self._chunk({"role": "assistant", "content": ""})

    def part(self, text: str) -> bytes:
        """Return a part of the text."""
        return self._chunk({"content": text} if self._asked.is_chat else text)

    def last(self, cost: Cost) -> bytes:
        """Return what comes after the text: how it ended, and what it took."""
        end = self._chunk({} if self._asked.is_chat else "", cost)
        if self._asked.include_usage:
            end += self._event({"choices": [], "usage": _usage(cost)})
        return end + DONE

    def _chunk(self, content: Any, cost: Cost | None = None) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "delta" if self._asked.is_chat else "text": content,
            "logprobs": None,
            "finish_reason": None if cost is None else cost.finish,
        }
        more: dict[str, Any] = {} if cost is None else {"moecache": _figures(cost)}
        if self._asked.include_usage:
            more["usage"] = None
        return self._event({"choices": [choice], **more})

    def _event(self, fields: dict[str, Any]) -> bytes:
        head = dict(self._head)
        if self._asked.is_chat:
            head["object"] = "chat.completion.chunk"
        return event({**head, **fields})


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


def _figures(cost: Cost) -> dict[str, Any]:
    """Return what the protocol has no word for."""
    figures = dataclasses.asdict(cost)
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "finish"):
        del figures[name]
    return {key: round(v, 6) if isinstance(v, float) else v for key, v in figures.items()}
