"""Requests of Anthropic's protocol: messages of blocks, and tools with an input's schema."""

import json
from collections.abc import Mapping
from typing import Any

from moecache.serving.errors import RequestError
from moecache.serving.fields import Fields, check_texts, refuse, text_of, texts_of
from moecache.serving.requests import Asked, check_model, read_object, read_seed, read_temperature
from moecache.serving.tools import Tools, check_names, function_of

_MOST_STOPS = 16
_CHOICES = ("auto", "any", "tool", "none")


def read_message(
    body: bytes | bytearray, *, models: tuple[str, ...], counts: bool = False
) -> Asked:
    """Return what a request to /v1/messages asks for.

    Parameters
    ----------
    body : bytes or bytearray
        JSON.
    models : tuple of str
        Names of the model that is served.
    counts : bool, default False
        Whether its tokens are to be counted, and nothing is generated.

    Raises
    ------
    RequestError
        If it is no such request, or asks for something that is not supported.
    """
    given = read_object(body)
    fields = Fields(given)
    # `context_management` may drop parts of a conversation; none are, and answers say of none.
    for name in ("container", "mcp_servers"):
        if given.get(name):
            raise RequestError(
                400, f"{name} is not supported; leave it out", param=name, code="unsupported"
            )
    check_model(fields, models)
    most = fields.whole("max_tokens", 1)
    if most is None and not counts:
        raise RequestError(400, "max_tokens is missing; say how many at most", param="max_tokens")
    return Asked(
        messages=(*_system(given.get("system")), *_messages(given)),
        prompt=None,
        max_tokens=most,
        temperature=read_temperature(fields),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.whole("top_k", 1),
        seed=read_seed(fields),
        stop=_stops(given.get("stop_sequences")),
        stream=fields.flag("stream"),
        include_usage=True,
        template=_thinking(fields),
        tools=_tools(fields, given),
    )


def _system(value: Any) -> list[dict[str, Any]]:
    if value is None or value == []:
        return []
    return [{"role": "system", "content": texts_of("system", value)}]


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        refuse("messages", messages, "a list of messages, at least one")
    found: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        if not isinstance(message, dict):
            refuse(name, message, "an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise RequestError(400, f"{name}.role must be user or assistant", param=f"{name}.role")
        if isinstance(content, list) and role != "system":
            read = _of_assistant if role == "assistant" else _of_user
            found += read(f"{name}.content", content)
        else:
            found.append({"role": role, "content": texts_of(f"{name}.content", content)})
    return found


def _of_user(name: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """Return what tools gave, each as a message of its own, and then what the user says."""
    results, texts = [], []
    for place, block in enumerate(blocks):
        where = f"{name}[{place}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            content = block.get("content")
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": text_of(f"{where}.tool_use_id", block.get("tool_use_id")),
                    "content": "" if content is None else texts_of(f"{where}.content", content),
                }
            )
        else:
            texts.append(texts_of(name, [block]))
    said = [{"role": "user", "content": "\n".join(texts)}] if texts or not results else []
    return [*results, *said]


def _of_assistant(name: str, blocks: list[Any]) -> list[dict[str, Any]]:
    texts, calls, thoughts = [], [], []
    for place, block in enumerate(blocks):
        where = f"{name}[{place}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(text_of(f"{where}.thinking", block.get("thinking")))
        elif kind == "tool_use":
            called = block.get("input")
            if not isinstance(called, dict):
                refuse(f"{where}.input", called, "an object")
            check_texts(f"{where}.input", called)
            function = {
                "name": text_of(f"{where}.name", block.get("name")),
                "arguments": called,
            }
            identity = text_of(f"{where}.id", block.get("id"))
            calls.append({"id": identity, "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(texts_of(name, [block]))
    found: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        found["tool_calls"] = calls
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    return [found]


def _tools(fields: Fields, given: Mapping[str, Any]) -> Tools:
    tools = given.get("tools")
    if tools is None:
        tools = []
    if not isinstance(tools, list):
        refuse("tools", tools, "a list of tools")
    functions = []
    for place, tool in enumerate(tools):
        name = f"tools[{place}]"
        if not isinstance(tool, dict):
            refuse(name, tool, "an object with name and input_schema")
        if tool.get("type", "custom") != "custom":
            raise RequestError(
                400,
                f"{name}: tools of the server's own, as {str(tool['type'])[:40]!r}, are not "
                "supported; send functions with an input_schema",
                param=f"{name}.type",
            )
        functions.append(
            function_of(
                name,
                tool.get("name"),
                tool.get("description"),
                tool.get("input_schema"),
                word="input_schema",
            )
        )
    names = [function["function"]["name"] for function in functions]
    check_names(names)
    choice = fields.table("tool_choice")
    kind = choice.get("type", "auto")
    if kind not in _CHOICES:
        raise RequestError(
            400, f"tool_choice.type must be one of {', '.join(_CHOICES)}", param="tool_choice.type"
        )
    if kind == "tool" and choice.get("name") not in names:
        raise RequestError(
            400, "tool_choice.name must be that of one of tools", param="tool_choice.name"
        )
    if kind == "any" and not names:
        raise RequestError(400, "tool_choice is any, but there are no tools", param="tools")
    chosen = {"any": "required", "tool": choice.get("name")}.get(kind, "auto")
    are_many = not Fields(choice).flag("disable_parallel_tool_use")
    return Tools(() if kind == "none" else tuple(functions), str(chosen), are_many)


def _thinking(fields: Fields) -> dict[str, Any]:
    """Return what a chat template is told of thinking: nothing if the request says nothing."""
    thinking = fields.table("thinking")
    if not thinking:
        return {}
    return {"enable_thinking": thinking.get("type") != "disabled"}


def _stops(stops: Any) -> tuple[str, ...]:
    if stops is None:
        return ()
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        refuse("stop_sequences", stops, f"a list of at most {_MOST_STOPS} strings")
    found = tuple(text_of("stop_sequences", stop) for stop in stops)
    if not all(1 <= len(stop) <= 1000 for stop in found):
        raise RequestError(
            400, "a stop sequence must have 1 to 1000 characters", param="stop_sequences"
        )
    return found


def event(kind: str, fields: dict[str, Any]) -> bytes:
    """Return an object as one server-sent event with a name."""
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()
