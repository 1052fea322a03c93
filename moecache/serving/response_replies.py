"""Replies of OpenAI's Responses: items of output, whole or as events."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from moecache.integrations.answer_parts import Piece
from moecache.serving.answer import Cost
from moecache.serving.errors import error_body
from moecache.serving.logprobs import Noted
from moecache.serving.replies import Choice
from moecache.serving.requests import Asked


class ResponseReply:
    """The answer to a request of OpenAI's Responses.

    Parts are written in order: `first`, `part`, `end`, then `last`.

    Parameters
    ----------
    asked : Asked
    model : str
        Name of the model.
    """

    def __init__(self, asked: Asked, model: str) -> None:
        self._parser = asked.new_parser()
        self._number = 0
        # Items that are there; text goes on in the last one while it is open.
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        functions = [{"type": "function", **tool["function"]} for tool in asked.tools.functions]
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": None,
            "max_output_tokens": asked.max_tokens,
            "metadata": {},
            "parallel_tool_calls": asked.tools.are_many,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "tool_choice": asked.tools.choice,
            "tools": functions,
            "top_p": asked.top_p,
            "truncation": "disabled",
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer as one response."""
        (choice,) = choices
        self._write([*self._parser.feed(choice.text), *self._parser.end()])
        self._close()
        return self._response(choice.cost)

    def first(self) -> bytes:
        """Return what comes before any text."""
        response = {**self._head, **_state("in_progress"), "output": [], "usage": None}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def part(self, text: str, noted: Sequence[Noted] = ()) -> bytes:
        """Return a part of the text."""
        del noted
        return self._write(self._parser.feed(text))

    def end(self, cost: Cost, noted: Sequence[Noted] = ()) -> bytes:
        """Return what comes after the text: all of it once more, and what it took."""
        del noted
        left = self._write(self._parser.end()) + self._close()
        response = self._response(cost)
        return left + self._event(f"response.{response['status']}", response=response)

    def last(self) -> bytes:
        """Return what comes after all of it: nothing."""
        return b""

    def failure(self, status: int, message: str) -> bytes:
        """Return what comes instead of the rest."""
        error = error_body(status, message)["error"]
        return self._event(
            "error", code=error["code"] or error["type"], message=message, param=error["param"]
        )

    def _response(self, cost: Cost) -> dict[str, Any]:
        status = "incomplete" if cost.finish == "length" else "completed"
        usage = {
            "input_tokens": cost.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cost.cached_tokens},
            "output_tokens": cost.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": cost.prompt_tokens + cost.completion_tokens,
        }
        return {**self._head, **_state(status), "output": self._items, "usage": usage}

    def _write(self, pieces: Sequence[Piece]) -> bytes:
        written = b""
        for piece in pieces:
            if piece.kind == "call":
                written += self._close() + self._call(piece)
                continue
            is_message = piece.kind == "content"
            word = "output_text" if is_message else "reasoning_text"
            if not self._is_open or (self._items[-1]["type"] == "message") != is_message:
                written += self._close() + self._begin(is_message, word)
            item = self._items[-1]
            item["content"][0]["text"] += piece.text
            more: dict[str, Any] = {"logprobs": []} if is_message else {}
            place = self._place(item)
            written += self._event(f"response.{word}.delta", **place, delta=piece.text, **more)
        return written

    def _begin(self, is_message: bool, word: str) -> bytes:
        part: dict[str, Any] = {"type": word, "text": ""}
        item: dict[str, Any] = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": []}
        if is_message:
            part["annotations"] = []
            item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        item |= {"status": "in_progress", "content": []}
        written = self._event(
            "response.output_item.added", output_index=len(self._items), item=item
        )
        self._items.append(item)
        self._is_open = True
        written += self._event("response.content_part.added", **self._place(item), part=part)
        item["content"].append(part)
        return written

    def _close(self) -> bytes:
        """Return the end of the item that is open."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        (part,) = item["content"]
        item["status"] = "completed"
        place = self._place(item)
        return (
            self._event(f"response.{part['type']}.done", **place, text=part["text"])
            + self._event("response.content_part.done", **place, part=part)
            + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
        )

    def _call(self, piece: Piece) -> bytes:
        index = len(self._items)
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": f"call_{uuid.uuid4().hex[:24]}",
            "name": piece.name,
            "arguments": "",
            "status": "in_progress",
        }
        place = {"item_id": item["id"], "output_index": index}
        written = self._event("response.output_item.added", output_index=index, item=item)
        item |= {"arguments": piece.text, "status": "completed"}
        self._items.append(item)
        kind = "response.function_call_arguments"
        return (
            written
            + self._event(f"{kind}.delta", **place, delta=piece.text)
            + self._event(f"{kind}.done", **place, arguments=piece.text, name=piece.name)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _state(status: str) -> dict[str, Any]:
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {"status": status, "incomplete_details": details}
