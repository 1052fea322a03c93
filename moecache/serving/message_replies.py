"""Replies by Anthropic's protocol: a message of blocks, whole or as events."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from moecache.integrations.answer_parts import Piece
from moecache.serving.answer import Cost
from moecache.serving.errors import message_error
from moecache.serving.logprobs import Noted
from moecache.serving.messages import event
from moecache.serving.replies import Choice
from moecache.serving.requests import Asked


class MessageReply:
    """The answer to a request of Anthropic's protocol.

    Parts are written in order: `first`, `part`, `end`, then `last`.

    Parameters
    ----------
    asked : Asked
    model : str
        Name of the model.
    """

    def __init__(self, asked: Asked, model: str) -> None:
        self._asked = asked
        self._parser = asked.new_parser()
        self._index = -1
        self._open = ""
        self._head = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer as one message."""
        (choice,) = choices
        blocks: list[dict[str, Any]] = []
        for piece in [*self._parser.feed(choice.text), *self._parser.end()]:
            word = {"content": "text", "reasoning": "thinking"}.get(piece.kind)
            if word is None:
                blocks.append({**_call(piece), "input": json.loads(piece.text)})
            elif blocks and blocks[-1]["type"] == word:
                blocks[-1][word] += piece.text
            else:
                blocks.append(_block(word) | {word: piece.text})
        return {
            **self._head,
            "content": blocks,
            **self._stop(choice.cost),
            "usage": _usage(choice.cost),
        }

    def first(self) -> bytes:
        """Return what comes before any text."""
        usage = {"input_tokens": self._asked.prompt_tokens, "output_tokens": 0}
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return event("message_start", {"message": message})

    def part(self, text: str, noted: Sequence[Noted] = ()) -> bytes:
        """Return a part of the text."""
        del noted
        return self._write(self._parser.feed(text))

    def end(self, cost: Cost, noted: Sequence[Noted] = ()) -> bytes:
        """Return what comes after the text: how it ended, and what it took."""
        del noted
        left = self._write(self._parser.end()) + self._close()
        return left + event("message_delta", {"delta": self._stop(cost), "usage": _usage(cost)})

    def last(self) -> bytes:
        """Return what comes after all of it."""
        return event("message_stop", {})

    def failure(self, status: int, message: str) -> bytes:
        """Return what comes instead of the rest."""
        return event("error", message_error(status, message))

    def _write(self, pieces: Sequence[Piece]) -> bytes:
        written = b""
        for piece in pieces:
            word = {"content": "text", "reasoning": "thinking"}.get(piece.kind)
            if word is None:
                written += self._close() + self._begin(_call(piece), "call")
                delta = {"type": "input_json_delta", "partial_json": piece.text}
                written += event("content_block_delta", {"index": self._index, "delta": delta})
                written += self._close()
                continue
            if self._open != word:
                written += self._close() + self._begin(_block(word), word)
            delta = {"type": f"{word}_delta", word: piece.text}
            written += event("content_block_delta", {"index": self._index, "delta": delta})
        return written

    def _begin(self, block: dict[str, Any], word: str) -> bytes:
        self._index += 1
        self._open = word
        return event("content_block_start", {"index": self._index, "content_block": block})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return event("content_block_stop", {"index": self._index})

    def _stop(self, cost: Cost) -> dict[str, Any]:
        stop, reason = None, "end_turn"
        if cost.finish == "length":
            reason = "max_tokens"
        elif self._parser.num_calls:
            reason = "tool_use"
        elif cost.stopped_by is not None:
            stop, reason = cost.stopped_by, "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}


def _block(word: str) -> dict[str, Any]:
    block = {"type": word, word: ""}
    # Thoughts are signed there, and nobody checks it here.
    return block | {"signature": ""} if word == "thinking" else block


def _call(piece: Piece) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": f"toolu_{uuid.uuid4().hex[:24]}",
        "name": piece.name,
        "input": {},
    }


def _usage(cost: Cost) -> dict[str, Any]:
    return {
        "input_tokens": cost.prompt_tokens - cost.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cost.cached_tokens,
        "output_tokens": cost.completion_tokens,
    }
